#!/usr/bin/env python3
"""The whole way once on SmolLM2-135M-Instruct: answers, hidden states, drafter, serving, benchmark. Needs no GPU and no network; ends with a short table."""

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import DEFAULT_CONFIG, load_config
from aerie.errors import run_main
from aerie.pipeline import Pipeline, call, only_pipeline, script_command
from aerie.servers import has_gpu, refuse_busy_ports, stop_servers


def speed_row(level: dict) -> tuple[str, str]:
    """One concurrency of the benchmark, by the names of bench/report.json."""
    plain, fast = level["baseline"]["tok_s"], level["speculative"]["tok_s"]
    return f"without / with the drafter, {level['concurrency']} at a time", f"{plain:,.1f} / {fast:,.1f} tok/s ({level['speedup']:.2f}x)"


def print_table(report: dict, seconds: float, whole: bool, gpu: bool) -> None:
    """The numbers a newcomer looks for, from bench/report.json. `seconds` is the time of this call; `whole`: it did every step."""
    lossless, same, levels = report["lossless"], report.get("same_prompts"), next(iter(report["sets"].values()))["levels"]
    rows = [
        ("samples, tokens", f"{report['samples']:,}, {report['tokens']:,}"),
        ("extraction", f"{report['extract_tok_s']:,.0f} tok/s"),
        ("training", f"{report['train_tok_s']:,.0f} tok/s"),
        ("accept length, predicted in training", f"{(same['predicted'] if same else report['predicted_accept_length']) or float('nan'):.3f} tokens a verification"),
        ("accept length, served", f"{same['served'] if same else report['accept_length']:.3f} tokens a verification"),
        ("texts compared, equal, near ties", f"{lossless['compared']}, {lossless['equal']}, {lossless['near_ties']}"),
        *(speed_row(level) for level in levels),
        ("the whole way" if whole else "this call, without the steps that were done", f"{seconds / 60:.1f} minutes"),
    ]
    width = max(len(name) for name, _ in rows)
    print()
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    if not gpu and any(level["speedup"] < 1 for level in levels):
        print(f"\n  Below 1x is expected on a CPU: it checks {report['num_steps'] + 1} tokens in more time than it makes one, and {report['accept_length']:.1f} tokens a check do not "
            "make up for that.\n  A GPU mostly waits to read the weights, and reads them once either way.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="demo", help="name of the run (default: %(default)s); an earlier run's finished steps are not repeated")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key of the config")
    args = parser.parse_args()
    config = load_config(DEFAULT_CONFIG, args.run, args.overrides)
    where = "the GPU" if has_gpu() else "the CPU"
    print(f"Aerie's demo: {config.path.name} on {where}; everything it makes lies in {config.run.root}", flush=True)
    start = time.monotonic()
    with only_pipeline(config):
        refuse_busy_ports(config)
        call(script_command(config, args.overrides, "prepare_target.py"), "preparing the target")
        try:
            seconds = Pipeline(config, args.overrides).run()
        finally:
            stop_servers(config)
    print_table(json.loads((config.run.bench / "report.json").read_text()), time.monotonic() - start, all(seconds.values()), has_gpu())
    print(f"\n  by step: {', '.join(f'{name} {value:.0f} s' for name, value in seconds.items())}")
    print(f"  report: {config.run.bench / 'report.json'}")


if __name__ == "__main__":
    run_main(main)
