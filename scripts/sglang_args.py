#!/usr/bin/env python3
"""Print the command that starts a server of a config: one argument a line, or with --shell one line to paste."""

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import add_config_arguments, config_from_args
from aerie.errors import run_main
from aerie.servers import MODES, command_line, server_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser, positional=True)
    parser.add_argument("mode", nargs="?", default="extraction", choices=MODES)
    parser.add_argument("--shell", action="store_true", help="one line with the environment, quoted for the shell")
    args = parser.parse_args()
    config = config_from_args(args)
    command = command_line(config, args.mode)
    if args.shell:
        print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in server_env(config, args.mode).items()), shlex.join(command)]))
    else:
        print("\n".join(command))


if __name__ == "__main__":
    run_main(main)
