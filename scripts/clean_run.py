#!/usr/bin/env python3
"""Remove what a run made: its whole folder under runs/. Refuses while a server of the run lives."""

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.errors import UserError, run_main
from aerie.paths import RunPaths


def living_servers(root: Path) -> list[str]:
    """Modes whose record names a process that still runs."""
    found = []
    for path in root.glob("*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if not isinstance(record, dict) or not isinstance(record.get("pid"), int):
            continue
        from aerie.servers import process_is  # a run that had servers has a Python with everything

        if process_is(record["pid"], record.get("start_ticks", 0)):
            found.append(path.stem)
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run's name")
    root = RunPaths(parser.parse_args().run).root
    if root.is_symlink():
        raise UserError(f"{root} is a link to {root.readlink()}; remove that folder and the link yourself")
    if not root.is_dir():
        print(f"there is no run {root.name!r} in {root.parent}: nothing to remove")
        return
    if living := living_servers(root):
        raise UserError(f"run {root.name!r} has running servers ({', '.join(living)}); end them first with `make stop RUN={root.name}`")
    shutil.rmtree(root)
    print(f"removed {root}")


if __name__ == "__main__":
    run_main(main)
