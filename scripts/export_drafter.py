#!/usr/bin/env python3
"""Write a drafter's folder for another engine. The weights stay; the auxiliary layer ids are written as that engine counts them, from the capture points."""

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.check import Check, Serving
from aerie.config import add_config_arguments, config_from_args
from aerie.drafter_files import DrafterFolder
from aerie.errors import UserError, run_main
from aerie.report import write_json

KEY = "eagle_aux_hidden_state_layer_ids"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, metavar="OUT", help="the folder to write; must not exist")
    parser.add_argument("--for", dest="engine", choices=("vllm",), required=True, help="the engine that will serve it")
    parser.add_argument("--drafter", type=Path, metavar="DIR", help="the folder to export (default: the run's)")
    add_config_arguments(parser)
    args = parser.parse_args()
    config = config_from_args(args)
    source = (args.drafter or config.run.drafter).expanduser()
    if args.output.exists():
        raise UserError(f"{args.output} is there already; name a new folder, or remove it first")
    check = Check(source, config.model_path, Serving(dtype=config.target.dtype))
    check.run()
    if check.failed:
        raise UserError(f"{source} is no drafter of {config.model_path}: {check.failed[0].key}: {check.failed[0].text}")
    folder = DrafterFolder(source)
    ids = check.aux_ids()
    points = folder.training.get("capture_points") or check.points(ids)
    # vLLM captures before layer N, 'the state after N layers', and reads the ids at the top level; none are left for SGLang, which would count otherwise.
    eagle = {key: value for key, value in folder.config["eagle_config"].items() if key != KEY}
    rewritten = folder.config | {"eagle_config": eagle, KEY: points}
    temporary = args.output.with_name(f".{args.output.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        for file in sorted({info.file for info in folder.tensors.values()} | {path.name for path in source.glob("*.index.json")}):
            shutil.copy2(source / file, temporary / file)
        write_json(temporary / "config.json", rewritten)
        if folder.training:
            write_json(temporary / "training.json", folder.training | {"engine": args.engine})
        written = Check(temporary, config.model_path, Serving(dtype=config.target.dtype, engine=args.engine))
        written.run()
        if written.failed:
            raise UserError(f"{source} cannot be served by {args.engine}: {written.failed[0].key}: {written.failed[0].text}")
        temporary.rename(args.output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"{args.output}: for {args.engine}; SGLang's ids {ids} are {points} there, the states after {', '.join(map(str, points))} decoder layers")


if __name__ == "__main__":
    run_main(main)
