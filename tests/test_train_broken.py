"""What a user can break before or between two trainings: checkpoints, the drafter's folder, shards, a drafter to begin from. One sentence each, or mended; never trained on."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from aerie import checkpoints
from aerie.config import Config, Target, Train
from aerie.curves import Curves
from aerie.drafter import Drafter
from aerie.drafter_init import start_from
from aerie.errors import UserError
from aerie.export import export_drafter
from aerie.optimizer import Optimizer
from aerie.shards import Shard
from aerie.store import Store, StreamingStore
from aerie.stream_train import wait_for_heldout
from safetensors.torch import load_file, save_file
from test_train_script import make
from train_helpers import HIDDEN, make_drafter, make_shape
from train_runs import train, write_run


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with weights and moments."""
    drafter = make_drafter(make_shape())
    optimizer = Optimizer(drafter, Train())
    optimizer.zero_grad()
    optimizer.step(1e-3)
    return checkpoints.save_checkpoint(tmp_path, 3, 3, drafter, optimizer.adam, {"fingerprint": "f", "loss": [0.1, float("nan")]})


def change(path: Path, place: float, bit: int = 1) -> None:
    """Flip a bit at this share of the file."""
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= bit
    path.write_bytes(data)


def test_a_checkpoint_reads_back(saved: Path) -> None:
    drafter = Drafter(make_shape())
    assert checkpoints.load_checkpoint(saved, drafter, Optimizer(drafter, Train()).adam)["step"] == 3
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(drafter.parameters(), make_drafter(make_shape()).parameters()))


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9, 0.9999])
def test_a_flipped_bit_of_a_checkpoint_is_not_trained_on(saved: Path, place: float) -> None:
    change(saved / "tensors.safetensors", place)
    drafter = Drafter(make_shape())
    with pytest.raises(UserError, match="is not a whole checkpoint"):
        checkpoints.load_checkpoint(saved, drafter, Optimizer(drafter, Train()).adam)


@pytest.mark.parametrize("text", ["{}", '{"fingerprint": "f", "step": 3}', "[]", '{"step":'])
def test_another_state_of_a_checkpoint_is_refused(saved: Path, text: str) -> None:
    (saved / "state.json").write_text(text)
    with pytest.raises(UserError, match="is not a whole checkpoint"):
        checkpoints.read_state(saved)


def test_a_changed_number_in_the_state_is_refused(saved: Path) -> None:
    (saved / "state.json").write_text((saved / "state.json").read_text().replace('"step": 3', '"step": 2'))
    with pytest.raises(UserError, match="is not a whole checkpoint"):
        checkpoints.read_state(saved)


def test_overfit_leaves_the_drafter_alone_and_a_lost_drafter_is_made_again(make_config) -> None:
    config = make(make_config, "broken-drafter")
    write_run(config, samples=6)
    assert train(config).returncode == 0
    weights, training, walks = ((config.run.drafter / name).read_bytes() for name in ("model.safetensors", "training.json", "walk.json"))
    best = json.loads((config.run.drafter / "report.json").read_text())["eval"]
    by_sample = json.loads(walks)["walks"]
    assert len(by_sample) == best["samples"] and sum(int(gained) for answers in by_sample.values() for answer in answers for gained in answer.split()) == best["walked_tokens"]
    done = train(config, "--overfit", "400", "--set", "train.lr=5e-3")
    assert done.returncode == 0 and "the store holds 6 samples" in done.stdout and "\nsound: 6 memorised" in done.stdout, done.stdout + done.stderr
    assert (config.run.drafter / "model.safetensors").read_bytes() == weights and (config.run.root / "overfit" / "model.safetensors").is_file()
    shutil.rmtree(config.run.drafter)
    shutil.copytree(config.run.root / "overfit", config.run.drafter)
    done = train(config)
    assert done.returncode == 0 and "it is made again from" in done.stdout, done.stdout + done.stderr
    assert (config.run.drafter / "model.safetensors").read_bytes() == weights and (config.run.drafter / "training.json").read_bytes() == training
    assert (config.run.drafter / "walk.json").read_bytes() == walks
    shutil.rmtree(config.run.drafter)
    done = train(config, "--set", "serve.num_steps=2")
    assert done.returncode == 0 and "the evaluations until here are dropped" in done.stdout, done.stdout + done.stderr
    report = json.loads((config.run.drafter / "report.json").read_text())
    assert len(report["evals"]) == 1 and len(report["eval"]["accuracy"]) == 2 and report["best_step"] == report["steps"]


def test_overfit_and_resume_that_make_no_sense_are_refused(make_config) -> None:
    config = make(make_config, "broken-words")
    for words in (("--overfit", "-3"), ("--overfit", "3", "--resume"), ("--fresh", "--resume")):
        done = train(config, *words)
        assert done.returncode == 2 and "leave" in done.stderr and "Traceback" not in done.stderr, done.stderr


def edit(path: Path, name: str, value: object) -> None:
    """Overwrite a tensor of a shard."""
    shard = Shard(path)
    start, end = shard.entries[name]["data_offsets"]
    dtype = {"I32": np.int32, "F32": np.float32}[shard.entries[name]["dtype"]]
    data = bytearray(path.read_bytes())
    data[shard.header_bytes + start : shard.header_bytes + end] = np.full((end - start) // 4, value, dtype).tobytes()
    path.write_bytes(data)


def test_shards_that_are_missing_changed_or_of_another_store_are_refused(make_config) -> None:
    config, other = make(make_config, "broken-store"), make(make_config, "broken-other", target={"aux_layer_ids": [0, 1, 4]})
    write_run(config)
    write_run(other, seed=1)
    first, *_ = sorted(config.run.store.glob("shard-*"))
    whole = first.read_bytes()
    first.unlink()
    assert Store.open(config.run.store).missing_shards() == [first.name]
    done = train(config)
    assert done.returncode == 2 and "1 shards of the store" in done.stderr and first.name in done.stderr, done.stderr
    first.write_bytes((other.run.store / first.name).read_bytes())
    with pytest.raises(UserError, match="is of another store.*aux_layer_ids"):
        Store.open(config.run.store)
    first.write_bytes(whole)
    edit(first, "input_ids", 10**6)
    with pytest.raises(UserError, match="is damaged: tensor input_ids"):
        Store.open(config.run.store).get(0)


def test_held_out_samples_that_cannot_be_walked_choose_no_drafter(make_config) -> None:
    """All of them hold a NaN: every evaluation says 0.0, and the first of them must not be the best."""
    config = make(make_config, "broken-heldout")
    write_run(config)
    for path in config.run.store.glob("shard-*"):
        if Shard(path).heldout.all():
            edit(path, "aux", np.nan)
    manifest = json.loads((config.run.store / "manifest.json").read_text())
    (config.run.store / "manifest.json").write_text(json.dumps(manifest | {"complete": False, "planned": 1234}))
    done = train(config)
    assert done.returncode == 0 and "the last weights are exported" in done.stdout, done.stdout + done.stderr
    assert f"not complete ({manifest['samples']} of 1,234 samples)" in done.stdout
    report = json.loads((config.run.drafter / "report.json").read_text())
    assert len(report["bad_samples"]) == 6 and report["predicted_accept_length"] is None and not report["evals"]
    last = load_file(sorted(config.run.checkpoints.glob("step-*"))[-1] / "tensors.safetensors")
    assert torch.equal(load_file(config.run.drafter / "model.safetensors")["fc.weight"], last["model.fc"])


@pytest.mark.parametrize("name, value, words", [
    ("fc.weight", torch.full((HIDDEN, 3 * HIDDEN), torch.nan), "not finite"), ("d2t", torch.full((40,), 10**6), "d2t names target ids"),
    ("lm_head.weight", torch.zeros(7, HIDDEN), "lm_head.weight is"), ("lm_head.weight", torch.zeros(40, 2 * HIDDEN), "lm_head.weight is"),
])  # fmt: skip
def test_a_bad_drafter_to_begin_from_is_refused(tmp_path: Path, name: str, value: torch.Tensor, words: str) -> None:
    drafter, config = make_drafter(make_shape()), Config(target=Target("none", [1, 2, 3]))
    ids = torch.arange(40)
    export_drafter(tmp_path / "old", drafter, ids, [1, 2, 3], {}, torch.float32, {})
    save_file(load_file(tmp_path / "old" / "model.safetensors") | {name: value}, tmp_path / "old" / "model.safetensors")
    with pytest.raises(UserError, match=words):
        start_from(tmp_path / "old", config, Drafter(make_shape()), torch.zeros(40, HIDDEN), ids)


def test_a_shard_that_vanishes_while_the_held_out_ones_are_looked_for(make_config, monkeypatch) -> None:
    """A trainer that is started again meets an extraction that deletes what was consumed."""
    config = make(make_config, "broken-stream")
    write_run(config)
    names = sorted(path.name for path in config.run.store.glob("shard-*"))
    stream = StreamingStore(config.run.store)
    stream.consume(names[0])
    gone = config.run.store / names[0]
    monkeypatch.setattr("aerie.stream_train.shard_paths", lambda folder: [gone, *(folder / name for name in names[1:])])
    gone.unlink()
    assert len(wait_for_heldout(stream, 6, print)) == 6


def test_tensorboard_files_that_cannot_be_written_end_no_training(tmp_path: Path, monkeypatch, capsys) -> None:
    curves = Curves(tmp_path)

    def full(*words: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(curves.writer, "add_scalar", full)
    for step in range(2):
        curves.add("train", {"step": step, "loss": [1.0, 2.0], "lr": 0.1})
    curves.close()
    assert capsys.readouterr().out.count("no more TensorBoard files (No space left") == 1
