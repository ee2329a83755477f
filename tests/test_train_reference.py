"""Training against the naive reference: loss, every gradient, counts; packing, chunking and checkpointing change nothing."""

from __future__ import annotations

import pytest
import torch

from train_helpers import MLA, YARN, make_drafter, make_fixed, make_sample, make_shape, numbers_of
from train_reference import reference

import aerie.unroll as unroll_module
from aerie import ops, ttt_loss
from aerie.batches import build_batch
from aerie.export import to_names
from aerie.ttt_attention import DocumentLayout
from aerie.unroll import Rope, unroll

MASKS = [
    [0, 0, 0, 1, 1, 1, 1, 1, 0],  # prompt, answer, end
    [0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1],  # two turns, the last cut by the sample's end
    [1, 1, 1, 1, 1],  # starts with the answer: row 0 has no row before it
    [0, 0, 1, 1, 0],  # supervised at step 0 alone
    [0, 1, 0, 1, 0, 1, 0],  # nothing supervised
]


def named_gradients(drafter) -> dict[str, torch.Tensor]:
    """Gradients by SGLang's names: to_names() is linear, so it maps gradients as it maps weights."""
    values = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            parameter.copy_(parameter.grad)
        gradients = {name: value.clone() for name, value in to_names(drafter).items()}
        for name, parameter in drafter.named_parameters():
            parameter.copy_(values[name])
    return gradients


def run(drafter, fixed, samples, dtype=torch.float32):
    drafter.zero_grads()
    batch = build_batch(samples, fixed.steps, dtype)
    loss, counts, drafted = unroll(drafter, batch, fixed, Rope(drafter, torch.device("cpu"), dtype), float(batch.counts[0]))
    loss.backward()
    return loss.detach(), counts, batch


def check(options: dict, steps: int = 4, masks=MASKS, fused: bool = True) -> None:
    shape = make_shape(**options)
    drafter, fixed = make_drafter(shape), make_fixed(shape, steps)
    drafter.set_compute(torch.float32, fused_grads=fused)
    samples = [make_sample(f"{i:016x}", mask, shape, seed=i) for i, mask in enumerate(masks)]
    loss, counts, _ = run(drafter, fixed, samples)
    weights = {name: value.clone().requires_grad_() for name, value in to_names(drafter).items()}
    expected = reference(weights, numbers_of(shape), samples, fixed.embedding, fixed.head.head, fixed.head.draft_ids, steps, fixed.decay)
    expected.loss.backward()
    assert abs(float(loss) - float(expected.loss.detach())) < 1e-5
    assert [one.rows for one in counts] == [count for count in expected.rows if count]
    assert [int(one.correct) for one in counts] == expected.correct[: len(counts)]
    for name, gradient in named_gradients(drafter).items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("options", [{}, {"fc_norm": True}, {"norm_before_fc": True}, {"norm_output": True}, {"num_aux": 2}, {"num_key_value_heads": 4}, MLA, {**MLA, "rope": YARN, "fc_norm": True, "norm_output": True}], ids=str)
def test_loss_and_gradients_equal_the_naive_reference(options):
    check(options)


def test_gradients_through_autograd_are_the_same():
    check({}, fused=False)


@pytest.mark.parametrize("length", range(3, 11))
def test_short_samples_with_seven_steps(length):
    check({}, steps=7, masks=[[0] + [1] * (length - 1), [1] * length])


def test_chunks_change_nothing(monkeypatch):
    monkeypatch.setattr(ttt_loss, "chunk_rows", lambda width, device: 3)
    check({})


def test_packing_and_checkpointing_change_nothing():
    shape = make_shape()
    fixed = make_fixed(shape, 4)
    samples = [make_sample(f"{i:016x}", mask, shape, seed=i) for i, mask in enumerate(MASKS)]
    drafter = make_drafter(shape)
    whole, _, _ = run(drafter, fixed, samples)
    packed = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    fixed.checkpointing = True
    assert torch.equal(run(drafter, fixed, samples)[0], whole)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, packed[name], rtol=1e-5, atol=1e-6)
    fixed.checkpointing = False
    drafter.zero_grads()
    rows = sum(build_batch([sample], 4).counts[0] for sample in samples[:4])
    for sample in samples[:4]:
        unroll(drafter, build_batch([sample], 4), fixed, Rope(drafter, torch.device("cpu"), torch.float32), float(rows))[0].backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.grad, packed[name], rtol=1e-4, atol=1e-6)


def test_attention_by_document_is_the_same(monkeypatch):
    monkeypatch.setattr(unroll_module, "make_layout", DocumentLayout)
    check({})


@pytest.mark.parametrize("options", [{}, {"norm_output": True, "fc_norm": True}, MLA], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_the_drafter_ops_give_the_same_numbers(monkeypatch, options, fused):
    """The way through cuda/ that a GPU takes, with the ops' references in place of their kernels."""
    called = []
    for name in ("drafter_input", "soft_target_ce_", "online_update_"):
        op = getattr(ops.drafter_ops.OPS, name)
        monkeypatch.setattr(ops.drafter_ops.OPS, name, lambda *args, op=op, name=name: called.append(name) or op(*args))
    check(options, fused=fused)
    assert not called
    monkeypatch.setattr(ops, "gpu_kernel", lambda tensor: True)
    check(options, fused=fused)
    assert set(called) == {"drafter_input", "soft_target_ce_", "online_update_"}
