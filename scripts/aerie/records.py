"""Records of processes that this checkout started: runs/<run>/<mode>.json. Standard library alone, for doctor too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Sequence

from .paths import runs_dir

MODES = ("extraction", "serving", "baseline", "oracle")  # capture on / target + drafter / target alone / SGLang's own aux states in the answer (see prove.py)


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 when it is gone. Tells a process from a later one with its number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0


def process_is(pid: int, ticks: int) -> bool:
    """Whether the process with this number is still the one that started at `ticks`."""
    return bool(ticks) and start_ticks(pid) == ticks


def read_record(path: Path, *keys: str) -> dict[str, Any] | None:
    """The record of a process, with these keys too; None where there is none, or a file that we did not write."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and all(key in record for key in keys) and all(type(record.get(key)) is int for key in ("pid", "start_ticks"))
    return record if whole and record["pid"] > 0 else None


def loaded_models(command: Sequence[str]) -> dict[str, list[int]]:
    """{folder: [bytes, newest change in nanoseconds] of its config.json and *.safetensors} for the models that a command starts SGLang with; a model that is no folder is left out."""
    folders = {Path(value) for option, value in zip(command, command[1:]) if option in ("--model-path", "--speculative-draft-model-path")}
    found = {}
    for folder in folders:
        files = [path.stat() for path in [*folder.glob("*.safetensors"), *folder.glob("config.json")]]
        if files:
            found[str(folder)] = [sum(file.st_size for file in files), max(file.st_mtime_ns for file in files)]
    return found


def server_on_port(port: int) -> tuple[str, str] | None:
    """(run, mode) of the living server of this checkout's runs that listens on the port, or None."""
    for mode in MODES:
        for path in sorted(runs_dir().glob(f"*/{mode}.json")):
            try:
                record = read_record(path, "url")
            except OSError:  # another user's
                continue
            if record and str(record["url"]).rpartition(":")[2] == str(port) and process_is(record["pid"], record["start_ticks"]):
                return path.parent.name, mode
    return None
