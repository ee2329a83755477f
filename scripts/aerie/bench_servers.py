"""The two servers of a benchmark: those that run already, or ones of its own; afterwards all is as it was found."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from contextlib import contextmanager
from typing import Any, Iterator

from .bench import SetBenchmark, measure
from .bench_stats import latency, merged
from .config import Config
from .config_rules import draft_tokens_problem
from .errors import EXIT_INTERRUPTED, UserError
from .generate import Prompt, accept_length
from .paths import lock_folder
from .running import refuse_other_options
from .servers import Server, stop_mode, watcher_record
from .serving import launch, refuse_bad_drafter, start_in_background


@contextmanager
def only_benchmark(config: Config) -> Iterator[None]:
    """One benchmark of a run at a time: two would share its servers, and each end the other's. SIGTERM and SIGHUP (not under nohup) end it as Ctrl-C does, its servers too.

    Raises UserError when another one is at work, OSError when runs/<run>/bench cannot be made: before the work, not after it.
    """
    config.run.bench.mkdir(parents=True, exist_ok=True)
    lock, _ = lock_folder(config.run.bench, f"another benchmark of run {config.run.name!r} is at work; wait for it, or end it")
    before = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGHUP)}
    for sign in (sign for sign, handler in before.items() if handler is not signal.SIG_IGN):
        signal.signal(sign, lambda *_: sys.exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        os.close(lock)
        for sign, handler in before.items():
            signal.signal(sign, handler)


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
            refuse_other_options(self.config, found)
            if not found.healthy():
                raise UserError(f"the running {mode} server of run {self.config.run.name!r} does not answer (yet?); see {found.log}, wait, or end it with "
                    f"scripts/04_serve.sh --stop")
            return found
        if mode == "serving":
            refuse_bad_drafter(self.config)
        self.own[mode] = launch(self.config, mode)
        return self.own[mode]

    def alone(self, mode: str) -> Server:
        """The server of `mode` with no other server of the run beside it."""
        self.put_away("baseline" if mode == "serving" else "serving")
        return self.get(mode)

    def other_settings(self, setting: tuple[int, int, int]) -> Server:
        """A serving server of its own with other (num_steps, topk, draft tokens); the one that ran makes room."""
        self.put_away("serving")
        steps, topk, tokens = setting
        serve = dataclasses.replace(self.config.serve, num_steps=steps, topk=topk, num_draft_tokens=tokens)
        self.own["serving"] = launch(dataclasses.replace(self.config, serve=serve), "serving")
        return self.own["serving"]

    def put_away(self, mode: str) -> None:
        """End the server of `mode`; the user's own is started again at the end."""
        if mode in self.own:
            self.own.pop(mode).stop()
        elif Server.find(self.config, mode):
            self.put_aside.append((mode, watcher_record(self.config, mode)))
            stop_mode(self.config, mode)

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


def parse_sweep(text: str) -> tuple[int, int, int]:
    """'3,4,16' -> (num_steps, topk, draft tokens). Raises UserError for what SGLang would not take."""
    parts = text.split(",")
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--sweep {text!r}: write steps,topk,tokens, for example 3,4,16")
    steps, topk, tokens = map(int, parts)
    if problem := draft_tokens_problem(steps, topk, tokens):
        raise UserError(f"--sweep {text!r}: {problem}; write so many as the third number")
    return steps, topk, tokens


def run_sweep(servers: BenchServers, one: SetBenchmark, settings: list[tuple[int, int, int]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Each setting on a server of its own, at the highest concurrency; speed-up against the plain server's pass there. And what failed: the others are measured all the same."""
    config = servers.config
    concurrency, timeout_s = max(config.bench.concurrency), config.data.request_timeout_s
    plain, rows, failed = one.fullest("baseline"), [], []
    if not config.bench.side_by_side:
        servers.put_away("baseline")
    for setting in settings:
        try:
            rows.append(run_setting(servers, one.prompts.prompts, setting, concurrency, timeout_s, plain.tok_s))
        except UserError as exc:  # a larger tree may need memory that is not there
            failed.append(f"--sweep {','.join(map(str, setting))} was not measured: {exc}")
    return rows, failed


def run_setting(servers: BenchServers, prompts: list[Prompt], setting: tuple[int, int, int], concurrency: int, timeout_s: float, plain_tok_s: float) -> dict[str, Any]:
    """One row of the sweep."""
    server = servers.other_settings(setting)
    measure(server, prompts[:concurrency], concurrency, timeout_s)  # warm-up
    fast = measure(server, prompts, concurrency, timeout_s)
    row = {
        "num_steps": setting[0], "topk": setting[1], "num_draft_tokens": setting[2], "concurrency": concurrency, "tok_s": fast.tok_s,
        "speedup": fast.tok_s / plain_tok_s, "accept_length": accept_length(fast.answers), "verifications_by_accepted": merged([answer.histogram for answer in fast.answers]),
    }  # fmt: skip
    if servers.config.bench.latency:
        row["step_ms"] = latency(measure(server, prompts[: 2 * concurrency], concurrency, timeout_s, streamed=True).answers).get("step_ms")
    return row
