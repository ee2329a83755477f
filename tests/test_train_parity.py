"""The trainer's drafter against SGLang's own class, loaded from the export in a process of its own: the same logits on the same states at TTT steps 0 to 3."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_helpers import MLA, YARN, make_drafter, make_fixed, make_sample, make_shape

from aerie.batches import build_batch
from aerie.export import export_drafter, from_names, read_drafter
from aerie.drafter import Drafter
from aerie.unroll import Rope, unroll

STEPS = 4
HELPER = Path(__file__).with_name("train_sglang.py")


def our_logits(drafter, fixed, sample) -> list[torch.Tensor]:
    """Logits of every row with a next token, by step, through the trainer's unroll (all rows supervised)."""
    caught: list[torch.Tensor] = []
    batch = build_batch([sample], STEPS)
    original = Drafter.after_attention

    def spy(self, state, attended):
        normed, following = original(self, state, attended)
        caught.append(normed @ self.lm_head.T)
        return normed, following

    Drafter.after_attention = spy
    try:
        with torch.no_grad():
            _, counts, _ = unroll(drafter, batch, fixed, Rope(drafter, torch.device("cpu"), torch.float32), 1.0)
    finally:
        Drafter.after_attention = original
    assert len(counts) == STEPS
    ordered = []
    for step, logits in enumerate(caught):
        rows = batch.rows[: batch.counts[step]]
        ordered.append(logits[torch.argsort(rows)])
    return ordered


CASES = {
    "plain": {},
    "fc_norm-norm_output": {"fc_norm": True, "norm_output": True},
    "norm_before_fc-two": {"norm_before_fc": True, "num_aux": 2},
    "llama3-rope": {"rope": {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    "mla": {**MLA, "rope": YARN},
    "mla-fc_norm-norm_output": {**MLA, "rope": YARN, "fc_norm": True, "norm_output": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """SGLang's logits for every case, from one process (importing SGLang takes longest)."""
    root = tmp_path_factory.mktemp("parity")
    for name, options in CASES.items():
        folder = root / name
        shape, drafter, fixed, sample = make_case(options)
        export_drafter(folder / "drafter", drafter, fixed.head.draft_ids, list(range(1, 1 + shape.num_aux)), {}, torch.float32, {})
        save_file({"input_ids": sample.input_ids, "aux": sample.aux, "embedding": fixed.embedding, "steps": torch.tensor(STEPS)}, folder / "states.safetensors")
    done = subprocess.run(
        [sys.executable, str(HELPER), *(str(root / name) for name in CASES)], capture_output=True, text=True, timeout=400,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: load_file(root / name / "logits.safetensors") for name in CASES}


def make_case(options):
    shape = make_shape(**options)
    return shape, make_drafter(shape), make_fixed(shape, STEPS), make_sample("0" * 16, [1] * 24, shape, seed=5)


@pytest.mark.parametrize("name", CASES)
def test_same_logits_as_sglang(name, theirs):
    _, drafter, fixed, sample = make_case(CASES[name])
    assert torch.equal(theirs[name]["hot_token_id"], fixed.head.draft_ids)
    for step, ours in enumerate(our_logits(drafter, fixed, sample)):
        # the last row of SGLang's step has no supervised label, so the trainer leaves it out
        assert len(ours) == len(theirs[name][f"logits_{step}"]) - 1
        torch.testing.assert_close(ours, theirs[name][f"logits_{step}"][: len(ours)], rtol=1e-4, atol=1e-4)


def test_export_read_back_is_the_same(tmp_path):
    shape = make_shape(fc_norm=True)
    drafter = make_drafter(shape)
    export_drafter(tmp_path / "d", drafter, torch.arange(shape.draft_vocab_size), [1, 2, 3], {}, torch.float32, {})
    again = make_drafter(shape, seed=9)
    config, tensors = read_drafter(tmp_path / "d")
    from_names(again, tensors, "there")
    assert config["tie_word_embeddings"] is False
    for (name, a), (_, b) in zip(drafter.named_parameters(), again.named_parameters()):
        assert torch.equal(a, b), name
