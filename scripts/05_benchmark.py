#!/usr/bin/env python3
"""With and without the drafter: output tokens a second at each concurrency, accept length (pooled, prefill's own token not counted), equal texts.

Uses the run's servers where they run, starts the missing ones, and leaves the user's server as it found it.
Output: a table, and report.json, report.png and report.html in runs/<run>/bench/.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.bench import SetBenchmark, keep_earlier, report_content, steps_before, table
from aerie.bench_page import write_page
from aerie.bench_prompts import CATEGORIES, load_set
from aerie.bench_servers import BenchServers, only_benchmark, parse_sweep, run_sweep
from aerie.config import Config, add_config_arguments, config_from_args
from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.other_runs import refuse_missing_drafter
from aerie.predicted import Prediction
from aerie.report import write_report
from aerie.servers import Server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    parser.add_argument("--prompts", nargs="+", metavar="SET", help=f"heldout, builtin, {', '.join(CATEGORIES)}, or files (chats, MT-Bench, GSM8K, "
        f"HumanEval); default: bench.prompts")
    parser.add_argument("--sweep", nargs="+", metavar="STEPS,TOPK,TOKENS", default=[], help="also measure these settings of speculation, for example 1,1,2 "
        "3,1,4 3,4,16")
    args = parser.parse_args()
    config = config_from_args(args)
    if Server.find(config, "serving") is None:
        refuse_missing_drafter(config)
    settings = [parse_sweep(text) for text in args.sweep]
    asked = args.prompts or [config.bench.prompts]
    sets = [SetBenchmark(config, load_set(config, name)) for name in asked]
    called = [one.prompts.name for one in sets]
    if len(set(called)) < len(called):
        raise UserError(f"--prompts: two sets are called {next(name for name in called if called.count(name) > 1)}, and the report goes by names; name each once, or rename a file")
    Prediction.load(config), steps_before(config)  # damaged ones are known before the work
    with only_benchmark(config):
        return benchmark(config, sets, asked, settings)


def report(config: Config, sets: list[SetBenchmark], names: list[str], sweep: list[dict[str, Any]]) -> None:
    """The table, then report.json and the page."""
    content = report_content(config, sets, sweep)
    print(table(content), flush=True)  # before anything is written: a full disk must not cost the numbers
    folder = config.run.bench
    keep_earlier(folder)
    written = write_report(folder / "report.json", **content, prompt_sets=names, run=config.run.name, config=config.as_dict())
    about = ", ".join([written["date"], written["device"], *(f"{name} {version}" for name, version in written["versions"].items() if name in ("sglang", "torch"))])
    page = write_page(content, folder, f"{config.run.name}: {Path(config.model_path).name} with and without its drafter", about)
    print(f"  report: {folder / 'report.json'}, page: {page}")


def benchmark(config: Config, sets: list[SetBenchmark], names: list[str], settings: list[tuple[int, int, int]]) -> int:
    """All passes, the table, the reports; the exit code."""
    concurrencies, sweep, failed = config.bench.concurrency, [], []
    print(f"benchmark: {', '.join(f'{one.prompts.name} ({len(one.prompts.prompts)} prompts)' for one in sets)}; {', '.join(map(str, concurrencies))} "
        f"requests in flight", flush=True)
    with BenchServers(config) as servers:
        if config.bench.side_by_side:
            both = servers.get("baseline"), servers.get("serving")
            for one, concurrency in ((one, concurrency) for one in sets for concurrency in concurrencies):
                one.run(both, concurrency)
        else:
            for mode in ("serving", "baseline"):  # the drafter first: where it is bad, that is known sooner
                server = servers.alone(mode)
                for one, concurrency in ((one, concurrency) for one in sets for concurrency in concurrencies):
                    one.run([server], concurrency)
        for one in sets:
            try:
                one.compare_texts(servers.get("baseline").url)
            except UserError as exc:  # the speed is known all the same
                failed.append(f"texts of {one.prompts.name} were not compared: {exc}")
        if settings:
            sweep, not_measured = run_sweep(servers, sets[0], settings)
            failed += not_measured
        report(config, sets, names, sweep)  # before yours is started again, which can fail
    unexplained = sum(one.lossless.unexplained for one in sets if one.lossless)
    if unexplained:
        failed.append(f"{unexplained} texts differ with the drafter and no near tie explains it; speculation must not change the text")
    for text in failed:
        print(f"error: {text}", file=sys.stderr)
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    run_main(main)
