"""Both splits written row by row, with a checkpoint every few seconds: a killed run goes on there instead of rendering everything again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from .paths import lock_folder
from .report import write_json
from .samples import Sample, SampleWriter

CHECKPOINT_S = 10.0
SPLITS = ("train", "heldout")
OURS = ("train.safetensors", "heldout.safetensors", "vocab_map.safetensors", "report.json", ".rows.json", "rejected.jsonl")


@contextmanager
def one_writer(folder: Path) -> Iterator[None]:
    """One data step of a run at a time; what a killed one left half-written is removed. Raises UserError when another one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, locked = lock_folder(folder, f"{folder} is being written by another process; wait for it, or end it first")
    try:
        for name in OURS if locked else ():
            for path in folder.glob(f".{name}.*.tmp"):
                path.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


class Rejected:
    """rejected.jsonl: rows that could not be used, with file, line and reason. Until the first checkpoint it has another name: what an interrupted run needs stays there."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.count, self.reasons = path, 0, Counter()
        self.before = path.read_bytes() if path.exists() else b""  # what an interrupted run had written
        self._temporary: Path | None = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file = open(self._temporary, "wb")  # noqa: SIM115  closed by close()

    def add(self, source: str, row: Any, reason: str) -> None:
        """Write one row; the first few are also said on the terminal."""
        self._count(reason)
        if self.count <= 5:
            print(f"rejected {source}: {reason[:200]}", flush=True)
        text = row.decode(errors="replace") if isinstance(row, bytes) else json.dumps(row, ensure_ascii=True)  # bytes: a line that is not JSON
        self._write(json.dumps({"source": source, "reason": reason, "row": text[:2000]}, ensure_ascii=True).encode() + b"\n")

    def place(self) -> int:
        """Bytes on the disk so far."""
        self._file.flush()
        return self._file.tell()

    def publish(self) -> None:
        """Give the file its name."""
        self._file.flush()
        if self._temporary is not None:
            os.replace(self._temporary, self.path)
            self._temporary = None

    def digest(self, start: int) -> str:
        """sha256 (hex) of what was written from this place on."""
        self.publish()
        os.fsync(self._file.fileno())
        return hashlib.sha256(self.path.read_bytes()[start:]).hexdigest()

    def take_over(self, start: int, end: int) -> None:
        """Write again what an interrupted run had written between these places."""
        for line in self.before[start:end].splitlines(keepends=True):
            self._count(json.loads(line)["reason"])
            self._write(line)

    def _count(self, reason: str) -> None:
        self.count += 1
        self.reasons[reason.split(":")[0][:80]] += 1

    def _write(self, line: bytes) -> None:
        self._file.write(line)

    def close(self, publish: bool = True) -> None:
        """`publish` false: interrupted; what the last checkpoint needs stays where it is."""
        if publish or not self.path.exists():
            self.publish()
        self._file.close()
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)


class RowWriter:
    """The rows of both splits, each row once. `settings` names everything that the rows depend on: only then an interrupted run is taken up."""

    def __init__(self, folder: Path, metadata: dict[str, str], settings: str, counts: Counter[str], rejected: Rejected):
        self.state, self.counts, self.rejected = folder / ".rows.json", counts, rejected
        self.fingerprint = hashlib.sha256(settings.encode()).hexdigest()
        self.chats, self.start = 0, rejected.place()
        self.supervised = Counter({split: 0 for split in SPLITS})
        sizes = {split: [0, 0] for split in SPLITS}
        if (found := self._interrupted(folder)) is not None:
            self.chats, sizes, self.supervised = found["chats"], found["sizes"], Counter(found["supervised"])
            counts.clear()
            counts.update(found["counts"])
            rejected.take_over(*found["rejected"])
            print(f"going on with an interrupted run: {self.chats:,} chats are rendered already", flush=True)
        self.writers = {split: SampleWriter(folder / f"{split}.safetensors", metadata, *sizes[split]) for split in SPLITS}
        self.seen = {number for writer in self.writers.values() for number in writer.sample_ids().tolist()}
        self._last = time.monotonic()

    def _interrupted(self, folder: Path) -> dict[str, Any] | None:
        try:
            found = json.loads(self.state.read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        if found["fingerprint"] != self.fingerprint:
            return None
        start, end = found["rejected"]
        if hashlib.sha256(self.rejected.before[start:end]).hexdigest() != found.get("rejected_hash"):
            return None  # rejected.jsonl is not the one that this checkpoint counts
        for split, (rows, tokens) in found["sizes"].items():
            for name, width, count in zip(SampleWriter.PARTS, SampleWriter.BYTES, (tokens, tokens, rows), strict=True):
                part = folder / f".{split}.safetensors.{name}.part"
                if rows and (not part.exists() or part.stat().st_size < width * count):
                    return None
        return found

    def add(self, sample: Sample, heldout: bool) -> int:
        """Write one row unless the same one is there; returns its tokens."""
        if (number := int(sample.id, 16)) in self.seen:
            self.counts["duplicate_rows"] += 1
            return 0
        self.seen.add(number)
        split = SPLITS[heldout]
        self.writers[split].add(sample)
        self.supervised[split] += int(sample.loss_mask.sum())
        return len(sample.input_ids)

    def end_of_chat(self) -> None:
        """One chat is done; every few seconds that is put on the disk."""
        self.chats += 1
        if time.monotonic() - self._last < CHECKPOINT_S:
            return
        for writer in self.writers.values():
            writer.sync()
        place, digest = self.rejected.place(), self.rejected.digest(self.start)
        write_json(self.state, {
            "fingerprint": self.fingerprint, "chats": self.chats, "sizes": {split: [writer.rows, writer.tokens] for split, writer in self.writers.items()},
            "supervised": self.supervised, "counts": self.counts, "rejected": [self.start, place], "rejected_hash": digest,
        })  # fmt: skip
        self._last = time.monotonic()

    def token_counts(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray, str]:
        """Counts [V] of the supervised and of the other tokens of the training split, and a hash of its rows whatever their order."""
        counts = np.zeros((2, vocab_size), np.int64)
        for ids, mask in self.writers["train"].blocks():
            counts[0] += np.bincount(ids[mask == 1], minlength=vocab_size)
            counts[1] += np.bincount(ids[mask == 0], minlength=vocab_size)
        return counts[0], counts[1], hashlib.sha256(np.sort(self.writers["train"].sample_ids()).tobytes()).hexdigest()

    def close(self) -> dict[str, dict[str, int]]:
        """Put both files together; returns rows, tokens and supervised tokens by split. Each says which rows the other holds: a run killed between the two leaves no pair."""
        ids = [np.sort(writer.sample_ids()).tobytes() for writer in self.writers.values()]
        pair = {"pair": hashlib.sha256(b"|".join(ids)).hexdigest(), "heldout_rows": str(self.writers["heldout"].rows)}
        for writer in self.writers.values():
            writer.metadata |= pair
            writer.close()
        self.state.unlink(missing_ok=True)
        return {split: {"rows": writer.rows, "tokens": writer.tokens, "supervised": self.supervised[split]} for split, writer in self.writers.items()}

    def release(self) -> None:
        """Interrupted: the parts stay where the last checkpoint can go on with them; without one they go."""
        for writer in self.writers.values():
            writer.release() if self.state.exists() else writer.abandon()

    def abandon(self) -> None:
        """Leave nothing behind."""
        for writer in self.writers.values():
            writer.abandon()
        self.state.unlink(missing_ok=True)
