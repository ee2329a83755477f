#!/usr/bin/env python3
"""Put Aerie's capture code into the SGLang of this Python (see patches/README.md). Run again it does nothing."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.errors import EXIT_FAILED, run_main
from aerie.patching import Installation


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="00_apply_patch.sh")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", action="store_true", help="only say whether exactly this checkout's version is installed; exit code 1 when not")
    group.add_argument("--reverse", action="store_true", help="take the patch out again")
    args = parser.parse_args()
    found = Installation.active()
    where = f"SGLang {found.version} in {found.site}"
    if args.check:
        differing = found.differing()
        if differing:
            print(f"{where}: not this version of the capture code ({', '.join(differing)}); run scripts/00_apply_patch.sh")
            return EXIT_FAILED
        print(f"{where}: carries exactly this version of the capture code")
    elif args.reverse:
        print(f"{where}: {'patch taken out' if found.reverse() else 'there was no patch to take out'}")
    else:
        print(f"{where}: {'patched' if found.apply() else 'already patched, nothing to do'}")
    return 0


if __name__ == "__main__":
    run_main(main)
