#!/usr/bin/env python3
"""What capture costs: prefill tokens a second with capture over those without it (`ratio`), same prompts, same concurrency, in one run.

Requests never cease; short blocks with capture and without it take turns. `ratio` is of all their tokens and seconds, `ratio_low` to `ratio_high` is where it
lies with a chance of 95%; see capture_bench.summary(). One server of the config's target is started, asked with our names and without, and ended again. With
--plain-server a second one with capture off stands beside it and is asked in its place: that counts what capture costs when nothing is captured, too, but two
processes are not equally fast by themselves.
"""

import argparse
import functools
import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.bench_servers import only_benchmark
from aerie.capture_bench import BLOCK_S, LEAST_PAIRS, WIDTH, Load, longest_prompt, make_prompts, measure, remove_dumps, start
from aerie.capture_server import check_patch
from aerie.config import Config, add_config_arguments, config_from_args
from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.report import write_report
from aerie.servers import dump_dir, has_gpu

MOST_IN_FLIGHT = 4096  # as extract.max_in_flight


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--report", type=Path, metavar="FILE", help="default: runs/<run>/bench_capture.json")
    parser.add_argument("--requests", type=int, default=0, help="different prompts (default: 512 on a GPU, 24 on a CPU)")
    parser.add_argument("--tokens", type=int, default=0, help="mean length of a prompt (default: 1024 on a GPU, 256 on a CPU)")
    parser.add_argument("--concurrency", type=int, default=0, help="requests in flight (default: extract.max_in_flight on a GPU, 4 on a CPU)")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured at least so long, after the warm-up (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="no further pair of blocks begins then, warm-up included, also when the interval is still wide; five are measured in any case (default: %(default)s)")
    parser.add_argument("--width", type=float, default=WIDTH, help="goes on while the interval of the ratio is wider (default: %(default)s; 0: ends after --seconds)")
    parser.add_argument("--block-seconds", type=float, default=BLOCK_S, help="seconds of a block; it holds eight batches at least (default: %(default)s)")
    parser.add_argument("--plain-server", action="store_true", help="ask a second server, with capture off, for the blocks without")
    args = parser.parse_args()
    config = config_from_args(args)
    check_patch()
    gpu = has_gpu()
    requests, tokens = args.requests or (512 if gpu else 24), args.tokens or (1024 if gpu else 256)
    concurrency = args.concurrency or (config.extract.max_in_flight if gpu else 4)
    if min(requests, tokens, concurrency) < 1:
        raise UserError("--requests, --tokens and --concurrency must be 1 or more")
    if concurrency > MOST_IN_FLIGHT:
        raise UserError(f"--concurrency {concurrency} must be at most {MOST_IN_FLIGHT}: each is a thread")
    if not all(value >= 0 for value in (args.seconds, args.limit, args.width, args.block_seconds)):  # NaN is none of these
        raise UserError("--seconds, --limit, --width and --block-seconds must be numbers, 0 or more")
    blocks = 2 * (LEAST_PAIRS + 1)
    if args.block_seconds > max(args.limit / blocks, BLOCK_S) or math.isinf(args.block_seconds):
        raise UserError(f"--block-seconds {args.block_seconds:g}: {blocks} blocks are the least that is measured, which --limit {args.limit:g} leaves no time for; shorten the blocks or raise --limit")
    if tokens + tokens // 2 > (longest := longest_prompt(config)):
        raise UserError(
            f"--tokens {tokens}: prompts would have up to {tokens + tokens // 2} tokens, and the server takes {longest} (server.args.context-length, max-total-tokens); at most {longest * 2 // 3} fit"
        )
    load = Load(make_prompts(config, requests, tokens), concurrency, args.seconds, args.limit, args.block_seconds, args.width)
    print(f"{requests} prompts of {load.mean_tokens:.0f} tokens on the mean, {concurrency} in flight", flush=True)
    with only_benchmark(config):
        result = run(config, load, args.plain_server)
    path = args.report or config.run.root / "bench_capture.json"
    write_report(
        path, config=config.as_dict(), requests=requests, mean_tokens=load.mean_tokens, concurrency=concurrency, plain_server=args.plain_server,
        dump_dir=str(dump_dir(config)), **result,
    )  # fmt: skip
    print(f"without capture {result['plain_tok_s']:.0f} tok/s, with capture {result['capture_tok_s']:.0f} tok/s")
    by = ", ".join(f"{words} {value:.3f}" for words, value in (("the forward thread's processor time", result["forward_ratio"]), ("the whole server's", result["cpu_ratio"])) if value)
    print(f"ratio {result['ratio']:.3f} ({result['ratio_low']:.3f} to {result['ratio_high']:.3f}, {result['pairs']} pairs of blocks in {result['measured_s']:.0f} s); by {by}")
    print(
        f"median against the neighbours {result['ratio_of_neighbours']:.3f} ({result['neighbours_low']:.3f} to {result['neighbours_high']:.3f}), "
        f"of the fastest quarter {result['ratio_of_fastest']:.3f}"
    )
    print(f"copies took {result['counters'].get('copy_s', 0):.2f} s on the device, our code {result['hook_share_of_wall']:.1%} of the wall time; report: {path}")
    if result["failed_requests"]:
        print(f"{result['failed_requests']} requests failed, the first: {result['problems'][0]}", file=sys.stderr)
        return EXIT_FAILED
    return 0


def run(config: Config, load: Load, plain_server: bool) -> dict[str, Any]:
    """Start the server, or both, measure, end them; nothing stays, however it ends."""
    with ExitStack() as ends:
        plain = None
        if plain_server:
            plain = ends.enter_context(start(config, False))
            plain.wait_ready()  # one after the other: each looks at how much memory is free while it starts
        capture = start(config, True)
        ends.callback(remove_dumps, config)  # when the server has ended
        ends.enter_context(capture)
        capture.wait_ready()
        return measure(config, plain or capture, capture, load, functools.partial(print, flush=True))


if __name__ == "__main__":
    run_main(main)
