"""Samples: token ids and loss mask, made once by 02a and never recomputed. One safetensors file a split: data/train.safetensors, data/heldout.safetensors.

Tensors: input_ids [sum T] int32, loss_mask [sum T] uint8, offsets [N+1] int64, sample_ids [N] uint64 (the 16 hex digits of rid.sample_id as a number).
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from array import array
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


def save_atomic(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Write a safetensors file under a temporary name in the same folder, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata=metadata)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
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
    """Write a split row by row with little memory: rows lie in hidden files beside `path` until close() puts the safetensors file together and renames it."""

    def __init__(self, path: Path, metadata: dict[str, str]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.metadata = path, {"kind": "aerie-samples", "format": "1", **metadata}
        self.lengths, self.numbers = array("q", [0]), array("Q")  # offsets, sample ids
        self._parts = [path.with_name(f".{path.name}.{os.getpid()}.{name}.tmp") for name in ("ids", "mask", "whole")]
        self._ids, self._mask = open(self._parts[0], "w+b"), open(self._parts[1], "w+b")  # noqa: SIM115  closed by close() or abandon()

    def __len__(self) -> int:
        return len(self.numbers)

    def add(self, sample: Sample) -> None:
        """Append one row."""
        self._ids.write(np.ascontiguousarray(sample.input_ids, "<i4").tobytes())
        self._mask.write(np.ascontiguousarray(sample.loss_mask, np.uint8).tobytes())
        self.lengths.append(self.lengths[-1] + len(sample.input_ids))
        self.numbers.append(int(sample.id, 16))

    def close(self) -> None:
        """Put the file together under a temporary name, fsync, rename. The layout is safetensors' own: length, JSON header, tensors without gaps."""
        rows = self.lengths[-1]
        sizes = {"offsets": 8 * len(self.lengths), "sample_ids": 8 * len(self.numbers), "input_ids": 4 * rows, "loss_mask": rows}
        shapes = {"offsets": len(self.lengths), "sample_ids": len(self.numbers), "input_ids": rows, "loss_mask": rows}
        header: dict[str, object] = {"__metadata__": self.metadata}
        place = 0
        for name, size in sizes.items():
            header[name] = {"dtype": TENSORS[name], "shape": [shapes[name]], "data_offsets": [place, place + size]}
            place += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        try:
            with open(self._parts[2], "wb") as whole:
                whole.write(struct.pack("<Q", len(text)) + text)
                whole.write(np.array(self.lengths, "<i8").tobytes() + np.array(self.numbers, "<u8").tobytes())
                for part in (self._ids, self._mask):
                    part.seek(0)
                    shutil.copyfileobj(part, whole, 1 << 20)
                whole.flush()
                os.fsync(whole.fileno())
            os.replace(self._parts[2], self.path)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Remove the unfinished parts; the file of an earlier run stays as it was."""
        for part in (self._ids, self._mask):
            part.close()
        for part in self._parts:
            part.unlink(missing_ok=True)


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
