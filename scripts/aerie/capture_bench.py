"""What capture costs: prefill throughput of the extraction server against the same server without capture, same prompts, same concurrency."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Sequence

import numpy as np

from . import dumps
from .config import Config
from .errors import UserError
from .generate_client import Client
from .identity import read_model_config, text_config
from .paths import RunPaths
from .processor_time import processor_time
from .rid import new_rid, sample_id
from .servers import CAPTURE_OFF, Server, dump_dir

WARM_ROUNDS, WARM_AGREE = 8, 0.04  # on an H200 rounds of 7 s went from 157,000 to 196,000 tok/s in the first three and then stayed within 6%


@dataclass
class Round:
    """One pass over the prompts.

    steady_tok_s: tokens a second from the first answer until fewer requests than wanted are under way, so neither the way in nor the wait for the last ones counts: a long
    run has one of each, rounds of seconds have many. A round with too few prompts for that has its plain rate there.
    """

    capture: bool
    tokens: int
    seconds: float
    steady_tok_s: float
    cpu: dict[str, float]  # processor time, see processor_time.py: on a machine with other work a steadier measure than the clock
    problems: list[str] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    def line(self) -> str:
        """For a log."""
        cpu = self.cpu
        return (
            f"  {'with' if self.capture else 'without'} capture: {self.steady_tok_s:.0f} tok/s ({self.tok_s:.0f} with both ends), forward thread {cpu['forward']:.2f} s of {self.seconds:.2f}, "
            f"server {cpu['server']:.2f}, its writing {cpu['writer']:.2f}, client {cpu['client']:.2f}, machine {cpu['machine']:.2f}"
        )


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
    ends: list[tuple[float, int]] = []  # when a request was over, its tokens

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
            ends.append((time.perf_counter(), len(ids)))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    cpu, begin = processor_time(server.record["pid"]), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, after = time.perf_counter() - begin, processor_time(server.record["pid"])
    tokens = sum(map(len, prompts))
    return Round(folder is not None, tokens, seconds, steady_rate(ends, concurrency) or tokens / seconds, {name: after[name] - cpu[name] for name in cpu}, problems)


def steady_rate(ends: list[tuple[float, int]], concurrency: int) -> float:
    """Tokens a second between the first end of a request and the one with which the last prompt was sent: all the while `concurrency` requests were under way.

    `ends`: (time in seconds, tokens). 0 where that is less than half of the requests.
    """
    inside = sorted(ends)[: len(ends) - concurrency]
    if 2 * len(inside) < len(ends) or len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return 0.0
    return sum(tokens for _, tokens in inside[1:]) / (inside[-1][0] - inside[0][0])


def counters(folder: Path) -> dict[str, float]:
    """The server's counters, added over its data-parallel ranks, at most two seconds old."""
    total: dict[str, float] = {}
    for info in dumps.capture_info(folder):
        for name, value in info["counters"].items():
            total[name] = total.get(name, 0) + value
    return total


def median_interval(values: Sequence[float], chance: float = 0.95) -> tuple[float, float]:
    """Where the median lies of what `values` are drawn from, with at least this chance, whatever its distribution: two order statistics. Below six values: the extremes."""
    ordered, count = sorted(values), len(values)
    place, tail = 0, 1 / 2**count  # tail: the chance that at most `place` of the values lie below that median
    while tail <= (1 - chance) / 2:
        place += 1
        tail += math.comb(count, place) / 2**count
    place = max(place - 1, 0)
    return ordered[place], ordered[-1 - place]


def summary(rounds: list[Round], before: dict[str, float], after: dict[str, float], warm: Sequence[Round] = ()) -> dict[str, Any]:
    """The report's numbers. The counters `before` and `after` cover the warm-up rounds `warm` too.

    `ratio`: each round with capture over the round without it that ran beside it in time (steady_tok_s of both), the median of these; `ratio_low` to `ratio_high` is where the
    median lies with a chance of 95%. A machine's rate wanders by a quarter within minutes, and now and then a round stands still for half a second: two neighbours share the
    first, and a median leaves out the second. The estimators that do not pair stand beside it: `ratio_of_medians`, `ratio_by_all_seconds` (both ends of each round counted too).
    `forward_ratio`: the forward threads' processor time a token, without over with, by the same pairs; `cpu_ratio`: the whole server's, its writing process included.
    """
    plain, capture = ([one for one in rounds if one.capture is wanted] for wanted in (False, True))
    pairs = list(zip(plain, capture))
    ratios = [mine.steady_tok_s / other.steady_tok_s for other, mine in pairs]
    rates = [statistics.median(one.steady_tok_s for one in part) for part in (plain, capture)]
    delta = {name: round(value - before.get(name, 0), 4) for name, value in after.items()}
    wall, plain_wall = (sum(one.seconds for one in part) for part in (capture, plain))
    counted = wall + sum(one.seconds for one in warm if one.capture)
    low, high = median_interval(ratios)
    result = {
        "ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high, "pairs": len(pairs), "ratio_of_medians": rates[1] / rates[0],
        "ratio_by_all_seconds": sum(one.tokens for one in capture) / wall / (sum(one.tokens for one in plain) / plain_wall), "plain_tok_s": rates[0], "capture_tok_s": rates[1],
        "forward_ratio": cpu_ratio(pairs, "forward"), "cpu_ratio": cpu_ratio(pairs, "server"), "pair_ratios": ratios,
        "plain_rounds_tok_s": [one.steady_tok_s for one in plain], "capture_rounds_tok_s": [one.steady_tok_s for one in capture],
        "plain_rounds_seconds": [one.seconds for one in plain], "capture_rounds_seconds": [one.seconds for one in capture],
        "capture_seconds": wall, "plain_seconds": plain_wall, "counters": delta,
        # copy_s: what the copies took on the device; were they not overlapped with prefill, rounds with capture would take at least that much longer
        "copy_share_of_wall": delta.get("copy_s", 0.0) / counted, "seconds_longer_with_capture": wall - plain_wall,
        "hook_share_of_wall": delta.get("hook_s", 0.0) / counted,
        "problems": [problem for one in rounds for problem in one.problems][:20], "failed_requests": sum(len(one.problems) for one in rounds),
    }  # fmt: skip
    for word, part in (("plain", plain), ("capture", capture)):  # who ran meanwhile: cores busy, and microseconds of the forward thread a token
        seconds = sum(one.seconds for one in part)
        result[f"{word}_cores"] = {name: sum(one.cpu[name] for one in part) / seconds for name in part[0].cpu}
        result[f"{word}_rounds_forward_us_a_token"] = [one.cpu["forward"] / one.tokens * 1e6 for one in part]
    return result


def cpu_ratio(pairs: list[tuple[Round, Round]], name: str) -> float | None:
    """Processor time a token without capture over that with it, the median over (without, with); None where there is none to compare."""
    ratios = [other.cpu[name] / other.tokens / (mine.cpu[name] / mine.tokens) for other, mine in pairs if mine.cpu[name] > 0]
    return statistics.median(ratios) if ratios else None


def warm_up(run: Callable[[bool], Round], kinds: Sequence[bool], say: Callable[[str], Any], end: float = math.inf) -> list[Round]:
    """Rounds of these kinds in turn, until of each the last two are no further apart than WARM_AGREE; after WARM_ROUNDS of each, or at the time `end`, they are left as they are."""
    rounds: list[Round] = []
    for index in range(WARM_ROUNDS):
        rounds += [run(kind) for kind in kinds]
        last = [one.steady_tok_s for one in rounds[-2 * len(kinds) :]]
        if index and all(abs(now / then - 1) <= WARM_AGREE for then, now in zip(last, last[len(kinds) :])) or time.monotonic() > end:
            break
    say(f"  warm-up, {index + 1} rounds of each kind: {', '.join(f'{one.steady_tok_s:.0f}' for one in rounds)} tok/s")
    return rounds


def measure(
    config: Config, plain: Server, capture: Server, prompts: Sequence[np.ndarray], concurrency: int, repeats: int, round_s: float = 3.0, limit_s: float = math.inf, say: Any = print
) -> dict[str, Any]:
    """Both servers alive: `repeats` pairs of rounds take turns (plain, capture, capture, plain, ...), after rounds that warm up and do not count.

    The prompts are sent again until a round lasts about `round_s` seconds. Rounds are short and many because the machine's own rate wanders: what is near in time is
    alike. After `limit_s` seconds no further pair begins, but one is always measured.
    """
    begin, folder = time.monotonic(), dump_dir(config)

    def run(kind: bool) -> Round:
        return run_round(capture if kind else plain, prompts, concurrency, folder if kind else None)

    for kind in (False, True, True):  # kernels are compiled in the first ones
        first = run(kind)
    prompts = list(itertools.islice(itertools.cycle(prompts), max(len(prompts), math.ceil(len(prompts) * round_s / first.seconds))))
    time.sleep(2.5)  # the counters' file follows within two seconds
    before, rounds = counters(folder), []
    warm = warm_up(run, (False, True), say, begin + limit_s / 2)
    for index in range(repeats):
        for kind in (False, True) if index % 2 == 0 else (True, False):
            rounds.append(run(kind))
            say(rounds[-1].line())
        if time.monotonic() > begin + limit_s:
            break
    time.sleep(2.5)
    return summary(rounds, before, counters(folder), warm)


def measure_one_by_one(config: Config, prompts: Sequence[np.ndarray], concurrency: int, repeats: int, say: Any = print) -> dict[str, Any]:
    """For targets of which only one fits: all rounds without capture, then all with it (so its pairs are no neighbours)."""
    folder, rounds, before = dump_dir(config), [], {}
    for kind in (False, True):
        with start(config, kind) as server:
            server.wait_ready()
            warm_up(lambda kind: run_round(server, prompts, concurrency, folder if kind else None), (kind,), say)
            time.sleep(2.5)
            before = counters(folder) if kind else {}
            for _ in range(repeats):
                rounds.append(run_round(server, prompts, concurrency, folder if kind else None))
                say(rounds[-1].line())
            time.sleep(2.5)
            after = counters(folder) if kind else {}
    return summary(rounds, before, after)
