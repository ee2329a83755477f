"""Where a drafter begins: a fit to the states that already drafts, the target's own layer, an existing drafter with another vocabulary."""

from __future__ import annotations

import pytest
import torch
from aerie import ttt_loss
from aerie.batches import Reader, pack
from aerie.config import Config, Target, Train
from aerie.drafter import Drafter
from aerie.drafter_fit import fit_drafter
from aerie.drafter_init import start_from
from aerie.errors import UserError
from aerie.evaluate import evaluate
from aerie.export import export_drafter, to_names
from aerie.unroll import Rope
from train_helpers import HIDDEN, FakeSample, FakeStore, make_drafter, make_fixed, make_shape

RULE = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(7))).Q


def linear_world(fixed, count: int, length: int = 40) -> FakeStore:
    """Samples whose next state is a fixed mix of the state and the token read, and whose text is what the target's head says of the state."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for number in range(count):
        state = 5 * torch.randn(HIDDEN, generator=generator)
        ids, states = [int(torch.randint(0, len(fixed.head.head), (1,), generator=generator))], []
        for _ in range(length):
            state = 0.6 * RULE @ state + 2.0 * fixed.embedding[ids[-1]]
            states.append(state)
            ids.append(int(fixed.head.draft_ids[(fixed.head.draft_head @ state).argmax()]))
        x = torch.stack(states)
        mask = torch.ones(length, dtype=torch.uint8)
        mask[:5] = 0
        samples.append(FakeSample(f"{number:016x}", torch.tensor(ids[:length], dtype=torch.int32), mask, torch.cat([0.1 * x, x.flip(1), x], dim=-1), x))
    return FakeStore(samples)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_fit_drafts_before_any_training(kv_heads):
    shape = make_shape(num_key_value_heads=kv_heads)
    fixed = make_fixed(shape, 3)
    store = linear_world(fixed, 60)
    drafter = make_drafter(shape)
    assert fit_drafter(drafter, store.samples[:50], fixed.embedding, fixed.head.draft_head, torch.Generator().manual_seed(0))
    drafter.set_compute(torch.float32)
    found = evaluate(drafter, store, Reader(store, 3, 0), pack(range(50, 60), store.lengths, 400), fixed, Rope(drafter, torch.device("cpu"), torch.float32), 3)
    plain = evaluate(make_drafter(shape), store, Reader(store, 3, 0), pack(range(50, 60), store.lengths, 400), fixed, Rope(drafter, torch.device("cpu"), torch.float32), 3)
    assert found["predicted_accept_length"] > plain["predicted_accept_length"] + 0.5, (found["accuracy"], plain["accuracy"])


def test_evaluation_makes_no_gradients(monkeypatch):
    """Parameters want gradients under no_grad too: the kernel of the loss, which gives no top tokens, must not run, and nothing may be added to .grad."""
    shape = make_shape()
    fixed, drafter = make_fixed(shape, 3), make_drafter(shape)
    store = linear_world(fixed, 6)
    drafter.zero_grads()
    arguments = (store, Reader(store, 3, 0), pack(range(6), store.lengths, 400), fixed, Rope(drafter, torch.device("cpu"), torch.float32), 3)
    before = evaluate(drafter, *arguments)
    monkeypatch.setattr(ttt_loss.ops, "gpu_kernel", lambda tensor: True)  # the op's own reference runs on the CPU
    found = evaluate(drafter, *arguments)
    assert found["predicted_accept_length"] == before["predicted_accept_length"] and found["accuracy"] == before["accuracy"]
    assert not any(parameter.grad.any() for parameter in drafter.parameters() if parameter.grad is not None)


def test_the_fit_refuses_what_it_cannot_do():
    for options in ({"fc_norm": True}, {"norm_output": True}):
        drafter = make_drafter(make_shape(**options))
        before = {name: value.clone() for name, value in drafter.named_parameters()}
        assert not fit_drafter(drafter, [], torch.zeros(4, HIDDEN), torch.zeros(4, HIDDEN), torch.Generator())
        assert all(torch.equal(value, before[name]) for name, value in drafter.named_parameters())


def test_starting_from_a_drafter_with_another_vocabulary(tmp_path):
    shape = make_shape()
    old, new = make_drafter(shape, seed=1), Drafter(shape)
    theirs = torch.arange(0, 2 * shape.draft_vocab_size, 2)
    ours = torch.arange(shape.draft_vocab_size)
    export_drafter(tmp_path / "old", old, theirs, [1, 2, 3], {}, torch.float32, {})
    head = torch.full((shape.draft_vocab_size, HIDDEN), 9.0)
    config = Config(target=Target("none", [1, 2, 3]), train=Train())
    assert f"{shape.draft_vocab_size // 2} of {shape.draft_vocab_size}" in start_from(tmp_path / "old", config, new, head, ours)
    for row in range(shape.draft_vocab_size):
        wanted = old.lm_head[row // 2] if row % 2 == 0 else head[row]
        assert torch.equal(new.lm_head[row], wanted)
    for name, value in to_names(new).items():
        if name != "lm_head.weight":
            assert torch.equal(value, to_names(old)[name]), name
    with pytest.raises(UserError, match="aux_layer_ids"):
        start_from(tmp_path / "old", Config(target=Target("none", [1, 2, 4])), new, head, ours)
    with pytest.raises(UserError, match="gate_proj|set \\[draft\\]"):
        start_from(tmp_path / "old", config, Drafter(make_shape(intermediate_size=64)), head, ours)


