#!/usr/bin/env python3
"""data -> extract -> train -> check -> serve -> bench for one config; with extract.keep_gb data -> stream -> check -> serve -> bench (see run_stream.py).

Each step goes on where it stopped, also after a reboot; what is done is not done again.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import add_config_arguments, config_from_args
from aerie.errors import run_main
from aerie.pipeline import STEP_NAMES, Pipeline, call, only_pipeline, script_command
from aerie.servers import refuse_busy_ports, stop_servers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--steps", nargs="+", choices=STEP_NAMES, help="only these steps (default: all)")
    parser.add_argument("--stop", action="store_true", help="end the run's servers afterwards")
    args = parser.parse_args()
    config = config_from_args(args)
    with only_pipeline(config):
        if not args.steps:
            refuse_busy_ports(config)
        pipeline = Pipeline(config, args.overrides)
        pipeline.refuse_missing_chats(args.steps)
        call(script_command(config, args.overrides, "prepare_target.py"), "preparing the target")
        try:
            seconds = pipeline.run(args.steps)
        finally:
            if args.stop:
                stop_servers(config)
    print("seconds by step: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()))


if __name__ == "__main__":
    run_main(main)
