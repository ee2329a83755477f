#!/usr/bin/env python3
"""What serve.drafter_ops is worth: output tokens a second of the served drafter with Aerie's ops over those with SGLang's own (`ratio`), and equal texts. GPU.

Two servers of the same run's drafter share the card, start side by side and answer the same prompts in turn, once each before the measured rounds.
"""

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.bench import compare_passes, measure
from aerie.bench_prompts import load_set
from aerie.config import Config, add_config_arguments, config_from_args
from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.generate import accept_length
from aerie.lossless import in_words
from aerie.paths import RunPaths
from aerie.report import write_report
from aerie.servers import Server
from aerie.serving import refuse_bad_drafter

USED = "Aerie: the drafter uses "  # what the plugin logs at an op's first call


def with_ops(config: Config, port: int) -> Config:
    """The same run under another name, with the ops on: drafter, data and store are links."""
    run = RunPaths(f"{config.run.name[:40]}-ops")
    run.root.mkdir(parents=True, exist_ok=True)
    for name in ("drafter", "data", "store"):
        link = run.root / name
        if not link.exists() and (config.run.root / name).exists():
            link.symlink_to(config.run.root / name)
    return dataclasses.replace(config, run=run, serve=dataclasses.replace(config.serve, drafter_ops=True, port=port))


def ops_in_use(server: Server) -> list[str]:
    """The kernels that the server's log says were called."""
    text = server.log.read_text(encoding="utf-8", errors="replace")
    return sorted({line.split(USED, 1)[1].strip() for line in text.splitlines() if USED in line})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--report", type=Path, metavar="FILE", help="default: runs/<run>/bench_drafter_ops.json")
    parser.add_argument("--prompts", default="", help="a prompt set of 05_benchmark.py (default: bench.prompts)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], help="requests in flight (default: 1 8 32)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each (default: %(default)s); the median counts")
    args = parser.parse_args()
    if min(args.concurrency) < 1 or args.rounds < 1:
        raise UserError("--concurrency and --rounds must be 1 or more")
    config = config_from_args(args)
    config = dataclasses.replace(config, serve=dataclasses.replace(config.serve, drafter_ops=False))
    refuse_bad_drafter(config)
    prompts = load_set(config, args.prompts or config.bench.prompts).prompts
    configs = {"off": config, "on": with_ops(config, config.serve.port + 1)}
    levels = []
    servers: dict[str, Server] = {}
    try:
        for name, one in configs.items():
            servers[name] = Server.start(one, "serving")
            print(f"starting the server with the ops {name} on {servers[name].url} (log: {servers[name].log})", flush=True)
        for server in servers.values():
            server.wait_ready()
        for concurrency in sorted(args.concurrency):
            chosen = prompts[: max(16, 4 * concurrency)]
            passes = {name: [] for name in servers}
            for turn in range(args.rounds + 1):  # the first round pays for warm-up
                for name, server in servers.items():
                    result = measure(server, chosen, concurrency, config.data.request_timeout_s)
                    if turn:
                        passes[name].append(result)
            medians = {name: statistics.median(each.tok_s for each in done) for name, done in passes.items()}
            level = {"concurrency": concurrency, "requests": len(chosen), "ratio": medians["on"] / medians["off"]}
            for name, done in passes.items():
                level |= {f"{name}_tok_s": medians[name], f"{name}_rounds": [each.tok_s for each in done], f"{name}_accept_length": accept_length(done[-1].answers)}
            levels.append(level)
            *others, plain = passes["off"]  # the control: the same prompts at the same concurrency, round by round
            level["lossless"] = compare_passes(config, chosen, plain, passes["on"][-1], others, servers["off"].url).as_dict()
        used = ops_in_use(servers["on"])
    finally:
        for server in servers.values():
            server.stop()
    path = args.report or config.run.root / "bench_drafter_ops.json"
    write_report(path, config=config.as_dict(), levels=levels, ops_in_use=used, ratio=levels[0]["ratio"])
    print(f"steps {config.serve.num_steps}, topk {config.serve.topk}; kernels called: {', '.join(used) or 'none'}")
    print("  concurrency  off tok/s  on tok/s  ratio  accept off  accept on  texts")
    for level in levels:
        texts = in_words(level["lossless"], "the server with the ops off", "between its rounds", "only one round")
        print(
            f"  {level['concurrency']:>11}  {level['off_tok_s']:>9.1f}  {level['on_tok_s']:>8.1f}  {level['ratio']:>5.3f}  {level['off_accept_length']:>10.3f}"
            f"  {level['on_accept_length']:>9.3f}  {texts}"
        )
    print(f"report: {path}")
    if not used or any(level["lossless"]["unexplained"] for level in levels):
        print("error: texts differ without a near tie, or no kernel was called", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    run_main(main)
