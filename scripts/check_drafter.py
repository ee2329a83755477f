#!/usr/bin/env python3
"""Check a drafter's folder before it is served: every key and tensor that SGLang's (or vLLM's) loader reads. Exit code 0: fits; 1: does not, the key is named; 2: not a drafter's folder."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.check import FLOATS, SGLANG_VERSIONS, Check, Serving, table
from aerie.config import DEFAULT_CONFIG, add_config_arguments, config_from_args
from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.other_runs import refuse_missing_drafter
from aerie.report import versions
from aerie.serving import read_manifest, serving_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("drafter", nargs="?", metavar="DIR", help="the drafter's folder (default: the run's)")
    parser.add_argument("--target", metavar="DIR", help="the target's folder (default: the config's)")
    parser.add_argument("--for", dest="engine", choices=("sglang", "vllm"), default="sglang", help="the engine that will serve it (default: %(default)s)")
    parser.add_argument("--server-version", default="", metavar="V", help=f"the SGLang that will serve it: {', '.join(SGLANG_VERSIONS)} (default: the "
        f"installed one)")
    parser.add_argument("--dtype", default="", choices=("auto", *FLOATS), help="the dtype that target and drafter are served in (default: the config's; with DIR and "
        "--target and no --config the one in the drafter's training.json)")
    add_config_arguments(parser)
    args = parser.parse_args(namespace=argparse.Namespace(config=""))  # stays "" when it is not given
    if args.server_version and args.server_version not in SGLANG_VERSIONS:
        raise UserError(f"--server-version {args.server_version}: its loader is not known here; known are {', '.join(SGLANG_VERSIONS)}")
    by_hand = args.drafter and args.target and not (args.config or args.run or args.overrides)  # then no config's server options say anything about this pair
    args.config = args.config or DEFAULT_CONFIG
    config = None if by_hand else config_from_args(args)
    if not args.drafter:
        refuse_missing_drafter(config)
    drafter = Path(args.drafter).expanduser() if args.drafter else config.run.drafter
    target = args.target or config.model_path
    serving = serving_of(config, read_manifest(config)) if config else Serving()
    serving.engine = args.engine
    serving.server_version = args.server_version or (versions()["sglang"] or "")
    check = Check(drafter, target, serving)
    if args.dtype:
        serving.dtype = args.dtype
    elif by_hand and (recorded := check.training.get("served_dtype")) in FLOATS:
        serving.dtype = recorded
    lines = check.run()
    print(f"drafter {drafter}\ntarget  {target}\n{table(lines)}")
    if check.failed:
        first = check.failed[0]
        print(f"error: {drafter}: {first.key}: {first.text}", file=sys.stderr)
        return EXIT_FAILED
    print(f"fits: {'vLLM' if args.engine == 'vllm' else 'SGLang'} will load all of it")
    return 0


if __name__ == "__main__":
    run_main(main)
