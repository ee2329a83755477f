"""Dumps made beforehand, for the client's ceiling: a request then costs the stand-in a header and a rename, and the client deletes real files whose pages the kernel must free.

All dumps of one length hold the same states; only the header and the token ids are the request's own. Several processes share the folder.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable

import numpy as np

HEADER_BYTES = 4096  # of every file of the pool: the real header goes over the place that was left for it


class DumpPool:
    """Files `<rows>.<number>` in `folder`/ready: not beside the dumps, where the client looks every few milliseconds. make_states(rows) -> {tensor: array}; checksum(array) -> text; header(rid, rows, sums, room) -> bytes."""

    def __init__(self, folder: Path, make_states: Callable[[int], dict[str, np.ndarray]], checksum: Callable[[np.ndarray], str], header: Callable[..., bytes]):
        self.folder, self.pool = folder, folder / "ready"
        self.make_states, self.checksum, self.header = make_states, checksum, header
        self.ready: dict[int, list[Path]] = {}
        self.states: dict[int, dict[str, np.ndarray]] = {}
        self.sums: dict[int, dict[str, str]] = {}

    def prepare(self, rows: int, count: int) -> int:
        """See to it that `count` dumps of this length lie ready, written by as many threads as there are cores. How many were missing."""
        states = self.states_of(rows)
        self.sums_of(rows)
        self.pool.mkdir(exist_ok=True)
        have = len(list(self.pool.glob(f"{rows}.*")))
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
            list(threads.map(lambda number: self.write(self.pool / f"{rows}.{os.getpid()}-{number}-{os.urandom(4).hex()}", rows, states), range(have, count)))
        return max(0, count - have)

    def write(self, path: Path, rows: int, states: dict[str, np.ndarray]) -> None:
        """One dump without a header of its own."""
        with open(path, "wb", buffering=0) as file:
            file.write(bytes(HEADER_BYTES + 4 * rows))
            for part in states.values():
                data = memoryview(part).cast("B")
                for start in range(0, len(data), 1 << 20):
                    file.write(data[start : start + (1 << 20)])

    def states_of(self, rows: int) -> dict[str, np.ndarray]:
        if rows not in self.states:
            self.states[rows] = self.make_states(rows)
        return self.states[rows]

    def sums_of(self, rows: int) -> dict[str, str]:
        """Their checksums; worked out by the first process that needs them."""
        if rows not in self.sums:
            path = self.folder / f".sums.{rows}.json"
            if not path.exists():
                temporary = path.with_name(f"{path.name}.{os.getpid()}")
                temporary.write_text(json.dumps({name: self.checksum(part) for name, part in self.states_of(rows).items()}))
                temporary.rename(path)
            self.sums[rows] = json.loads(path.read_text())
        return self.sums[rows]

    def claim(self, rows: int, target: Path) -> None:
        """A file of this length under the name `target`: one that lies ready, or a new one."""
        ready = self.ready.setdefault(rows, [])
        for _ in range(2):
            while ready:
                try:
                    ready.pop().rename(target)
                    return
                except (FileNotFoundError, IndexError):  # another process or thread was first
                    continue
            ready.extend(sorted(self.pool.glob(f"{rows}.*"), key=lambda path: path.name[::-1]))
        self.write(target, rows, self.states_of(rows))

    def hand_out(self, rid: str, ids: np.ndarray) -> None:
        """A dump for this request."""
        rows, target = len(ids), self.folder / f".{rid}.tmp"
        ids = ids.astype(np.int32)
        head = self.header(rid, rows, {**self.sums_of(rows), "input_ids": self.checksum(ids)}, HEADER_BYTES)
        assert len(head) == HEADER_BYTES, len(head)
        self.claim(rows, target)
        fd = os.open(target, os.O_WRONLY)
        os.pwrite(fd, head + ids.tobytes(), 0)
        os.close(fd)
        target.rename(self.folder / f"{rid}.safetensors")
