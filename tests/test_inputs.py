"""Missing chats are said before a server is started for them: in make data, make all and doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
from aerie import pipeline
from aerie.config import Config
from aerie.errors import UserError
from aerie.paths import ROOT
from aerie.pipeline import Pipeline
from aerie.records import start_ticks
from aerie.report import write_json
from aerie.servers import Server, command_line, url_of
from data_fake_server import FakeServer, finished
from data_tools import make_fast
from test_answers import prepare, write_config
from test_doctor import doctor, line
from test_prepare_data import chat

MISSING = "does not exist; name your chats in data.inputs"


def unusable(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.jsonl"
    if kind == "empty":
        path.write_text("")
    elif kind == "blank":
        path.write_text("\n \n")
    elif kind == "folder":
        path.mkdir()
    return path


@pytest.mark.parametrize(("kind", "says"), [("missing", MISSING), ("empty", "is empty; put chats into it"), ("blank", "is empty"), ("folder", "cannot be read")])
def test_no_server_is_started_for_chats_that_are_not_there(kind: str, says: str, make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = unusable(tmp_path, kind)
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt": "a"}\n')
    config = make_config("llama", f"chats-{kind}", data={"inputs": [str(good), str(path)]})
    called: list[Any] = []
    monkeypatch.setattr(pipeline, "call", lambda *words: called.append(words))
    with pytest.raises(UserError, match=f"{path.name} .*{says}"):
        Pipeline(config, []).run()
    assert not called
    Pipeline(config, []).run(["check"])  # a step that reads no chats
    assert called


@pytest.mark.parametrize("words", [("run_all.py",), ("02a_prepare_data.py", "--start-server")])
def test_the_scripts_say_it_and_leave_no_server(words: tuple[str, ...], make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config("llama", "nochats", data={"inputs": [str(tmp_path / "nosuch.jsonl")]})
    command = [sys.executable, str(ROOT / "scripts" / words[0]), "--config", str(config.path), "--run", "nochats", *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and f"nosuch.jsonl {MISSING}" in done.stderr, done.stdout + done.stderr
    assert not (config.run.logs / "extraction.log").exists()


def test_make_data_starts_no_server_before_the_chats_are_read() -> None:
    said = subprocess.run(["make", "-n", "data", f"PY={sys.executable}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "01_launch_server.sh" not in said and "02a_prepare_data.py" in said and "--start-server" in said


def test_make_stream_starts_no_server_before_there_is_data(make_config: Callable[..., Config]) -> None:
    config = make_config("llama", "nodata", extract={"keep_gb": 1.0})
    command = [sys.executable, str(ROOT / "scripts" / "run_stream.py"), "--config", str(config.path), "--run", "nodata", "--start-server"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2 and "make it with `make data" in done.stderr, done.stdout + done.stderr
    assert not (config.run.logs / "extraction.log").exists()
    said = subprocess.run(["make", "-n", "stream", f"PY={sys.executable}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "01_launch_server.sh" not in said and "run_stream.py" in said and "--start-server" in said


def test_the_server_is_started_once_the_chats_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And only where it writes the answers."""
    model, called = make_fast(tmp_path / "chatml", "chatml"), []

    def launch(command: list[str], what: str) -> None:
        called.append(command)
        raise SystemExit(3)

    monkeypatch.setattr(pipeline, "call", launch)
    config = write_config(tmp_path, model, [chat(i) for i in range(5)], regenerate=True)
    with pytest.raises(SystemExit):
        prepare(monkeypatch, config, "starts", "--start-server")
    assert len(called) == 1 and called[0][0].endswith("01_launch_server.sh") and called[0][-1] == "--background" and "5 chats: 3 to train on" in capsys.readouterr().out
    prepare(monkeypatch, config, "starts", "--start-server", "--no-regenerate")
    for others in ('data.url="http://127.0.0.1:9"', 'server.urls=["http://127.0.0.1:9"]'):
        with pytest.raises(UserError, match="no server answers at"):
            prepare(monkeypatch, config, "starts", "--start-server", "--set", others, "--set", "extract.server_wait_s=0")
    assert len(called) == 1


def test_data_with_a_server_that_runs_already(make_config: Callable[..., Config], tmp_path: Path) -> None:
    """02a --start-server as make data calls it, down to 01_launch_server.sh, which finds the run's server; its answers become rows."""
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"prompt": f"Question {i}"}) + "\n" for i in range(6)))
    config = make_config("llama", "runs-already", data={"inputs": [str(chats)], "heldout": 2, "max_new_tokens": 8}, draft={"vocab_size": 64})
    command = [sys.executable, str(ROOT / "scripts" / "02a_prepare_data.py"), "--config", str(config.path), "--run", "runs-already", "--start-server"]
    record = {
        "pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "mode": "extraction", "url": url_of(config, "extraction"), "log": "", "command": command_line(config, "extraction"),
        "model_path": config.model_path, "aux_layer_ids": config.target.aux_layer_ids, "dtype": config.extract.dtype,
    }  # fmt: skip
    write_json(Server.record_path(config, "extraction"), record)
    with FakeServer(lambda prompt, _: finished([5, 6, 7, 8]), port=config.server.port):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"PY": sys.executable})
    assert done.returncode == 0 and "already running and healthy" in done.stdout and "train: 4 rows" in done.stdout and "heldout: 2 rows" in done.stdout, done.stdout + done.stderr


def test_doctor_has_a_line_for_the_chats(tmp_path: Path) -> None:
    code, text = doctor("--run", "doctor-chats", "--set", f"data.inputs={json.dumps([str(tmp_path / 'nosuch.jsonl')])}")
    assert code == 1 and line(text, "chats").startswith("✗") and "nosuch.jsonl does not exist" in line(text, "chats") and "make_prompts.py" in text
    _, text = doctor("--run", "doctor-chats")
    assert line(text, "chats").startswith("✓") and "1 file" in line(text, "chats")
