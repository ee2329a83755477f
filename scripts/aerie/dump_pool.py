"""The parent's side of the worker processes (dump_worker.py): hands them dumps, keeps the books of their shards."""

from __future__ import annotations

import heapq
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from .dump_file import DumpError
from .errors import UserError
from .paths import python_path
from .shard_writer import ShardSize, Spec

SCRIPTS = Path(__file__).resolve().parents[1]


class WorkerDied(UserError):
    """A worker process is gone, and with it the shards that it had in the making: their samples are asked for again by the next run."""


def default_workers() -> int:
    """Processes that check and write: three quarters of the cores, 2 to 16. One moves about 1 GB/s."""
    cores = len(os.sched_getaffinity(0))
    return max(2, min(16, cores - cores // 4))


def start_module(name: str, *arguments: Any, **options: Any) -> subprocess.Popen:
    """A module of this package as a process whose numpy keeps to one thread; options as Popen's."""
    env = os.environ | {"PYTHONPATH": python_path(SCRIPTS), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", f"aerie.{name}", *map(str, arguments)], env=env, **options)


class DumpWorker:
    """One worker process, started when first needed. For one thread at a time."""

    def __init__(self, folder: Path, identity: dict[str, Any], spec: Spec, shard_bytes: int):
        self.setup = str(folder), identity, tuple(spec), shard_bytes
        self.spec, self.shard_bytes = spec, shard_bytes
        self.peak_bytes = 0
        self._process: subprocess.Popen | None = None
        self._pipe: Connection | None = None

    def start(self) -> None:
        """Start it now; returns at once."""
        if self._process is not None:
            return
        self._pipe, other = Pipe()
        with other:
            self._process = start_module("dump_worker", other.fileno(), pass_fds=[other.fileno()], stdin=subprocess.DEVNULL)
        self._pipe.send_bytes(pickle.dumps(self.setup))

    def call(self, *message: Any) -> Any:
        """What the worker's method of that name returns or raises. Raises WorkerDied."""
        self.start()
        try:
            self._pipe.send_bytes(pickle.dumps(message))
            kind, value = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError):
            code = self._process.wait()
            raise WorkerDied(
                f"a worker process of the extraction ended (exit code {code}; -9: the system's, when memory is short): what is in whole shards is kept, run the same "
                "command again to go on"
            ) from None
        if kind == "DumpError":
            raise DumpError(value)
        if kind == "OtherStates":
            raise UserError(value)
        if kind == "OSError":
            raise OSError(*value)
        if kind != "done":
            raise RuntimeError(f"in a worker process: {value}")
        return value

    def begin(self, path: Path, metadata: dict[str, str], heldout: bool) -> WorkerShard:
        """A new shard in that process (see store_writer.Lane)."""
        shard = WorkerShard(self, path, heldout)
        self.call("begin", heldout, str(path), str(shard.temporary), metadata)
        return shard

    def stop(self) -> None:
        """End the process, after asking for its peak memory."""
        if self._process is None:
            return
        try:
            self.peak_bytes = self.call("peak_bytes")
        except WorkerDied:
            pass
        self._pipe.close()
        self._process.wait()


class WorkerShard(ShardSize):
    """A shard that a worker process writes."""

    def __init__(self, worker: DumpWorker, path: Path, heldout: bool):
        super().__init__(path, worker.spec, worker.shard_bytes)
        self.worker, self.heldout = worker, heldout

    def take(self, rid: str, sample: str, ids: np.ndarray, mask: np.ndarray, kept: np.ndarray) -> None:
        """Have a dump checked, written and deleted. What it raises leaves the shard as it was."""
        self.worker.call("take", self.heldout, rid, sample, ids, mask, kept)
        self.count(sample, len(ids), len(kept))

    def finish(self) -> None:
        """fsync and rename."""
        self.worker.call("finish", self.heldout)


class Hands:
    """Work for numbered hands: an item goes to the free one with the lowest number, so that few of them (few processes, few open shards) do a little work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._waiting: deque[Any] = deque()
        self._boxes: dict[int, SimpleQueue[Any]] = {}

    def put(self, item: Any) -> None:
        """Give it to a free hand, or to the next one that asks."""
        with self._lock:
            if self._free:
                self._boxes[heapq.heappop(self._free)].put(item)
            else:
                self._waiting.append(item)

    def get(self, number: int) -> Any:
        """The next item for hand `number`; waits for it."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            box = self._boxes.setdefault(number, SimpleQueue())
            heapq.heappush(self._free, number)
        return box.get()
