"""What capture costs: prefill throughput of the extraction server with our names over the same without them, or over a server with capture off; same prompts, same concurrency.

The machine's own rate wanders: on a virtual machine with an H200 the one core that launches the forwards ran at 1 and at 1/1.8 of its speed in turns of 0.1
to 3 s. So requests never cease (capture_loop.py), and short blocks of them without and with capture take turns, strictly: each has one of the other kind
right before it and right behind it. Simulated with the batch times of that day, a capture that costs 5% and 60 s of measuring, 95% of the ratios lie within
0.086 of the truth for pairs of rounds of 2.5 s, and for blocks that leave out their first quarter within 0.069 (1 s), 0.034 (0.5 s), 0.030 (0.4 s), 0.028
(0.3 s); in the order ABBA, which changes half as often, 0.057 (0.5 s). The first quarter is left out because files of the block before are still written
then: a cost that comes 0.1 s late would read 0.978 in place of 0.95 in blocks of 0.4 s. What a writing process costs that cannot keep up shows in no short
block: `held_back` and `dump_lag_s` of the report say whether it does, also for the warm-up's blocks of LONG_S.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from . import dumps
from .bench_prompts import longest_context
from .capture_loop import END, TOO_MANY, Block, Loop
from .config import Config
from .config_rules import option_number
from .errors import UserError
from .identity import read_model_config, text_config
from .paths import RunPaths
from .rid import parse_rid
from .servers import CAPTURE_OFF, Server, dump_dir, server_args

BLOCK_S, LONG_S = 0.4, 1.5  # seconds of a block, and of one in the warm-up
WIDTH = 0.03  # of the interval: so narrow is enough
MIN_BATCHES = 8  # of the server in a block: fewer, and what two blocks share counts for too much
GROUP = 4  # pairs of blocks that are drawn together for the interval
LEAST_PAIRS = 4


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked of the server, and for how long.

    seconds: measured at least, warm-up not counted. limit_s: no further pair of blocks begins so long after the beginning of it all; until then it goes on while the interval
    of the ratio is wider than `width` (0: it does not).
    """

    prompts: Sequence[np.ndarray]
    concurrency: int
    seconds: float = 45.0
    limit_s: float = math.inf
    block_s: float = BLOCK_S
    width: float = WIDTH

    @property
    def mean_tokens(self) -> float:
        return sum(map(len, self.prompts)) / len(self.prompts)


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


def longest_prompt(config: Config) -> int:
    """Tokens of a prompt that the extraction server still takes."""
    return int(min(longest_context(config, "extraction"), option_number(server_args(config, "extraction"), "max-total-tokens", default=math.inf))) - 8


def remove_dumps(config: Config) -> None:
    """What a benchmark that was interrupted, or requests that failed, left in the dump folder; its server has ended."""
    for path in dump_dir(config).glob(f"aerie.{config.run.name}.*"):
        if parse_rid(path.stem) is not None:
            path.unlink(missing_ok=True)


def counters(folder: Path) -> dict[str, float]:
    """The server's counters, added over its data-parallel ranks, at most two seconds old."""
    total: dict[str, float] = {}
    for info in dumps.capture_info(folder):
        for name, value in info["counters"].items():
            total[name] = total.get(name, 0) + value
    return total


def split(blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
    """Without capture, with it."""
    plain, capture = ([block for block in blocks if block.capture is wanted] for wanted in (False, True))
    return plain, capture


def rate_of(blocks: Sequence[Block]) -> float:
    """Tokens a second of all these blocks together."""
    return sum(block.tokens for block in blocks) / sum(block.seconds for block in blocks)


def ratio(blocks: Sequence[Block]) -> float:
    """Tokens a second with capture over those without it, of all these blocks together."""
    plain, capture = map(rate_of, split(blocks))
    return capture / plain


def neighbour_ratios(blocks: Sequence[Block]) -> np.ndarray:
    """Of each block but the first and the last: its rate against the geometric mean of the two beside it, as with over without capture. [blocks - 2] float64"""
    rates = np.log([block.tok_s for block in blocks])
    sign = np.where([block.capture for block in blocks], 1, -1)
    return np.exp((rates[1:-1] - (rates[:-2] + rates[2:]) / 2) * sign[1:-1])


def intervals(blocks: Sequence[Block], draws: int = 2000) -> dict[str, tuple[float, float]]:
    """Where `ratio` and `ratio_of_neighbours` lie with a chance of 95%: runs of neighbouring blocks drawn at random, with a fixed seed, as many as there are.

    Runs of GROUP pairs: a block that a change of the machine's rate spoils is counted against both neighbours, so single pairs would make the interval wider
    than it is. Where there are few pairs they are drawn one by one.
    """
    size = 2 * GROUP if len(blocks) >= 16 * GROUP else 2
    starts = range(0, len(blocks), size)
    groups = [blocks[start : start + size] for start in starts]
    totals = np.array([[sum(getattr(block, name) for block in part) for part in split(group) for name in ("tokens", "seconds")] for group in groups], float)  # [groups, 4]
    drawn = np.random.default_rng(0).integers(0, len(groups), (draws, len(groups)))
    sums = totals[drawn].sum(1)
    near = neighbour_ratios(blocks)
    parts = [near[max(start - 1, 0) : start + size - 1] for start in starts]
    medians = [np.median(np.concatenate([parts[place] for place in places])) for places in drawn]
    found = {"ratio": sums[:, 2] / sums[:, 3] / (sums[:, 0] / sums[:, 1]), "ratio_of_neighbours": medians}
    return {name: (float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975))) for name, values in found.items()}


def summary(blocks: Sequence[Block], before: dict[str, float], after: dict[str, float], counted: Sequence[Block] = ()) -> dict[str, Any]:
    """The report's numbers. `blocks` take turns, the first one without capture; the counters `before` and `after` cover the blocks `counted`.

    `ratio`: all tokens a second with capture over all tokens a second without it, which is what an extraction gets; `ratio_low` to `ratio_high` is where it
    lies with a chance of 95%.
    `ratio_of_neighbours` (and its interval): the median over blocks, each against the two beside it. A change of the machine's rate in the middle of a block,
    a batch that stands still for half a second, do not move it: several times narrower where the machine has two speeds; but neither does what capture does
    seldom, and its interval held the truth in nine of ten simulations. `ratio_of_fastest`: of the fastest quarter of each kind.
    `forward_ratio`: the forward threads' processor time a token, without over with; `cpu_ratio`: the whole server's, its writing process included.
    """
    plain, capture = split(blocks)
    near, between = neighbour_ratios(blocks), intervals(blocks)
    fastest = [block for part in (plain, capture) for block in sorted(part, key=lambda block: -block.tok_s)[: max(len(part) // 4, 1)]]
    delta = {name: round(value - before.get(name, 0), 4) for name, value in after.items()}
    wall = sum(block.whole_seconds for block in counted or blocks if block.capture)
    result = {
        "ratio": ratio(blocks), "ratio_low": between["ratio"][0], "ratio_high": between["ratio"][1], "pairs": len(capture), "ratio_of_neighbours": float(np.median(near)),
        "neighbours_low": between["ratio_of_neighbours"][0], "neighbours_high": between["ratio_of_neighbours"][1], "ratio_of_fastest": ratio(fastest),
        "forward_ratio": cpu_ratio(plain, capture, "forward"), "cpu_ratio": cpu_ratio(plain, capture, "server"), "plain_tok_s": rate_of(plain), "capture_tok_s": rate_of(capture),
        "measured_s": sum(block.whole_seconds for block in blocks), "left_out_s": statistics.median(block.whole_seconds - block.seconds for block in blocks), "counters": delta,
        # copy_s: what the copies took on the device; were they not overlapped with prefill, blocks with capture would take at least that much longer
        "copy_share_of_wall": delta.get("copy_s", 0.0) / wall, "hook_share_of_wall": delta.get("hook_s", 0.0) / wall, "longer_with_capture": 1 / ratio(blocks) - 1,
    }  # fmt: skip
    for word, part in (("plain", plain), ("capture", capture)):  # who ran meanwhile: cores busy, and microseconds of the forward thread a token
        seconds = sum(block.seconds for block in part)
        result[f"{word}_cores"] = {name: sum(block.cpu(name) for block in part) / seconds for name in part[0].marks[END].cpu}
        result[f"{word}_blocks_tok_s"] = [round(block.tok_s, 1) for block in part]
        result[f"{word}_blocks_seconds"] = [round(block.seconds, 4) for block in part]
        result[f"{word}_blocks_forward_us_a_token"] = [round(block.cpu("forward") / block.tokens * 1e6, 4) for block in part]
    return result


def cpu_ratio(plain: Sequence[Block], capture: Sequence[Block], name: str) -> float | None:
    """Processor time a token without capture over that with it; None where there is none to compare."""
    spent = [sum(block.cpu(name) for block in part) / sum(block.tokens for block in part) for part in (plain, capture)]
    return spent[0] / spent[1] if spent[1] > 0 else None


def measure(config: Config, plain: Server, capture: Server, load: Load, say: Callable[[str], Any] = print) -> dict[str, Any]:
    """The report's numbers (see summary()). `plain` is the server without capture, or `capture` itself, asked without our names. Both are alive.

    Raises UserError when too many requests fail to say anything.
    """
    begin, folder = time.monotonic(), dump_dir(config)
    chunk = option_number(server_args(config, "extraction"), "chunked-prefill-size", default=16384, least=-1)
    batch = min(load.concurrency, math.ceil(chunk / load.mean_tokens)) if chunk > 0 else load.concurrency  # requests
    overlap = 2 * (batch if plain is capture else load.concurrency)  # two servers work side by side until the first has answered what it has

    def loop() -> Loop:
        return Loop(plain, capture, load.prompts, load.concurrency, folder, config.run.name)

    def requests(seconds: float) -> int:
        return max(math.ceil(seconds * rate), MIN_BATCHES * batch, 3 * overlap)

    some = some_prompts(load, 0, max(len(load.prompts), 4 * load.concurrency))  # fewer than are in flight would end together, which says nothing of the rate
    first = timed(loop(), iter([Block(kind, some) for kind in (False, True, True)]))  # kernels are compiled in the first ones
    rate = len(first[-1].prompts) / first[-1].whole_seconds  # requests a second
    time.sleep(2.5)  # the counters' file follows within two seconds
    before, warm_loop = counters(folder), loop()
    warm = timed(warm_loop, (Block(kind, some_prompts(load, 0, requests(LONG_S)), overlap) for kind in (False, True, True, False)))
    rate = statistics.median(len(block.prompts) / block.whole_seconds for block in warm)
    say(f"  warm-up: {', '.join(f'{block.tok_s:.0f}' for block in warm)} tok/s")
    count = requests(load.block_s)
    say(f"  a block is {count} requests, about {count / rate:.1f} s; {LEAST_PAIRS + 1} pairs of blocks at least")
    guard = max(count // 4, overlap)
    work, started = loop(), time.monotonic()

    def plan() -> Iterator[Block]:
        pair, said = 0, started
        while True:
            prompts = some_prompts(load, pair, count)
            yield from (Block(kind, prompts, guard) for kind in (False, True))
            pair += 1  # the first one is not counted: the way in
            done, now = [block for block in work.blocks[2:] if block.ended], time.monotonic()
            enough = pair > LEAST_PAIRS and len(done) >= 4
            if not enough and now - said > 10:
                said = now
                say(f"  after {now - started:.0f} s: {pair} pairs")
            if not enough or now - begin <= load.limit_s and now - started < load.seconds:
                continue
            low, high = intervals(done, 300)["ratio"]
            if now - said > 10:
                said = now
                say(f"  after {now - started:.0f} s: ratio {ratio(done):.3f}, {low:.3f} to {high:.3f}")
            if now - begin > load.limit_s or load.width <= 0 or high - low <= load.width:
                break
        yield Block(False, some_prompts(load, 0, load.concurrency))  # so that the last block ends like the others

    blocks = timed(work, plan())
    time.sleep(2.5)
    return summary(blocks[2 : 2 * ((len(blocks) - 1) // 2)], before, counters(folder), [*warm, *blocks]) | {
        "requests_a_block": count, "left_out_requests": guard, "out_of_order": work.strangers, "held_back": work.held_back, "long_blocks_held_back": warm_loop.held_back,
        **lags("dump_lag", work.lags), **lags("long_blocks_dump_lag", warm_loop.lags), "failed_requests": len(work.problems) + len(warm_loop.problems),
        "problems": [*warm_loop.problems, *work.problems],
    }  # fmt: skip


def some_prompts(load: Load, pair: int, count: int) -> list[int]:
    """The places of a block's prompts; the two of a pair send the same ones."""
    return [(pair * count + place) % len(load.prompts) for place in range(count)]


def timed(work: Loop, blocks: Iterator[Block]) -> list[Block]:
    """Run a loop. Raises UserError when most of its requests fail, or so many that it gave up."""
    found = work.run(blocks)
    if len(work.problems) >= TOO_MANY or 2 * len(work.problems) >= work.ended:
        server = next((server for server in work.servers.values() if not server.alive()), work.servers[True])
        state = "" if server.alive() else f"; the server {server.state()}"
        raise UserError(f"{len(work.problems)} of {work.ended} requests to {server.url} failed, the first: {work.problems[0]}{state} (see {server.log})")
    return found


def lags(name: str, values: Sequence[float]) -> dict[str, float]:
    """From an answer to its dump: median and 95% quantile, seconds."""
    return {f"{name}_s": float(np.median(values)), f"{name}_q95_s": float(np.quantile(values, 0.95))} if values else {}


def plain_rate(server: Server, load: Load) -> dict[str, Any]:
    """Prefill throughput without our names, of one server alone: for `load.seconds` after all prompts went once."""
    work = Loop(server, server, load.prompts, load.concurrency, Path("/nowhere"))
    everything = range(len(load.prompts))

    def plan() -> Iterator[Block]:
        yield Block(False, everything)
        begin = time.monotonic()
        while True:
            yield Block(False, everything, min(load.concurrency, len(everything) // 2))
            if time.monotonic() - begin > load.seconds:
                break
        yield Block(False, some_prompts(load, 0, load.concurrency))

    blocks = timed(work, plan())[1:-1]
    return {"plain_tok_s": rate_of(blocks), "blocks_tok_s": [block.tok_s for block in blocks], "failed_requests": len(work.problems)}
