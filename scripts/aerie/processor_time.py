"""Processor time of a server's processes, by what they do: how much of it is the forward thread, the process that writes dumps, all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Iterable

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SCHEDULER = "sglang::schedul"  # what SGLang's schedulers call themselves, as far as the kernel keeps it; their first thread launches the forwards


def group_folders(pgid: int) -> list[Path]:
    """The /proc folders of the processes of this group that are there now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if read_stat(folder / "stat")[1] == pgid:
                found.append(folder)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def processor_time(pgid: int, folders: Iterable[Path] | None = None) -> dict[str, float]:
    """Seconds so far of the processes of group `pgid`, or of those of them in `folders` (see group_folders(): asked for often, looking through all of /proc costs too much).

    server: all of them, user and system time. writer: those that write dumps. forward: the schedulers' forward threads alone (added up over the ranks), and
    forward_wait: how long these could have run but another thread had their core (0 where the kernel does not say). machine: everything that ran on this
    machine, ours or not, as far as /proc/stat shows it. client: this process.
    """
    found = dict.fromkeys(("server", "writer", "forward", "forward_wait"), 0.0)
    for folder in group_folders(pgid) if folders is None else folders:
        try:
            name, group, seconds = read_stat(folder / "stat")
            if group != pgid:
                continue
            found["server"] += seconds
            if name == SCHEDULER:
                thread = folder / "task" / folder.name
                run, wait = run_and_wait(thread / "schedstat")
                found["forward"] += run or read_stat(thread / "stat")[2]
                found["forward_wait"] += wait
            elif b"hidden_state_dump.py" in (folder / "cmdline").read_bytes():
                found["writer"] += seconds
        except (FileNotFoundError, ProcessLookupError):
            continue
    times = os.times()
    return found | {"client": times.user + times.system, "machine": machine_seconds()}


def read_stat(path: Path) -> tuple[str, int, float]:
    """Name, process group, and user and system seconds of a /proc/.../stat."""
    before, _, after = path.read_text().rpartition(")")
    fields = after.split()
    return before.partition("(")[2], int(fields[2]), (int(fields[11]) + int(fields[12])) * TICK_S


def run_and_wait(path: Path) -> tuple[float, float]:
    """Seconds that a thread ran and waited for a core, from its schedstat: nanoseconds run, nanoseconds waited, turns. Finer than the ticks of its stat; (0, 0) where there is none."""
    try:
        run, wait = path.read_text().split()[:2]
        return int(run) / 1e9, int(wait) / 1e9
    except (OSError, ValueError):
        return 0.0, 0.0


def machine_seconds() -> float:
    """Busy time of all cores since the start: user, nice, system, irq, softirq, steal."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    return sum(int(ticks) for place, ticks in enumerate(fields) if place not in (3, 4)) * TICK_S
