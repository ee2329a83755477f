"""The store of extracted hidden states: a folder of immutable shards, a manifest that says what they are, and a log of what is done.

    manifest.json      identity of the states (model, layers, dtype, tokenizer, data) and counts
    shard-*.safetensors see shards.py
    done.log           'sample shard rows' a line, fsynced after the shard's rename; outlives shards that streaming deletes
    consumed.log       one shard name a line, written by the trainer when it has done with a shard (streaming)
    failed.jsonl       sample, reason, attempts

The shards are the truth: manifest counts and done.log are repaired from them when a writer opens the store after a crash.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch

from .errors import UserError
from .ops import drafter_ops
from .shards import BadShard, Shard
from .store_files import FORMAT, IDENTITY, append_line, read_done, read_manifest, refuse_other_identity, shard_paths, supervised_rows, whole_lines
from .store_writer import StoreWriter

__all__ = [
    "Store", "StoreWriter", "StoredSample", "StreamingStore", "read_done", "read_manifest", "refuse_other_identity", "sample_of",
    "shard_paths", "shard_problem", "supervised_rows", "whole_lines",
]  # fmt: skip

MAPPED_SHARDS = 32  # maps kept open by a reader


@dataclass
class StoredSample:
    """One sample's states; tensors are views of the mapped file."""

    id: str
    heldout: bool
    input_ids: torch.Tensor  # [T] int32
    loss_mask: torch.Tensor  # [T] uint8
    aux: torch.Tensor  # [T, A*H], A = 3 layers side by side; the store's dtype
    final: torch.Tensor  # [F, H]: after the final norm, what the LM head reads
    final_rows: torch.Tensor  # [F] int64: which rows of the sample `final` has
    aux_scale: torch.Tensor | None = None  # fp8: [T, A] float32
    final_scale: torch.Tensor | None = None  # fp8: [F] float32

    def aux_float(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[T, A*H] in `dtype`, dequantised where the store is fp8."""
        if self.aux_scale is None:
            return self.aux.to(dtype)
        rows, layers = self.aux_scale.shape
        return drafter_ops.dequantize_rows_fp8(self.aux.reshape(rows * layers, -1), self.aux_scale.flatten(), dtype).view(rows, -1)

    def final_float(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[F, H] in `dtype`, dequantised where the store is fp8."""
        if self.final_scale is None:
            return self.final.to(dtype)
        return drafter_ops.dequantize_rows_fp8(self.final, self.final_scale.contiguous(), dtype)


class Store:
    """A store, for reading. Costs memory by sample and shard, not by row; rows are mapped when asked for."""

    def __init__(self, path: Path, manifest: dict[str, Any], shards: Sequence[Shard]):
        self.path, self.manifest, self.shards = path, manifest, list(shards)
        counts = [len(shard.ids) for shard in self.shards]
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
        self.ids: list[str] = [sample for shard in self.shards for sample in shard.ids]
        empty = np.zeros(0, np.int64)
        self.lengths: np.ndarray = np.concatenate([empty, *(np.diff(shard.offsets) for shard in self.shards)])  # [N]
        self.final_counts: np.ndarray = np.concatenate([empty, *(np.diff(shard.final_offsets) for shard in self.shards)])  # [N]
        self.heldout: np.ndarray = np.concatenate([np.zeros(0, bool), *(shard.heldout for shard in self.shards)])  # [N]
        self._maps: OrderedDict[int, Any] = OrderedDict()
        self._checked: set[int] = set()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path | str) -> Store:
        """Headers and indexes of all shards are checked here, states by verify(). Raises UserError naming the store or the damaged shard."""
        path = Path(path)
        manifest = read_manifest(path)
        if manifest is None:
            raise UserError(f"there is no store in {path}; make it with `make extract`")
        if manifest.get("format") != FORMAT:
            raise UserError(f"the store in {path} has format {manifest.get('format')}, this code reads {FORMAT}; extract again into another run")
        shards = [open_shard(file) for file in shard_paths(path)]
        for shard in shards:
            refuse_foreign(shard, manifest)
        return cls(path, manifest, shards)

    def missing_shards(self) -> list[str]:
        """Names of shards that done.log knows and that are neither here nor consumed by streaming."""
        logged = {shard for shard, _ in read_done(self.path).values()}
        return sorted(logged - {shard.path.name for shard in self.shards} - set(whole_lines(self.path / "consumed.log")))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def bytes(self) -> int:
        """Size of the shards."""
        return sum(shard.bytes for shard in self.shards)

    def locate(self, index: int) -> tuple[int, int]:
        """(shard, place in the shard) of sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a store of {len(self)}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return shard, index - int(self._starts[shard])

    def _map(self, number: int) -> Any:
        with self._lock:
            if number in self._maps:
                self._maps.move_to_end(number)
            else:
                if number not in self._checked:  # ids, mask and rows; the states, a thousand times larger, are looked at by verify()
                    self._checked.add(number)
                    check_small(self.shards[number])
                self._maps[number] = self.shards[number].map()
                if len(self._maps) > MAPPED_SHARDS:
                    self._maps.popitem(last=False)  # tensors handed out keep their map alive
            return self._maps[number]

    def get(self, index: int) -> StoredSample:
        """Sample `index` as views of the mapped shard."""
        number, place = self.locate(index)
        return sample_of(self.shards[number], self._map(number), place)

    def check(self, index: int) -> None:
        """Compare one sample's states with their checksums. Raises UserError naming shard and sample."""
        number, place = self.locate(index)
        try:
            self.shards[number].check_sample(self._map(number), place)
        except BadShard as exc:
            raise UserError(f"{self.shards[number].path} is damaged: {exc}; run `make extract` again, which asks for what is missing") from None

    def verify(self) -> list[tuple[Path, str]]:
        """Every checksum of every shard; the damaged ones with what is wrong."""
        return [(shard.path, problem) for shard in self.shards if (problem := shard_problem(shard))]


def open_shard(path: Path) -> Shard:
    """Shard(path), with a damaged one as a UserError that names it."""
    try:
        return Shard(path)
    except BadShard as exc:
        raise UserError(f"{path} is damaged: {exc}; run `make extract` again, which removes it and asks for its samples") from None


def check_small(shard: Shard) -> None:
    """Shard.check_small(), with a damaged one as a UserError that names it."""
    try:
        shard.check_small()
    except BadShard as exc:
        raise UserError(f"{shard.path} is damaged: {exc}; remove it and run `make extract` again, which asks for its samples") from None


def refuse_foreign(shard: Shard, manifest: dict[str, Any]) -> None:
    """Raise UserError for a shard of another store: copied here, its states would be trained on as if they were this target's."""
    own = shard.manifest()
    differ = [key for key in IDENTITY if key in own and key in manifest and own[key] != manifest[key]]
    if differ:
        raise UserError(f"{shard.path} is of another store than its manifest.json says: {', '.join(differ)} differ; remove it, and run `make extract` again")


def shard_problem(shard: Shard) -> str:
    """What verify() finds wrong with a shard, or an empty string."""
    try:
        shard.verify()
    except (BadShard, OSError, ValueError) as exc:
        return str(exc)
    return ""


def sample_of(shard: Shard, mapped: Any, place: int) -> StoredSample:
    """Sample number `place` of a shard, as views of `mapped` (shard.map())."""
    rows = int(shard.offsets[place]), int(shard.offsets[place + 1])
    finals = int(shard.final_offsets[place]), int(shard.final_offsets[place + 1])
    fp8 = "aux_scale" in shard.entries
    return StoredSample(
        shard.ids[place], bool(shard.heldout[place]),
        shard.rows(mapped, "input_ids", *rows), shard.rows(mapped, "loss_mask", *rows),
        shard.rows(mapped, "aux", *rows), shard.rows(mapped, "final", *finals), shard.rows(mapped, "final_rows", *finals),
        shard.rows(mapped, "aux_scale", *rows) if fp8 else None, shard.rows(mapped, "final_scale", *finals) if fp8 else None,
    )  # fmt: skip


class StreamingStore:
    """A store that is still being written, read shard by shard as they appear; consumed shards may be deleted by the extraction (extract.keep_gb)."""

    def __init__(self, path: Path | str):
        self.path = Path(path)

    def manifest(self) -> dict[str, Any] | None:
        """The manifest, or None before the first sample is in."""
        return read_manifest(self.path)

    def consumed(self) -> set[str]:
        """Names of the shards that the trainer has done with."""
        return set(whole_lines(self.path / "consumed.log"))

    def consume(self, name: str) -> None:
        """Say that shard `name` is trained on: from here on it may be deleted. Durable on return, so call it after the checkpoint that holds its steps."""
        append_line(self.path / "consumed.log", f"{name}\n")

    def complete(self) -> bool:
        """Whether the extraction has finished: no shard will be added."""
        return bool((self.manifest() or {}).get("complete"))

    def shards(self, poll_s: float = 0.5, keep_waiting: Callable[[], bool] = lambda: True) -> Iterator[Store]:
        """Yield each unconsumed shard once, in order, as a Store of that shard alone; ends when the extraction is complete or keep_waiting() says no.

        Raises UserError for a damaged shard.
        """
        seen: set[str] = set()
        while True:
            finished = self.complete()  # before looking: no shard can appear unseen after it
            consumed = self.consumed()
            new = [path for path in shard_paths(self.path) if path.name not in seen and path.name not in consumed]
            for path in new:
                seen.add(path.name)
                yield Store(self.path, self.manifest() or {}, [open_shard(path)])
            if not new:
                if finished or not keep_waiting():
                    return
                time.sleep(poll_s)
