"""Extraction and training at once: every sample is read, though the store never is whole; either end may be killed."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time

import pytest
from aerie.errors import UserError
from extract_tools import ROOT, fake_run  # noqa: F401  (a fixture)
from fake_dump_server import known_states


def stream_module():
    spec = importlib.util.spec_from_file_location("run_stream", ROOT / "scripts" / "run_stream.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_stream"] = module
    spec.loader.exec_module(module)
    return module


def streamed(run, die_every: int, kill_extraction_after: float = 0.0):
    """watch() over 02b and the stand-in trainer; the samples that the trainer read, and the largest size of the store it saw."""
    module = stream_module()
    log = run.folder / "trained.log"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in run.env.items():
            patch.setenv(name, value)
        extract = module.End("extraction", run.command())
        train = module.End("training", [sys.executable, str(ROOT / "tests" / "stream_reader.py"), str(run.store_path), str(log), str(die_every)])
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
    run = fake_run(samples=150, heldout=4, extract={"keep_gb": KEEP, "shard_gb": 2e-4, "max_in_flight": 4})
    run.start_server()
    seen, largest, _ = streamed(run, die_every=0)
    check_streamed(run, seen, largest, int(KEEP * 1e9))
    assert run.report()["samples"] == 154
    assert {path.name for path in run.store_path.glob("shard-*")} >= {"shard-000000.safetensors"}  # the held-out shard stays for evaluation


@pytest.mark.slow
def test_either_end_may_die_and_come_back(fake_run):
    run = fake_run(samples=150, heldout=4, extract={"keep_gb": KEEP, "shard_gb": 2e-4, "max_in_flight": 4})
    run.start_server()
    seen, largest, ends = streamed(run, die_every=4, kill_extraction_after=0.1)
    assert ends[0].restarts >= 1 and ends[1].restarts >= 1
    check_streamed(run, seen, largest, int(KEEP * 1e9))


def test_more_epochs_than_the_folder_can_serve_are_refused(fake_run, monkeypatch):
    run = fake_run(extract={"keep_gb": 1e-4})
    module = stream_module()
    monkeypatch.setenv("AERIE_RUNS_DIR", str(run.runs))
    monkeypatch.setattr(sys, "argv", ["run_stream.py", "--config", str(run.config_path), "--run", run.name])
    with pytest.raises(UserError, match="train.epochs = 1"):
        module.main()
