"""Writing one shard of the store. Numpy alone, so that a worker process starts in a moment; shards.py reads.

Layout: header (of a fixed, reserved size), aux [T, A*H], final [F, H], then the small tensors; T and F are summed over the shard's samples. Row widths do not
change while a shard grows, so aux rows go straight into their places; `final` (at most a quarter) waits in memory until the shard ends. Under a temporary
name until everything is in it and fsynced: a file named shard-*.safetensors is whole.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np

from .dump_file import ITEM_BYTES

STATE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "fp8": "F8_E4M3"}
NUMPY_DTYPES = {"F32": np.float32, "I32": np.int32, "I64": np.int64, "U64": np.uint64, "U8": np.uint8}
CHUNK_BYTES = 768 << 10  # what is copied, looked at, hashed and written in one go: stays in a core's cache
WRITEBACK_BYTES = 16 << 20  # the disk begins to write after so many
MAX_SAMPLES = 4096  # ids stand in the header, whose size is reserved when the shard begins


class Spec(NamedTuple):
    """What one row is: `layers` auxiliary states and one final state, each of `hidden` values."""

    layers: int
    hidden: int
    dtype: str  # a key of STATE_NAMES

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


def row_hashes(words: np.ndarray) -> np.ndarray:
    """[R, W] uint64 -> [R] uint64: sum of weight * word mod 2^64 (multiply-shift hashing). Odd weights: any one changed word changes the sum.

    Runs at memory speed in numpy, which zlib.crc32 and hashlib do not: the check must not be what bounds the extraction.
    """
    return np.einsum("ij,j->i", words, _weights(words.shape[1]))


def digest(data: bytes | memoryview | np.ndarray) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def states_sum(hashes: np.ndarray) -> int:
    """One number for a sample's states: the first 8 bytes of sha256 over its row hashes."""
    return int.from_bytes(hashlib.sha256(np.ascontiguousarray(hashes)).digest()[:8], "little")


class FileRows(NamedTuple):
    """[rows, width] uint8 in an open file. Read piece by piece into a buffer: half of what mapping costs where each page of 4 KiB must be mapped and unmapped."""

    fd: int
    offset: int
    rows: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.width

    def __len__(self) -> int:
        return self.rows

    def read(self, first: int, count: int, scratch: np.ndarray) -> np.ndarray:
        """[count, width] from row `first` on, a view of `scratch` (flat, uint8). Raises OSError when the file ends before."""
        out = scratch[: count * self.width].reshape(count, self.width)
        if os.preadv(self.fd, [out], self.offset + first * self.width) != out.nbytes:
            raise OSError(errno.EIO, f"a file ends before byte {self.offset + first * self.width + out.nbytes}")
        return out


Rows = np.ndarray | FileRows  # [R, bytes] uint8


def chunked_rows(planes: Sequence[Rows]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (first row, [R, W*8] uint8 padded with zeros, [R] hashes): the planes' rows side by side, CHUNK_BYTES at a time. The array is reused."""
    total, width = len(planes[0]), sum(plane.shape[1] for plane in planes)
    step = min(max(1, CHUNK_BYTES // max(width, 1)), max(total, 1))
    buffer = np.zeros((step, -(-width // 8) * 8), np.uint8)
    scratch = scratch_for(planes, step)
    for first in range(0, total, step):
        chunk, column = buffer[: min(step, total - first)], 0
        for plane in planes:
            part = plane.read(first, len(chunk), scratch) if isinstance(plane, FileRows) else plane[first : first + len(chunk)]
            chunk[:, column : column + plane.shape[1]] = part
            column += plane.shape[1]
        yield first, chunk, row_hashes(chunk.view(np.uint64))


def scratch_for(planes: Sequence[Rows], step: int) -> np.ndarray:
    """Memory for FileRows.read of `step` rows of any of these: one for all, so that it stays in the cache."""
    return np.empty(max((step * plane.width for plane in planes if isinstance(plane, FileRows)), default=0), np.uint8)


def arena_bytes(spec: Spec, shard_bytes: int) -> int:
    """Room for the `final` rows of a shard in which every row is kept; untouched pages cost nothing."""
    return shard_bytes // (spec.layers + 1) if shard_bytes < 1 << 40 else 0


class ShardSize:
    """How full a shard is that is being written; the same numbers in the process that writes it and in the one that plans it."""

    def __init__(self, path: Path, spec: Spec, shard_bytes: int):
        self.path, self.spec, self.shard_bytes = path, spec, shard_bytes
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self.max_samples = int(min(MAX_SAMPLES, max(16, shard_bytes // 65536)))
        self.rows = self.final_rows = 0
        self.begun = time.monotonic()
        self.lengths: list[tuple[str, int]] = []  # (sample, rows) of each sample, in order

    @property
    def bytes(self) -> int:
        """Bytes of states so far."""
        return self.rows * self.spec.aux_bytes + self.final_rows * self.spec.final_bytes

    def fits(self, rows: int, final_rows: int) -> bool:
        """Whether a sample still belongs in this shard; an empty one takes a sample of any size."""
        more = rows * self.spec.aux_bytes + final_rows * self.spec.final_bytes
        return not self.lengths or (len(self.lengths) < self.max_samples and self.bytes + more <= self.shard_bytes)

    def count(self, sample: str, rows: int, final_rows: int) -> None:
        """A sample is in."""
        self.lengths.append((sample, rows))
        self.rows += rows
        self.final_rows += final_rows

    def discard(self) -> None:
        """Remove the temporary file."""
        self.temporary.unlink(missing_ok=True)


class ShardWriter(ShardSize):
    """A shard that is being written, by one thread of one process: writers to one file would wait for each other (the kernel locks it for each write)."""

    def __init__(self, path: Path, spec: Spec, shard_bytes: int, metadata: dict[str, str], arenas: list[np.ndarray], temporary: Path | None = None):
        """metadata: what finish() writes beside the ids and checksums. arenas: memory for `final` of finished shards, to be used again (fresh memory costs a page fault
        every 4 KiB). Creates the temporary file and fixes the header's size."""
        super().__init__(path, spec, shard_bytes)
        self.temporary = temporary or self.temporary
        self.arenas, self.metadata = arenas, metadata
        self.arena = arenas.pop() if arenas else np.empty(arena_bytes(spec, shard_bytes), np.uint8)
        self.samples: list[dict[str, Any]] = []
        self.header_bytes = -(-(len(json.dumps(metadata)) + 17 * self.max_samples + 3072) // 4096) * 4096
        self._started = self.header_bytes  # up to here the disk has begun to write
        self._fd = os.open(self.temporary, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644)

    def write(
        self, sample: str, heldout: bool, input_ids: np.ndarray, loss_mask: np.ndarray, aux: Sequence[Rows], final: Rows, kept: np.ndarray,
        scales: tuple[np.ndarray, np.ndarray] | None = None, look: Callable[[bool, int, np.ndarray], None] = lambda final, first, block: None,
        verdict: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Put one sample behind the others. aux: planes [T, bytes]; final [T, bytes], of which the rows `kept` go in; scales of fp8 rows: [T, A], [T].

        look(final?, first row, block) is shown every block of states while it is in the cache; verdict() is asked at the end. What it raises leaves the shard as it
        was: the next sample goes over these bytes.
        """
        width = self.spec.aux_bytes
        hashes = np.zeros(len(input_ids), np.uint64)
        begin = self.header_bytes + self.rows * width
        for first, chunk, part in chunked_rows(aux):
            hashes[first : first + len(part)] = part
            look(False, first, chunk)
            _pwrite_all(self._fd, chunk[:, :width], begin + first * width)
        final_hashes = self._keep_final(final, kept, look)
        verdict()
        if (end := begin + len(hashes) * width) - self._started >= WRITEBACK_BYTES:
            start_writeback(self._fd, self._started, end - self._started)
            self._started = end
        self.samples.append({
            "heldout": heldout, "input_ids": np.array(input_ids, np.int32), "loss_mask": np.array(loss_mask, np.uint8), "final_rows": np.array(kept, np.int64),
            "aux_sum": states_sum(hashes), "final_sum": states_sum(final_hashes),
            "aux_scale": scales and np.array(scales[0], np.float32), "final_scale": scales and np.array(scales[1][kept], np.float32),
        })  # fmt: skip
        self.count(sample, len(hashes), len(kept))

    def _keep_final(self, final: Rows, kept: np.ndarray, look: Callable[[bool, int, np.ndarray], None]) -> np.ndarray:
        """Copy the rows `kept` of [T, bytes] behind those of the earlier samples in the arena; their hashes [F]."""
        width = self.spec.final_bytes
        need = (self.final_rows + len(kept)) * width
        if need > len(self.arena):
            larger = np.empty(need + need // 4, np.uint8)
            larger[: self.final_rows * width] = self.arena[: self.final_rows * width]
            self.arena = larger
        place = self.arena[self.final_rows * width : need].reshape(len(kept), width)
        hashes, step = np.zeros(len(kept), np.uint64), max(1, CHUNK_BYTES // max(width, 1))
        bounds = np.searchsorted(kept, [*range(0, len(final), step), len(final)])
        scratch = scratch_for([final], min(step, len(final)))
        for number, first in enumerate(range(0, len(final), step)):
            count = min(step, len(final) - first)
            block = final.read(first, count, scratch) if isinstance(final, FileRows) else np.ascontiguousarray(final[first : first + count])
            look(True, first, block)
            low, high = bounds[number], bounds[number + 1]
            if low == high:
                continue
            np.take(block, kept[low:high] - first, axis=0, out=place[low:high], mode="clip")  # mode raise would copy once more
            if width % 8 == 0:
                hashes[low:high] = row_hashes(place[low:high].view(np.uint64))
            else:
                hashes[low:high] = np.concatenate([part for _, _, part in chunked_rows([place[low:high]])])
        return hashes

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
        _pwrite_all(self._fd, self.arena[: self.final_rows * self.spec.final_bytes], at)
        for name, array in tensors.items():
            kind = next(kind for kind, dtype in NUMPY_DTYPES.items() if dtype == array.dtype)
            _pwrite_all(self._fd, array, place(name, kind, list(array.shape)))
            checksums[name] = digest(np.ascontiguousarray(array))
        checksums["aux"], checksums["final"] = checksums["aux_sums"], checksums["final_sums"]
        metadata = {**self.metadata, "ids": ",".join(sample for sample, _ in self.lengths), "checksums": json.dumps(checksums)}
        header = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
        room = self.header_bytes - 8
        if len(header) > room:
            raise AssertionError(f"the shard's header needs {len(header)} bytes, {room} are reserved")
        os.pwrite(self._fd, room.to_bytes(8, "little") + header.ljust(room), 0)
        os.ftruncate(self._fd, self.header_bytes + position)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        self.arenas.append(self.arena)
        os.rename(self.temporary, self.path)
        fsync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().discard()

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


def _pwrite_all(fd: int, array: np.ndarray, offset: int) -> None:
    """pwrite all of it: a single call may write less, and at most 2 GiB."""
    data = memoryview(np.ascontiguousarray(array)).cast("B") if array.nbytes else memoryview(b"")
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + (1 << 30)], offset + done)


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Let the disk begin with these pages now, so that fsync finds little left to do. Nothing on a tmpfs; what goes wrong, fsync will say."""
    _libc().sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), 2)  # SYNC_FILE_RANGE_WRITE: starts, does not wait


@lru_cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def fsync_folder(folder: Path) -> None:
    """Make a rename or an unlink in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
