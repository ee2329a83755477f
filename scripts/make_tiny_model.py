#!/usr/bin/env python3
"""Write a tiny random checkpoint in the shape of a real model family, with a tokenizer and a chat template, for tests and trials."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aerie  # noqa: E402, F401  first: it finds the Python that has the packages
import torch  # noqa: E402

from aerie.errors import run_main  # noqa: E402
from aerie.paths import runs_dir  # noqa: E402
from aerie.tiny import FAMILIES, make_tiny  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("folder", nargs="?", type=Path, help="where to write it (default: runs/models/tiny-FAMILY)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    args = parser.parse_args()
    folder = args.folder or runs_dir() / "models" / f"tiny-{args.family}"
    make_tiny(args.family, folder.absolute(), args.seed, getattr(torch, args.dtype))
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {args.family}, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    run_main(main)
