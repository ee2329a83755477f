"""scripts/03_train.py as the user calls it, on a synthetic store: export, report, resume, refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from aerie.check import Check
from safetensors.torch import load_file
from train_runs import SCRIPT, train, write_run

TRAIN = {"ttt_steps": 3, "epochs": 3, "batch_tokens": 64, "lr": 3e-3, "eval_samples": 6, "checkpoint_every": 2, "device": "cpu"}


def make(make_config, name, **sections):
    sections["train"] = {**TRAIN, **sections.get("train", {})}
    sections["draft"] = {"vocab_size": 128, **sections.get("draft", {})}
    return make_config("llama", name, **sections)


def report_of(config):
    return json.loads((config.run.drafter / "report.json").read_text())


def test_train_exports_a_drafter_that_the_check_passes(make_config, tmp_path):
    config = make(make_config, "train-plain", train={"epochs": 12})
    write_run(config)
    done = train(config, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = report_of(config)
    assert report["predicted_accept_length"] > 1.5 and report["samples"] == 24 * 12 and not report["bad_samples"]
    assert report["eval"]["loss"][0] < report["evals"][0]["loss"][0]
    assert (config.run.drafter / "curves.png").stat().st_size > 10_000
    check = Check(config.run.drafter, config.model_path)
    assert not [line for line in check.run() if line.ok is False]
    assert json.loads((config.run.drafter / "training.json").read_text())["served_dtype"] == config.target.dtype == "float32"
    names = load_file(config.run.drafter / "model.safetensors")
    assert names["d2t"].dtype == torch.int64 and names["t2d"].sum() == 128


def test_killed_and_resumed_is_bit_identical(make_config):
    straight, killed = make(make_config, "train-straight"), make(make_config, "train-killed")
    for config in (straight, killed):
        write_run(config)
    assert train(straight).returncode == 0
    command = [sys.executable, str(SCRIPT), "--config", str(killed.path), "--run", killed.run.name]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list(killed.run.checkpoints.glob("step-*"))) < 1:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = train(killed, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    first, second = (sorted(config.run.checkpoints.glob("step-*"))[-1] / "tensors.safetensors" for config in (straight, killed))
    a, b = load_file(first), load_file(second)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert report_of(straight)["evals"] == report_of(killed)["evals"]


def test_nan_is_skipped_named_and_counted_and_too_many_stop_the_run(make_config):
    config = make(make_config, "train-nan", train={"epochs": 1, "max_bad_samples": 2})
    write_run(config, bad=2)
    done = train(config)
    assert done.returncode == 0, done.stderr
    bad = report_of(config)["bad_samples"]
    assert len(bad) == 2 and all(name in done.stdout for name in bad)
    done = train(config, "--fresh", "--set", "train.max_bad_samples=1")
    assert done.returncode == 2 and "max_bad_samples" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("change, words", [
    ("target.aux_layer_ids=[0, 2, 4]", "layers"),
    ("draft.vocab_size=64", "draft.vocab_size"),
    ("draft.num_key_value_heads=3", "key heads"),
])  # fmt: skip
def test_refusals_are_one_sentence(make_config, change, words):
    config = make(make_config, "train-refused")
    if not config.run.store.exists():
        write_run(config)
    done = train(config, "--set", change)
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_overfit_says_whether_the_pipeline_is_sound(make_config):
    config = make(make_config, "train-overfit", train={"lr": 5e-3})
    write_run(config)
    done = train(config, "--overfit", "4")
    assert done.returncode == 0 and "\nsound: 4 memorised samples" in done.stdout, done.stdout + done.stderr
    assert list((config.run.root / "tensorboard" / "overfit").glob("events*")) and not config.run.checkpoints.exists()


@pytest.mark.slow
def test_overfit_sees_states_of_the_wrong_row(make_config):
    config = make(make_config, "train-unsound", train={"lr": 5e-3})
    write_run(config, learnable=False, samples=64)  # random text and random teachers that do not point at it
    done = train(config, "--overfit", "48")
    assert done.returncode == 1 and "NOT sound" in done.stdout, done.stdout + done.stderr
