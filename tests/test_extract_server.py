"""02b against the real patched server on the tiny DeepSeek-V3: chunked prompts, several in flight, proof of final by the server's own answers."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from aerie.identity import tokenizer_hash
from aerie.samples import write_samples
from aerie.store import Store
from extract_tools import RunOf, make_samples

pytestmark = pytest.mark.server


def test_extract_from_the_real_server(capture_server):
    config = capture_server.config
    samples = make_samples(24, seed=5, longest=400, vocab=500)
    meta = {"tokenizer_hash": tokenizer_hash(config.model_path), "template_hash": "t", "mask_rule": "r"}
    write_samples(config.run.data / "train.safetensors", samples[4:], meta)
    write_samples(config.run.data / "heldout.safetensors", samples[:4], meta)
    code, out, err = RunOf(config).extract_here("--set", "extract.proof_samples=24")
    assert code == 0, err
    assert "done 24 + failed 0 + skipped 0 = 24 samples" in out
    report = json.loads((config.run.store / "report.json").read_text())
    assert report["proof"]["samples"] == 24 and report["proof"]["equal"] == report["proof"]["compared"] > 1000
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
