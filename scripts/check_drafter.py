#!/usr/bin/env python3
"""Check a drafter's folder before it is served: every key and tensor that SGLang's loader reads. Exit code 0: fits; 1: does not, the key is named; 2: not a drafter's folder."""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.check import SGLANG_VERSIONS, Check, table
from aerie.config import Config, add_config_arguments, config_from_args
from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.serving import serving_of


def read_store(config: Config | None) -> dict:
    """The manifest of the run's store, {} when there is none (then only training.json is compared)."""
    path = config.run.store / "manifest.json" if config else Path()
    return json.loads(path.read_text()) if config and path.is_file() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", nargs="?", metavar="DIR", help="the drafter's folder (default: the run's)")
    parser.add_argument("--target", metavar="DIR", help="the target's folder (default: the config's)")
    parser.add_argument("--server-version", default="", metavar="V", help=f"the SGLang that will serve it: {', '.join(SGLANG_VERSIONS)} (default: the installed one)")
    add_config_arguments(parser)
    args = parser.parse_args()
    if args.server_version and args.server_version not in SGLANG_VERSIONS:
        raise UserError(f"--server-version {args.server_version}: its loader is not known here; known are {', '.join(SGLANG_VERSIONS)}")
    by_hand = args.drafter and args.target  # then the config's server options say nothing about this pair
    config = None if by_hand else config_from_args(args)
    drafter = Path(args.drafter).expanduser() if args.drafter else config.run.drafter
    target = args.target or config.model_path
    check = Check(drafter, target, serving_of(config, read_store(config)) if config else None)
    lines = check.run()
    print(f"drafter {drafter}\ntarget  {target}\n{table(lines)}")
    if check.failed:
        first = check.failed[0]
        print(f"error: {drafter}: {first.key}: {first.text}", file=sys.stderr)
        return EXIT_FAILED
    print("fits: SGLang will load all of it")
    return 0


if __name__ == "__main__":
    run_main(main)
