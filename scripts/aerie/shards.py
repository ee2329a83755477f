"""One shard of the store: a safetensors file with the rows of many samples end to end, written once and never changed.

Layout: header (of a fixed, reserved size), aux [T, A*H], final [F, H], then the small tensors; T and F are summed over the shard's samples. Row widths
do not change while a shard grows, so worker threads put aux rows straight into their places; `final` (at most a quarter) waits in memory until the shard
ends. Under a temporary name until everything is in it and fsynced: a file named shard-*.safetensors is whole.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import numpy as np
import torch

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}
STATE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "fp8": "F8_E4M3"}
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I32": 4, "I64": 8, "U64": 8, "U8": 1}
NUMPY_DTYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "U64": np.uint64, "U8": np.uint8}
CHUNK_BYTES = 256 << 10  # what is copied, hashed and written in one go: stays in a core's cache
MAP_NORESERVE = 0x4000  # Linux; Python names it from 3.13 on
MAX_SAMPLES = 4096  # ids stand in the header, whose size is reserved when the shard begins


class BadShard(Exception):
    """A shard that is not whole or not what its checksums say; the text says why."""


class Spec(NamedTuple):
    """What one row is: `layers` auxiliary states and one final state, each of `hidden` values."""

    layers: int
    hidden: int
    dtype: str  # a key of TORCH_DTYPES

    @property
    def final_bytes(self) -> int:
        return self.hidden * ITEM_BYTES[STATE_NAMES[self.dtype]]

    @property
    def aux_bytes(self) -> int:
        return self.layers * self.final_bytes


@lru_cache
def _weights(words: int) -> np.ndarray:
    """`words` fixed odd 64-bit numbers (splitmix64 of 0, 1, 2, ...)."""
    x = (np.arange(1, words + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) | np.uint64(1)


def row_hashes(words: np.ndarray, products: np.ndarray) -> np.ndarray:
    """[R, W] uint64 -> [R] uint64: sum of weight * word mod 2^64 (multiply-shift hashing). Odd weights: any one changed word changes the sum.

    Runs at memory speed in numpy, which zlib.crc32 and hashlib do not: the check must not be what bounds the extraction. `products`: scratch, as `words`.
    """
    return np.multiply(words, _weights(words.shape[1]), out=products).sum(axis=1, dtype=np.uint64)


def _digest(data: bytes | memoryview | np.ndarray) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def states_sum(hashes: np.ndarray) -> int:
    """One number for a sample's states: the first 8 bytes of sha256 over its row hashes."""
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(hashes)).digest()[:8], "little")


def byte_rows(tensor: torch.Tensor) -> np.ndarray:
    """[R, ...] of any dtype -> [R, bytes of a row] uint8, without a copy where the tensor is contiguous."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel() == 0:
        return np.zeros((len(tensor), int(np.prod(tensor.shape[1:], dtype=np.int64)) * tensor.element_size()), np.uint8)
    return tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy()


def chunked_rows(planes: Sequence[np.ndarray], rows: np.ndarray | None = None):
    """Yield (first row, [R, W*8] uint8 padded with zeros, [R] hashes): the planes' rows side by side, CHUNK_BYTES at a time. The array is reused."""
    total = len(planes[0]) if rows is None else len(rows)
    width = sum(plane.shape[1] for plane in planes)
    words = -(-width // 8)
    step = max(1, CHUNK_BYTES // max(width, 1))
    buffer = np.zeros((min(step, max(total, 1)), words * 8), np.uint8)
    products = np.empty((len(buffer), words), np.uint64)
    for first in range(0, total, step):
        count = min(step, total - first)
        chunk, column = buffer[:count], 0
        for plane in planes:
            source = plane[first : first + count] if rows is None else plane[rows[first : first + count]]
            chunk[:, column : column + plane.shape[1]] = source
            column += plane.shape[1]
        yield first, chunk, row_hashes(chunk.view(np.uint64), products[:count])


def arena_for(spec: Spec, shard_bytes: int) -> np.ndarray:
    """Room for the `final` rows of a shard in which every row is kept; untouched pages cost nothing."""
    return np.empty(shard_bytes // (spec.layers + 1) if shard_bytes < 1 << 40 else 0, np.uint8)


class Slot(NamedTuple):
    """A sample's place in a shard that is being written."""

    index: int
    row: int
    rows: int
    final_row: int


class ShardWriter:
    """A shard that is being written. reserve() under the owner's lock; write() from any thread; finish() once, after all writes."""

    def __init__(self, path: Path, spec: Spec, shard_bytes: int, arena: np.ndarray | None = None):
        """arena: memory for `final`, used again from shard to shard (fresh memory costs a page fault every 4 KiB)."""
        self.path, self.spec, self.shard_bytes = path, spec, shard_bytes
        self.arena = arena if arena is not None else arena_for(spec, shard_bytes)
        self.max_samples = int(min(MAX_SAMPLES, max(16, shard_bytes // 65536)))
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.rows = self.final_rows = self.pending = 0
        self.samples: list[dict[str, Any]] = []
        self.metadata: dict[str, str] = {}
        self.header_bytes = 0
        self.begun = time.monotonic()
        self._fd = -1

    @property
    def bytes(self) -> int:
        """Bytes of states reserved so far."""
        return self.rows * self.spec.aux_bytes + self.final_rows * self.spec.final_bytes

    def fits(self, rows: int, final_rows: int) -> bool:
        """Whether a sample still belongs in this shard; an empty one takes a sample of any size."""
        more = rows * self.spec.aux_bytes + final_rows * self.spec.final_bytes
        return not self.samples or (len(self.samples) < self.max_samples and self.bytes + more <= self.shard_bytes)

    def reserve(self, rows: int, final_rows: int) -> Slot:
        """Take the next `rows` rows; the slot must be filled with write()."""
        slot = Slot(len(self.samples), self.rows, rows, self.final_rows)
        self.samples.append({})
        self.rows += rows
        self.final_rows += final_rows
        self.pending += 1
        return slot

    def open(self, metadata: dict[str, str]) -> None:
        """Create the temporary file and fix the header's size; `metadata` is what finish() will write beside the ids and checksums."""
        self.metadata = metadata
        size = len(json.dumps(metadata)) + 17 * self.max_samples + 3072
        self.header_bytes = -(-size // 4096) * 4096
        self._fd = os.open(self.temporary, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644)

    def write(
        self, slot: Slot, sample: str, heldout: bool, input_ids: np.ndarray, loss_mask: np.ndarray, aux: Sequence[np.ndarray], final: np.ndarray,
        final_rows: np.ndarray, final_picked: bool, aux_scale: np.ndarray | None = None, final_scale: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Put one sample in its place. aux: planes [T, bytes]; final: [T, bytes], or [F, bytes] when `final_picked`."""
        hashes = np.zeros(slot.rows, np.uint64)
        width = self.spec.aux_bytes
        for first, chunk, part in chunked_rows(aux):
            hashes[first : first + len(part)] = part
            _pwrite_all(self._fd, np.ascontiguousarray(chunk[:, :width]), self.header_bytes + (slot.row + first) * width)
        at, size = slot.final_row * self.spec.final_bytes, len(final_rows) * self.spec.final_bytes
        kept = self.arena[at : at + size] if at + size <= len(self.arena) else np.empty(size, np.uint8)
        kept = kept.reshape(len(final_rows), self.spec.final_bytes)
        final_hashes = np.zeros(len(final_rows), np.uint64)
        for first, chunk, part in chunked_rows([final], None if final_picked else final_rows):
            final_hashes[first : first + len(part)] = part
            kept[first : first + len(part)] = chunk[:, : self.spec.final_bytes]
        self.samples[slot.index] = {
            "id": sample, "heldout": heldout, "input_ids": np.array(input_ids, np.int32), "loss_mask": np.array(loss_mask, np.uint8), "final": kept,
            "final_rows": np.array(final_rows, np.int64), "aux_sum": states_sum(hashes), "final_sum": states_sum(final_hashes),
            "aux_scale": aux_scale, "final_scale": final_scale,
        }  # fmt: skip

    def finish(self) -> None:
        """Write the rest, fsync, rename, fsync the folder: from here on the shard exists."""
        tensors = self._small_tensors()
        entries: dict[str, Any] = {}
        checksums: dict[str, str] = {}
        state = STATE_NAMES[self.spec.dtype]
        position = 0

        def place(name: str, dtype: str, shape: list[int]) -> int:
            nonlocal position
            start = position
            position += int(np.prod(shape)) * ITEM_BYTES[dtype]
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, position]}
            return self.header_bytes + start

        place("aux", state, [self.rows, self.spec.layers * self.spec.hidden])
        at = place("final", state, [self.final_rows, self.spec.hidden])
        for sample in self.samples:
            _pwrite_all(self._fd, sample["final"], at)
            at += sample["final"].nbytes
        for name, array in tensors.items():
            kind = next(kind for kind, dtype in NUMPY_DTYPES.items() if dtype == array.dtype)
            _pwrite_all(self._fd, array, place(name, kind, list(array.shape)))
            checksums[name] = _digest(np.ascontiguousarray(array))
        checksums["aux"], checksums["final"] = checksums["aux_sums"], checksums["final_sums"]
        metadata = {**self.metadata, "ids": ",".join(sample["id"] for sample in self.samples), "checksums": json.dumps(checksums)}
        header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
        room = self.header_bytes - 8
        if len(header) > room:
            raise AssertionError(f"the shard's header needs {len(header)} bytes, {room} are reserved")
        os.pwrite(self._fd, room.to_bytes(8, "little") + header.ljust(room), 0)
        os.ftruncate(self._fd, self.header_bytes + position)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        os.rename(self.temporary, self.path)
        fsync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.temporary.unlink(missing_ok=True)

    def _small_tensors(self) -> dict[str, np.ndarray]:
        def joined(key: str, dtype: type, tail: tuple[int, ...] = ()) -> np.ndarray:
            return np.concatenate([np.zeros((0, *tail), dtype), *(sample[key].reshape(-1, *tail) for sample in self.samples)])

        def offsets(key: str) -> np.ndarray:
            return np.concatenate([np.zeros(1, np.int64), np.cumsum([len(sample[key]) for sample in self.samples], dtype=np.int64)])

        tensors = {
            "offsets": offsets("input_ids"),
            "final_offsets": offsets("final_rows"),
            "aux_sums": np.array([sample["aux_sum"] for sample in self.samples], np.uint64),
            "final_sums": np.array([sample["final_sum"] for sample in self.samples], np.uint64),
            "final_rows": joined("final_rows", np.int64),
            "input_ids": joined("input_ids", np.int32),
            "loss_mask": joined("loss_mask", np.uint8),
            "heldout": np.array([sample["heldout"] for sample in self.samples], np.uint8),
        }
        if self.spec.dtype == "fp8":
            tensors["aux_scale"] = joined("aux_scale", np.float32, (self.spec.layers,))
            tensors["final_scale"] = joined("final_scale", np.float32)
        return tensors


class Shard:
    """A finished shard. Its header and index are read here; states are mapped on demand and stay readable after the file is deleted."""

    def __init__(self, path: Path):
        """Raises BadShard when the file is torn or not a shard; the checksums of the states are looked at by verify() alone."""
        self.path = path
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                self.header_bytes = int.from_bytes(file.read(8), "little") + 8
                if not 10 <= self.header_bytes <= size:
                    raise BadShard(f"its header would need {self.header_bytes} bytes, the file has {size}")
                try:
                    self.entries: dict[str, Any] = json.loads(file.read(self.header_bytes - 8))
                    self.metadata: dict[str, str] = self.entries.pop("__metadata__")
                    self.checksums: dict[str, str] = json.loads(self.metadata["checksums"])
                    ids = self.metadata["ids"]
                except (ValueError, KeyError, AttributeError) as exc:
                    raise BadShard(f"its header cannot be read ({type(exc).__name__})") from None
                self.bytes = size
                end = max(entry["data_offsets"][1] for entry in self.entries.values())
                if self.header_bytes + end != size:
                    raise BadShard(f"it has {size} bytes where its header says {self.header_bytes + end}")
                self.ids: list[str] = ids.split(",") if ids else []
                self.offsets = self._read(file, "offsets")  # [N+1]
                self.final_offsets = self._read(file, "final_offsets")  # [N+1]
                self.heldout = self._read(file, "heldout").astype(bool)  # [N]
        except OSError as exc:
            raise BadShard(f"it cannot be read ({exc})") from None
        counts = {len(self.offsets), len(self.final_offsets), len(self.ids) + 1, len(self.heldout) + 1}
        if len(counts) != 1 or self.entries["aux"]["shape"][0] != self.offsets[-1]:
            raise BadShard("its index does not agree with its ids")

    def _read(self, file: Any, name: str) -> np.ndarray:
        entry = self.entries[name]
        start, end = entry["data_offsets"]
        data = os.pread(file.fileno(), end - start, self.header_bytes + start)
        if _digest(data) != self.checksums[name]:
            raise BadShard(f"tensor {name} does not match its checksum")
        return np.frombuffer(data, NUMPY_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def map(self) -> mmap.mmap:
        """The whole file, copy on write: torch wants writable memory. Nothing is written, so no memory need be set aside for it."""
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def rows(self, mapped: mmap.mmap, name: str, first: int, last: int) -> torch.Tensor:
        """Rows first..last-1 of a tensor, without a copy."""
        entry = self.entries[name]
        kind, shape = entry["dtype"], [last - first, *entry["shape"][1:]]
        dtype = next((TORCH_DTYPES[key] for key, value in STATE_NAMES.items() if value == kind), None)
        dtype = dtype or {"I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "U64": torch.uint64}[kind]
        width = int(np.prod(shape[1:], dtype=np.int64))
        if last == first or width == 0:
            return torch.zeros(shape, dtype=dtype)
        start = self.header_bytes + entry["data_offsets"][0] + first * width * ITEM_BYTES[kind]
        return torch.frombuffer(mapped, dtype=dtype, count=(last - first) * width, offset=start).view(shape)

    def check_sample(self, mapped: mmap.mmap, index: int) -> None:
        """Compare one sample's states with their checksums. Raises BadShard."""
        for name, sums, offsets in (("aux", "aux_sums", self.offsets), ("final", "final_sums", self.final_offsets)):
            first, last = int(offsets[index]), int(offsets[index + 1])
            hashes = [part for _, _, part in chunked_rows([byte_rows(self.rows(mapped, name, first, last))])]
            found = states_sum(np.concatenate([np.zeros(0, np.uint64), *hashes]))
            if found != int(self.rows(mapped, sums, index, index + 1).view(torch.int64).item()) % 2**64:
                raise BadShard(f"the states {name} of sample {self.ids[index]} do not match their checksum")

    def verify(self) -> None:
        """Every checksum of the shard. Raises BadShard naming the first tensor or sample that differs."""
        with open(self.path, "rb") as file:
            for name, entry in self.entries.items():
                if name not in ("aux", "final"):
                    self._read(file, name)
        mapped = self.map()
        for index in range(len(self.ids)):
            self.check_sample(mapped, index)


def _pwrite_all(fd: int, array: np.ndarray, offset: int) -> None:
    """pwrite all of it: a single call may write less, and at most 2 GiB."""
    data = memoryview(np.ascontiguousarray(array)).cast("B") if array.nbytes else memoryview(b"")
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + (1 << 30)], offset + done)


def fsync_folder(folder: Path) -> None:
    """Make a rename or an unlink in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
