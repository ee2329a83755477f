"""Every script runs by hand: executable, from any folder, with any Python that finds .venv, and with one sentence where there is none."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from aerie.config import Config
from aerie.errors import UserError
from aerie.paths import ROOT
from aerie.pipeline import Pipeline, steps_of
from aerie.samples import save_atomic
from aerie.servers import refuse_busy_ports

SCRIPTS = sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "scripts").glob("*.sh")])
PLAIN = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"  # the Python that the venv was made from


def plain_python() -> str:
    """A Python without our packages, or skip."""
    if not PLAIN.exists() or subprocess.run([PLAIN, "-c", "import safetensors"], capture_output=True, check=False).returncode == 0:
        pytest.skip(f"{PLAIN} is not a Python without our packages")
    return str(PLAIN)


def run(*command: Any, **environment: str) -> subprocess.CompletedProcess:
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PY", "VENV")}
    return subprocess.run([str(word) for word in command], cwd="/", env=kept | environment, capture_output=True, text=True, timeout=120, check=False)


def test_all_are_executable() -> None:
    assert len(SCRIPTS) > 25
    for path in SCRIPTS:
        assert os.access(path, os.X_OK) and path.read_text(encoding="utf-8").startswith("#!/usr/bin/env "), path


@pytest.mark.parametrize("name", ["show_sample.py", "store_tool.py", "03_train.py", "bench_extract.py"])
def test_a_plain_python_goes_on_with_the_venv(name: str, tmp_path: Path) -> None:
    """In a copy whose .venv is a link to the Python of these tests."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for folder in ("configs", "cuda"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    missing = run(plain_python(), tmp_path / "scripts" / name, "--help")
    assert missing.returncode == 2 and "has no module" in missing.stderr and "make setup" in missing.stderr and len(missing.stderr.splitlines()) == 1
    (tmp_path / ".venv").symlink_to(sys.prefix)
    found = run(plain_python(), tmp_path / "scripts" / name, "--help")
    assert found.returncode == 0 and found.stdout.startswith(f"usage: {name}"), found.stderr


def test_a_plain_python_goes_on_with_the_venv_or_the_python_that_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    script = tmp_path / "scripts" / "show_sample.py"
    for named in ({"VENV": sys.prefix}, {"PY": sys.executable}, {"PY": sys.executable, "VENV": "/nowhere"}):
        assert run(plain_python(), script, "--help", **named).stdout.startswith("usage: show_sample.py"), named
    shim = tmp_path / "python"
    shim.write_text(f'#!/bin/sh\nexec {plain_python()} "$@"\n')
    shim.chmod(0o755)
    for wrong in ({"PY": plain_python()}, {"PY": str(shim)}, {"PY": "/no/such/python"}, {"VENV": "/nowhere"}):  # never asked twice
        done = run(plain_python(), script, "--help", **wrong)
        assert done.returncode == 2 and "has no module" in done.stderr and "VENV=/path/to/venv" in done.stderr, wrong


@pytest.mark.parametrize("name", ["gpu_benchmark.sh", "setup.sh"])
def test_help_of_a_shell_script_does_nothing_else(name: str, tmp_path: Path) -> None:
    done = run(ROOT / "scripts" / name, "--help", AERIE_RUNS_DIR=str(tmp_path))
    assert done.returncode == 0 and name in done.stdout and not list(tmp_path.iterdir()) and not (ROOT / "--help").exists()
    assert run(ROOT / "scripts" / name, "--no-such-flag", AERIE_RUNS_DIR=str(tmp_path)).returncode == 2


def test_a_port_that_will_be_needed_is_refused_before_the_work(make_config: Callable[..., Config]) -> None:
    config = make_config("llama", "ports")
    refuse_busy_ports(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", config.bench.baseline_port))
        listener.listen()
        with pytest.raises(UserError, match="in use.*SET='bench.baseline_port=N'.*the baseline server"):
            refuse_busy_ports(config)


def test_make_demo_takes_run_and_set() -> None:
    said = run("make", "-n", "-C", ROOT, "demo", "RUN=mine", "SET=serve.port=31001 data.limit=50", f"PY={sys.executable}").stdout
    assert "--run='mine' --set 'serve.port=31001' --set 'data.limit=50'" in said


def test_files_that_safetensors_writes_can_be_read_like_any_other(tmp_path: Path) -> None:
    save_atomic(tmp_path / "a.safetensors", {"x": np.zeros(2, np.float32)}, {})
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_make_all_streams_when_the_store_may_not_be_whole(make_config: Callable[..., Config]) -> None:
    whole, streamed = make_config("llama", "all-whole"), make_config("llama", "all-stream", extract={"keep_gb": 1.0})
    assert [step.name for step in steps_of(whole)] == ["data", "extract", "train", "check", "serve", "bench"]
    assert [step.name for step in steps_of(streamed)] == ["data", "stream", "check", "serve", "bench"]
    for config, step in ((streamed, "extract"), (whole, "stream")):
        with pytest.raises(UserError, match=f"--steps {step}: with extract.keep_gb = .* the steps of this run are data "):
            Pipeline(config, []).run(["data", step])
