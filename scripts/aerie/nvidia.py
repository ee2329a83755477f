"""What nvidia-smi says of the GPUs here, and which of them CUDA_VISIBLE_DEVICES leaves. Standard library alone."""

from __future__ import annotations

import os
import subprocess
from typing import Mapping


def gpu_rows(*fields: str) -> list[list[str]]:
    """A row a GPU: index, uuid, then `fields` of `nvidia-smi --query-gpu`, without units. Empty where nvidia-smi is not there, hangs or fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(('index', 'uuid', *fields))}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


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
