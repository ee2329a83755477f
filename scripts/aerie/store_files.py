"""The files of a store beside its shards: names, manifest, logs, lock; and what two sets of states must share to lie in one store."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from .errors import UserError

FORMAT = 1
# What two sets of states must share to lie in one store; anything else in the manifest is information.
IDENTITY = (
    "model_hash", "aux_layer_ids", "capture_points", "hidden_size", "dtype", "model_dtype", "tokenizer_hash", "template_hash", "mask_rule", "data_hash",
    "all_final_rows", "logits",
)  # fmt: skip


def supervised_rows(loss_mask: np.ndarray) -> np.ndarray:
    """[F] int64: the rows whose `final` a supervised prediction needs as its label, for every TTT step: r >= 1 with mask[r] and mask[r+1]."""
    mask = np.asarray(loss_mask).astype(bool)
    return np.flatnonzero(mask[1:-1] & mask[2:]).astype(np.int64) + 1


def shard_name(index: int) -> str:
    """shard-000012.safetensors"""
    return f"shard-{index:06d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """The finished shards, in the order they were made."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """manifest.json, or None when it is missing or torn."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("kind") == "aerie-store" else None


def whole_lines(path: Path) -> list[str]:
    """The lines of a log that end in a newline; a torn last line is left out."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.split("\n")[:-1] if line.strip()]


def read_done(folder: Path) -> dict[str, tuple[str, int]]:
    """done.log as {sample: (shard, rows)}; malformed lines are left out."""
    done = {}
    for line in whole_lines(folder / "done.log"):
        parts = line.split()
        if len(parts) == 3 and len(parts[0]) == 16 and parts[2].isdigit():
            done[parts[0]] = (parts[1], int(parts[2]))
    return done


def append_line(path: Path, text: str) -> None:
    """Append and fsync; after a torn last line, on a new one."""
    with open(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write((b"\n" if torn else b"") + text.encode())
        file.flush()
        os.fsync(file.fileno())


def lock_store(folder: Path) -> Any:
    """Take the store's lock for this process. Raises UserError when another extraction holds it."""
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"another extraction is writing {folder}; wait for it, end it, or choose another run with --run") from None
    return file


def refuse_other_identity(folder: Path, manifest: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise UserError naming each field in which the store differs from what would be added."""
    if manifest.get("format", FORMAT) != FORMAT:
        raise UserError(f"the store in {folder} has format {manifest['format']}, this code writes {FORMAT}; choose another run with --run")
    differ = [key for key in IDENTITY if key in fields and manifest.get(key, fields[key]) != fields[key]]
    if differ:
        text = ", ".join(f"{key} {manifest[key]!r} there and {fields[key]!r} now" for key in differ)
        raise UserError(f"the store in {folder} holds other states: {text}; choose another run with --run, or remove that folder")
