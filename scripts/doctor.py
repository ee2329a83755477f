#!/usr/bin/env python3
"""What this machine has and what is wrong with it: a tick or a cross a line, and what to do. Standard library alone; works before `make setup` and with no GPU."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.doctor import gpu, machine, python_side
from aerie.doctor.checks import Facts, Result, print_results, results_of
from aerie.errors import run_main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default="smollm2-135m", metavar="CONFIG", help="also check this config's model folder, ports and options (default: %(default)s)")
    parser.add_argument("--run", default="", metavar="RUN", help="name of the run (default: the config's name)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key of the config")
    parser.add_argument("--python", default=os.environ.get("PY", ""), help="the Python with everything installed (default: PY, else .venv/bin/python)")
    args = parser.parse_args()
    facts = Facts.gather(args.python, args.config, args.run, args.overrides)
    results: list[Result] = []
    for title, checks in (("Python and packages", python_side.CHECKS), ("GPUs and driver", gpu.CHECKS), ("Machine", machine.CHECKS)):
        found = [result for check in checks for result in results_of(check, facts)]
        print_results(title, found)
        results += found
    wrong = [result for result in results if result.ok is False]
    print(f"\n{len(wrong)} of {len(results)} need something" if wrong else f"\nnothing is wrong among {len(results)} checks")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
