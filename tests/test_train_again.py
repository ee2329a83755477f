"""A second training of a run with another config: make all does not take its drafter for its own, and what the first one made is kept until it is set back."""

from __future__ import annotations

import json
import shutil

import pytest
from aerie import earlier
from aerie.belongs import deciding, differences, fingerprint, other_training, recorded
from aerie.checkpoints import last_checkpoint
from aerie.config import load_config
from aerie.errors import UserError
from aerie.pipeline import APART, Pipeline
from aerie.report import write_json
from aerie.store import read_manifest
from aerie.vocab import load_vocab_map
from safetensors.torch import load_file
from test_train_script import make
from train_runs import train, write_run

ANOTHER = ("--set", "train.epochs=1", "--set", "train.ttt_steps=2")


def drafter_of(config) -> tuple[bytes, str]:
    return (config.run.drafter / "model.safetensors").read_bytes(), json.loads((config.run.drafter / "training.json").read_text())["fingerprint"]


@pytest.fixture
def trained(make_config, request):
    """A run whose train step is done, as `make all` marks it."""
    config = make(make_config, "again-" + request.node.name.removeprefix("test_")[:30], train={"epochs": 2})
    write_run(config, samples=8)
    write_json(config.run.store / "report.json", {})
    done = train(config)
    assert done.returncode == 0, done.stderr
    pipeline = Pipeline(config, [])
    write_json(pipeline.marker, {"train": pipeline.fingerprint(APART[-1])})
    assert pipeline.is_done(APART[-1])
    return config


def test_the_drafter_of_another_config_is_not_the_pipelines_and_the_first_comes_back(trained, capfd):
    pipeline, step = Pipeline(trained, []), APART[-1]
    weights, own = drafter_of(trained)
    before = load_file(last_checkpoint(trained.run.checkpoints) / "tensors.safetensors")
    done = train(trained, *ANOTHER)
    assert done.returncode == 0, done.stderr
    assert "is of another training: train.ttt_steps 3, now 2; train.epochs 2, now 1; the checkpoints that were there are kept in" in done.stdout
    kept = trained.run.earlier / own
    assert f"are kept in {kept / 'checkpoints'}" in done.stdout and f"it is kept in {kept / 'drafter'}" in done.stdout
    assert (kept / "drafter" / "model.safetensors").read_bytes() == weights and (kept / "drafter" / "report.json").is_file()
    assert json.loads((trained.run.drafter / "report.json").read_text())["epochs"] == 1 and drafter_of(trained)[1] != own
    why = pipeline.not_done(step)
    assert why and "is of another training" in why and "train.epochs 1, now 2" in why and "samples" not in why
    capfd.readouterr()
    pipeline.run(["train"])
    said = capfd.readouterr().out
    assert said.startswith(f"== 1/1 train: {why}\n") and "the config is set back" in said and "is made again from" in said, said
    after = load_file(last_checkpoint(trained.run.checkpoints) / "tensors.safetensors")
    assert drafter_of(trained) == (weights, own) and pipeline.is_done(step) and all((after[name] == value).all() for name, value in before.items())
    (trained.run.drafter / "training.json").write_text("{")
    assert "cannot be told" in pipeline.not_done(step)
    shutil.rmtree(trained.run.drafter)
    assert not pipeline.is_done(step)


def test_another_store_is_named_and_keys_that_decide_nothing_are_not(trained):
    shutil.rmtree(trained.run.store)
    write_run(trained, samples=9)
    write_json(trained.run.store / "report.json", {})  # the same bytes: the marker alone does not tell
    assert Pipeline(trained, []).not_done(APART[-1]).endswith("the samples of the store")
    done = train(trained, "--resume")
    assert done.returncode == 2 and "nothing to resume" in done.stderr and "the samples of the store" in done.stderr
    configs = [load_config(str(trained.path), trained.run.name, changes) for changes in ([], ["train.checkpoint_every=7", "train.gpus=[0,1]"])]
    one, two = (recorded(deciding(config, {}, ["a"], world)) for config, world in zip(configs, (2, 2)))
    assert one == two and differences(one, recorded(deciding(configs[0], {}, ["a"]))) == "train.accumulate x processes 2, now 1"
    assert "does not say which keys" in differences(None, one)


def test_a_drafter_of_a_stream_is_known_by_its_data_when_the_shards_are_gone(trained):
    vocab = load_vocab_map(trained.run.data / "vocab_map.safetensors", read_manifest(trained.run.store)["tokenizer_hash"], 512, 128).metadata
    manifest, training = trained.run.store / "manifest.json", trained.run.drafter / "training.json"
    write_json(manifest, json.loads(manifest.read_text()) | {"data_hash": "abc"})
    write_json(training, json.loads(training.read_text()) | {"fingerprint": fingerprint(deciding(trained, vocab, "abc"))})
    for shard in trained.run.store.glob("shard-*"):
        shard.unlink()
    assert other_training(trained) == ""
    write_json(manifest, json.loads(manifest.read_text()) | {"data_hash": "abd"})
    assert "is of another training" in other_training(trained)


def test_nothing_is_removed_before_the_new_training_has_a_checkpoint(trained, monkeypatch, capsys):
    run, (_, own) = trained.run, drafter_of(trained)
    assert train(trained, *ANOTHER).returncode == 0
    second = drafter_of(trained)[1]
    state = last_checkpoint(run.checkpoints).name
    kept = earlier.set_aside(run)
    assert kept == run.earlier / second / "checkpoints"  # as a third training does, which then dies
    assert {path.parent.name for path in run.earlier.glob("*/checkpoints")} == {own, second}
    assert (kept / state).is_dir() and f"one generation is kept: {run.earlier / own / 'checkpoints'} goes when this" in earlier.about_kept(run, kept)
    assert train(trained, "--fresh").returncode == 0
    (kept,) = run.earlier.glob("*/checkpoints")  # one generation
    assert last_checkpoint(kept)
    monkeypatch.setattr(earlier.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(UserError, match="which would be kept; .*--fresh"):
        earlier.make_space(run, 4, fresh=False)
    assert last_checkpoint(run.checkpoints) and last_checkpoint(kept)
    earlier.make_space(run, 3, fresh=False)
    earlier.make_space(run, 4, fresh=True)
    assert "are removed, not kept" in capsys.readouterr().out and not run.checkpoints.exists() and not kept.exists()


def test_fresh_hides_its_own_checkpoints_alone(trained):
    run, (_, own) = trained.run, drafter_of(trained)
    assert earlier.set_aside(run, "anothertraining") == run.earlier / own / "checkpoints" and earlier.take_back(run, own)
    assert earlier.set_aside(run, own) == run.earlier / f"{own}-before-fresh" / "checkpoints" and not earlier.take_back(run, own)
