"""The scripts for a machine with two GPUs, on one without: the motions are the same, over gloo and with stand-in servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aerie.paths import ROOT

pytestmark = pytest.mark.slow


def run(name: str, out: Path, *words: str) -> dict:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "gpu" / f"{name}.py"), str(out), *words], env=env, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (report,) = out.glob("two_*.json")
    return json.loads(report.read_text())


def test_two_servers_of_which_one_is_killed_lose_nothing(tmp_path: Path) -> None:
    result = run("two_extract", tmp_path / "out")
    killed = result["killed"]
    assert killed["right"] and killed["in_store"] == killed["samples"] and killed["server_losses"] == 1
    assert result["rate"]["ratio"] > 0 and result["rate"]["retries"] == 0


def test_make_all_through_the_streaming_store(tmp_path: Path) -> None:
    """With extract.keep_gb `make all` extracts and trains at once; the store never is whole, and the extraction server ends before the drafter is served."""
    result = run("two_stream", tmp_path / "out")["all"]
    assert result["trained_samples"] == result["train_samples"] == 16 and result["consumed_shards"] > 0
    assert result["server_losses"] == 0  # it closes connections that idle while the store is full, which is no loss
    assert result["trainer_gpus"] in ("", "1") and result["texts"] == "4 of 4 equal" and result["served"] >= 1.0


def test_two_processes_follow_the_curve_of_one(tmp_path: Path) -> None:
    result = run("two_train", tmp_path / "out", "--skip", "chain")
    assert result["links"]["right"]
    assert result["ddp-tiny"]["early_sums"] == 7
    for part in ("ddp-tiny", "fsdp-tiny"):
        assert result[part]["curve_difference"] < 1e-5 and result[part]["steps"] == 8


def test_a_run_that_changes_its_number_of_processes(tmp_path: Path) -> None:
    result = run("two_train", tmp_path / "out", "--parts", "chain")["chain"]
    assert result["same_steps"] and result["same_samples"] and result["loss_difference"] < 1e-5 and result["weights_difference"] < 1e-5
