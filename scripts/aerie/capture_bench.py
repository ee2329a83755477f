"""What capture costs: prefill throughput of the extraction server against the same server without capture, same prompts, same concurrency."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from . import dumps
from .config import Config
from .errors import UserError
from .generate_client import Client
from .identity import read_model_config, text_config
from .paths import RunPaths
from .rid import new_rid, sample_id
from .servers import CAPTURE_OFF, Server, dump_dir


@dataclass
class Round:
    """One pass over the prompts."""

    capture: bool
    tokens: int
    seconds: float
    cpu_s: float  # processor time of all of the server's processes: on a machine with other work a steadier measure than the clock
    problems: list[str] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


def plain_config(config: Config) -> Config:
    """The same server without capture: another run name and port, so that both can live side by side."""
    name = f"{config.run.name}-plain"[:48]
    return dataclasses.replace(config, run=RunPaths(name), server=dataclasses.replace(config.server, port=config.bench.baseline_port))


def start(config: Config, capture: bool) -> Server:
    """The extraction server, or the same one with capture off; not waited for."""
    return Server.start(config if capture else plain_config(config), "extraction", extra_env=None if capture else CAPTURE_OFF)


def make_prompts(config: Config, count: int, tokens: int) -> list[np.ndarray]:
    """`count` prompts of random ids; lengths between half of `tokens` and one and a half, `tokens` on the mean."""
    vocab = int(text_config(read_model_config(config.model_path)).get("vocab_size", 0)) or 256
    generator = np.random.default_rng(0)
    lengths = generator.integers(max(tokens // 2, 2), tokens + tokens // 2 + 1, count)
    return [generator.integers(0, vocab, int(length)).astype(np.int32) for length in lengths]


def run_round(server: Server, prompts: Sequence[np.ndarray], concurrency: int, folder: Path | None, timeout_s: float = 300.0) -> Round:
    """Send every prompt once, `concurrency` at a time, one token each; with `folder` under our names, each dump waited for and deleted."""
    places, lock, problems = iter(range(len(prompts))), threading.Lock(), []

    def work() -> None:
        client = Client(server.url, timeout_s)
        while True:
            with lock:
                place = next(places, None)
            if place is None:
                client.close()
                return
            ids = prompts[place]
            rid = str(new_rid("bench", sample_id(ids, np.zeros(len(ids), np.uint8)), len(ids)))
            body = {"rid": rid if folder else f"plain-{rid[-20:]}", "input_ids": ids.tolist(), "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
            try:
                status, data = client.request("POST", "/generate", body)
                if status != 200:
                    raise UserError(f"status {status}: {data[:200]!r}")
                if folder:
                    dumps.wait_dump(folder, rid, 60)
                    dumps.remove_dump(folder, rid)
            except Exception as exc:
                problems.append(f"{len(ids)} tokens: {exc}")

    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    begin, cpu = time.perf_counter(), cpu_seconds(server.record["pid"])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Round(folder is not None, sum(map(len, prompts)), time.perf_counter() - begin, cpu_seconds(server.record["pid"]) - cpu, problems)


def cpu_seconds(pgid: int) -> float:
    """User and system time so far of the processes of a group."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pgid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def counters(folder: Path) -> dict[str, float]:
    """The server's counters, added over its data-parallel ranks, at most two seconds old."""
    total: dict[str, float] = {}
    for info in dumps.capture_info(folder):
        for name, value in info["counters"].items():
            total[name] = total.get(name, 0) + value
    return total


def summary(rounds: list[Round], before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """The report's numbers. `ratio` is the median throughput with capture over the median without; `cpu_ratio` the same of tokens a second of processor time."""
    plain, capture = ([one for one in rounds if one.capture is wanted] for wanted in (False, True))
    rates = [statistics.median(one.tok_s for one in part) for part in (plain, capture)]
    delta = {name: round(value - before.get(name, 0), 4) for name, value in after.items()}
    wall = sum(one.seconds for one in capture)
    copied = delta.get("copy_s", 0.0)
    return {
        "ratio": rates[1] / rates[0], "plain_tok_s": rates[0], "capture_tok_s": rates[1],
        "cpu_ratio": statistics.median(one.cpu_s for one in plain) / statistics.median(one.cpu_s for one in capture),
        "plain_rounds_cpu_s": [one.cpu_s for one in plain], "capture_rounds_cpu_s": [one.cpu_s for one in capture],
        "plain_rounds_tok_s": [one.tok_s for one in plain], "capture_rounds_tok_s": [one.tok_s for one in capture],
        "capture_seconds": wall, "plain_seconds": sum(one.seconds for one in plain), "counters": delta,
        # copy_s: what the copies took on the device; were they not overlapped with prefill, rounds with capture would take at least that much longer
        "copy_share_of_wall": copied / wall, "seconds_longer_with_capture": wall - sum(one.seconds for one in plain), "hook_share_of_wall": delta.get("hook_s", 0.0) / wall,
        "problems": [problem for one in rounds for problem in one.problems][:20], "failed_requests": sum(len(one.problems) for one in rounds),
    }  # fmt: skip


def measure(
    config: Config, plain: Server, capture: Server, prompts: Sequence[np.ndarray], concurrency: int, repeats: int, round_s: float = 8.0, say: Any = print
) -> dict[str, Any]:
    """Both servers alive: rounds take turns (plain, capture, capture, plain, ...), after two rounds each that warm up and do not count.

    On an H200 the first round after a single one each, and after the pause for the counters, ran at half the rate of those that followed. The prompts are sent again
    and again until a round lasts `round_s` seconds or more: a round ends with its last dump, and in a short one the wait for that weighs more than it does in a long run.
    """
    folder = dump_dir(config)
    for server, where in ((plain, None), (capture, folder), (capture, folder)):
        warm = run_round(server, prompts, concurrency, where)
    prompts = list(prompts) * max(1, math.ceil(round_s / warm.seconds))
    time.sleep(2.5)  # the counters' file follows within two seconds
    before, rounds = counters(folder), []
    run_round(plain, prompts, concurrency, None)  # the server has idled since
    for index in range(repeats):
        for kind in ((False, True) if index % 2 == 0 else (True, False)):
            rounds.append(run_round(capture if kind else plain, prompts, concurrency, folder if kind else None))
            say(f"  {'with' if kind else 'without'} capture: {rounds[-1].tok_s:.0f} tok/s, {rounds[-1].cpu_s:.2f} s of processor time")
    time.sleep(2.5)
    return summary(rounds, before, counters(folder))


def measure_one_by_one(config: Config, prompts: Sequence[np.ndarray], concurrency: int, repeats: int, say: Any = print) -> dict[str, Any]:
    """For targets of which only one fits: all rounds without capture, then all with it."""
    folder, rounds, before = dump_dir(config), [], {}
    for kind in (False, True):
        with start(config, kind) as server:
            server.wait_ready()
            run_round(server, prompts, concurrency, folder if kind else None)
            time.sleep(2.5)
            before = counters(folder) if kind else {}
            for _ in range(repeats):
                rounds.append(run_round(server, prompts, concurrency, folder if kind else None))
                say(f"  {'with' if kind else 'without'} capture: {rounds[-1].tok_s:.0f} tok/s, {rounds[-1].cpu_s:.2f} s of processor time")
            time.sleep(2.5)
            after = counters(folder) if kind else {}
    return summary(rounds, before, after)
