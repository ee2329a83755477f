"""The scripts for a machine with two GPUs, on one without: the motions are the same, over gloo and with stand-in servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aerie.paths import ROOT

def run(name: str, out: Path, *words: str) -> dict:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "gpu" / f"{name}.py"), str(out), *words], env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (report,) = out.glob("two_*.json")
    return json.loads(report.read_text())


def gone(pid: int) -> bool:
    """Whether it has ended, within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if not Path(f"/proc/{pid}/cmdline").read_bytes():  # a zombie
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("what", ["servers", "training", "stream"])
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_two_gpus_sh_ends_its_parts(tmp_path: Path, what: str, sign: int) -> None:
    """Not with SIGKILL: they end their servers and say how far they are. In place of Python stands a script that notes who it is, and that it was told."""
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(f"#!/bin/sh\ncase $* in *--prepare*) exit;; esac\ntrap 'echo told >> {notes}; exit 143' TERM\necho $$ >> {notes}\nwhile :; do sleep 0.1; done\n")
    python.chmod(0o755)
    env = os.environ | {"PY": str(python), "QUICK": "1", "WORK": str(tmp_path / "work")}
    script = subprocess.Popen([str(ROOT / "tests" / "gpu" / "two_gpus.sh"), what, str(tmp_path / "out")], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (notes.exists() and notes.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    script.send_signal(sign)
    try:
        output = script.communicate(timeout=60)[0]  # until the last of them has closed it
    finally:
        pid, *told = notes.read_text().split()
        if not gone(int(pid)):
            os.kill(int(pid), signal.SIGKILL)
    assert script.returncode == 130 and told == ["told"] and "exit 143" in output and (tmp_path / "out" / f"logs-{what}.tar.gz").exists()


def test_a_torchrun_that_hangs_is_ended_with_its_workers(tmp_path: Path) -> None:
    """Which have sessions of their own."""
    worker = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True); time.sleep(300)"
    script = f"import sys; sys.path[:0] = [{str(ROOT / 'tests' / 'gpu')!r}, {str(ROOT / 'scripts')!r}]; import two_train, pathlib; two_train.call([sys.executable, '-c', {worker!r}], pathlib.Path('log'), 5.0)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=120, check=False)
    assert "exit code none after 5 s" in done.stderr and gone(int((tmp_path / "log").read_text()))


@pytest.mark.slow
def test_two_servers_of_which_one_is_killed_lose_nothing(tmp_path: Path) -> None:
    result = run("two_extract", tmp_path / "out")
    killed = result["killed"]
    assert killed["right"] and killed["in_store"] == killed["samples"] and killed["server_losses"] == 1
    assert result["rate"]["ratio"] > 0 and result["rate"]["retries"] == 0


@pytest.mark.slow
def test_make_all_through_the_streaming_store(tmp_path: Path) -> None:
    """With extract.keep_gb `make all` extracts and trains at once; the store never is whole, and the extraction server ends before the drafter is served."""
    result = run("two_stream", tmp_path / "out")["all"]
    assert result["trained_samples"] == result["train_samples"] == 16 and result["consumed_shards"] > 0
    assert result["server_losses"] == 0  # it closes connections that idle while the store is full, which is no loss
    assert result["trainer_gpus"] in ("", "1") and result["texts"] == "4 of 4 equal" and result["served"] >= 1.0


@pytest.mark.slow
def test_two_processes_follow_the_curve_of_one(tmp_path: Path) -> None:
    result = run("two_train", tmp_path / "out", "--skip", "chain")
    assert result["links"]["right"]
    assert result["ddp-tiny"]["early_sums"] == 7
    for part in ("ddp-tiny", "fsdp-tiny"):
        assert result[part]["curve_difference"] < 1e-5 and result[part]["steps"] == 8


@pytest.mark.slow
def test_a_run_that_changes_its_number_of_processes(tmp_path: Path) -> None:
    result = run("two_train", tmp_path / "out", "--parts", "chain")["chain"]
    assert result["same_steps"] and result["same_samples"] and result["loss_difference"] < 1e-5 and result["weights_difference"] < 1e-5
