"""The two servers of a benchmark: those that run already, or ones of its own; afterwards all is as it was found."""

from __future__ import annotations

from typing import Any

from .config import Config
from .errors import UserError
from .servers import Server, command_line, stop_mode, watcher_record
from .serving import launch, refuse_bad_drafter, start_in_background


class BenchServers:
    """Context manager. `get(mode)` finds or starts a server; `alone(mode)` ends the other one first, for targets of which only one fits."""

    def __init__(self, config: Config):
        self.config = config
        self.own: dict[str, Server] = {}
        self.put_aside: list[tuple[str, dict[str, Any] | None]] = []  # the user's servers that had to make room: mode, its watcher's record

    def get(self, mode: str) -> Server:
        """The running server of `mode`, or a new one. Raises UserError when the running one was started with other options than the config's."""
        if mode in self.own:
            return self.own[mode]
        found = Server.find(self.config, mode)
        if found:
            if found.record["command"][1:] != command_line(self.config, mode)[1:]:
                raise UserError(f"the running {mode} server of run {self.config.run.name!r} was started with other options than the config's; end it with scripts/04_serve.sh --stop")
            found.wait_ready()
            return found
        if mode == "serving":
            refuse_bad_drafter(self.config)
        self.own[mode] = launch(self.config, mode)
        return self.own[mode]

    def alone(self, mode: str) -> Server:
        """The server of `mode` with no other server of the run beside it."""
        other = "baseline" if mode == "serving" else "serving"
        if other in self.own:
            self.own.pop(other).stop()
        elif Server.find(self.config, other):
            self.put_aside.append((other, watcher_record(self.config, other)))
            stop_mode(self.config, other)
        return self.get(mode)

    def __enter__(self) -> BenchServers:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self.own.values():
            server.stop()
        for mode, watcher in self.put_aside:
            print(f"starting the {mode} server again, as it was before the benchmark", flush=True)
            if watcher:
                start_in_background(self.config, mode, watcher["command"], watcher["cwd"])
            else:
                launch(self.config, mode)
