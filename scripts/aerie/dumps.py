"""Read and check what the patched server writes: one safetensors file a request (dump_file.py), or a `.error` that says why there is none.

A file that is there is whole: it appears by rename. Its metadata's `checksums` are made by the server's writer over what it writes, so a byte that changed on
the way is seen, wherever it lies.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np
import torch

from . import dump_file
from .dump_file import FORMAT, KIND, DumpError, DumpFile, check_request, check_states, open_dump, remove_dump
from .ops import drafter_ops
from .rid import Rid

__all__ = [
    "FORMAT", "KIND", "Dump", "DumpError", "capture_info", "check_dump", "dump_path", "error_path", "first_bad_row", "read_dump", "read_error", "remove_dump",
    "wait_dump",
]  # fmt: skip

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "fp8"}
TORCH_KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E4M3": torch.float8_e4m3fn}


class Dump(NamedTuple):
    """One request's states. The tensors are views of the mapped file (nothing is copied): keep them only as long as the file."""

    path: Path
    metadata: dict[str, str]
    input_ids: torch.Tensor  # [T] int32
    aux: list[torch.Tensor]  # one [T, H] a capture point
    final: torch.Tensor  # [T, H], after the final norm
    aux_scale: list[torch.Tensor]  # one [T] float32 a capture point for fp8 rows, else empty
    final_scale: torch.Tensor | None  # [T] float32 for fp8 rows
    file: DumpFile | None = None  # where it comes from

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        tensors = [self.input_ids, *self.aux, self.final, *self.aux_scale, *([] if self.final_scale is None else [self.final_scale])]
        return sum(tensor.nbytes for tensor in tensors)

    def identity(self) -> dict[str, Any]:
        """What these states are, as the store's manifest says it: layers, width, dtype, how the model makes logits of `final`. Raises DumpError."""
        return self.file.identity()

    def aux_float(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[T, 3H]: the auxiliary states side by side, dequantised."""
        scales = self.aux_scale or [None] * len(self.aux)
        return torch.cat([dequantize_rows(state, scale, dtype) for state, scale in zip(self.aux, scales)], dim=-1)

    def final_float(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[T, H]: the states that the LM head reads, dequantised."""
        return dequantize_rows(self.final, self.final_scale, dtype)


def dequantize_rows(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """e4m3 [T, H] times its float32 scale [T]; without a scale only the dtype changes."""
    return rows.to(dtype) if scale is None else drafter_ops.dequantize_rows_fp8(rows, scale, dtype)


def dump_path(folder: Path, rid: Rid | str) -> Path:
    """Where the server writes this request's states."""
    return Path(folder) / f"{rid}.safetensors"


def error_path(folder: Path, rid: Rid | str) -> Path:
    """Where the server says why there are none."""
    return Path(folder) / f"{rid}.error"


def read_error(folder: Path, rid: Rid | str) -> str | None:
    """The server's reason for dropping this dump, or None when it gave none."""
    try:
        text = error_path(folder, rid).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        return str(json.loads(text)["reason"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"unreadable {error_path(folder, rid).name}: {text[:200]!r}"


def wait_dump(folder: Path, rid: Rid | str, timeout_s: float = 30.0, poll_s: float = 0.005) -> Path:
    """The dump's path once it is there. Raises DumpError with the server's reason, or after `timeout_s`.

    The answer of /generate can come a moment before the file: rows are on their way to it while the first token is sampled.
    """
    path, deadline = dump_path(folder, rid), time.monotonic() + timeout_s
    while not path.exists():
        reason = read_error(folder, rid)
        if reason is not None:
            raise DumpError(reason)
        if time.monotonic() > deadline:
            raise DumpError(f"no dump after {timeout_s:g} s in {folder} (is capture on, and is this the folder of the server that answered?)")
        time.sleep(poll_s)
    return path


def read_dump(path: Path) -> Dump:
    """Map one dump. Raises DumpError when it is no dump of this format; looks at no value yet (see check_dump)."""
    file = open_dump(path)
    *aux, final = (torch.from_numpy(file.rows[name]).view(TORCH_KINDS[file.kinds[name][0]]) for name in file.states)
    *aux_scale, final_scale = (torch.from_numpy(file.scale(name)) for name in file.states) if file.dtype == "fp8" else (None,)
    return Dump(path, file.metadata, torch.from_numpy(file.tokens), aux, final, aux_scale, final_scale, file)


def check_dump(dump: Dump, rid: Rid | str, input_ids: np.ndarray | Sequence[int] | torch.Tensor) -> None:
    """Raise DumpError unless this is the whole dump of exactly this request, as written: name, row count, checksums, every token id, every value finite."""
    check_request(dump.file, rid, np.asarray(input_ids))
    check_states(dump.file)


def first_bad_row(rows: torch.Tensor) -> int | None:
    """The first row of [T, H] with a NaN or an infinity, or None."""
    return dump_file.first_bad_row(rows.contiguous().view(torch.uint8).view(len(rows), -1).numpy(), DTYPE_NAMES[rows.dtype])


def capture_info(folder: Path) -> list[dict[str, Any]]:
    """What the servers that write into `folder` say of themselves, one a data-parallel rank: metadata of the dumps, pid, budget_bytes, counters."""
    found = []
    for path in sorted(Path(folder).glob("capture.*.json")):
        try:
            info = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        if Path(f"/proc/{info['pid']}").exists():  # else a dead server's, until the next one clears it away
            found.append(info)
    return found
