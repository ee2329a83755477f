#!/usr/bin/env python3
"""Extraction over two servers of one GPU each (about five minutes on a fresh machine): the rate against one of them, and one killed in the middle.

Run by hand on a machine with two GPUs whose Python has SGLang and the capture patch: tests/gpu/two_extract.py OUT. Every part goes on when another fails. Writes
OUT/two_extract.json, prints a JSON line a part. To reach: `ratio` 1.8. The target has the shape of an 8 B Llama and weights of SGLang's own making, since only its speed
counts: a smaller one would measure the client. Without a GPU: stand-in servers of a fixed speed (its numbers then mean nothing).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from aerie.config import Config, load_config  # noqa: E402
from aerie.dumps import capture_info  # noqa: E402
from aerie.extract_plan import order  # noqa: E402
from aerie.extraction import Extraction  # noqa: E402
from aerie.generate_client import Client  # noqa: E402
from aerie.servers import Server, dump_dir, end_group, has_gpu, url_of  # noqa: E402
from aerie.store import Store, StoreWriter  # noqa: E402
from aerie.tiny import CONFIGS, tiny_tokenizer  # noqa: E402
from bench_extract import Prompts, ask_identity, extract_once, make_prompts, plain_seconds  # noqa: E402
from cpu_tools import free_port, write_config  # noqa: E402
from gpu_parts import Parts, begin  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

GPU = has_gpu()
LLAMA = CONFIGS["llama"] | {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336, "vocab_size": 32000,
    "max_position_embeddings": 8192, "dtype": "bfloat16",
}  # fmt: skip
LAYER_IDS, VOCAB, HIDDEN = ([1, 15, 28], 32000, 4096) if GPU else ([1, 2, 4], 320, 64)
SAMPLES, TOKENS, LANES, ROUNDS = (240, (300, 2000), 24, 2) if GPU else (120, (20, 60), 4, 2)
ARGS = {
    "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.6, "max-total-tokens": 131072, "context-length": 8192,
    "disable-cuda-graph": True, "chunked-prefill-size": 8192, "max-running-requests": 128, "skip-tokenizer-init": True, "load-format": "dummy",
}  # fmt: skip
BUDGET_MB = 4096  # 24 requests of at most 2,000 tokens at 32 KB a token are 1.6 GB
STAND_IN_TOK_S = 5000


def make_model(folder: Path) -> Path:
    """config.json, a tokenizer, and a file of weights for the look at the folder before a server starts: load-format dummy reads none, SGLang makes its own."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA if GPU else CONFIGS["llama"]))
    tiny_tokenizer().save_pretrained(folder)
    return folder


class Pair:
    """Two servers, one a GPU, that write into one folder."""

    def __init__(self, work: Path):
        self.work = work
        self.configs = [self.config(number) for number in range(2)]
        self.servers: list[Server | subprocess.Popen] = []

    def config(self, number: int) -> Config:
        server = {
            "args": ARGS if GPU else {}, "gpus": [number] if GPU else [], "port": free_port(), "dump_dir": str(self.work / "dumps"), "ready_timeout_s": 280.0,
            "env": {"SGLANG_HS_DUMP_BUDGET_MB": str(BUDGET_MB)},
        }  # fmt: skip
        extract = {"max_in_flight": LANES, "proof_samples": 0, "request_timeout_s": 60.0}
        path = write_config(self.work / f"server-{number}.toml", self.work / "model", LAYER_IDS, target={"dtype": "bfloat16"}, server=server, extract=extract)
        return load_config(str(path), f"two-extract-{number}")

    @property
    def urls(self) -> list[str]:
        return [url_of(config, "extraction") for config in self.configs]

    def start(self) -> str:
        for config in self.configs:
            if GPU:
                self.servers.append(Server.start(config, "extraction"))
            else:
                words = ["--port", str(config.server.port), "--dump-dir", str(dump_dir(config)), "--dtype", "bfloat16", "--tok-s", str(STAND_IN_TOK_S)]
                self.servers.append(subprocess.Popen([sys.executable, str(ROOT / "tests" / "fake_dump_server.py"), *words], start_new_session=True))
        return "started"

    def ready(self) -> str:
        deadline = time.monotonic() + 280
        for server, url in zip(self.servers, self.urls):
            if isinstance(server, Server):
                server.wait_ready(max(1.0, deadline - time.monotonic()))
            while not Client(url, 5.0).healthy():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{url} does not answer")
                time.sleep(0.1)
        return "both answer"

    def kill(self, number: int) -> None:
        """As if the power of that server went: its whole process group at once."""
        server = self.servers[number]
        os.killpg(server.record["pid"] if isinstance(server, Server) else server.pid, signal.SIGKILL)

    def stop(self, out: Path) -> None:
        for number, server in enumerate(self.servers):
            if isinstance(server, Server):
                (out / f"two-extract-{number}.log").write_bytes(server.log.read_bytes()[-200_000:])
                server.stop()
            else:
                end_group(server.pid)
                server.wait()


class Measured:
    """The prompts, and what the parts have in common."""

    def __init__(self, pair: Pair, samples: int):
        self.pair, self.config, self.folder, self.store = pair, pair.configs[0], dump_dir(pair.configs[0]), pair.work / "store"
        self.plan = Prompts(make_prompts(samples, *TOKENS, VOCAB, 0))
        self.tokens = sum(job.tokens for job in self.plan.jobs)
        self.identity: dict[str, Any] = {}
        self.rates: dict[str, list[float]] = {"one": [], "two": []}

    def warm(self) -> dict[str, Any]:
        """What the states are, and a few requests to each server."""
        self.identity = ask_identity(self.config, self.pair.urls[0], self.folder, self.plan.made[0])
        warm = make_prompts(2 * LANES, *TOKENS, VOCAB, 1)
        threads = [threading.Thread(target=plain_seconds, args=(url, warm, LANES, 60.0)) for url in self.pair.urls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return dict(self.identity)

    def plain(self) -> dict[str, Any]:
        """One server's own prefill rate, nothing captured."""
        samples = [self.plan.sample(job) for job in order(self.plan.jobs)]
        return {"plain_tok_s": self.tokens / plain_seconds(self.pair.urls[0], samples, LANES, 60.0)}

    def rate(self) -> dict[str, Any]:
        """One server and both in turns, the other one idle in between."""
        late = {}
        for _ in range(ROUNDS):
            for name, urls in (("one", self.pair.urls[:1]), ("two", self.pair.urls)):
                seconds, outcome = extract_once(self.config, self.plan, urls, self.folder, self.store, self.identity)
                self.rates[name].append(self.tokens / seconds)
                late[name] = outcome.retries
        one, two = (statistics.median(self.rates[name]) for name in ("one", "two"))
        dropped = sum(info.get("counters", {}).get("dropped", 0) for info in capture_info(self.folder))
        return {
            "ratio": two / one, "one_tok_s": one, "two_tok_s": two, "rounds": self.rates, "tokens": self.tokens, "samples": len(self.plan.jobs),
            "retries": sum(late.values()), "dropped": dropped,
            "store_bytes_s": two * self.store_bytes() / self.tokens,
        }  # fmt: skip

    def store_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.store.glob("shard-*.safetensors"))

    def killed(self) -> dict[str, Any]:
        """Both, and the second one dies when a third is there: every sample must be in the store, once, with its own tokens."""
        shutil.rmtree(self.store, ignore_errors=True)
        writer = StoreWriter(self.store, {**self.identity, "model_hash": "bench"}, 1 << 30)
        extraction = Extraction(self.config, self.plan, order(self.plan.jobs), writer, self.pair.urls, self.folder, self.identity)
        at = []

        def kill() -> None:
            while extraction.outcome.extracted < len(self.plan.jobs) // 3 and not extraction.stopping:
                time.sleep(0.01)
            self.pair.kill(1)
            at.append(extraction.outcome.extracted)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        outcome = extraction.run()
        thread.join(10)
        store = Store.open(self.store)
        wanted = {sample.id: sample for sample in self.plan.made}
        equal = sum(np.array_equal(store.get(index).input_ids.numpy(), wanted[name].input_ids) for index, name in enumerate(store.ids))
        right = sorted(store.ids) == sorted(wanted) and equal == len(wanted) and not outcome.failed and outcome.server_losses == 1
        return {
            "right": right, "killed_after": at[0] if at else -1, "samples": len(wanted), "in_store": len(store.ids), "equal_tokens": equal, "failed": len(outcome.failed),
            "server_losses": outcome.server_losses, "retries": outcome.retries, "late": outcome.late, "tok_s": self.tokens / outcome.seconds,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--seconds", type=float, default=320.0, help="no part begins after that (default: %(default)s)")
    args = parser.parse_args()
    out = args.out.absolute()
    begin(out, out / "runs")
    memory = Path("/dev/shm")
    room = shutil.disk_usage(memory).free
    samples = args.samples if not GPU else min(args.samples, int(0.4 * room / (32768 * sum(TOKENS) / 2)))  # a store and the dumps in flight lie in memory
    roomy = samples >= 60 or not GPU
    work = (memory if GPU and roomy else out) / f"aerie-two-extract-{os.getpid()}"
    work.mkdir()
    make_model(work / "model")
    pair = Pair(work)
    (work / "dumps").mkdir()
    parts = Parts(out / "two_extract.json", args.seconds, gpu=GPU, cores=os.cpu_count(), folder=str(work), free_bytes=room)
    measured = Measured(pair, samples if roomy else args.samples)
    try:
        if parts("start", pair.start) and parts("ready", pair.ready) and parts("warm", measured.warm):
            parts("plain", measured.plain)
            parts("rate", measured.rate)
            parts("killed", measured.killed)
    finally:
        pair.stop(out)
        shutil.rmtree(work, ignore_errors=True)
        rates = ("ratio", "plain_tok_s", "one_tok_s", "two_tok_s", "store_bytes_s")
        parts.summary((*rates, "retries", "dropped", "right", "killed_after", "in_store", "samples", "server_losses", "late"))


if __name__ == "__main__":
    main()
