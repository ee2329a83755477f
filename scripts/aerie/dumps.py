"""Read and check one dump of the server: `<rid>.safetensors`, or `<rid>.error` with a reason (format: patches/hidden_state_dump.py, which writes them).

Tensors: input_ids [T] int32, aux_0 aux_1 ... [T, H], final [T, H]; as fp8 also aux_0_scale ... final_scale [T] float32. Nothing is copied: tensors are
views of the mapped file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "fp8"}
# Shifted left by one bit (the sign goes), every NaN or Inf is at least this. e4m3 has NaN alone: 0x7f.
NOT_FINITE = {torch.float32: (np.uint32, 0xFF000000), torch.bfloat16: (np.uint16, 0xFF00), torch.float16: (np.uint16, 0xF800), torch.float8_e4m3fn: (np.uint8, 0xFE)}
CHUNK = 1 << 16  # values looked at in one go: stays in a core's cache


class BadDump(Exception):
    """A dump that must not reach the store; the text says why."""


@dataclass
class Dump:
    """One request's states as the server wrote them."""

    path: Path
    metadata: dict[str, str]
    input_ids: np.ndarray  # [T] int32
    aux: list[torch.Tensor]  # A tensors [T, H]
    final: torch.Tensor  # [T, H]
    aux_scale: torch.Tensor | None  # fp8: [T, A] float32
    final_scale: torch.Tensor | None  # fp8: [T] float32

    @property
    def dtype(self) -> str:
        """float32, bfloat16, float16 or fp8."""
        return NAMES[self.final.dtype]

    def identity(self) -> dict[str, Any]:
        """What the metadata says of the states: the keys of the store's manifest that the server knows."""
        try:
            return {
                "aux_layer_ids": json.loads(self.metadata["aux_layer_ids"]), "capture_points": json.loads(self.metadata["capture_points"]),
                "hidden_size": int(self.final.shape[1]), "dtype": self.dtype, "logits": json.loads(self.metadata.get("logits", "{}")),
            }  # fmt: skip
        except (KeyError, ValueError) as exc:
            raise BadDump(f"its metadata lacks or garbles {exc}") from None


def first_bad_row(states: torch.Tensor) -> int | None:
    """The first row of [T, H] that holds a NaN or an Inf, or None. Reads each value once, at memory speed (torch.isfinite makes copies)."""
    kind, limit = NOT_FINITE[states.dtype]
    flat = states.reshape(-1).view(torch.uint8).numpy().view(kind)
    shifted = np.empty(min(CHUNK, len(flat)), kind)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        found = np.left_shift(part, 1, out=shifted[: len(part)])
        if found.max() >= limit:
            return (start + int(np.argmax(found >= limit))) // states.shape[1]
    return None


def read_dump(path: Path) -> Dump:
    """Open a dump. Raises BadDump when it is not a whole file of the known form."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as exc:
        raise BadDump(f"it is not a whole safetensors file ({exc})") from None
    if metadata.get("kind") != "aerie-dump" or metadata.get("format") != "1":
        raise BadDump(f"it says kind {metadata.get('kind')!r}, format {metadata.get('format')!r}, not 'aerie-dump', '1'")
    layers = sum(name.startswith("aux_") and name[4:].isdigit() for name in tensors)
    names = [*(f"aux_{index}" for index in range(layers)), "final"]
    scales = [f"{name}_scale" for name in names] if tensors.get("final") is not None and tensors["final"].dtype == torch.float8_e4m3fn else []
    if layers < 1 or set(tensors) != {"input_ids", *names, *scales}:
        raise BadDump(f"it holds the tensors {', '.join(sorted(tensors))}")
    final = tensors["final"]
    rows = len(tensors["input_ids"])
    if tensors["input_ids"].dtype != torch.int32 or final.dtype not in NAMES or final.dim() != 2:
        raise BadDump(f"input_ids is {tensors['input_ids'].dtype}, final is {final.dtype} {list(final.shape)}")
    for name in names:
        if tensors[name].shape != (rows, final.shape[1]) or tensors[name].dtype != final.dtype:
            raise BadDump(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, not {final.dtype} {[rows, final.shape[1]]}")
    for name in scales:
        if tensors[name].shape != (rows,) or tensors[name].dtype != torch.float32:
            raise BadDump(f"{name} is {tensors[name].dtype} {list(tensors[name].shape)}, not float32 {[rows]}")
    aux_scale = torch.stack([tensors[name] for name in scales[:-1]], 1) if scales else None
    return Dump(path, metadata, tensors["input_ids"].numpy(), [tensors[name] for name in names[:-1]], final, aux_scale, tensors["final_scale"] if scales else None)


def check_dump(dump: Dump, rid: str, input_ids: np.ndarray, identity: dict[str, Any] | None = None) -> None:
    """Every check of the design: whose it is, row count, each token, each value finite, and (with `identity`) layers, width and dtype. Raises BadDump."""
    if dump.metadata.get("rid") != rid:
        raise BadDump(f"it is the dump of {dump.metadata.get('rid')!r}, not of {rid!r}")
    if dump.metadata.get("normed") != "true":
        raise BadDump(f"its final states say normed={dump.metadata.get('normed')!r}; only states after the final norm can be used")
    if len(dump.input_ids) != len(input_ids):
        raise BadDump(f"it has {len(dump.input_ids)} rows for {len(input_ids)} tokens")
    if not np.array_equal(dump.input_ids, input_ids):
        row = int(np.flatnonzero(dump.input_ids != input_ids)[0])
        raise BadDump(f"row {row} is token {dump.input_ids[row]}, sent was {input_ids[row]}")
    if identity is not None:
        found = dump.identity()
        differ = [f"{key} {found[key]} instead of {identity[key]}" for key in found if found[key] != identity[key]]
        if differ:
            raise BadDump(f"it holds other states: {', '.join(differ)}")
    for name, states in [*((f"aux_{index}", plane) for index, plane in enumerate(dump.aux)), ("final", dump.final)]:
        if (row := first_bad_row(states)) is not None:
            raise BadDump(f"{name} holds a NaN or an Inf in row {row}")
    for name, scale in (("aux scale", dump.aux_scale), ("final scale", dump.final_scale)):
        if scale is not None and not bool(torch.isfinite(scale).all()):
            row = int((~torch.isfinite(scale.reshape(len(scale), -1)).all(1)).nonzero()[0])
            raise BadDump(f"{name} holds a NaN or an Inf in row {row}")


def read_error(path: Path) -> str:
    """The reason in a `.error` file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["reason"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        return f"the server gave up on it; {path.name} cannot be read ({exc})"
