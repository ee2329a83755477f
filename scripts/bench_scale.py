#!/usr/bin/env python3
"""The full-size job at a thousandth of its volume, without a GPU: a fake target server, extraction, the store, and the trainer's reader.

Two shapes of the same thousandth, because one cannot show everything:
  wide   H 7168 dumps of 37 samples of 300 to 8,192 tokens: bytes a second, memory a sample. The server hands out files that it has written before the
         clock starts (twelve lengths), so that making states costs nothing and the rate can be set; 'ceiling' is the same without a set rate.
  many   all 37,312 samples with their real lengths at H 8, in as many shards as the full job has: accounting, memory by sample and shard, open files.
The states are generated; the numbers are about this code and this machine, not about any target.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aerie  # noqa: F401  first: it finds the Python that has the packages
import numpy as np
import torch
from safetensors.torch import save_file

from aerie.batches import Reader, pack
from aerie.config import load_config
from aerie.errors import UserError, run_main
from aerie.generate_client import Client
from aerie.identity import tokenizer_hash
from aerie.paths import ROOT
from aerie.ports import free_port
from aerie.report import peak_memory_bytes, write_report
from aerie.rid import sample_id
from aerie.samples import Sample, write_samples
from aerie.store import Store

SAMPLES, MEAN, SHORTEST, LONGEST = 37312, 2350, 300, 8192
FULL = {"hidden": 7168, "rows": SAMPLES * MEAN}
EXTRACT = ROOT / "scripts" / "02b_extract_hidden_states_sglang.py"
FAKE = ROOT / "tests" / "fake_dump_server.py"


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    """[count] token counts: log-normal, cut to 300..8,192, with a mean of 2,350."""
    draws = np.random.default_rng(seed).standard_normal(count)
    low, high = 5.0, 9.0
    for _ in range(40):
        middle = (low + high) / 2
        if np.clip(np.exp(middle + 0.75 * draws), SHORTEST, LONGEST).mean() < MEAN:
            low = middle
        else:
            high = middle
    return np.clip(np.exp(low + 0.75 * draws), SHORTEST, LONGEST).astype(int)


def few_lengths(lengths: np.ndarray, kinds: int = 12) -> np.ndarray:
    """The same distribution in `kinds` lengths: each sample takes the mean of its group of neighbours."""
    ranked = np.argsort(lengths, kind="stable")
    result = lengths.copy()
    for group in np.array_split(ranked, kinds):
        result[group] = int(lengths[group].mean())
    return result


def make_target(folder: Path, hidden: int) -> None:
    """A folder with what extraction reads of a target: config, tokenizer, embedding and head (one row of vocabulary each; nothing is proved here)."""
    folder.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": 61, "vocab_size": 163840, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": torch.zeros(1, hidden), "lm_head.weight": torch.zeros(1, hidden)}, folder / "model.safetensors")


def make_data(folder: Path, lengths: np.ndarray, target: Path, seed: int = 0) -> None:
    """train.safetensors with half of each sample supervised, at its end."""
    rng = np.random.default_rng(seed)

    def sample(tokens: int) -> Sample:
        ids = rng.integers(0, 163840, tokens, dtype=np.int32)
        mask = (np.arange(tokens) >= tokens // 2).astype(np.uint8)
        return Sample(sample_id(ids, mask), ids, mask)

    write_samples(folder / "train.safetensors", [sample(int(tokens)) for tokens in lengths], {"tokenizer_hash": tokenizer_hash(target), "template_hash": "", "mask_rule": "generated"})


class Anonymous(threading.Thread):
    """This process's own memory at most, without the pages of mapped files, which the kernel takes back when it needs them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
            self.peak = max(self.peak, int(found.split()[1]) * 1024)


class Watch(threading.Thread):
    """The most files and bytes that lay in the dump folder at once, looked at ten times a second."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.folder, self.files, self.bytes, self.ended = folder, 0, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.1):
            sizes = []
            for entry in os.scandir(self.folder):
                try:
                    if entry.name.startswith("aerie."):
                        sizes.append(entry.stat().st_size)
                except FileNotFoundError:
                    continue
            self.files, self.bytes = max(self.files, len(sizes)), max(self.bytes, sum(sizes))


def read_all(store_path: Path, batch_tokens: int, steps: int) -> dict[str, Any]:
    """The trainer's own reader over the whole store, as 03_train.py sets it up for bf16; in a process of its own, for its peak memory."""
    own = Anonymous()
    own.start()
    start = time.monotonic()
    store = Store.open(store_path)
    opened = time.monotonic()
    time.sleep(0.1)
    after_open = own.peak
    batches = pack(range(len(store)), store.lengths, batch_tokens)
    tokens = rows = nbytes = 0
    for batch in Reader(store, steps, 0, torch.bfloat16).read(batches):
        if batch is not None:
            tokens, rows = tokens + batch.tokens, rows + len(batch.rows)
            nbytes += batch.aux.nbytes + batch.final.nbytes
    seconds = time.monotonic() - opened
    return {"samples": len(store), "shards": len(store.shards), "open_s": opened - start, "own_memory_after_open": after_open, "batches": len(batches), "tokens": tokens,
            "supervised_rows": rows, "seconds": seconds, "tok_s": tokens / seconds, "gb_s": nbytes / seconds / 1e9, "peak_memory_bytes": peak_memory_bytes(), "peak_own_memory_bytes": own.peak}  # fmt: skip


def phase(name: str, work: Path, hidden: int, lengths: np.ndarray, shard_gb: float, tok_s: float, in_flight: int, batch_tokens: int, pool: bool) -> dict[str, Any]:
    """Data, fake server, extraction, reading: one shape of the job. Returns what was measured."""
    target, dumps, run = work / f"target-{name}", work / f"dumps-{name}", work / name
    make_target(target, hidden)
    make_data(run / "data", lengths, target)
    dumps.mkdir()
    port = free_port()
    settings = [f"target.model_path={target}", "target.from_package=", "target.aux_layer_ids=[3, 31, 59]", "target.dtype=bfloat16", f"server.dump_dir={dumps}",
                f"server.urls=['http://127.0.0.1:{port}']", "extract.proof_samples=0", f"extract.shard_gb={shard_gb}", f"extract.max_in_flight={in_flight}"]  # fmt: skip
    load_config("smollm2-135m", name, settings)  # a typing error here, not in the child
    server = subprocess.Popen(
        [sys.executable, str(FAKE), "--port", str(port), "--dump-dir", str(dumps), "--model", str(target), "--hidden", str(hidden), "--layer-ids", "[3, 31, 59]",
         "--dtype", "bfloat16", "--tok-s", str(tok_s), *(["--pool"] if pool else [])]
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while not Client(f"http://127.0.0.1:{port}", 1.0).healthy():
            if time.monotonic() > deadline or server.poll() is not None:
                raise UserError("the fake server did not answer within 30 s")
            time.sleep(0.1)
        words = [word for text in settings for word in ("--set", text)]
        environment = os.environ | {"AERIE_RUNS_DIR": str(work)}
        for rows, count in Counter(lengths.tolist()).items() if pool else ():
            Client(f"http://127.0.0.1:{port}", 300.0).request("POST", "/prepare", {"rows": rows, "count": count})
        watch = Watch(dumps)
        watch.start()
        code = subprocess.run([sys.executable, str(EXTRACT), "--config", "smollm2-135m", "--run", name, *words], env=environment, check=False).returncode
        watch.ended.set()
        watch.join()
        if code:
            raise UserError(f"extraction of the {name} shape ended with exit code {code}")
    finally:
        server.terminate()
        server.wait()
    extracted = json.loads((run / "store" / "report.json").read_text())
    child = subprocess.run([sys.executable, __file__, "--read", str(run / "store"), "--batch-tokens", str(batch_tokens)], capture_output=True, text=True, check=False)
    if child.returncode:
        raise UserError(f"reading the store of the {name} shape failed: {child.stderr.strip().splitlines()[-1:]}")
    left = [path.name for path in dumps.iterdir() if path.name.startswith("aerie.")]
    return {
        "hidden": hidden, "samples": len(lengths), "tokens": int(lengths.sum()), "server_tok_s": tok_s, "accounting": extracted["accounting"], "extract_seconds": extracted["seconds"],
        "extract_tok_s": extracted["extract_tok_s"], "dump_gb_s": extracted["extract_tok_s"] * (4 * hidden * 2 + 4) / 1e9, "store_bytes": extracted["store_bytes"], "shards": extracted["shards"],
        "client_peak_memory_bytes": extracted["peak_memory_bytes"], "workers": extracted["workers"], "workers_peak_bytes": extracted["workers_peak_bytes"], "peak_requests_in_flight": extracted["peak_requests_in_flight"], "dump_files_at_most": watch.files,
        "dump_bytes_at_most": watch.bytes, "dumps_left": left, "read": json.loads(child.stdout.strip().splitlines()[-1]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["wide", "ceiling", "many"], choices=["wide", "ceiling", "many"], help="ceiling: wide, with a server that answers at once")
    parser.add_argument("--tok-s", type=float, default=2600.0, help="rate of the fake server in the shape 'wide' (default: %(default)s)")
    parser.add_argument("--thousandth", type=float, default=1.0, help="how many thousandths of the volume (default: %(default)s)")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--work", default="", help="an empty folder for it, about 17 GB (default: a temporary one)")
    parser.add_argument("--report", default="", metavar="FILE")
    parser.add_argument("--read", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(json.dumps(read_all(Path(args.read), args.batch_tokens, 7)))
        return
    found: dict[str, Any] = {}
    for name in args.shapes:
        work = Path(args.work) / name if args.work else Path(tempfile.mkdtemp(prefix="aerie-scale-"))
        work.mkdir(parents=True, exist_ok=True)
        try:
            if name == "many":
                # Shards of the full job: 5 TB in 1 GiB each, here as many of a thousandth; every sample and every row at H 8.
                lengths = lengths_of(int(SAMPLES * args.thousandth))
                rows = int(lengths.sum())
                full_shards = rows * (3 * FULL["hidden"] * 2 + 5 + FULL["hidden"]) / 2**30
                shard_gb = rows * (3 * 8 * 2 + 5 + 8 + 8) / 2**30 / full_shards
                found[name] = phase(name, work, 8, lengths, shard_gb, 0.0, 32, args.batch_tokens, pool=False)
            else:
                lengths = few_lengths(lengths_of(max(int(SAMPLES * args.thousandth / 1000), 12)))
                found[name] = phase(name, work, FULL["hidden"], lengths, 1.0, args.tok_s if name == "wide" else 0.0, 4, args.batch_tokens, pool=True)
            print(json.dumps({name: found[name]}, indent=2), flush=True)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    if args.report:
        write_report(Path(args.report), shapes=found, full=FULL)


if __name__ == "__main__":
    run_main(main)
