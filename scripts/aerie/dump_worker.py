"""A process that checks dumps and writes them into shards of its own: one pass over the bytes, each block checked, summed and written while it is in the cache.

Processes, not threads: blocks are small, so threads would spend their time on Python's lock, and on the locks of one file and one address space. The parent
(dump_pool.py) says what to do and keeps the books; this one imports no torch and starts in a moment. It ends when its pipe does.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from .dump_file import DumpError, Look, check_request, open_dump, remove_dump
from .shard_writer import FileRows, ShardWriter, Spec, arena_bytes


class OtherStates(Exception):
    """The dump's states are not those of the store: the server was started again with something else."""


class Worker:
    """What the parent may call, by name."""

    def __init__(self, folder: str, identity: dict[str, Any], spec: tuple[Any, ...], shard_bytes: int):
        self.folder, self.identity, self.spec, self.shard_bytes = Path(folder), identity, Spec(*spec), shard_bytes
        self.open: dict[bool, ShardWriter] = {}
        self.arenas: list[np.ndarray] = []

    def begin(self, heldout: bool, path: str, temporary: str, metadata: dict[str, str]) -> None:
        """A new shard; the earlier one of this kind is finished or given up."""
        self.open[heldout] = ShardWriter(Path(path), self.spec, self.shard_bytes, metadata, self.arenas, Path(temporary))

    def take(self, heldout: bool, rid: str, sample: str, ids: np.ndarray, mask: np.ndarray, kept: np.ndarray) -> None:
        """Check the dump of one request, write it, delete it. Raises DumpError, OtherStates, OSError; then the shard is as before."""
        dump = open_dump(self.folder / f"{rid}.safetensors")
        check_request(dump, rid, ids)
        found = dump.identity()
        if differ := [f"{key} {found[key]!r} instead of {self.identity[key]!r}" for key in found if found[key] != self.identity[key]]:
            raise OtherStates(f"the server's states changed during the run: {', '.join(differ)}; was it started again with another model or config?")
        *aux, final = dump.states
        look = Look(dump)
        scales = (np.stack([dump.scale(name) for name in aux], 1), dump.scale(final)) if dump.dtype == "fp8" else None
        fd = os.open(dump.path, os.O_RDONLY)
        try:
            planes = [FileRows(fd, *dump.places[name]) for name in dump.states]
            self.open[heldout].write(
                sample, heldout, ids, mask, planes[:-1], planes[-1], kept, scales,
                lambda is_final, first, block: look([final] if is_final else aux, first, block), look.verdict,
            )  # fmt: skip
        finally:
            os.close(fd)
        remove_dump(self.folder, rid)

    def touch(self) -> None:
        """Have the memory of a shard's `final` rows ready, for measurements that are shorter than a shard's life: it is used again from shard to shard."""
        self.arenas.append(np.full(arena_bytes(self.spec, self.shard_bytes), 1, np.uint8))

    def finish(self, heldout: bool) -> None:
        """Make the shard whole on disk, under its name."""
        self.open.pop(heldout).finish()

    def peak_bytes(self) -> int:
        """The highest resident size so far (getrusage would count what the parent had when it started this process)."""
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024


def answer(worker: Worker, message: tuple[Any, ...]) -> tuple[str, Any]:
    """(kind of answer, value)."""
    try:
        return "done", getattr(worker, message[0])(*message[1:])
    except (DumpError, OtherStates) as exc:
        return type(exc).__name__, str(exc)
    except OSError as exc:
        return "OSError", (exc.errno, exc.strerror, exc.filename)
    except Exception:
        return "bug", traceback.format_exc()


def main() -> None:
    for name in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the whole group: what is in the making is still ended, by the parent's word
        signal.signal(name, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    try:
        worker = Worker(*pickle.loads(connection.recv_bytes()))
        while True:
            connection.send_bytes(pickle.dumps(answer(worker, pickle.loads(connection.recv_bytes()))))
    except (EOFError, OSError):  # the parent is gone
        pass


if __name__ == "__main__":
    main()
