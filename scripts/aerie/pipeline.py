"""The steps of a run in their order, each a script of its own; what is done and unchanged is not done again.

A step is done when runs/<run>/steps.json holds its fingerprint: the config sections it reads, its input files, and the report of the step before.
So `make all` after a crash or a reboot goes on where it stopped, and a change of a section redoes that step and what follows.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Sequence

from .belongs import other_training
from .config import Config
from .errors import UserError
from .inputs import input_files
from .paths import ROOT, lock_folder, resolve_input
from .report import read_report, write_json
from .servers import make_room

SCRIPTS = ROOT / "scripts"
LIBC = ctypes.CDLL(None)
ENDING_S = 35.0  # of a script that was interrupted: a server is given 30 s to end


@dataclass(frozen=True)
class Step:
    """One step: its script, the config sections it reads, the report it leaves in the run's folder."""

    name: str
    script: str
    sections: tuple[str, ...]
    report: str  # below runs/<run>/; "" when the step leaves none and is repeated each time
    needs: str = ""  # the server it works against: extraction, or none
    flags: tuple[str, ...] = ()


DATA = Step("data", "02a_prepare_data.py", ("target", "data", "draft"), "data/report.json", needs="extraction", flags=("--start-server",))
APART = (
    Step("extract", "02b_extract_hidden_states_sglang.py", ("target", "extract"), "store/report.json", needs="extraction", flags=("--start-server",)),
    Step("train", "03_train.py", ("target", "draft", "train"), "drafter/report.json"),
)
STREAM = Step("stream", "run_stream.py", ("target", "extract", "draft", "train"), "drafter/report.json", needs="extraction", flags=("--start-server",))  # extract and train at once
LAST = (
    Step("check", "check_drafter.py", (), ""),
    Step("serve", "04_serve.sh", (), "", flags=("--background",)),
    Step("bench", "05_benchmark.py", ("target", "serve", "bench"), "bench/report.json"),
)
STEP_NAMES = [step.name for step in (DATA, *APART, STREAM, *LAST)]


def steps_of(config: Config) -> tuple[Step, ...]:
    """The steps of a run: with extract.keep_gb the states pass through the store while the trainer reads them."""
    return (DATA, *((STREAM,) if config.extract.keep_gb else APART), *LAST)


def script_command(config: Config, overrides: list[str], script: str, flags: tuple[str, ...] = ()) -> list[str]:
    """The command of one script for this config; shell scripts take CONFIG as their first word."""
    common = ["--run", config.run.name, *(word for text in overrides for word in ("--set", text))]
    if script.endswith(".sh"):
        return [str(SCRIPTS / script), str(config.path), *common, *flags]
    return [sys.executable, str(SCRIPTS / script), "--config", str(config.path), *common, *flags]


def end_with_parent() -> None:
    """In a new process: SIGTERM for it when we end, even by kill -9 (PR_SET_PDEATHSIG); alone it would go on and hold the run's folders."""
    LIBC.prctl(1, signal.SIGTERM)


def file_hash(path: Path) -> str:
    """sha256, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def call(command: list[str], what: str) -> None:
    """Run one script, which ends when we do; its failure ends the pipeline with its own exit code, its own words stand above."""
    process = subprocess.Popen(command, env=os.environ | {"PY": sys.executable}, preexec_fn=end_with_parent)  # noqa: PLW1509  no threads here
    try:
        code = process.wait()
    except BaseException:  # Ctrl-C has reached the script too, which ends the server that it was starting: subprocess.run() would kill it after 0.25 s, and leave that
        for then in (process.terminate, process.kill):  # SIGTERM may have reached us alone
            try:
                process.wait(ENDING_S)
                break
            except subprocess.TimeoutExpired:
                then()
        process.wait()
        raise
    if code:
        print(f"{what} ended with exit code {code}; mend what it says above, then run the same command again: it goes on from here", file=sys.stderr)
        raise SystemExit(code)


@contextmanager
def only_pipeline(config: Config) -> Iterator[None]:
    """One pipeline of a run at a time: each would end the other's servers. Raises UserError while another is at work."""
    config.run.logs.mkdir(parents=True, exist_ok=True)
    lock, _ = lock_folder(config.run.logs, f"the steps of run {config.run.name!r} are already at work in another process; wait for it, end it, or choose another run (RUN=... or --run)")
    try:
        yield
    finally:
        os.close(lock)


class Pipeline:
    """Runs steps of one config and remembers which are done."""

    def __init__(self, config: Config, overrides: list[str]):
        self.config, self.overrides = config, overrides
        self.marker = config.run.root / "steps.json"
        self.steps = steps_of(config)

    def _done(self) -> dict[str, str]:
        return read_report(self.marker, "every step that has changed")

    def fingerprint(self, step: Step) -> str:
        """What the step's result depends on: config sections, input files by size and time, the report of the step before."""
        sections = self.config.as_dict()
        parts = [json.dumps({name: sections[name] for name in step.sections}, sort_keys=True, default=str)]
        if step.name == "data":
            for name in self.config.data.inputs:
                path = resolve_input(name)
                parts.append(f"{name} {file_hash(path) if path.is_file() else 'missing'}")
        earlier = [other for other in self.steps[: self.steps.index(step)] if other.report]
        if earlier:
            report = self.config.run.root / earlier[-1].report
            parts.append(hashlib.sha256(report.read_bytes()).hexdigest() if report.is_file() else "missing")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def is_done(self, step: Step) -> bool:
        """Whether the step's result is there and nothing it depends on has changed."""
        return self.not_done(step) is None

    def not_done(self, step: Step) -> str | None:
        """None when the step's result is there and nothing it depends on has changed; else why it is made again, where that needs a word."""
        if not step.report or self._done().get(step.name) != self.fingerprint(step):
            return ""
        if step.report == APART[-1].report and (why := other_training(self.config)):  # a training by hand has replaced the drafter since
            return why
        if not (self.config.run.root / step.report).is_file():
            return ""
        return None if step.name != "bench" or self.own_benchmark(step) else ""

    def own_benchmark(self, step: Step) -> bool:
        """Whether bench/report.json is that of the config as it is, and not of `make bench` with other options."""
        sections = self.config.as_dict()
        try:
            report = read_report(self.config.run.bench / "report.json")
        except UserError:
            return False  # damaged: it is measured again
        then = report.get("config") or {}
        same = all(json.dumps(then.get(name), sort_keys=True) == json.dumps(sections[name], sort_keys=True, default=str) for name in step.sections)
        return same and not report.get("sweep") and report.get("prompt_sets", [self.config.bench.prompts]) == [self.config.bench.prompts]

    def refuse_missing_chats(self, names: Sequence[str] | None) -> None:
        """Raise UserError where one of these steps (None: all) is data and a file of data.inputs is not there, not readable or empty: before a server is started for it."""
        if names is None or DATA.name in names:  # the step is done only while its files are as they were
            input_files(self.config)

    def run(self, names: list[str] | None = None) -> dict[str, float]:
        """Run the steps (all when `names` is None); returns seconds by step, 0 for one that was done. Raises UserError for a step that this run has not."""
        seconds: dict[str, float] = {}
        own = [step.name for step in self.steps]
        if wrong := [name for name in names or () if name not in own]:
            raise UserError(f"--steps {' '.join(wrong)}: with extract.keep_gb = {self.config.extract.keep_gb:g} the steps of this run are {' '.join(own)}")
        steps = [step for step in self.steps if names is None or step.name in names]
        self.refuse_missing_chats(names)
        for number, step in enumerate(steps, 1):
            later_done = step.name in ("check", "serve") and self.is_done(self.steps[-1])
            why = self.not_done(step)
            if why is None or later_done:
                print(f"== {number}/{len(steps)} {step.name}: already done", flush=True)
                seconds[step.name] = 0.0
                continue
            print(f"== {number}/{len(steps)} {step.name}{': ' + why if why else ''}", flush=True)
            start = time.monotonic()
            if step.needs and not (step.name in ("extract", "stream") and self.config.server.urls):
                make_room(self.config, ["serving", "baseline"])  # of an earlier call
            call(script_command(self.config, self.overrides, step.script, step.flags), f"step {step.name}")
            seconds[step.name] = time.monotonic() - start
            if step.report:
                write_json(self.marker, self._done() | {step.name: self.fingerprint(step)})
        return seconds
