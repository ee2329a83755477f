"""The store of extracted hidden states: a folder of immutable shards, a manifest that says what they are, and a log of what is done.

    manifest.json      identity of the states (model, layers, dtype, tokenizer, data) and counts
    shard-*.safetensors see shards.py
    done.log           'sample shard rows' a line, fsynced after the shard's rename; outlives shards that streaming deletes
    consumed.log       one shard name a line, written by the trainer when it has done with a shard (streaming)
    failed.jsonl       sample, reason, attempts

The shards are the truth: manifest counts and done.log are repaired from them when a writer opens the store after a crash.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np
import torch

from .errors import UserError
from .report import write_json
from .shards import STATE_NAMES, BadShard, Shard, ShardWriter, Spec, byte_rows, fsync_folder

FORMAT = 1
# What two sets of states must share to lie in one store; anything else in the manifest is information.
IDENTITY = (
    "model_hash", "aux_layer_ids", "capture_points", "hidden_size", "dtype", "model_dtype", "tokenizer_hash", "template_hash", "mask_rule", "data_hash",
    "all_final_rows", "logits",
)  # fmt: skip
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
        return (self.aux.to(torch.float32).view(rows, layers, -1) * self.aux_scale[:, :, None]).view(rows, -1).to(dtype)

    def final_float(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[F, H] in `dtype`, dequantised where the store is fp8."""
        if self.final_scale is None:
            return self.final.to(dtype)
        return (self.final.to(torch.float32) * self.final_scale[:, None]).to(dtype)


def supervised_rows(loss_mask: np.ndarray) -> np.ndarray:
    """[F] int64: the rows whose `final` a supervised prediction needs as its label, for every TTT step: r >= 1 with mask[r] and mask[r+1]."""
    mask = np.asarray(loss_mask).astype(bool)
    return np.flatnonzero(mask[1:-1] & mask[2:]).astype(np.int64) + 1


def shard_name(index: int) -> str:
    """shard-000012.safetensors"""
    return f"shard-{index:06d}.safetensors"


def shard_paths(folder: Path) -> list[Path]:
    """The finished shards, in the order they were made."""
    return sorted(folder.glob("shard-*.safetensors"))


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """manifest.json, or None when it is missing or torn."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("kind") == "aerie-store" else None


def whole_lines(path: Path) -> list[str]:
    """The lines of a log that end in a newline; a torn last line is left out."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in text.split("\n")[:-1] if line.strip()]


def read_done(folder: Path) -> dict[str, tuple[str, int]]:
    """done.log as {sample: (shard, rows)}; malformed lines are left out."""
    done = {}
    for line in whole_lines(folder / "done.log"):
        parts = line.split()
        if len(parts) == 3 and len(parts[0]) == 16 and parts[2].isdigit():
            done[parts[0]] = (parts[1], int(parts[2]))
    return done


def append_line(path: Path, text: str) -> None:
    """Append and fsync; after a torn last line, on a new one."""
    with open(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
        file.write((b"\n" if torn else b"") + text.encode())
        file.flush()
        os.fsync(file.fileno())


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
        return cls(path, manifest, [open_shard(file) for file in shard_paths(path)])

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


class StoreWriter:
    """The one writer of a store. add() may be called from several threads; a sample counts once its shard is whole on disk.

    Opening an existing store resumes it: temporary files go, headers and sizes of all shards and the checksums of the last two are checked, damaged
    shards are removed (`removed` says which and why) and done.log is repaired. `done` holds every sample that need not be asked for again.
    """

    def __init__(self, path: Path | str, manifest_fields: dict[str, Any], shard_bytes: int = 1 << 30, shard_seconds: float = 0.0):
        """manifest_fields: at least hidden_size, dtype (float32, bfloat16, float16, fp8) and aux_layer_ids. shard_seconds > 0: also end a shard at that age.

        Raises UserError when the store holds states of another model, layers, tokenizer or data, or when another process writes it.
        """
        self.path, self.shard_bytes, self.shard_seconds = Path(path), shard_bytes, shard_seconds
        fields = json.loads(json.dumps(manifest_fields))  # as it will be read back
        if fields["dtype"] not in STATE_NAMES:
            raise ValueError(f"dtype {fields['dtype']!r}: one of {', '.join(STATE_NAMES)}")
        self.spec = Spec(len(fields["aux_layer_ids"]), fields["hidden_size"], fields["dtype"])
        self.all_final_rows = bool(fields.get("all_final_rows"))
        self.removed: list[tuple[str, str]] = []
        self.on_shard: Callable[[str, list[str]], None] = lambda name, ids: None  # called after a shard is whole on disk
        self._lock = threading.RLock()
        self._open: ShardWriter | None = None
        self._opened = 0.0
        self._unfinished: set[ShardWriter] = set()
        self._finishing = threading.Lock()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_file = lock_store(self.path)
        try:
            self._resume(fields)
        except BaseException:
            self._lock_file.close()
            raise

    def _resume(self, fields: dict[str, Any]) -> None:
        for leftover in self.path.glob(".shard-*.tmp"):
            leftover.unlink()
        shards = self._good_shards()
        manifest = read_manifest(self.path)
        if manifest is None and shards:
            manifest = json.loads(shards[0].metadata["manifest"])  # manifest.json was lost: every shard carries its identity
        if manifest is not None:
            refuse_other_identity(self.path, manifest, fields)
        self.manifest: dict[str, Any] = {"kind": "aerie-store", "format": FORMAT, **(manifest or {}), **fields}
        self.done = self._repair_done(shards)
        consumed = set(whole_lines(self.path / "consumed.log"))
        names = {path.name for path in shard_paths(self.path)} | {shard for shard, _ in self.done.values()} | consumed
        self._next = 1 + max((int(name[6:12]) for name in names if name[6:12].isdigit()), default=-1)
        self._counts = {shard.path.name: (len(shard.ids), int(shard.offsets[-1]), shard.bytes) for shard in shards}
        self._write_manifest(complete=False)

    def _good_shards(self) -> list[Shard]:
        paths = shard_paths(self.path)
        good = []
        for number, path in enumerate(paths):
            try:
                shard = Shard(path)
                if number >= len(paths) - 2:
                    shard.verify()
                good.append(shard)
            except (BadShard, KeyError, ValueError) as exc:
                self.remove_shard(path, str(exc))
        return good

    def remove_shard(self, path: Path, reason: str) -> None:
        """Delete a damaged shard; its samples are asked for again."""
        self.removed.append((path.name, reason))
        path.unlink()
        fsync_folder(self.path)

    def _repair_done(self, shards: list[Shard]) -> dict[str, tuple[str, int]]:
        """Samples of whole shards, and logged samples of shards that were consumed; done.log is rewritten where it says anything else."""
        logged = read_done(self.path)
        consumed = set(whole_lines(self.path / "consumed.log"))
        present = {shard.path.name for shard in shards}
        gone = {name for name, _ in self.removed}
        done = {sample: entry for sample, entry in logged.items() if entry[0] in consumed and entry[0] not in present and entry[0] not in gone}
        for shard in shards:
            rows = np.diff(shard.offsets)
            done.update({sample: (shard.path.name, int(rows[place])) for place, sample in enumerate(shard.ids)})
        if done != logged or len(whole_lines(self.path / "done.log")) != len(done):
            temporary = self.path / ".done.log.tmp"
            with open(temporary, "w", encoding="utf-8") as file:
                file.writelines(f"{sample} {shard} {rows}\n" for sample, (shard, rows) in done.items())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path / "done.log")
            fsync_folder(self.path)
        return done

    def _write_manifest(self, complete: bool) -> None:
        counts = list(self._counts.values())
        self.manifest |= {
            "samples": sum(count[0] for count in counts), "rows": sum(count[1] for count in counts), "bytes": sum(count[2] for count in counts),
            "shards": len(counts), "done": len(self.done), "complete": complete,
        }  # fmt: skip
        write_json(self.path / "manifest.json", self.manifest)

    @property
    def bytes(self) -> int:
        """Bytes of the shards in the folder, and of those that are being written."""
        with self._lock:
            return sum(count[2] for count in self._counts.values()) + sum(shard.bytes for shard in self._unfinished)

    def rows_to_keep(self, loss_mask: np.ndarray) -> np.ndarray:
        """[F] int64: the rows whose `final` this store keeps."""
        return np.arange(len(loss_mask), dtype=np.int64) if self.all_final_rows else supervised_rows(loss_mask)

    def add(
        self, id: str, input_ids: Any, loss_mask: Any, aux: Any, final: torch.Tensor, heldout: bool = False,
        aux_scale: Any = None, final_scale: Any = None,
    ) -> bool:  # fmt: skip
        """Add one sample: input_ids, loss_mask [T]; aux [T, A*H], or the A tensors [T, H]; final [T, H], of which the needed rows are kept.

        fp8: aux_scale [T, A], final_scale [T] float32. Returns False when the sample is there already. An OSError (full disk) leaves the store whole,
        without the shards that were being written; then only abandon() may follow.
        """
        ids, mask = np.asarray(input_ids, np.int32), np.asarray(loss_mask, np.uint8)
        planes = [byte_rows(plane) for plane in ([aux] if isinstance(aux, torch.Tensor) else aux)]
        kept = self.rows_to_keep(mask)
        if any(len(part) != len(ids) for part in (mask, *planes, final)):
            raise ValueError(f"sample {id}: {len(ids)} tokens, but {[len(part) for part in (mask, *planes, final)]} rows")
        final_plane = byte_rows(final)
        if sum(plane.shape[1] for plane in planes) != self.spec.aux_bytes or final_plane.shape[1] != self.spec.final_bytes:
            raise ValueError(f"sample {id}: rows of {sum(p.shape[1] for p in planes)} and {final_plane.shape[1]} bytes do not fit {self.spec}")
        if self.spec.dtype == "fp8":
            aux_scale, final_scale = np.asarray(aux_scale, np.float32), np.asarray(final_scale, np.float32)[kept]
            if aux_scale.shape != (len(ids), self.spec.layers):
                raise ValueError(f"sample {id}: aux_scale {aux_scale.shape}, not {(len(ids), self.spec.layers)}")
        full: ShardWriter | None = None
        with self._lock:
            if id in self.done:
                return False
            if self._open is not None and (not self._open.fits(len(ids), len(kept)) or 0 < self.shard_seconds < time.monotonic() - self._opened):
                full = self._take_open()
            shard = self._open = self._open or self._begin()
            self.done[id] = (shard.path.name, len(ids))
            slot = shard.reserve(len(ids), len(kept))
        if full is not None:
            self._finish(full)
        shard.write(slot, id, heldout, ids, mask, planes, final_plane, kept, False, aux_scale, final_scale)
        with self._lock:
            shard.pending -= 1
            ended = shard.pending == 0 and shard is not self._open and shard in self._unfinished
        if ended:
            self._finish(shard)
        return True

    def _begin(self) -> ShardWriter:
        shard = ShardWriter(self.path / shard_name(self._next), self.spec, self.shard_bytes)
        self._next += 1
        identity = {key: value for key, value in self.manifest.items() if key not in ("samples", "rows", "bytes", "shards", "done", "complete")}
        shard.open({"kind": "aerie-shard", "manifest": json.dumps(identity)})
        self._unfinished.add(shard)
        self._opened = time.monotonic()
        return shard

    def _take_open(self) -> ShardWriter | None:
        """Close the open shard for new samples; returns it when nobody writes to it any more (the last writer finishes it otherwise)."""
        shard, self._open = self._open, None
        return shard if shard is not None and shard.pending == 0 else None

    def roll(self) -> None:
        """End the current shard now."""
        with self._lock:
            shard = self._take_open()
        if shard is not None:
            self._finish(shard)

    def _finish(self, shard: ShardWriter) -> None:
        shard.finish()
        with self._finishing:  # done.log and manifest, one shard at a time
            ids = [sample["id"] for sample in shard.samples]
            append_line(self.path / "done.log", "".join(f"{sample['id']} {shard.path.name} {len(sample['input_ids'])}\n" for sample in shard.samples))
            with self._lock:
                self._unfinished.discard(shard)
                self._counts[shard.path.name] = (len(ids), shard.rows, shard.path.stat().st_size)
                self._write_manifest(complete=False)
        self.on_shard(shard.path.name, ids)

    def delete_consumed(self) -> int:
        """Streaming: delete shards that the trainer has consumed, except those with held-out samples; returns the bytes freed."""
        consumed = set(whole_lines(self.path / "consumed.log"))
        freed = 0
        for name in sorted(consumed & set(self._counts)):
            if Shard(self.path / name).heldout.any():
                continue
            (self.path / name).unlink()
            with self._lock:
                freed += self._counts.pop(name)[2]
        if freed:
            fsync_folder(self.path)
            with self._finishing, self._lock:
                self._write_manifest(complete=False)
        return freed

    def close(self, complete: bool = True) -> None:
        """End the last shard and say in the manifest whether everything that was asked for is in. No add() may be running."""
        self.roll()
        with self._lock:
            if self._unfinished:
                raise RuntimeError("close() while samples are still being written")
            self._write_manifest(complete=complete)
        self._lock_file.close()

    def abandon(self) -> None:
        """Leave the store as it is on disk, without the shards that are not whole; for a full disk or another error while writing."""
        with self._lock:
            for shard in self._unfinished:
                shard.discard()
            self._unfinished.clear()
            self._open = None
        self._lock_file.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def lock_store(folder: Path) -> Any:
    """Take the store's lock for this process. Raises UserError when another extraction holds it."""
    file = open(folder / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"another extraction is writing {folder}; wait for it, end it, or choose another run with --run") from None
    return file


def refuse_other_identity(folder: Path, manifest: dict[str, Any], fields: dict[str, Any]) -> None:
    """Raise UserError naming each field in which the store differs from what would be added."""
    if manifest.get("format", FORMAT) != FORMAT:
        raise UserError(f"the store in {folder} has format {manifest['format']}, this code writes {FORMAT}; choose another run with --run")
    differ = [key for key in IDENTITY if key in fields and manifest.get(key, fields[key]) != fields[key]]
    if differ:
        text = ", ".join(f"{key} {manifest[key]!r} there and {fields[key]!r} now" for key in differ)
        raise UserError(f"the store in {folder} holds other states: {text}; choose another run with --run, or remove that folder")
