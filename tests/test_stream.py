"""Extraction and training at once: every sample is read, though the store never is whole; either end may be killed."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from aerie.errors import UserError
from aerie.identity import tokenizer_hash
from aerie.store import Store
from aerie.vocab import write_vocab_map
from extract_tools import ROOT, children_named, fake_run  # noqa: F401  (a fixture)
from fake_dump_server import known_states


def stream_module():
    spec = importlib.util.spec_from_file_location("run_stream", ROOT / "scripts" / "run_stream.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_stream"] = module
    spec.loader.exec_module(module)
    return module


def streamed(run, die_every: int, kill_extraction_after: float = 0.0, pause: float = 0.05):
    """watch() over 02b and the stand-in trainer; the samples that the trainer read, and the largest size of the store it saw."""
    module = stream_module()
    log = run.folder / "trained.log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in run.env.items():
            patch.setenv(name, value)
        extract = module.End("extraction", run.command())
        train = module.End("training", [sys.executable, str(ROOT / "tests" / "stream_reader.py"), str(run.store_path), str(log), str(die_every), str(pause)])
        if kill_extraction_after:

            def kill() -> None:
                while not (run.store_path / "consumed.log").exists():
                    time.sleep(0.05)
                extract.process.kill()

            threading.Thread(target=kill, daemon=True).start()
        patch.setattr(module, "PAUSE_S", 0.1)
        code = module.watch([extract, train])
    assert code == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    return {sample: (int(heldout), float(total)) for sample, heldout, total, _ in lines}, max(int(size) for *_, size in lines), (extract, train)


def check_streamed(run, seen, largest, keep: int) -> None:
    by_id = {sample.id: sample for sample in run.train + run.heldout}
    assert sorted(seen) == sorted(by_id)
    for sample, (heldout, total) in seen.items():
        assert heldout == int(any(sample == held.id for held in run.heldout))
        assert total == round(float(sum(known_states(by_id[sample].input_ids, layer, 64).sum(dtype="f8") for layer in range(3))))
    whole = sum(len(sample.input_ids) for sample in by_id.values()) * 3 * 64 * 4
    assert largest < whole / 2 and largest <= keep * 1.2, (largest, whole, keep)


KEEP = 1.6e-3  # GB


def test_the_store_passes_through_a_small_folder(fake_run):
    run = fake_run(samples=150, heldout=4, extract={"keep_gb": KEEP, "shard_gb": 2e-4, "max_in_flight": 4, "request_timeout_s": 60.0})
    run.start_server()
    seen, largest, _ = streamed(run, die_every=0)
    check_streamed(run, seen, largest, int(KEEP * 1e9))
    assert run.report()["samples"] == 154
    left = Store.open(run.store_path)  # the shards with held-out samples stay for evaluation, whatever their numbers
    assert sorted(sample for sample, heldout in zip(left.ids, left.heldout, strict=True) if heldout) == sorted(sample.id for sample in run.heldout)


def test_a_store_that_stays_full_is_no_lost_server(fake_run, capfd):
    """While the store is full nothing is sent; the server closes connections that idle, SGLang's after five seconds, and that costs nothing."""
    run = fake_run(samples=40, heldout=4, extract={"keep_gb": KEEP / 2, "shard_gb": 2e-4, "max_in_flight": 4, "request_timeout_s": 60.0})
    run.start_server("--idle-s", "0.2")
    seen, _, ends = streamed(run, die_every=0, pause=0.5)
    assert len(seen) == 44 and ends[0].restarts == 0
    report = run.report()
    assert report["server_losses"] == report["retries"] == 0
    assert "waiting for it" not in capfd.readouterr().out


@pytest.mark.slow
def test_either_end_may_die_and_come_back(fake_run):
    run = fake_run(samples=150, heldout=4, extract={"keep_gb": KEEP, "shard_gb": 2e-4, "max_in_flight": 4})
    run.start_server()
    seen, largest, ends = streamed(run, die_every=4, kill_extraction_after=0.1)
    assert ends[0].restarts >= 1 and ends[1].restarts >= 1
    check_streamed(run, seen, largest, int(KEEP * 1e9))


@pytest.mark.slow
def test_make_stream_with_the_real_trainer(fake_run):
    """run_stream.py as a user starts it: 02b and 03_train at once, the trainer killed on the way; the drafter is there and the store never was whole."""
    run = fake_run(samples=150, heldout=8, extract={"keep_gb": KEEP, "shard_gb": 2e-4, "max_in_flight": 4})
    run.start_server("--tok-s", "800")
    metadata = {"tokenizer_hash": tokenizer_hash(run.model), "data_hash": "", "coverage": "1"}
    write_vocab_map(run.root / "data" / "vocab_map.safetensors", np.arange(64), 512, metadata)
    options = ["epochs=1", "ttt_steps=3", "batch_tokens=256", "lr=1e-3", "checkpoint_every=4", "dtype=float32"]
    options = [f"train.{option}" for option in options] + ["draft.vocab_size=64"]
    command = [sys.executable, str(ROOT / "scripts" / "run_stream.py"), "--config", str(run.config_path), "--run", run.name]
    command += [word for option in options for word in ("--set", option)]
    process = subprocess.Popen(command, env=run.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    largest, killed = 0, False
    while process.poll() is None:
        with contextlib.suppress(FileNotFoundError):  # the trainer has just done with it
            largest = max(largest, sum(file.stat().st_size for file in run.store_path.glob("shard-*")))
        if not killed and (run.store_path / "consumed.log").exists():
            for trainer in children_named(process.pid, "03_train.py"):
                os.kill(trainer, signal.SIGKILL)
                killed = True
        time.sleep(0.05)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert killed and "starting it again" in output and "resumed from" in output, output
    whole = sum(len(sample.input_ids) for sample in run.train + run.heldout) * 3 * 64 * 4
    assert largest < whole / 2 and largest <= KEEP * 1.2e9
    report = json.loads((run.root / "drafter" / "report.json").read_text())
    assert report["samples"] == 150 and report["predicted_accept_length"] >= 1.0 and (run.root / "drafter" / "model.safetensors").is_file()
    manifest = json.loads((run.store_path / "manifest.json").read_text())
    assert manifest["complete"] and manifest["done"] == 158
    consumed = (run.store_path / "consumed.log").read_text().split()
    assert len(consumed) == len(set(consumed)) >= 8


def still_runs(pid: int) -> bool:
    """Whether it is there and no zombie (whose command line is empty)."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_both_ends(fake_run, number):
    """As `kill`, a batch system or a kernel short of memory sends it: nobody goes on alone and holds the store's lock."""
    run = fake_run(samples=150, extract={"keep_gb": KEEP, "shard_gb": 2e-4, "max_in_flight": 4})
    run.start_server("--tok-s", "500")
    command = [sys.executable, str(ROOT / "scripts" / "run_stream.py"), "--config", str(run.config_path), "--run", run.name, "--set", "train.epochs=1"]
    process = subprocess.Popen(command, env=run.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 60
    while not list(run.store_path.glob("shard-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    ends = children_named(process.pid, "scripts/")
    assert len(ends) == 2
    process.send_signal(number)
    output = process.communicate(timeout=90)[0]  # until the last of them has closed it
    assert process.returncode == (130 if number == signal.SIGTERM else -signal.SIGKILL)
    assert "Traceback" not in output, output
    deadline = time.monotonic() + 60
    while (alive := [end for end in ends if still_runs(end)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive


def test_more_epochs_than_the_folder_can_serve_are_refused(fake_run, monkeypatch):
    run = fake_run(extract={"keep_gb": 1e-4})
    module = stream_module()
    monkeypatch.setenv("AERIE_RUNS_DIR", str(run.runs))
    monkeypatch.setattr(sys, "argv", ["run_stream.py", "--config", str(run.config_path), "--run", run.name])
    with pytest.raises(UserError, match="train.epochs = 1"):
        module.main()


@pytest.mark.parametrize(("settled", "code"), [(0.0, 0), (600.0, 1)])
def test_restarts_count_in_a_row(tmp_path, monkeypatch, settled, code):
    """Seven deaths are too many in a row, and none too many for an end that ran for long in between."""
    module = stream_module()
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setattr(module, "SETTLED_S", settled)
    log = tmp_path / "deaths"
    script = 'f=$1; n=$(cat "$f" 2>/dev/null | wc -c); [ "$n" -ge 7 ] && exit 0; printf x >>"$f"; kill -9 $$'
    assert module.watch([module.End("training", ["sh", "-c", script, "sh", str(log)])]) == code
    assert log.stat().st_size == (7 if code == 0 else 1 + module.RESTARTS)
