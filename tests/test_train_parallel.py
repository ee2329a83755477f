"""Two processes under torchrun over gloo, DDP and FSDP2: the same loss and weights as one process, a step in which one process has nothing to do included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from aerie.batches import build_batch
from aerie.config import Train
from aerie.distributed import Group
from aerie.drafter import Drafter
from aerie.optimizer import Optimizer
from aerie.step import add_gradients
from aerie.store import Store
from aerie.trainer import make_plan
from aerie.unroll import Rope
from safetensors.torch import load_file
from train_helpers import make_fixed, make_sample, make_shape
from train_runs import SCRIPT, torchrun, train, write_run

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


def together(config, *words, script=SCRIPT):
    """Two processes under a torchrun of one's own."""
    command = torchrun(2, [str(script), *words, "--config", str(config.path), "--run", config.run.name])
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def compare(config, alone):
    (report, tensors), (single, expected) = result(config), alone
    assert report["tokens"] == single["tokens"] and report["samples"] == single["samples"]
    np.testing.assert_allclose(report["history"][-1]["loss"], single["history"][-1]["loss"], rtol=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-6)
    return report


def test_train_gpus_starts_the_processes_and_they_train_what_one_trains(alone, make_config):
    config = make(make_config, "train-ddp", gpus=[0, 1])
    done = train(config)
    assert done.returncode == 0, done.stderr[-3000:]
    assert compare(config, alone)["processes"] == 2


def test_split_weights_train_what_one_process_trains(alone, make_config):
    config = make(make_config, "train-fsdp", parallel="fsdp")
    together(config)
    assert compare(config, alone)["processes"] == 2


@pytest.mark.slow
def test_split_weights_where_one_process_has_fewer_batches_in_a_step(make_config):
    """Four batches a step and seven an epoch: in the last step one process has two and the other one."""
    single = make(make_config, "train-alone-4", accumulate=4)
    assert train(single).returncode == 0
    config = make(make_config, "train-fsdp-2", parallel="fsdp", accumulate=2)
    together(config)
    compare(config, result(single))


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(alone, make_config):
    """One process, killed; two with all weights each, killed; two with split weights, killed; one to the end."""
    until = Path(__file__).with_name("train_until.py")
    config = make(make_config, "train-chain", checkpoint_every=1)
    single = ("--config", str(config.path), "--run", config.run.name, "--set", "train.accumulate=2")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, str(until), "2", *single], env=env, timeout=300, check=True)
    together(config, "4", "--resume", script=until)
    together(config, "6", "--resume", "--set", "train.parallel=fsdp", script=until)
    assert [path.name for path in sorted(config.run.checkpoints.glob("step-*"))][-1] == "step-00000006"
    subprocess.run([sys.executable, str(SCRIPT), *single, "--resume"], env=env, timeout=300, check=True)
    compare(config, alone)


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sums_start_during_backward_of_the_last_batch_alone(checkpointing, group_of_one):
    """Every matrix is summed once, early where its uses are counted, and never before its gradient is whole."""
    shape = make_shape()
    batch = build_batch([make_sample("a" * 16, [0] * 5 + [1] * 12, shape, 0)], 3)
    fixed = make_fixed(shape, 3)
    fixed.checkpointing = checkpointing
    grads = []
    for group in (Group(), Group(0, 2)):  # the second one only says that sums are wanted; they are over one process
        drafter = Drafter(shape)
        drafter.reset(torch.Generator().manual_seed(0), 0.1)
        drafter.set_compute(torch.float32)
        optimizer = Optimizer(drafter, Train(max_grad_norm=0.0), group)
        optimizer.zero_grad()
        add_gradients(drafter, optimizer, [batch, batch], fixed, Rope(drafter, torch.device("cpu"), torch.float32), 10.0)
        started = len(optimizer.sums.works)
        optimizer.step(1e-3)
        grads.append({name: parameter.grad.clone() for name, parameter in drafter.named_parameters()})
    assert started == optimizer.sums.early == (1 if checkpointing else 7)  # the head alone where steps are computed again, else all seven matrices
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad)
