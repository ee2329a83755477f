"""One shard of the store, for reading: a safetensors file with the rows of many samples end to end, written once and never changed (shard_writer.py)."""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .dump_file import ITEM_BYTES, MAP_NORESERVE
from .shard_writer import NUMPY_DTYPES, STATE_NAMES, chunked_rows, digest, states_sum

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.float8_e4m3fn}


class BadShard(Exception):
    """A shard that is not whole or not what its checksums say; the text says why."""


def byte_rows(tensor: torch.Tensor) -> np.ndarray:
    """[R, ...] of any dtype -> [R, bytes of a row] uint8, without a copy where the tensor is contiguous."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.numel() == 0:
        return np.zeros((len(tensor), int(np.prod(tensor.shape[1:], dtype=np.int64)) * tensor.element_size()), np.uint8)
    return tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy()


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
        if digest(data) != self.checksums[name]:
            raise BadShard(f"tensor {name} does not match its checksum")
        return np.frombuffer(data, NUMPY_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def manifest(self) -> dict[str, Any]:
        """The identity of the store that it was written for; {} when it cannot be read."""
        try:
            found = json.loads(self.metadata["manifest"])
        except (KeyError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

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

    def check_small(self) -> None:
        """The checksums of all tensors but the states. Raises BadShard."""
        with open(self.path, "rb") as file:
            for name in self.entries:
                if name not in ("aux", "final"):
                    self._read(file, name)

    def verify(self) -> None:
        """Every checksum of the shard. Raises BadShard naming the first tensor or sample that differs."""
        self.check_small()
        mapped = self.map()
        for index in range(len(self.ids)):
            self.check_sample(mapped, index)
