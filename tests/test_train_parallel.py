"""Two processes under torchrun over gloo, DDP and FSDP2: the same loss and weights as one process, a step in which one process has nothing to do included."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from aerie.config import Train
from aerie.store import Store
from aerie.trainer import make_plan
from cpu_tools import free_port
from safetensors.torch import load_file
from train_runs import SCRIPT, train, write_run

TRAIN = {"ttt_steps": 3, "epochs": 2, "batch_tokens": 64, "lr": 1e-3, "eval_samples": 4, "checkpoint_every": 1000, "device": "cpu"}


def make(make_config, name, **changes):
    config = make_config("llama", name, draft={"vocab_size": 128}, train={**TRAIN, **changes})
    write_run(config, samples=13, heldout=4)
    return config


def result(config):
    report = json.loads((config.run.drafter / "report.json").read_text())
    return report, load_file(sorted(config.run.checkpoints.glob("step-*"))[-1] / "tensors.safetensors")


@pytest.fixture(scope="module")
def alone(make_config):
    config = make(make_config, "train-alone", accumulate=2)
    done = train(config)
    assert done.returncode == 0, done.stderr
    store = Store.open(config.run.store)
    plan = make_plan(Train(**config.as_dict()["train"]), np.flatnonzero(~store.heldout), store.lengths)
    assert any(len(step) == 1 for step in plan.steps)  # with two processes the second one has nothing to do there
    return result(config)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_what_one_trains(parallel, alone, make_config):
    config = make(make_config, f"train-{parallel}", parallel=parallel)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "--"]
    done = subprocess.run(
        [*command, str(SCRIPT), "--config", str(config.path), "--run", config.run.name], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (report, tensors), (single, expected) = result(config), alone
    assert report["tokens"] == single["tokens"] and report["samples"] == single["samples"] and report["processes"] == 2
    np.testing.assert_allclose(report["history"][-1]["loss"], single["history"][-1]["loss"], rtol=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-6)
