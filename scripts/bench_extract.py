#!/usr/bin/env python3
"""How much of a server's prefill rate extraction keeps, and how fast the client itself can be.

default    one server, the same prompts at the same concurrency: plain requests against extraction; `ratio` = extraction / plain (to reach: 0.85)
--ceiling  a stand-in server that hands out H 7168 dumps as fast as memory allows: the client's GB/s; `ratio` = that / the folder's own write rate (0.6)
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
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

from aerie.config import Config, add_config_arguments, config_from_args
from aerie.dumps import capture_info, check_dump, dump_path, read_dump, remove_dump, wait_dump
from aerie.errors import UserError, run_main
from aerie.extract_plan import Job, Plan, order
from aerie.extraction import Extraction, default_workers
from aerie.generate_client import Client
from aerie.identity import read_model_config, text_config
from aerie.paths import ROOT
from aerie.report import write_report
from aerie.rid import new_rid, sample_id
from aerie.samples import Sample
from aerie.servers import Server, dump_dir, url_of
from aerie.store import StoreWriter, supervised_rows


def make_prompts(count: int, shortest: int, longest: int, vocabulary: int, seed: int) -> list[Sample]:
    """Random ids, lengths spread evenly over the range; the last two thirds are supervised."""
    rng = np.random.default_rng(seed)
    samples = []
    for tokens in rng.permutation(np.linspace(shortest, longest, count).astype(int)):
        ids = rng.integers(10, vocabulary, tokens, dtype=np.int32)
        mask = (np.arange(tokens) >= tokens // 3).astype(np.uint8)
        samples.append(Sample(sample_id(ids, mask), ids, mask))
    return samples


class Prompts(Plan):
    """A plan over samples in memory."""

    def __init__(self, samples: list[Sample]):
        super().__init__({})
        self.made = samples
        self.jobs = [Job(sample.id, False, index, len(sample.input_ids), len(supervised_rows(sample.loss_mask))) for index, sample in enumerate(samples)]
        self.samples = len(samples)

    def sample(self, job: Job) -> Sample:
        return self.made[job.index]


def plain_seconds(url: str, samples: list[Sample], concurrency: int, timeout_s: float) -> float:
    """The same requests without a name that the capture knows: nothing is captured, nothing is written."""
    todo = [sample.input_ids.tolist() for sample in samples]
    lock = threading.Lock()
    problems: list[str] = []

    def lane() -> None:
        client = Client(url, timeout_s)
        while True:
            with lock:
                if not todo or problems:
                    return
                ids = todo.pop(0)
            body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
            status, data = client.request("POST", "/generate", body)
            if status != 200:
                problems.append(f"{url} answered {status}: {data[:200]!r}")

    threads = [threading.Thread(target=lane) for _ in range(concurrency)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise UserError(problems[0])
    return time.monotonic() - start


def extract_once(config: Config, plan: Prompts, urls: list[str], folder: Path, store: Path, identity: dict[str, Any]) -> tuple[float, Any]:
    """Extract the whole plan from these servers into a fresh store; seconds and outcome."""
    shutil.rmtree(store, ignore_errors=True)
    writer = StoreWriter(store, {**identity, "model_hash": "bench"}, int(config.extract.shard_gb * 2**30))
    outcome = Extraction(config, plan, order(plan.jobs), writer, urls, folder, identity).run()
    if outcome.failed:
        raise UserError(f"{len(outcome.failed)} samples failed, the first: {next(iter(outcome.failed.values()))}")
    return outcome.seconds, outcome


def ask_identity(config: Config, url: str, folder: Path, sample: Sample) -> dict[str, Any]:
    """One request through the dump path: what the states are."""
    rid = new_rid(config.run.name, sample.id, len(sample.input_ids))
    body = {"rid": str(rid), "input_ids": sample.input_ids.tolist(), "sampling_params": {"max_new_tokens": 1}}
    status, answer = Client(url, 300.0).request("POST", "/generate", body)
    if status != 200:
        raise UserError(f"{url} refused a prompt of {len(sample.input_ids)} tokens ({status}: {answer[:200]!r}); --tokens MIN MAX must fit its context-length")
    wait_dump(folder, rid, 60.0)
    dump = read_dump(dump_path(folder, rid))
    check_dump(dump, rid, sample.input_ids)
    identity = dump.identity()
    remove_dump(folder, rid)
    return identity


def bench_server(config: Config, args: argparse.Namespace, store: Path) -> dict[str, Any]:
    """Plain and extraction in turns on one server; the ratio is that of the medians."""
    vocabulary = int(text_config(read_model_config(config.model_path))["vocab_size"])
    samples = make_prompts(args.samples, args.tokens[0], args.tokens[1], vocabulary, 0)
    plan = Prompts(samples)
    tokens = sum(len(sample.input_ids) for sample in samples)
    folder, url = dump_dir(config), args.url or url_of(config, "extraction")
    server = None
    if not args.url and Server.find(config, "extraction") is None:
        server = Server.start(config, "extraction")
        server.wait_ready()
    try:
        identity = ask_identity(config, url, folder, samples[0])
        lanes = config.extract.max_in_flight
        warm = make_prompts(min(len(samples), 2 * lanes), args.tokens[0], args.tokens[1], vocabulary, 1)
        plain_seconds(url, warm, lanes, config.extract.request_timeout_s)
        plain, extract = [], []
        outcome = None
        ordered = [plan.sample(job) for job in order(plan.jobs)]  # the same prompts in the same order on both sides
        for turn in range(args.rounds):
            plain.append(tokens / plain_seconds(url, ordered, lanes, config.extract.request_timeout_s))
            seconds, outcome = extract_once(config, plan, [url], folder, store / "store", identity)
            extract.append(tokens / seconds)
            print(f"round {turn + 1}: plain {plain[-1]:,.0f} tok/s, extraction {extract[-1]:,.0f} tok/s ({extract[-1] / plain[-1]:.3f})", flush=True)
        counters = [info.get("counters") for info in capture_info(folder)]
    finally:
        if server is not None:
            server.stop()
    return {
        "ratio": statistics.median(extract) / statistics.median(plain), "plain_tok_s": plain, "extract_tok_s": extract,
        "samples": len(samples), "tokens": tokens,
        "concurrency": lanes, "states": identity, "retries": outcome.retries, "peak_dump_bytes": outcome.peak_dump_bytes, "server_counters": counters,
    }  # fmt: skip


def write_rate(folder: Path, nbytes: int, threads: int) -> float:
    """Bytes a second that `threads` threads write into new files here and fsync, 1 MiB a call."""
    block = memoryview(np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8))

    def one(number: int) -> None:
        with open(folder / f"rate.{number}", "wb", buffering=0) as file:
            for _ in range(max(1, nbytes // threads >> 20)):
                file.write(block)
            os.fsync(file.fileno())

    workers = [threading.Thread(target=one, args=(number,)) for number in range(threads)]
    start = time.monotonic()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.monotonic() - start
    written = sum(path.stat().st_size for path in folder.glob("rate.*"))
    for path in folder.glob("rate.*"):
        path.unlink()
    return written / seconds


def bench_ceiling(config: Config, args: argparse.Namespace, store: Path) -> dict[str, Any]:
    """The client alone against dumps that cost nothing to make."""
    folder = Path(args.dumps or "/dev/shm") / f"aerie-ceiling-{os.getpid()}"
    samples = make_prompts(args.samples, args.tokens[0], args.tokens[0], 1000, 0)  # one length: the stand-in uses its files again
    plan = Prompts(samples)
    identity = {"aux_layer_ids": [1, 2, 4], "capture_points": [2, 3, 5], "hidden_size": args.hidden, "dtype": "bfloat16", "logits": {}}
    port = args.port
    stand_in = [sys.executable, str(ROOT / "tests" / "fake_dump_server.py"), "--dtype", "bfloat16", "--pool"]
    command = [*stand_in, "--port", str(port), "--dump-dir", str(folder), "--hidden", str(args.hidden)]
    server = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        client = Client(url, 60.0)
        deadline = time.monotonic() + 60
        while not client.healthy():
            if server.poll() is not None or time.monotonic() > deadline:
                raise UserError(f"the stand-in server did not start on port {port}; choose another with --port")
            time.sleep(0.05)
        warm = Prompts(make_prompts(2 * config.extract.max_in_flight, args.tokens[0], args.tokens[0], 1000, 1))
        extract_once(config, warm, [url], folder, store / "store", identity)  # the stand-in writes its files
        rates, client_rates, cpu = [], [], []
        size = sum(job.tokens * 3 + job.final_rows for job in plan.jobs) * args.hidden * 2
        workers = args.threads or default_workers()
        for turn in range(args.rounds):
            shutil.rmtree(store / "store", ignore_errors=True)
            rates.append(write_rate(store, size, workers))
            before = os.times()
            seconds, outcome = extract_once(config, plan, [url], folder, store / "store", identity)
            after = os.times()
            cpu.append(after.user + after.system - before.user - before.system)
            client_rates.append(size / seconds)
            print(
                f"round {turn + 1}: client {client_rates[-1] / 1e9:.2f} GB/s ({cpu[-1] / seconds:.2f} cores), plain writes of {workers} threads "
                f"{rates[-1] / 1e9:.2f} GB/s",
                flush=True,
            )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "ratio": statistics.median(client_rates) / statistics.median(rates), "client_bytes_s": client_rates, "write_bytes_s": rates, "client_cpu_seconds": cpu,
        "hidden": args.hidden, "samples": len(samples), "tokens_a_sample": args.tokens[0], "store_bytes": size,
        "store_folder": str(store), "dump_folder": str(folder),
        "retries": outcome.retries, "lost_and_late": dict(Counter(late=outcome.late, losses=outcome.server_losses)),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--report", type=Path, default=None, help="where the report goes (default: runs/<run>/bench/extract.json, or extract_ceiling.json)")
    parser.add_argument("--samples", type=int, default=200, help="prompts a round (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs=2, default=(300, 4000), metavar=("MIN", "MAX"), help="prompt lengths; --ceiling uses MIN alone (default: 300 4000)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements, whose median counts (default: %(default)s)")
    parser.add_argument("--url", default="", help="a running capture server of this config (default: the run's own, started if need be)")
    parser.add_argument("--store", type=Path, default=None, help="folder for the store (default: under the run's folder)")
    parser.add_argument("--ceiling", action="store_true", help="the client's own limit, against a stand-in server")
    parser.add_argument("--hidden", type=int, default=7168, help="--ceiling: width of a state (default: %(default)s)")
    parser.add_argument("--dumps", default="", help="--ceiling: where the stand-in writes (default: /dev/shm)")
    parser.add_argument("--threads", type=int, default=0, help="--ceiling: threads of the plain writes (default: as many as the client has workers)")
    parser.add_argument("--port", type=int, default=31999, help="--ceiling: the stand-in's port (default: %(default)s)")
    args = parser.parse_args()
    config = config_from_args(args)
    config.extract.proof_samples = 0
    base = args.store or config.run.root
    base.mkdir(parents=True, exist_ok=True)
    store = Path(tempfile.mkdtemp(prefix="bench-extract-", dir=base))
    try:
        result = (bench_ceiling if args.ceiling else bench_server)(config, args, store)
    finally:
        shutil.rmtree(store, ignore_errors=True)
    path = args.report or config.run.bench / ("extract_ceiling.json" if args.ceiling else "extract.json")
    write_report(path, config=config.as_dict(), **result)
    print(f"ratio {result['ratio']:.3f}; report: {path}")
    return 0


if __name__ == "__main__":
    run_main(main)
