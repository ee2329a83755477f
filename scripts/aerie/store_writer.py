"""The writing side of a store (see store.py): samples from several threads into shards, resume after any crash, deletion of what streaming has consumed."""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

from .report import write_json
from .shard_writer import STATE_NAMES, ShardSize, ShardWriter, Spec, fsync_folder
from .shards import BadShard, Shard, byte_rows
from .store_files import FORMAT, append_line, lock_store, read_done, read_manifest, refuse_other_identity, shard_name, shard_paths, supervised_rows, whole_lines


class Lane:
    """One that writes shards, in this process or another, a sample or the end of a shard at a time. Each lane has shards of its own: no two write to one file."""

    def __init__(self, begin: Callable[[Path, dict[str, str], bool], Any]):
        """begin(path, metadata, held out?) -> a ShardSize that also has finish()."""
        self.begin = begin
        self.lock = threading.RLock()
        self.open: dict[bool, Any] = {}  # held out? -> the shard that grows: held-out samples have shards of their own, which streaming keeps


class StoreWriter:
    """The one writer of a store. add() writes here, put() through a lane of one's own; both from any thread. A sample counts once its shard is whole on disk.

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
        self._unfinished: set[ShardSize] = set()
        arenas: list[np.ndarray] = []
        self._own = Lane(lambda path, metadata, heldout: ShardWriter(path, self.spec, self.shard_bytes, metadata, arenas))
        self.lanes = [self._own]
        self._finishing = threading.Lock()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock_file = lock_store(self.path)
        try:
            self._resume(fields)
        except BaseException:
            self._lock_file.close()
            raise

    def _resume(self, fields: dict[str, Any]) -> None:
        for leftover in self.path.glob(".*.tmp"):  # a shard, manifest or report that a killed run was writing
            leftover.unlink(missing_ok=True)  # or a worker of a killed run is just giving it its name: then it counts
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

        fp8: aux_scale [T, A], final_scale [T] float32. For what it returns and raises, see put().
        """
        ids, mask = np.asarray(input_ids, np.int32), np.asarray(loss_mask, np.uint8)
        planes = [byte_rows(plane) for plane in ([aux] if isinstance(aux, torch.Tensor) else aux)]
        kept = self.rows_to_keep(mask)
        if any(len(part) != len(ids) for part in (mask, *planes, final)):
            raise ValueError(f"sample {id}: {len(ids)} tokens, but {[len(part) for part in (mask, *planes, final)]} rows")
        final_plane = byte_rows(final)
        if sum(plane.shape[1] for plane in planes) != self.spec.aux_bytes or final_plane.shape[1] != self.spec.final_bytes:
            raise ValueError(f"sample {id}: rows of {sum(p.shape[1] for p in planes)} and {final_plane.shape[1]} bytes do not fit {self.spec}")
        scales = None
        if self.spec.dtype == "fp8":
            aux_scale, final_scale = np.asarray(aux_scale, np.float32), np.asarray(final_scale, np.float32)
            if aux_scale.shape != (len(ids), self.spec.layers):
                raise ValueError(f"sample {id}: aux_scale {aux_scale.shape}, not {(len(ids), self.spec.layers)}")
            scales = aux_scale, final_scale
        return self.put(
            self._own, id, len(ids), len(kept), heldout,
            lambda shard: shard.write(id, heldout, ids, mask, planes, final_plane, kept, scales),
        )  # fmt: skip

    def new_lane(self, begin: Callable[[Path, dict[str, str], bool], Any]) -> Lane:
        """One more lane (see Lane)."""
        lane = Lane(begin)
        with self._lock:
            self.lanes.append(lane)
        return lane

    def put(self, lane: Lane, id: str, rows: int, final_rows: int, heldout: bool, write: Callable[[Any], None]) -> bool:
        """Have write(shard) put one sample into the lane's shard, after a full or old one was ended. What it raises leaves the sample out, and the shard as it was.

        Returns False when the sample is there already. An OSError (full disk) leaves the store whole, without the shards in the making; then only abandon() may follow.
        """
        with lane.lock:
            with self._lock:
                if id in self.done:
                    return False
                self.done[id] = ("", rows)
            try:
                shard = lane.open.get(heldout)
                if shard is not None and (not shard.fits(rows, final_rows) or self._is_old(shard)):
                    self._finish(lane, heldout)
                    shard = None
                write(shard or self._begin(lane, heldout))
            except BaseException:
                with self._lock:
                    del self.done[id]
                raise
            with self._lock:
                self.done[id] = (lane.open[heldout].path.name, rows)
        return True

    def _is_old(self, shard: ShardSize) -> bool:
        return 0 < self.shard_seconds < time.monotonic() - shard.begun

    def _begin(self, lane: Lane, heldout: bool) -> Any:
        with self._lock:
            path = self.path / shard_name(self._next)
            self._next += 1
        identity = {key: value for key, value in self.manifest.items() if key not in ("samples", "rows", "bytes", "shards", "done", "complete")}
        shard = lane.begin(path, {"kind": "aerie-shard", "manifest": json.dumps(identity)}, heldout)
        with self._lock:
            self._unfinished.add(shard)
        lane.open[heldout] = shard
        return shard

    def roll(self, only_old: bool = False) -> None:
        """End the current shards now; with only_old those that have reached shard_seconds."""
        self._roll(lambda heldout, shard: not only_old or self._is_old(shard))

    def roll_heldout(self) -> None:
        """End the shards of held-out samples now."""
        self._roll(lambda heldout, shard: heldout)

    def _roll(self, chosen: Callable[[bool, ShardSize], bool]) -> None:
        """The lanes end theirs side by side; the first error is raised when all are through."""

        def end(lane: Lane) -> None:
            with lane.lock:
                for heldout in [heldout for heldout, shard in lane.open.items() if chosen(heldout, shard)]:
                    self._finish(lane, heldout)

        lanes = [lane for lane in list(self.lanes) if any(chosen(heldout, shard) for heldout, shard in list(lane.open.items()))]
        if len(lanes) <= 1:
            for lane in lanes:
                end(lane)
            return
        with ThreadPoolExecutor(len(lanes)) as threads:
            for ended in [threads.submit(end, lane) for lane in lanes]:
                ended.result()

    def _finish(self, lane: Lane, heldout: bool) -> None:
        """End a lane's shard. Durable first: the shard is whole under its name before done.log names its samples."""
        shard = lane.open.pop(heldout)
        if not shard.lengths:  # its only sample was refused
            shard.discard()
            with self._lock:
                self._unfinished.discard(shard)
            return
        shard.finish()
        ids = [sample for sample, _ in shard.lengths]
        with self._finishing:  # done.log and manifest, one shard at a time
            append_line(self.path / "done.log", "".join(f"{sample} {shard.path.name} {rows}\n" for sample, rows in shard.lengths))
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
        """End the last shard and say in the manifest whether everything that was asked for is in. No add() may be running.

        What could not be finished (its worker process died while it was) is given up, which a store that is not `complete` may.
        """
        self.roll()
        with self._lock:
            if self._unfinished and complete:
                raise RuntimeError("close() while samples are still being written")
            for shard in self._unfinished:
                shard.discard()
            self._unfinished.clear()
            self._write_manifest(complete=complete)
        self._lock_file.close()

    def abandon(self) -> None:
        """Leave the store as it is on disk, without the shards that are not whole; for a full disk or another error while writing."""
        with self._lock:
            for shard in self._unfinished:
                shard.discard()
            self._unfinished.clear()
            for lane in self.lanes:
                lane.open.clear()
        self._lock_file.close()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: Any, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
