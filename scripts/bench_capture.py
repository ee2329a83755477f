#!/usr/bin/env python3
"""What capture costs: prefill tokens a second with capture over those without it (`ratio`), same prompts, same concurrency, in one run.

`ratio` is the median over pairs of rounds that run one after the other, `ratio_low` to `ratio_high` is where that median lies with a chance of 95%; see capture_bench.summary().

Two servers of the config's target are started, one with capture and one without, and ended again: side by side with bench.side_by_side, else one by one.
"""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.capture_bench import make_prompts, measure, measure_one_by_one, start
from aerie.capture_server import check_patch
from aerie.config import add_config_arguments, config_from_args
from aerie.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError, run_main
from aerie.report import write_report
from aerie.servers import dump_dir, has_gpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--report", type=Path, metavar="FILE", help="default: runs/<run>/bench_capture.json")
    parser.add_argument("--requests", type=int, default=0, help="prompts a round (default: 512 on a GPU, 24 on a CPU)")
    parser.add_argument("--tokens", type=int, default=0, help="mean length of a prompt (default: 1024 on a GPU, 256 on a CPU)")
    parser.add_argument("--concurrency", type=int, default=0, help="requests in flight (default: extract.max_in_flight on a GPU, 8 on a CPU)")
    parser.add_argument("--repeats", type=int, default=0, help="pairs of rounds (default: 12 on a GPU, 6 on a CPU)")
    parser.add_argument("--round-seconds", type=float, default=3.0, help="the prompts are sent again until a round lasts so long (default: %(default)s)")
    args = parser.parse_args()
    config = config_from_args(args)
    check_patch()
    gpu = has_gpu()
    requests, tokens = args.requests or (512 if gpu else 24), args.tokens or (1024 if gpu else 256)
    concurrency = args.concurrency or (config.extract.max_in_flight if gpu else 8)
    repeats = args.repeats or (12 if gpu else 6)
    if min(requests, tokens, concurrency, repeats) < 1:
        raise UserError("--requests, --tokens, --concurrency and --repeats must be 1 or more")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_INTERRUPTED))  # so that the servers end with us
    prompts = make_prompts(config, requests, tokens)
    print(f"{requests} prompts, {sum(map(len, prompts))} tokens a round, {concurrency} in flight, {repeats} rounds of each kind", flush=True)
    if config.bench.side_by_side:
        plain = start(config, False)
        try:
            plain.wait_ready()  # one after the other: each looks at how much memory is free while it starts
            with start(config, True) as capture:
                capture.wait_ready()
                result = measure(config, plain, capture, prompts, concurrency, repeats, args.round_seconds)
        finally:
            plain.stop()
    else:
        result = measure_one_by_one(config, prompts, concurrency, repeats)
    path = args.report or config.run.root / "bench_capture.json"
    write_report(
        path, config=config.as_dict(), requests=requests, tokens=int(sum(map(len, prompts))), concurrency=concurrency, repeats=repeats,
        side_by_side=config.bench.side_by_side, dump_dir=str(dump_dir(config)), **result,
    )  # fmt: skip
    print(f"without capture {result['plain_tok_s']:.0f} tok/s, with capture {result['capture_tok_s']:.0f} tok/s, medians")
    by = ", ".join(f"{words} {value:.3f}" for words, value in (("the forward thread's processor time", result["forward_ratio"]), ("the whole server's", result["cpu_ratio"])) if value)
    print(f"ratio {result['ratio']:.3f} ({result['ratio_low']:.3f} to {result['ratio_high']:.3f}, {result['pairs']} pairs); by {by}")
    print(f"of the medians {result['ratio_of_medians']:.3f}, by all seconds {result['ratio_by_all_seconds']:.3f}")
    print(f"copies took {result['counters'].get('copy_s', 0):.2f} s on the device, our code {result['hook_share_of_wall']:.1%} of the wall time; report: {path}")
    if result["failed_requests"]:
        print(f"{result['failed_requests']} requests failed, the first: {result['problems'][0]}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    run_main(main)
