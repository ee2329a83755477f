"""The processes that train.gpus starts, one a GPU, with the environment that torchrun would give them. The first speaks for all; what the others say goes to a log each.

torchrun itself is for users who bring their own: it answers a plain refusal of ours with two tracebacks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Sequence

from .errors import EXIT_INTERRUPTED, EXIT_USER, SAYS
from .pipeline import end_with_parent
from .ports import free_port

PATIENCE_S = 60.0  # for a process that was asked to end: a checkpoint may be on its way to the disk
TAIL = 30  # lines of the log of a process that broke


class Ended(Exception):
    """SIGTERM came."""


def on_sigterm(number: int, frame: FrameType | None) -> None:
    raise Ended


def end(processes: Sequence[subprocess.Popen], number: int) -> None:
    """Ask those that still run to end, and wait; kill what does not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are at it
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tell(rank: int, code: int, log: Path) -> None:
    """That a process broke, and of all but the first, whose words stand above, how its log ends."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL:] if rank else []
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    print("\n".join([*lines, f"error: process {rank} of the training {ended}; {f'all that it said is in {log}' if rank else 'what it said stands above'}"]), file=sys.stderr)


def run_together(count: int, words: Sequence[str], logs: Path) -> int:
    """Run a Python script (`words`: it and its arguments) in `count` processes of this machine to the end; returns the exit code of all.

    When one fails the others are ended; its reason is said once. Ctrl-C and SIGTERM reach every process once. logs: train-<rank>.log of all but the first lie there.
    """
    logs.mkdir(parents=True, exist_ok=True)
    files, says = [logs / f"train-{rank}.log" for rank in range(count)], logs / "train-error.txt"
    says.unlink(missing_ok=True)
    env = {"OMP_NUM_THREADS": "1"} | os.environ | {SAYS: str(says), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    processes: list[subprocess.Popen] = []
    before = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        for rank in range(count):
            with open(files[rank] if rank else os.devnull, "wb") as log:
                processes.append(subprocess.Popen(  # noqa: PLW1509  no threads here; a session of its own: a terminal's Ctrl-C reaches us alone, and we pass it on
                    [sys.executable, *words], env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, start_new_session=True, preexec_fn=end_with_parent,
                    stdout=subprocess.DEVNULL if rank else None, stderr=log if rank else None,
                ))  # fmt: skip
        while (failed := next((rank for rank, process in enumerate(processes) if process.poll()), None)) is None:
            if all(process.poll() == 0 for process in processes):
                return 0
            time.sleep(0.1)
        end(processes, signal.SIGTERM)
        if says.exists() and (text := says.read_text(encoding="utf-8")):
            print(text, file=sys.stderr)
            return EXIT_USER
        code = processes[failed].returncode
        tell(failed, code, files[failed])
        return code if code > 0 else 128 - code
    except KeyboardInterrupt:
        end(processes, signal.SIGINT)  # the first says 'interrupted'
        return EXIT_INTERRUPTED
    except Ended:
        end(processes, signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)  # as one process ends
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        for process in processes:
            if process.poll() is None:
                process.kill()
