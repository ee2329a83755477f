"""Read and check what the patched server writes: one safetensors file a request, or a `.error` that says why there is none.

The format is that of patches/hidden_state_dump.py: input_ids [T] int32, aux_0 aux_1 ... [T, H] and final [T, H] in the model's dtype, or as fp8 rows
(e4m3) with aux_0_scale ... final_scale [T] float32. A file that is there is whole: it appears by rename. Its metadata's `checksums` are made by the server's
writer over what it writes, so a byte that changed on the way is seen, wherever it lies.
"""

from __future__ import annotations

import json
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from .ops import drafter_ops
from .rid import Rid, parse_rid

KIND, FORMAT = "aerie-dump", "2"
DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float8_e4m3fn: "fp8"}
# Shifted left by one bit (the sign goes), every NaN or Inf is at least this. e4m3 has NaN alone.
NOT_FINITE = {
    torch.float32: (np.uint32, 0xFF000000), torch.bfloat16: (np.uint16, 0xFF00), torch.float16: (np.uint16, 0xF800), torch.float8_e4m3fn: (np.uint8, 0xFE),
}  # fmt: skip
CHUNK = 1 << 16  # values looked at in one go: stays in a core's cache
BLOCK_BYTES = 1 << 20  # of rows summed and looked at in one go, likewise


class DumpError(Exception):
    """This request's dump is missing, broken or not what was asked for; the same sample may be asked for again under a new name."""


class Dump(NamedTuple):
    """One request's states. The tensors are views of the mapped file (nothing is copied): keep them only as long as the file."""

    path: Path
    metadata: dict[str, str]
    input_ids: torch.Tensor  # [T] int32
    aux: list[torch.Tensor]  # one [T, H] a capture point
    final: torch.Tensor  # [T, H], after the final norm
    aux_scale: list[torch.Tensor]  # one [T] float32 a capture point for fp8 rows, else empty
    final_scale: torch.Tensor | None  # [T] float32 for fp8 rows
    checksums: dict[str, str] = {}  # what the server's writer says of each tensor: rows_sum, 16 hex digits

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        tensors = [self.input_ids, *self.aux, self.final, *self.aux_scale, *([] if self.final_scale is None else [self.final_scale])]
        return sum(tensor.nbytes for tensor in tensors)

    def identity(self) -> dict[str, Any]:
        """What these states are, as the store's manifest says it: layers, width, dtype, how the model makes logits of `final`. Raises DumpError."""
        try:
            return {
                "aux_layer_ids": json.loads(self.metadata["aux_layer_ids"]), "capture_points": json.loads(self.metadata["capture_points"]),
                "hidden_size": int(self.final.shape[1]), "dtype": DTYPE_NAMES[self.final.dtype], "logits": json.loads(self.metadata["logits"]),
            }  # fmt: skip
        except (KeyError, json.JSONDecodeError) as exc:
            raise DumpError(f"{self.path.name}: its metadata lacks or garbles {exc}") from None

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
    try:
        file = safe_open(path, "pt")
        metadata: dict[str, str] = file.metadata() or {}
        if metadata.get("kind") != KIND:
            raise DumpError(f"{path.name} is no dump (kind {metadata.get('kind')!r})")
        if metadata.get("format") != FORMAT:
            raise DumpError(
                f"{path.name} is a dump of format {metadata.get('format')!r}, this code reads {FORMAT}: the server runs another version of the capture code; "
                "run scripts/00_apply_patch.sh and start the server again"
            )
        checksums = read_checksums(path, metadata.get("checksums", ""))
        points = len(json.loads(metadata["capture_points"]))
        names = {*(f"aux_{index}" for index in range(points)), "final"}
        scales = {f"{name}_scale" for name in names} if metadata["dtype"] == "fp8" else set()
        if set(file.keys()) != {"input_ids", *names, *scales}:
            raise DumpError(f"{path.name} holds {sorted(file.keys())}, not the states of {points} capture points ({metadata['dtype']})")
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise DumpError(f"{path} does not exist") from None
    except (SafetensorError, OSError, KeyError, ValueError) as exc:
        raise DumpError(f"{path.name} is not a whole dump: {exc!r}") from None
    rows = len(tensors["input_ids"])
    aux = [tensors[f"aux_{index}"] for index in range(points)]
    width, dtype = aux[0].shape[-1], tensors["final"].dtype
    if tensors["input_ids"].dtype != torch.int32 or dtype not in DTYPE_NAMES or (dtype == torch.float8_e4m3fn) != bool(scales):
        raise DumpError(f"{path.name}: input_ids are {tensors['input_ids'].dtype}, states {dtype}, and its metadata says {metadata['dtype']}")
    for name in names:
        if tensors[name].shape != (rows, width) or tensors[name].dtype != dtype:
            raise DumpError(f"{path.name}: {name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, not {dtype} {(rows, width)}")
    for name in scales:
        if tensors[name].shape != (rows,) or tensors[name].dtype != torch.float32:
            raise DumpError(f"{path.name}: {name} is {tensors[name].dtype} {tuple(tensors[name].shape)}, not float32 {(rows,)}")
    return Dump(
        path, metadata, tensors["input_ids"], aux, tensors["final"],
        [tensors[f"aux_{index}_scale"] for index in range(points)] if scales else [], tensors.get("final_scale"), checksums,
    )  # fmt: skip


def check_dump(dump: Dump, rid: Rid | str, input_ids: np.ndarray | Sequence[int] | torch.Tensor) -> None:
    """Raise DumpError unless this is the whole dump of exactly this request, as written: name, row count, checksums, every token id, every value finite."""
    parsed = parse_rid(str(rid))
    if dump.metadata.get("rid") != str(rid):
        raise DumpError(f"the dump is of request {dump.metadata.get('rid')!r}, not {str(rid)!r}")
    if dump.metadata.get("normed") != "true":
        raise DumpError(f"final says normed={dump.metadata.get('normed')!r}; only states after the final norm can be used")
    expected = torch.as_tensor(np.ascontiguousarray(input_ids, dtype=np.int32))
    if len(dump.input_ids) != len(expected) or parsed is not None and parsed.tokens != len(expected):
        raise DumpError(f"{len(dump.input_ids)} rows for {len(expected)} tokens")
    check_sum(dump, "input_ids", rows_sum(dump.input_ids))
    wrong = (dump.input_ids != expected).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise DumpError(f"row {row} is token {int(dump.input_ids[row])}, sent was {int(expected[row])} ({len(wrong)} rows differ)")
    scales = dump.aux_scale or [None] * len(dump.aux)
    for name, rows, scale in [*((f"aux_{index}", state, scales[index]) for index, state in enumerate(dump.aux)), ("final", dump.final, dump.final_scale)]:
        row, total = look_through(rows)
        check_sum(dump, name, total)
        if scale is not None:
            check_sum(dump, f"{name}_scale", rows_sum(scale))
            row = min((place for place in (row, first_bad_scale(scale)) if place is not None), default=None)
        if row is not None:
            raise DumpError(f"{name} holds a value that is not finite in row {row} of {len(rows)}")


def read_checksums(path: Path, text: str) -> dict[str, str]:
    """`text` (the metadata's checksums) by name, once the header itself, but for that text, is as the server wrote it. Raises DumpError, OSError."""
    sums = dict(entry.partition(":")[::2] for entry in text.split())
    with open(path, "rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    if f"{zlib.crc32(header.replace(text.encode(), b'', 1)):08x}" != sums.pop("header", ""):
        raise DumpError(f"{path.name}: its header is not as the server wrote it (checksum)")
    return sums


def rows_sum(rows: torch.Tensor, first: int = 0) -> int:
    """Checksum of [T] or [T, H], whose first row is row `first`: sum over rows of (2 row + 1) * (the row's 32-bit words added mod 2^32), mod 2^64.

    The twin of rows_sum in patches/hidden_state_dump.py, whose sums it must give. Any one changed byte changes it. Runs at memory speed, without the GIL.
    """
    words = row_words(rows)
    return weighted(words[:, 0] if words.shape[1] == 1 else words.sum(axis=1, dtype=np.uint32), first)


def row_words(rows: torch.Tensor) -> np.ndarray:
    """[T] or [T, H] -> [T, W] uint32, or narrower where a row is no multiple of 4 bytes; a view where `rows` is contiguous."""
    parts = rows.contiguous().view(torch.uint8).view(len(rows), -1).numpy()
    width = parts.shape[1]
    return parts.view(np.uint32 if width % 4 == 0 else np.uint16 if width % 2 == 0 else np.uint8)


def weighted(sums: np.ndarray, first: int = 0) -> int:
    """[T] sums of rows `first`, `first` + 1, ... -> the checksum."""
    weights = np.arange(first, first + len(sums), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return int((sums * weights).sum(dtype=np.uint64))


def check_sum(dump: Dump, name: str, total: int) -> None:
    """Raise DumpError unless the tensor `name`, of which `total` is the rows_sum, has the checksum that the server gave it."""
    if dump.checksums.get(name) != f"{total:016x}":
        raise DumpError(f"{name} is not as the server wrote it: checksum {total:016x} instead of {dump.checksums.get(name, 'none')}; a byte changed on the way")


def look_through(rows: torch.Tensor) -> tuple[int | None, int]:
    """The first row of [T, H] that is not finite (or None), and rows_sum: both while a block is in the cache, so that memory is read once."""
    step = max(1, BLOCK_BYTES // (rows.shape[1] * rows.element_size()))
    bad, words, sums = None, row_words(rows), np.empty(len(rows), np.uint32)
    for start in range(0, len(rows), step):
        np.add.reduce(words[start : start + step], axis=1, dtype=np.uint32, out=sums[start : start + step])
        if bad is None and (row := first_bad_row(rows[start : start + step])) is not None:
            bad = start + row
    return bad, weighted(sums)


def first_bad_scale(scale: torch.Tensor) -> int | None:
    """The first entry of [T] that is not finite, or None."""
    bad = (~torch.isfinite(scale)).nonzero()
    return int(bad[0]) if len(bad) else None


def first_bad_row(rows: torch.Tensor) -> int | None:
    """The first row of [T, H] with a NaN or an infinity, or None. Reads each value once, at memory speed (torch.isfinite makes copies)."""
    kind, limit = NOT_FINITE[rows.dtype]
    flat = rows.contiguous().view(-1).view(torch.uint8).numpy().view(kind)
    shifted = np.empty(min(CHUNK, len(flat)), kind)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        found = np.left_shift(part, 1, out=shifted[: len(part)])
        if found.max() >= limit:
            return (start + int(np.argmax(found >= limit))) // rows.shape[1]
    return None


def remove_dump(folder: Path, rid: Rid | str) -> None:
    """Delete what the server wrote for this request."""
    dump_path(folder, rid).unlink(missing_ok=True)
    error_path(folder, rid).unlink(missing_ok=True)


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
