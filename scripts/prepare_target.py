#!/usr/bin/env python3
"""Make the target's folder from the package that the config names; does nothing when the folder is there and whole."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import add_config_arguments, config_from_args  # noqa: E402
from aerie.errors import run_main  # noqa: E402
from aerie.target import prepare_target  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    print(prepare_target(config_from_args(parser.parse_args())))


if __name__ == "__main__":
    run_main(main)
