#!/usr/bin/env python3
"""Print the command that starts a server of a config: one argument a line, or with --shell one line to paste.

It is the command of this machine: without a GPU it has the options that keep a server on a CPU small. --paper prints the one of a machine with GPUs.
"""

import argparse
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import add_config_arguments, config_from_args
from aerie.errors import run_main
from aerie.servers import MODES, command_line, has_gpu, server_env


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser, positional=True)
    parser.add_argument("mode", nargs="?", default="extraction", choices=MODES)
    parser.add_argument("--shell", action="store_true", help="one line with the environment, quoted for the shell")
    parser.add_argument("--paper", action="store_true", help="for a machine with GPUs, whatever is here")
    args = parser.parse_args()
    config = config_from_args(args)
    gpu = True if args.paper else None
    command = command_line(config, args.mode, gpu)
    if not args.paper and not has_gpu():
        print("note: no GPU here, so these are the options for this machine's CPU; --paper prints those for a machine with GPUs", file=sys.stderr)
    if args.shell:
        print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in server_env(config, args.mode, gpu).items()), shlex.join(command)]))
    else:
        print("\n".join(command))


if __name__ == "__main__":
    run_main(main)
