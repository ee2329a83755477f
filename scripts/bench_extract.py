#!/usr/bin/env python3
"""How much of a server's prefill rate extraction keeps, and how fast the client itself can be.

default    one server, the same prompts at the same concurrency: plain requests against extraction; `ratio` = extraction / plain (to reach: 0.85)
--ceiling  a stand-in server with processes of its own hands out H 7168 dumps that were made before the clock starts: the client's GB/s from the first request to the last
           fsync; `ratio` = that / what as many processes write into fresh files of a shard's size in the same folder, fsync included (to reach: 0.6)
"""

from __future__ import annotations

import argparse
import os
import resource
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
from aerie.dump_pool import default_workers
from aerie.dumps import capture_info, check_dump, dump_path, read_dump, remove_dump, wait_dump
from aerie.errors import UserError, run_main
from aerie.extract_plan import Job, Plan, order
from aerie.extraction import Extraction
from aerie.generate_client import Client
from aerie.identity import read_model_config, text_config
from aerie.paths import ROOT
from aerie.report import write_report
from aerie.rid import new_rid, sample_id
from aerie.samples import Sample
from aerie.servers import Server, dump_dir, url_of
from aerie.store import StoreWriter, supervised_rows
from aerie.write_rate import write_rate


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


def extract_once(config: Config, plan: Prompts, urls: list[str], folder: Path, store: Path, identity: dict[str, Any], workers: int = 0) -> tuple[float, Any]:
    """Extract the whole plan from these servers into a fresh store; seconds and outcome."""
    shutil.rmtree(store, ignore_errors=True)
    writer = StoreWriter(store, {**identity, "model_hash": "bench"}, int(config.extract.shard_gb * 2**30))
    extraction = Extraction(config, plan, order(plan.jobs), writer, urls, folder, identity, workers)
    extraction.start_workers()  # a real run lasts for hours: their start is no part of the rate
    outcome = extraction.run()
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


def cpu_seconds() -> tuple[float, float]:
    """Processor time of this process, and of its children that have ended."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, ended.ru_utime + ended.ru_stime


def start_stand_in(args: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen, Client]:
    """The stand-in server, once it answers."""
    processes = max(1, min(6, len(os.sched_getaffinity(0)) // 3))
    command = [sys.executable, str(ROOT / "tests" / "fake_dump_server.py"), "--dtype", "bfloat16", "--pool", "--processes", str(processes)]
    server = subprocess.Popen([*command, "--port", str(args.port), "--dump-dir", str(folder), "--hidden", str(args.hidden)])
    client = Client(f"http://127.0.0.1:{args.port}", 300.0)
    deadline = time.monotonic() + 60
    while not client.healthy():
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise UserError(f"the stand-in server did not start on port {args.port}; choose another with --port")
        time.sleep(0.05)
    return server, client


def bench_ceiling(config: Config, args: argparse.Namespace, store: Path) -> dict[str, Any]:
    """The client alone against dumps that lie ready."""
    folder = Path(args.dumps or "/dev/shm") / f"aerie-ceiling-{os.getpid()}"
    folder.mkdir()
    tokens = args.tokens[0]
    samples = make_prompts(args.samples, tokens, tokens, 1000, 0)  # one length: a dump is ready for any of them
    plan = Prompts(samples)
    identity = {"aux_layer_ids": [1, 2, 4], "capture_points": [2, 3, 5], "hidden_size": args.hidden, "dtype": "bfloat16", "logits": {}}
    size = sum(job.tokens * 3 + job.final_rows for job in plan.jobs) * args.hidden * 2
    dumps = len(samples) * tokens * (4 * args.hidden * 2 + 4)
    room = size + (dumps if folder.stat().st_dev == store.stat().st_dev else 0)
    for place, needed in ((folder, dumps), (store, room)):
        if (free := shutil.disk_usage(place).free) < needed:
            raise UserError(f"{place.parent} has {free / 1e9:.1f} GB free and {needed / 1e9:.1f} GB are needed; fewer --samples, or another --dumps or --store")
    workers = args.workers or default_workers()
    rates, client_rates, cpu, peaks = [], [], [], []
    server, client = start_stand_in(args, folder)
    try:
        warm = Prompts(make_prompts(min(len(samples), 2 * workers), tokens, tokens, 1000, 1))
        for turn in range(-1, args.rounds):
            now = plan if turn >= 0 else warm
            client.request("POST", "/prepare", {"rows": tokens, "count": len(now.made)})
            shutil.rmtree(store / "store", ignore_errors=True)
            rate = write_rate(store, size if turn >= 0 else room, workers, int(config.extract.shard_gb * 2**30))
            before = cpu_seconds()
            seconds, outcome = extract_once(config, now, [client.url], folder, store / "store", identity, workers)
            after = cpu_seconds()
            if turn < 0:
                continue  # the first is for everybody to wake up, and for a virtual machine to get all the memory that is used below
            rates.append(rate)
            cpu.append((after[0] - before[0], after[1] - before[1]))
            client_rates.append(size / seconds)
            peaks.append(outcome.workers_peak_bytes)
            print(
                f"round {turn + 1}: client {client_rates[-1] / 1e9:.2f} GB/s ({seconds:.2f} s; {cpu[-1][0]:.2f} core-seconds and {cpu[-1][1]:.2f} in "
                f"{outcome.workers} workers), plain writes of {workers} processes {rates[-1] / 1e9:.2f} GB/s",
                flush=True,
            )
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "ratio": statistics.median(client_rates) / statistics.median(rates), "client_bytes_s": client_rates, "write_bytes_s": rates,
        "samples_s": statistics.median(client_rates) / size * len(samples),
        "client_cpu_ms_a_sample": 1e3 * statistics.median(own for own, _ in cpu) / len(samples),
        "worker_cpu_s_a_gb": statistics.median(theirs for _, theirs in cpu) / size * 1e9, "workers": workers, "workers_peak_bytes": max(peaks),
        "hidden": args.hidden, "samples": len(samples), "tokens_a_sample": tokens, "store_bytes": size, "dump_bytes": dumps,
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
    parser.add_argument("--workers", type=int, default=0, help="--ceiling: processes of the client, and of the plain writes (default: as many as extraction has)")
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
