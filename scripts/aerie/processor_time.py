"""Processor time of a server's processes, by what they do: how much of it is the forward thread, the process that writes dumps, all of them."""

from __future__ import annotations

import os
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SCHEDULER = "sglang::schedul"  # what SGLang's schedulers call themselves, as far as the kernel keeps it; their first thread launches the forwards


def processor_time(pgid: int) -> dict[str, float]:
    """Seconds so far of the processes of group `pgid`.

    server: all of them, user and system time. writer: those that write dumps. forward: the schedulers' forward threads alone (added up over the ranks), and
    forward_wait: how long these could have run but another thread had their core (0 where the kernel does not say). machine: everything that ran on this
    machine, ours or not, as far as /proc/stat shows it. client: this process.
    """
    found = dict.fromkeys(("server", "writer", "forward", "forward_wait"), 0.0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name, group, seconds = read_stat(folder / "stat")
            if group != pgid:
                continue
            found["server"] += seconds
            if name == SCHEDULER:
                thread = folder / "task" / folder.name
                found["forward"] += read_stat(thread / "stat")[2]
                found["forward_wait"] += wait_seconds(thread / "schedstat")
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


def wait_seconds(path: Path) -> float:
    """The time a thread waited for a core, from its schedstat: nanoseconds run, nanoseconds waited, turns."""
    try:
        return int(path.read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


def machine_seconds() -> float:
    """Busy time of all cores since the start: user, nice, system, irq, softirq, steal."""
    fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    return sum(int(ticks) for place, ticks in enumerate(fields) if place not in (3, 4)) * TICK_S
