#!/usr/bin/env python3
"""What serve.drafter_ops is worth: output tokens a second of the served drafter with Aerie's ops over those with SGLang's own (`ratio`), and equal texts. GPU.

Two servers of the same run's drafter share the card and answer the same prompts in turn, once each before the measured rounds. The run's own server is used where it
runs (without the ops) and goes on afterwards. The one with the ops is started here, on the next free port, as run NAME-ops, and ends with the benchmark.
"""

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.bench import Pass, compare_passes, measure_in_turn
from aerie.bench_prompts import load_set
from aerie.bench_servers import BenchServers, only_benchmark
from aerie.config import Config, add_config_arguments, config_from_args
from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.generate import Prompt, accept_length
from aerie.lossless import in_words
from aerie.paths import RunPaths
from aerie.ports import port_is_free
from aerie.report import write_report
from aerie.servers import Server, stop_mode
from aerie.serving import refuse_bad_drafter

USED = "Aerie: the drafter uses "  # what the plugin logs at an op's first call
KERNELS = ("aerie_build_tree", "aerie_draft_topk", "aerie_verify_tree_greedy")


def next_free_port(config: Config) -> int:
    """The first port after serve.port that nobody listens on and that no other server of this config is for."""
    others = {config.server.port, config.bench.baseline_port}
    ports = range(config.serve.port + 1, min(config.serve.port + 100, 65536))
    for port in ports:
        if port not in others and port_is_free(config.server.host, port):
            return port
    raise UserError(f"no port of {config.serve.port + 1} to {config.serve.port + 99} on {config.server.host} is free for the server with the ops; set serve.port")


def with_ops(config: Config) -> Config:
    """The same run under another name, with the ops on: drafter, data and store are links."""
    run = RunPaths(f"{config.run.name[:40]}-ops")
    run.root.mkdir(parents=True, exist_ok=True)
    for name in ("drafter", "data", "store"):
        link, to = run.root / name, config.run.root / name
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            raise UserError(f"{link} is no link: run {run.name!r} is not this benchmark's; choose another --run")
        if to.exists():
            link.symlink_to(to.resolve())
    return dataclasses.replace(config, run=run, serve=dataclasses.replace(config.serve, drafter_ops=True, port=next_free_port(config)))


def logged_kernels(server: Server) -> list[str]:
    """The kernels that the server's log says were called."""
    text = server.log.read_text(encoding="utf-8", errors="replace")
    return sorted({line.split(USED, 1)[1].strip() for line in text.splitlines() if USED in line})


def measure_level(servers: dict[str, Server], prompts: list[Prompt], concurrency: int, rounds: int, timeout_s: float) -> tuple[dict, dict[str, list[Pass]]]:
    """One concurrency: its numbers, and the passes of each server in the order in which they ran."""
    passes = dict(zip(servers, measure_in_turn(list(servers.values()), prompts, concurrency, rounds, timeout_s)))
    medians = {name: statistics.median(each.tok_s for each in done) for name, done in passes.items()}
    level = {"concurrency": concurrency, "requests": len(prompts), "ratio": medians["on"] / medians["off"]}
    for name, done in passes.items():
        level |= {f"{name}_tok_s": medians[name], f"{name}_rounds": [each.tok_s for each in done], f"{name}_accept_length": accept_length(done[-1].answers)}
    return level, passes


def compare_texts(config: Config, prompts: list[Prompt], passes: dict[str, list[Pass]], url: str) -> dict | None:
    """Texts with the ops off and on; the control: the server with the ops off, round by round. None where it fails when asked: the speed is known all the same."""
    *others, plain = passes["off"]
    try:
        return compare_passes(config, prompts, plain, passes["on"][-1], others, url).as_dict()
    except UserError as exc:
        print(f"texts not compared: {exc}", file=sys.stderr, flush=True)
        return None


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
    with only_benchmark(config):
        return benchmark(config, args)


def benchmark(config: Config, args: argparse.Namespace) -> int:
    """Starts what does not run, measures, writes the report; the exit code."""
    refuse_bad_drafter(config)
    prompts = load_set(config, args.prompts or config.bench.prompts).prompts
    on = with_ops(config)
    if stop_mode(on, "serving"):
        print("ended the server with the ops that an earlier benchmark left", flush=True)
    servers: dict[str, Server] = {}
    own: list[Server] = []
    try:
        if Server.find(config, "serving"):
            servers["off"] = BenchServers(config).get("serving")  # or says why not
            if logged_kernels(servers["off"]):
                raise UserError(
                    f"the running server of run {config.run.name!r} was started with serve.drafter_ops = true; end it with scripts/04_serve.sh --stop"
                )
            print(f"the server with the ops off runs on {servers['off'].url}", flush=True)
        for name, one in {"off": config, "on": on}.items():
            if name not in servers:
                servers[name] = Server.start(one, "serving")
                own.append(servers[name])
                print(f"starting the server with the ops {name} on {servers[name].url} (log: {servers[name].log})", flush=True)
        for server in own:
            server.wait_ready()
        done, failed = [], []
        print("  concurrency  off tok/s  on tok/s  ratio  accept off  accept on", flush=True)
        for concurrency in sorted(args.concurrency):
            chosen = prompts[: max(16, 4 * concurrency)]
            try:
                level, passes = measure_level(servers, chosen, concurrency, args.rounds, config.data.request_timeout_s)
            except UserError as exc:  # what was measured is not lost
                if not done:
                    raise
                failed.append(f"{concurrency} at a time was not measured: {exc}")
                break
            done.append((level, chosen, passes))
            print(
                f"  {level['concurrency']:>11}  {level['off_tok_s']:>9.1f}  {level['on_tok_s']:>8.1f}  {level['ratio']:>5.3f}  {level['off_accept_length']:>10.3f}"
                f"  {level['on_accept_length']:>9.3f}", flush=True,
            )  # fmt: skip
        for level, chosen, passes in done:
            level["lossless"] = compare_texts(config, chosen, passes, servers["off"].url)
        used = logged_kernels(servers["on"])
    finally:
        for server in own:
            server.stop()
    levels = [level for level, *_ in done]
    path = args.report or config.run.root / "bench_drafter_ops.json"
    write_report(path, config=config.as_dict(), levels=levels, ops_in_use=used, ratio=levels[0]["ratio"])
    print(f"steps {config.serve.num_steps}, topk {config.serve.topk}; kernels called: {', '.join(used) or 'none'}")
    for level in levels:
        if level["lossless"]:
            print(f"  texts at {level['concurrency']}: {in_words(level['lossless'], 'the server with the ops off', 'between its rounds', 'only one round')}")
    print(f"report: {path}")
    if missing := [name for name in KERNELS if name not in used]:
        failed.append(f"{', '.join(missing)} never called ({servers['on'].log} says what was handed over instead)")
    if any(level["lossless"] is None for level in levels):
        failed.append("texts were not compared")
    if any(level["lossless"] and level["lossless"]["unexplained"] for level in levels):
        failed.append("texts differ without a near tie")
    if failed:
        print(f"error: {'; '.join(failed)}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    run_main(main)
