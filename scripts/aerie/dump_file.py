"""One dump of the patched server, as mapped bytes: format, header, checksums, finiteness. Numpy alone, so that a worker process starts in a moment (dumps.py has torch).

A file is one safetensors file, `<rid>.safetensors`: input_ids [T] int32, aux_0 aux_1 ... [T, H] and final [T, H] in the model's dtype, or as fp8 rows (e4m3)
with aux_0_scale ... final_scale [T] float32. Its metadata's `checksums` are made by the server's writer over what it writes.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np

from .rid import Rid, parse_rid

KIND, FORMAT = "aerie-dump", "2"
STATE_KINDS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E4M3": "fp8"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8, "U64": 8, "U8": 1, "F64": 8, "I16": 2, "I8": 1, "BOOL": 1}
# A NaN or an infinity is at least `limit` without its sign bit (e4m3 has NaN alone): as a signed number when positive, as an unsigned one, sign bit set, when negative.
NOT_FINITE = {
    "float32": (np.int32, np.uint32, 0x7F800000), "bfloat16": (np.int16, np.uint16, 0x7F80), "float16": (np.int16, np.uint16, 0x7C00), "fp8": (np.int8, np.uint8, 0x7F),
}  # fmt: skip
BLOCK_BYTES = 512 << 10  # of rows looked at in one go: stays in a core's cache
MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on


class DumpError(Exception):
    """This request's dump is missing, broken or not what was asked for; the same sample may be asked for again under a new name."""


class DumpFile(NamedTuple):
    """A mapped dump. Arrays are views of the file: keep them only as long as it."""

    path: Path
    metadata: dict[str, str]
    kinds: dict[str, tuple[str, tuple[int, ...]]]  # tensor: safetensors dtype and shape
    rows: dict[str, np.ndarray]  # tensor: [T, bytes of a row] uint8
    places: dict[str, tuple[int, int, int]]  # tensor: where in the file it begins, rows, bytes of a row
    checksums: dict[str, str]  # what the server's writer says of each tensor: rows_sum, 16 hex digits

    @property
    def states(self) -> list[str]:
        """aux_0, aux_1, ..., final."""
        return [*(f"aux_{index}" for index in range(len(json.loads(self.metadata["capture_points"])))), "final"]

    @property
    def dtype(self) -> str:
        """float32, bfloat16, float16 or fp8."""
        return STATE_KINDS[self.kinds["final"][0]]

    @property
    def tokens(self) -> np.ndarray:
        """[T] int32."""
        return self.rows["input_ids"].view(np.int32)[:, 0]

    def scale(self, name: str) -> np.ndarray:
        """[T] float32: the scales of fp8 rows."""
        return self.rows[f"{name}_scale"].view(np.float32)[:, 0]

    def identity(self) -> dict[str, Any]:
        """What these states are, as the store's manifest says it: layers, width, dtype, how the model makes logits of `final`. Raises DumpError."""
        try:
            return {
                "aux_layer_ids": json.loads(self.metadata["aux_layer_ids"]), "capture_points": json.loads(self.metadata["capture_points"]),
                "hidden_size": self.kinds["final"][1][1], "dtype": self.dtype, "logits": json.loads(self.metadata["logits"]),
            }  # fmt: skip
        except (KeyError, json.JSONDecodeError) as exc:
            raise DumpError(f"{self.path.name}: its metadata lacks or garbles {exc}") from None


def open_dump(path: Path) -> DumpFile:
    """Map one dump. Raises DumpError when it is no dump of this format; looks at no value yet."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)  # torch wants writable memory
        entries, start, checksums = read_header(path, mapped)
        metadata = entries.pop("__metadata__")
        points = len(json.loads(metadata["capture_points"]))
        names = [*(f"aux_{index}" for index in range(points)), "final"]
        scales = [f"{name}_scale" for name in names] if metadata["dtype"] == "fp8" else []
        if set(entries) != {"input_ids", *names, *scales}:
            raise DumpError(f"{path.name} holds {sorted(entries)}, not the states of {points} capture points ({metadata['dtype']})")
        kinds = {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
        data, rows, places = np.frombuffer(mapped, np.uint8), {}, {}
        for name, (kind, shape) in kinds.items():
            first, last = entries[name]["data_offsets"]
            width = int(np.prod(shape[1:], dtype=np.int64)) * ITEM_BYTES[kind]
            if last - first != shape[0] * width:
                raise ValueError(f"{name} has {last - first} bytes for {shape}")
            places[name] = (start + first, shape[0], width)
            rows[name] = data[start + first : start + last].reshape(shape[0], width)
    except FileNotFoundError:
        raise DumpError(f"{path} does not exist") from None
    except (OSError, AttributeError, KeyError, ValueError, TypeError, IndexError) as exc:
        raise DumpError(f"{path.name} is not a whole dump: {exc!r}") from None
    check_kinds(path, metadata, kinds, names, scales)
    return DumpFile(path, metadata, kinds, rows, places, checksums)


def read_header(path: Path, mapped: mmap.mmap) -> tuple[dict[str, Any], int, dict[str, str]]:
    """Entries with metadata, where the data begin, checksums by tensor; once the header, but for the checksums' text, is as the server wrote it.

    Raises DumpError, ValueError, KeyError, TypeError.
    """
    start = 8 + int.from_bytes(mapped[:8], "little")
    if not 10 <= start <= len(mapped):
        raise ValueError(f"its header would need {start} bytes, the file has {len(mapped)}")
    header = mapped[8:start]
    entries = json.loads(header)
    metadata = entries["__metadata__"]
    if metadata.get("kind") != KIND:
        raise DumpError(f"{path.name} is no dump (kind {metadata.get('kind')!r})")
    if metadata.get("format") != FORMAT:
        raise DumpError(
            f"{path.name} is a dump of format {metadata.get('format')!r}, this code reads {FORMAT}: the server runs another version of the capture code; "
            "run scripts/00_apply_patch.sh and start the server again"
        )
    text = metadata.get("checksums", "")
    sums = dict(entry.partition(":")[::2] for entry in text.split())
    if f"{zlib.crc32(header.replace(text.encode(), b'', 1)):08x}" != sums.pop("header", ""):
        raise DumpError(f"{path.name}: its header is not as the server wrote it (checksum)")
    places = sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__")
    if [0, *(last for _, last in places)] != [*(first for first, _ in places), len(mapped) - start]:
        raise ValueError(f"its tensors end at byte {start + places[-1][1]}, the file has {len(mapped)}")
    return entries, start, sums


def check_kinds(path: Path, metadata: dict[str, str], kinds: dict[str, tuple[str, tuple[int, ...]]], names: list[str], scales: list[str]) -> None:
    """Raise DumpError unless dtypes and shapes are those of a dump."""
    known = {**STATE_KINDS, "F64": "float64", "I32": "int32", "I64": "int64"}

    def said(kind: str, shape: tuple[int, ...]) -> str:
        return f"{known.get(kind, kind)} {shape}"

    (ids_kind, (rows, *_)), (kind, final_shape) = kinds["input_ids"], kinds["final"]
    if ids_kind != "I32" or kind not in STATE_KINDS or (kind == "F8_E4M3") != bool(scales):
        raise DumpError(f"{path.name}: input_ids are {said(*kinds['input_ids'])}, states {said(*kinds['final'])}, and its metadata says {metadata['dtype']}")
    for name in names:
        if kinds[name] != (kind, (rows, final_shape[-1])):
            raise DumpError(f"{path.name}: {name} is {said(*kinds[name])}, not {said(kind, (rows, final_shape[-1]))}")
    for name in scales:
        if kinds[name] != ("F32", (rows,)):
            raise DumpError(f"{path.name}: {name} is {said(*kinds[name])}, not {said('F32', (rows,))}")


def check_request(dump: DumpFile, rid: Rid | str, input_ids: np.ndarray | Sequence[int]) -> None:
    """Raise DumpError unless the dump is of exactly this request: name, row count, every token id. Looks at no state."""
    parsed = parse_rid(str(rid))
    if dump.metadata.get("rid") != str(rid):
        raise DumpError(f"the dump is of request {dump.metadata.get('rid')!r}, not {str(rid)!r}")
    if dump.metadata.get("normed") != "true":
        raise DumpError(f"final says normed={dump.metadata.get('normed')!r}; only states after the final norm can be used")
    tokens, expected = dump.tokens, np.asarray(input_ids, np.int32)
    if len(tokens) != len(expected) or parsed is not None and parsed.tokens != len(expected):
        raise DumpError(f"{len(tokens)} rows for {len(expected)} tokens")
    check_sum(dump, "input_ids", rows_sum(dump.rows["input_ids"]))
    wrong = np.flatnonzero(tokens != expected)
    if len(wrong):
        row = int(wrong[0])
        raise DumpError(f"row {row} is token {int(tokens[row])}, sent was {int(expected[row])} ({len(wrong)} rows differ)")


class Look:
    """Sums and finiteness of a dump's states, block by block in any order, while a block is in the cache; verdict() once all of it was seen."""

    def __init__(self, dump: DumpFile):
        self.dump = dump
        self.sums = {name: np.empty(len(dump.rows[name]), np.uint32) for name in dump.states}
        self.bad: dict[str, int] = {}

    def __call__(self, names: Sequence[str], first: int, block: np.ndarray) -> None:
        """block [R, bytes] uint8, contiguous: rows first ... of the tensors `names` side by side; zeros may follow them in each row."""
        at = 0
        for name in names:
            width = self.dump.rows[name].shape[1]
            np.add.reduce(row_words(block[:, at : at + width]), axis=1, dtype=np.uint32, out=self.sums[name][first : first + len(block)])
            at += width
        if not finite(block, self.dump.dtype):
            for name in names:
                row = first_bad_row(self.dump.rows[name][first : first + len(block)], self.dump.dtype)
                if row is not None:
                    self.bad[name] = min(first + row, self.bad.get(name, first + row))

    def verdict(self) -> None:
        """Raise DumpError for the first tensor whose checksum or values are not right."""
        fp8 = self.dump.dtype == "fp8"
        for name in self.dump.states:
            check_sum(self.dump, name, weighted(self.sums[name]))
            bad = [self.bad[name]] if name in self.bad else []
            if fp8:
                check_sum(self.dump, f"{name}_scale", rows_sum(self.dump.rows[f"{name}_scale"]))
                bad += np.flatnonzero(~np.isfinite(self.dump.scale(name)))[:1].tolist()
            if bad:
                raise DumpError(f"{name} holds a value that is not finite in row {min(bad)} of {len(self.sums[name])}")


def check_states(dump: DumpFile) -> None:
    """Raise DumpError unless every state is as the server wrote it, and finite."""
    look = Look(dump)
    for name in dump.states:
        rows = dump.rows[name]
        step = max(1, BLOCK_BYTES // max(rows.shape[1], 1))
        for first in range(0, len(rows), step):
            look([name], first, rows[first : first + step])
    look.verdict()


def check_sum(dump: DumpFile, name: str, total: int) -> None:
    """Raise DumpError unless the tensor `name`, of which `total` is the rows_sum, has the checksum that the server gave it."""
    if dump.checksums.get(name) != f"{total:016x}":
        raise DumpError(f"{name} is not as the server wrote it: checksum {total:016x} instead of {dump.checksums.get(name, 'none')}; a byte changed on the way")


def row_words(rows: np.ndarray) -> np.ndarray:
    """[T, bytes] uint8 -> [T, W] uint32, or narrower where a row is no multiple of 4 bytes; a view."""
    width = rows.shape[1]
    return rows.view(np.uint32 if width % 4 == 0 else np.uint16 if width % 2 == 0 else np.uint8)


def rows_sum(rows: np.ndarray, first: int = 0) -> int:
    """Checksum of [T, bytes] uint8, whose first row is row `first`: sum over rows of (2 row + 1) * (the row's 32-bit words added mod 2^32), mod 2^64.

    The twin of rows_sum in patches/hidden_state_dump.py, whose sums it must give. Any one changed byte changes it.
    """
    words = row_words(rows)
    return weighted(words[:, 0] if words.shape[1] == 1 else words.sum(axis=1, dtype=np.uint32), first)


def weighted(sums: np.ndarray, first: int = 0) -> int:
    """[T] sums of rows `first`, `first` + 1, ... -> the checksum."""
    weights = np.arange(first, first + len(sums), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return int((sums * weights).sum(dtype=np.uint64))


def finite(block: np.ndarray, dtype: str) -> bool:
    """Whether no value of a contiguous block of bytes is NaN or infinite: two maxima, no copy."""
    signed, unsigned, limit = NOT_FINITE[dtype]
    flat = block.reshape(-1)
    return not len(flat) or bool(flat.view(signed).max() < limit and flat.view(unsigned).max() < limit + np.iinfo(signed).max + 1)


def first_bad_row(rows: np.ndarray, dtype: str) -> int | None:
    """The first row of [T, bytes] uint8 with a NaN or an infinity, or None. Reads each value once, at memory speed."""
    step = max(1, BLOCK_BYTES // max(rows.shape[1], 1))
    for start in range(0, len(rows), step):
        if not finite(rows[start : start + step], dtype):
            return next(row for row in range(start, len(rows)) if not finite(rows[row], dtype))
    return None


def remove_dump(folder: Path, rid: Rid | str) -> None:
    """Delete what the server wrote for this request."""
    for ending in ("safetensors", "error"):
        try:
            os.unlink(folder / f"{rid}.{ending}")
        except FileNotFoundError:
            pass
