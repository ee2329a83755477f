"""What nvidia-smi says of the GPUs here, and which of them CUDA_VISIBLE_DEVICES leaves. Standard library alone."""

from __future__ import annotations

import os
import subprocess
from typing import Mapping


NOT_THERE, HANGS = 127, 124  # exit codes of ask(), as a shell and `timeout` give them


def ask(command: list[str], timeout_s: float = 20.0) -> tuple[int, str]:
    """(exit code, stdout) of a program; NOT_THERE and no text where it cannot be started, HANGS where it does not end in time.

    Such a program is killed and not waited for: beside a GPU that fell off the bus nvidia-smi can stand in the kernel, where no signal reaches it.
    """
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
    except OSError:
        return NOT_THERE, ""
    try:
        text, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return HANGS, ""
    return process.returncode, text


def gpu_rows(*fields: str) -> list[list[str]]:
    """A row a GPU: index, uuid, then `fields` of `nvidia-smi --query-gpu`, without units. Empty where nvidia-smi is not there, hangs or fails.

    What a driver does not tell is "[N/A]" or the like. Where a GPU is lost nvidia-smi writes a sentence in place of its row, and fails: the other rows count.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(('index', 'uuid', *fields))}", "--format=csv,noheader,nounits"]
    rows = [[part.strip() for part in line.split(",")] for line in ask(command)[1].splitlines()]
    return [row for row in rows if len(row) == 2 + len(fields) and row[0].isdecimal()]


def visible(rows: list[list[str]], environ: Mapping[str, str] = os.environ) -> list[list[str]]:
    """The rows (index, uuid, ...) that CUDA_VISIBLE_DEVICES names, in its order; like CUDA, nothing from the first name on that is no GPU here."""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return rows
    found: list[list[str]] = []
    for name in (part.strip() for part in shown.split(",")):
        row = next((row for row in rows if name and (row[0] == name or name.startswith("GPU-") and row[1].startswith(name))), None)
        if row is None:
            break
        found.append(row)
    return found
