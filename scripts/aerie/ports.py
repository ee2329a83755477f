"""Ports of this machine: whether a server can listen on one, and whether the one that listens is ours. Standard library alone."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import Iterator

LISTENS = "0A"  # the state in /proc/net/tcp


def port_problem(host: str, port: int) -> str:
    """Why no server can listen there now, '' where one can."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except (OSError, UnicodeError):  # a name that nobody knows, or no name at all
        return f"server.host = {host!r} is no address of this machine; set it to 127.0.0.1, 0.0.0.0 or a name that resolves"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            if exc.errno == errno.EADDRINUSE:
                return f"port {port} on {host} is in use; end what listens there, or choose another"
            return f"no server may listen on port {port} of {host} ({exc.strerror}); choose another port, or set server.host to an address of this machine"
    return ""


def port_is_free(host: str, port: int) -> bool:
    """Whether a server can listen there now."""
    return not port_problem(host, port)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening_sockets(port: int) -> set[str]:
    """socket:[inode] of all that listen on the port, as /proc/PID/fd names them; empty where /proc does not say."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found


def open_files(pgid: int) -> Iterator[str]:
    """What the processes of a group have open, by the links in /proc/PID/fd."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(name) != pgid and os.getpgid(int(name)) != pgid:
                continue
            for file in os.scandir(f"/proc/{name}/fd"):
                yield os.readlink(file.path)
        except OSError:  # gone meanwhile, or somebody else's
            continue


def another_listens(port: int, pgid: int) -> bool:
    """Whether programs listen on the port and none of them is of the process group `pgid`."""
    listening = listening_sockets(port)
    return bool(listening) and not any(name in listening for name in open_files(pgid))
