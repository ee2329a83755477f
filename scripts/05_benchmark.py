#!/usr/bin/env python3
"""With and without the drafter: output tokens a second at each concurrency, accept length (pooled, prefill's own token not counted), equal texts.

Uses the run's servers where they run, starts the missing ones, and leaves the user's server as it found it. Output: a table and runs/<run>/bench/report.json.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.bench import Benchmark, heldout_prompts, table
from aerie.bench_servers import BenchServers
from aerie.config import add_config_arguments, config_from_args
from aerie.errors import EXIT_FAILED, run_main
from aerie.report import write_report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    args = parser.parse_args()
    config = config_from_args(args)
    benchmark = Benchmark(config, heldout_prompts(config))
    print(f"benchmark: {len(benchmark.prompts)} prompts, concurrency {', '.join(map(str, config.bench.concurrency))}", flush=True)
    with BenchServers(config) as servers:
        if config.bench.side_by_side:
            both = servers.get("baseline"), servers.get("serving")
            for concurrency in config.bench.concurrency:
                for server in both:
                    benchmark.run(server, concurrency)
        else:
            for mode in ("serving", "baseline"):  # the drafter first: where it is bad, that is known sooner
                server = servers.alone(mode)
                for concurrency in config.bench.concurrency:
                    benchmark.run(server, concurrency)
        lossless = benchmark.compare_texts(servers.get("baseline").url)
    content = benchmark.content()
    path = config.run.bench / "report.json"
    write_report(path, **content, run=config.run.name, config=config.as_dict())
    print(f"{table(content)}\n  report: {path}")
    if lossless.different:
        print(f"error: {len(lossless.different)} of {lossless.compared} texts differ with the drafter and no near tie explains it; speculation must not change the text", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    run_main(main)
