"""`make all` killed and started again, or started twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable

import pytest
from aerie.config import Config
from aerie.pipeline import DATA, Pipeline, only_pipeline
from aerie.report import write_json
from aerie.servers import Server, process_is, start_ticks

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_a_step_ends_with_the_pipeline(sign: signal.Signals, tmp_path: Path) -> None:
    """Else it goes on alone, and the same command again finds its folders locked and ends its servers."""
    said = tmp_path / "pid"
    step = f"import os, time; open({str(said)!r}, 'w').write(str(os.getpid())); time.sleep(120)"
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from aerie.pipeline import call; call([sys.executable, '-c', {step!r}], 'a step')"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (said.exists() and said.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    pid = int(said.read_text())
    ticks = start_ticks(pid)
    process.send_signal(sign)
    process.wait(30)
    try:
        while process_is(pid, ticks) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, "the step goes on without the pipeline"
            time.sleep(0.05)
    except FileNotFoundError:
        pass
    finally:
        if process_is(pid, ticks):
            os.kill(pid, signal.SIGKILL)


def interrupted_step(tmp_path: Path, begins: str, ends: str, ending_s: float, interrupt: Callable[[subprocess.Popen], None]) -> Path:
    """call() on a step that sleeps and is interrupted: `begins` is run first, `ends` when it is told to end; the file that it writes then."""
    started, ended = tmp_path / "started", tmp_path / "ended"
    step = f"import signal, sys, time\n{begins}\ntry:\n    open({str(started)!r}, 'w').close(); time.sleep(120)\nfinally:\n    {ends}; open({str(ended)!r}, 'w').close()"
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import aerie.pipeline as pipeline; pipeline.ENDING_S = {ending_s}; pipeline.call([sys.executable, '-c', {step!r}], 'a step')"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not started.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    interrupt(process)
    process.wait(60)
    return ended


def test_an_interrupted_step_has_the_time_to_end_what_it_started(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole group: the step is not killed while it ends its server."""
    assert interrupted_step(tmp_path, "", "time.sleep(1.5)", 35.0, lambda process: os.killpg(process.pid, signal.SIGINT)).exists()


def test_a_step_that_was_not_told_is_told(tmp_path: Path) -> None:
    """SIGTERM for us alone, which our scripts take as Ctrl-C: the step gets one too before it is killed, and ends its server."""
    begins = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))"
    assert interrupted_step(tmp_path, begins, "pass", 1.0, lambda process: process.send_signal(signal.SIGINT)).exists()


@pytest.mark.parametrize("script", ["run_all.py", "demo.py"])
def test_two_pipelines_of_one_run(make_config: Callable[..., Config], script: str) -> None:
    """The second must not end the first one's servers, neither between its steps nor when it is refused."""
    config = make_config("llama", "twice")
    config.run.logs.mkdir(parents=True, exist_ok=True)
    server = subprocess.Popen(["sleep", "120"], start_new_session=True)
    record = {"pid": server.pid, "start_ticks": start_ticks(server.pid), "url": "http://127.0.0.1:1", "log": "", "command": []}
    for mode in ("serving", "extraction"):
        write_json(Server.record_path(config, mode), record)
    words = [sys.executable, str(SCRIPTS / script), "--run", "twice", *(["--config", str(config.path), "--stop", "--steps", "check"] if script == "run_all.py" else [])]
    try:
        with only_pipeline(config):
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 2 and "already at work" in done.stderr and server.poll() is None, done.stdout + done.stderr
        with only_pipeline(config):  # free again
            pass
    finally:
        server.kill()
        server.wait()


def test_an_input_of_any_size_is_hashed_in_pieces(make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of chats can be larger than the memory."""
    chats = tmp_path / "chats.jsonl"
    chats.write_bytes(b'{"prompt": "a"}\n' * 1000)
    config = make_config("llama", "hashed", data={"inputs": [str(chats)]})
    read: list[Path] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or real(path))
    before = Pipeline(config, []).fingerprint(DATA)
    assert chats not in read
    chats.write_bytes(b'{"prompt": "b"}\n' * 1000)
    assert Pipeline(config, []).fingerprint(DATA) != before
