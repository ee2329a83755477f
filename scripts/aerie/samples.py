"""Samples: token ids and loss mask, made once by 02a and never recomputed. One safetensors file a split: data/train.safetensors, data/heldout.safetensors.

Tensors: input_ids [sum T] int32, loss_mask [sum T] uint8, offsets [N+1] int64, sample_ids [N] uint64 (the 16 hex digits of rid.sample_id as a number).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Iterator, NamedTuple, Sequence

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from .errors import UserError

TENSORS = {"input_ids": "I32", "loss_mask": "U8", "offsets": "I64", "sample_ids": "U64"}


class Sample(NamedTuple):
    """One row of training data."""

    id: str  # rid.sample_id(input_ids, loss_mask)
    input_ids: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] uint8, 1: this token was written by the assistant and is supervised


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """safetensors hides the system's error, a full disk too, in its text: raised again as the OSError that it is."""
    try:
        yield
    except SafetensorError as exc:
        if (number := re.search(r"os error (\d+)", str(exc))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def settle(path: Path) -> None:
    """What safetensors wrote gets the mode of any other new file (it makes files that their owner alone can read), and is on the disk."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def save_atomic(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a safetensors file under a temporary name in the same folder, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with system_errors(path):
            save_file(tensors, temporary, metadata=metadata)
        settle(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_samples(path: Path, samples: Sequence[Sample], metadata: dict[str, str]) -> None:
    """Write one split. `metadata` says what the samples are: tokenizer_hash, template_hash, mask_rule, model_path."""
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    empty_ids, empty_mask = np.zeros(0, np.int32), np.zeros(0, np.uint8)
    tensors = {
        "input_ids": np.concatenate([empty_ids, *(sample.input_ids for sample in samples)]).astype(np.int32, copy=False),
        "loss_mask": np.concatenate([empty_mask, *(sample.loss_mask for sample in samples)]).astype(np.uint8, copy=False),
        "offsets": offsets,
        "sample_ids": np.array([int(sample.id, 16) for sample in samples], dtype=np.uint64),
    }
    save_atomic(path, tensors, {"kind": "aerie-samples", "format": "1", **metadata})


class SampleWriter:
    """Write a split row by row with little memory. Rows lie in hidden files beside `path` until close() puts the safetensors file together and renames it.

    `rows` and `tokens` above 0 go on with the parts of an interrupted run, cut to what its last sync() had put on the disk.
    """

    PARTS = ("ids", "mask", "index")  # int32 a token, uint8 a token, (length, sample id) uint64 a row
    BYTES = (4, 1, 16)

    def __init__(self, path: Path, metadata: dict[str, str], rows: int = 0, tokens: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.metadata = path, {"kind": "aerie-samples", "format": "1", **metadata}
        self.rows, self.tokens = rows, tokens
        self._paths = [path.with_name(f".{path.name}.{name}.part") for name in self.PARTS]
        self._files = [open(part, "r+b" if rows else "w+b") for part in self._paths]  # noqa: SIM115  closed by close() or abandon()
        for file, size in zip(self._files, self._sizes(), strict=True):
            file.truncate(size)
            file.seek(size)

    def _sizes(self) -> list[int]:
        return [width * count for width, count in zip(self.BYTES, (self.tokens, self.tokens, self.rows), strict=True)]

    def add(self, sample: Sample) -> None:
        """Append one row."""
        ids, mask, index = self._files
        ids.write(np.ascontiguousarray(sample.input_ids, "<i4").tobytes())
        mask.write(np.ascontiguousarray(sample.loss_mask, np.uint8).tobytes())
        index.write(struct.pack("<QQ", len(sample.input_ids), int(sample.id, 16)))
        self.rows, self.tokens = self.rows + 1, self.tokens + len(sample.input_ids)

    def sync(self) -> None:
        """Put what was added on the disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def sample_ids(self) -> np.ndarray:
        """Ids [N] uint64 of all rows so far."""
        self._files[2].flush()
        return np.fromfile(self._paths[2], "<u8", 2 * self.rows)[1::2].copy()

    def blocks(self, size: int = 1 << 18) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """input_ids int32 and loss_mask uint8 of all rows so far, `size` tokens at a time: never all of them in memory, mapped or not."""
        for file in self._files[:2]:
            file.flush()
        with open(self._paths[0], "rb") as ids, open(self._paths[1], "rb") as mask:
            for start in range(0, self.tokens, size):
                count = min(size, self.tokens - start)
                yield np.fromfile(ids, "<i4", count), np.fromfile(mask, np.uint8, count)

    def close(self) -> None:
        """Put the file together under a temporary name, fsync, rename. The layout is safetensors' own: length, JSON header, tensors without gaps."""
        for file in self._files:
            file.flush()
        index = np.fromfile(self._paths[2], "<u8").reshape(-1, 2)  # [N, 2]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(index[:, 0].astype(np.int64))])
        shapes = {"offsets": self.rows + 1, "sample_ids": self.rows, "input_ids": self.tokens, "loss_mask": self.tokens}
        header: dict[str, object] = {"__metadata__": self.metadata}
        place = 0
        for (name, count), width in zip(shapes.items(), (8, 8, 4, 1), strict=True):
            header[name] = {"dtype": TENSORS[name], "shape": [count], "data_offsets": [place, place + width * count]}
            place += width * count
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            with open(temporary, "wb") as whole:
                whole.write(struct.pack("<Q", len(text)) + text)
                whole.write(offsets.astype("<i8").tobytes() + index[:, 1].tobytes())
                for part in self._files[:2]:
                    part.seek(0)
                    shutil.copyfileobj(part, whole, 1 << 20)
                whole.flush()
                os.fsync(whole.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self.abandon()

    def release(self) -> None:
        """Close the parts and leave them."""
        for file in self._files:
            with suppress(OSError):  # on a full disk: what close() wrote to the end is on the disk already, what an interrupted run had not synced is not counted
                file.close()

    def abandon(self) -> None:
        """Remove the parts; the file of an earlier run stays as it was."""
        self.release()
        for path in self._paths:
            path.unlink(missing_ok=True)


class SampleFile:
    """A split, read by memory map: len(), [i], iteration. Raises UserError when the file is missing or not one of ours."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, "np")
        except FileNotFoundError:
            raise UserError(f"{path} does not exist; make it with `make data`") from None
        except (SafetensorError, OSError) as exc:
            raise UserError(f"{path} is not a whole safetensors file ({exc}); make it again with `make data`") from None
        self.metadata: dict[str, str] = self._file.metadata() or {}
        if self.metadata.get("kind") != "aerie-samples" or set(self._file.keys()) != set(TENSORS):
            raise UserError(f"{path} holds no samples of Aerie; make it with `make data`")
        for name, dtype in TENSORS.items():
            found = self._file.get_slice(name).get_dtype()
            if found != dtype:
                raise UserError(f"{path}: tensor {name} is {found}, not {dtype}; make it again with `make data`")
        self.offsets: np.ndarray = self._file.get_tensor("offsets")
        self._ids: np.ndarray = self._file.get_tensor("sample_ids")
        self.input_ids: np.ndarray = self._file.get_tensor("input_ids")
        self.loss_mask: np.ndarray = self._file.get_tensor("loss_mask")
        if len(self.offsets) != len(self._ids) + 1 or int(self.offsets[-1]) != len(self.input_ids) or len(self.loss_mask) != len(self.input_ids):
            raise UserError(f"{path}: offsets and rows do not agree; make it again with `make data`")

    def __len__(self) -> int:
        return len(self._ids)

    def sample_id(self, index: int) -> str:
        """The 16 hex digits of sample `index`."""
        return f"{int(self._ids[index]):016x}"

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Sample(self.sample_id(index), self.input_ids[rows], self.loss_mask[rows])

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))
