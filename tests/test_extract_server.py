"""02b against the real patched server on the tiny DeepSeek-V3: chunked prompts, several in flight, proof of final by the server's own answers."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from aerie.config import load_config
from aerie.identity import tokenizer_hash
from aerie.samples import write_samples
from aerie.servers import dump_dir
from aerie.store import Store
from extract_tools import RunOf, make_samples

pytestmark = pytest.mark.server


def test_extract_from_the_real_server(capture_server):
    shared = capture_server.config
    config = load_config(str(shared.path), "extract-real")  # a run of its own against the shared server
    samples = make_samples(24, seed=5, longest=400, vocab=500)
    write_data(config, samples, 4)
    overrides = ["extract.proof_samples=24", f'server.urls=["{capture_server.url}"]', f'server.dump_dir="{dump_dir(shared)}"']
    code, out, err = RunOf(config).extract_here(*(word for text in overrides for word in ("--set", text)))
    assert code == 0, err
    assert "done 24 + failed 0 + skipped 0 = 24 samples" in out
    report = json.loads((config.run.store / "report.json").read_text())
    assert report["proof"]["samples"] == 24 and report["proof"]["compared"] > 1000
    assert report["proof"]["equal"] >= 0.999 * report["proof"]["compared"]  # float32: a near-tie may fall the other way
    assert report["retries"] == 0 and report["peak_requests_in_flight"] > 1
    store = Store.open(config.run.store)
    assert store.verify() == [] and sorted(store.ids) == sorted(sample.id for sample in samples)
    assert store.manifest["capture_points"] == [2, 3, 5] and store.manifest["aux_layer_ids"] == [2, 3, 5] and int(store.heldout.sum()) == 4
    assert max(store.lengths) > 256  # a prompt in chunks
    by_id = {sample.id: sample for sample in samples}
    for index in range(len(store)):
        got = store.get(index)
        assert np.array_equal(got.input_ids.numpy(), by_id[got.id].input_ids)
        assert got.aux.shape == (len(got.input_ids), 3 * 64) and float(got.aux.abs().max()) > 0 and torch.isfinite(got.aux).all()
        states = got.aux.view(-1, 3, 64)
        assert not torch.equal(states[:, 0], states[:, 1]) and not torch.equal(states[:, 1], states[:, 2])


def write_data(config, samples, heldout: int) -> None:
    meta = {"tokenizer_hash": tokenizer_hash(config.model_path), "template_hash": "t", "mask_rule": "r"}
    write_samples(config.run.data / "train.safetensors", samples[heldout:], meta)
    write_samples(config.run.data / "heldout.safetensors", samples[:heldout], meta)


@pytest.mark.slow
def test_the_real_server_killed_in_mid_prefill_and_fp8(make_config, start_server):
    """kill -9 of every process of the server while prefills run; it is started again and the run goes on. In fp8, against the same samples in float32,

    of which the process that writes the dumps is killed alone: the server starts another one."""
    samples = make_samples(60, seed=6, longest=400, shortest=100, vocab=500)
    stores = {}
    for dtype in ("model", "fp8"):
        options = {"dtype": dtype, "max_in_flight": 8, "shard_gb": 2e-4}
        config = make_config("deepseek_v3", f"kill-{dtype}", server={"args": {"chunked-prefill-size": 256}}, extract=options)
        write_data(config, samples, 4)
        server = start_server(config, "extraction")
        done = {}
        worker = threading.Thread(target=lambda config=config: done.update(result=RunOf(config).extract_in_a_process()))
        worker.start()
        deadline = time.monotonic() + 120
        while not list(config.run.store.glob("shard-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        if dtype == "model":
            writers = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if b"hidden_state_dump.py" in path.read_bytes() and os.getpgid(int(path.parent.name)) == server.record["pid"]]
            assert len(writers) == 1
            os.kill(writers[0], signal.SIGKILL)
        else:
            os.killpg(server.record["pid"], signal.SIGKILL)
            server.process.wait()
            server = start_server(config, "extraction")
        worker.join()
        code, out, err = done["result"]
        assert code == 0, err
        assert "done 60 + failed 0 + skipped 0 = 60 samples" in out
        report = json.loads((config.run.store / "report.json").read_text())
        assert report["server_losses"] == (1 if dtype == "fp8" else 0)
        server.stop()
        stores[dtype] = Store.open(config.run.store)
        assert stores[dtype].verify() == [] and len(stores[dtype]) == 60
    exact, rough = stores["model"], stores["fp8"]
    assert exact.manifest["dtype"] == "float32" and rough.manifest["dtype"] == "fp8"
    places = {sample: index for index, sample in enumerate(exact.ids)}
    for index in range(60):
        a, b = exact.get(places[rough.ids[index]]), rough.get(index)
        for mine, theirs in ((b.aux_float(), a.aux_float()), (b.final_float(), a.final_float())):
            assert float((mine - theirs).norm() / theirs.norm()) < 0.04  # e4m3 has a 3-bit mantissa: at most 1/16 a value
    assert rough.bytes < exact.bytes / 3
