"""The rules of training on small examples written by hand: alignment, packing, the walk, the draft vocabulary's misses, what a target's weights are called."""

from __future__ import annotations

import errno
import json
import os

import numpy as np
import pytest
import torch
from aerie.batches import BadSample, build_batch, epoch_order, pack, supervised_depth
from aerie.checkpoints import last_checkpoint, one_training, read_state, write_checkpoint
from aerie.config import Train
from aerie.curves import warnings_of
from aerie.errors import UserError
from aerie.ops import choose_kernels, drafter_ops
from aerie.paths import RunPaths
from aerie.store import StoredSample
from aerie.target_weights import TargetWeights
from aerie.trainer import Trainer, learning_rate, make_plan
from aerie.walk import Walked, answer_runs, as_text, first_tokens, gains, walk
from safetensors.torch import save_file
from train_helpers import HIDDEN, FakeStore, make_drafter, make_fixed, make_sample, make_shape

# Eight tokens: 3 of the prompt, 3 of the answer (the end of turn included), 2 of the next user turn.
TOKENS = [10, 11, 12, 20, 21, 22, 30, 31]
MASK = [0, 0, 0, 1, 1, 1, 0, 0]


def test_alignment_row_by_row():
    """Row t reads aux[t] and token[t+1], is taught by final[t+1], and counts while token[t+1] .. token[t+2+k] are the assistant's.

    t   reads   predicts   taught by   steps
    0   11      12         final[1]    none: 11 and 12 are the prompt's
    1   12      20         final[2]    none: the target itself gives the answer's first token
    2   20      21         final[3]    0 (20, 21), and 1 (20, 21, 22): reads 21, predicts 22, taught by final[4]
    3   21      22         final[4]    0
    4   22      30         final[5]    none: 30 is the user's
    5   30 ..                          none
    """
    assert supervised_depth(np.array(MASK), 3).tolist() == [0, 0, 2, 1, 0, 0, 0, 0]
    sample = make_sample("a" * 16, MASK, make_shape(), seed=0)
    sample.input_ids = torch.tensor(TOKENS, dtype=torch.int32)
    batch = build_batch([sample], 3)
    assert batch.rows.tolist() == [2, 3] and batch.counts == [2, 1, 0]
    assert batch.next_ids.tolist() == [11, 12, 20, 21]  # rows 0 to 3: later ones are nobody's key
    assert batch.text_ids[batch.rows].tolist() == [21, 22]
    assert torch.equal(batch.final, sample.final_all[[3, 4]])
    assert torch.equal(batch.aux, sample.aux[:4])
    assert batch.labels(0).tolist() == [0, 1] and batch.labels(1).tolist() == [1]  # row 2 at step 1 is taught what row 3 is at step 0


@pytest.mark.parametrize("mask, depth", [
    ([1] * 5, [3, 3, 2, 1, 0][1:] + [0]), ([0, 1], [0, 0]), ([1], [0]), ([], []), ([0, 1, 1], [1, 0, 0]), ([0, 1, 0, 1, 1, 1], [0, 0, 2, 1, 0, 0]),
])  # fmt: skip
def test_depth_at_edges(mask, depth):
    assert supervised_depth(np.array(mask, dtype=np.uint8), 3).tolist() == depth


def test_documents_do_not_touch_and_empty_ones_are_left_out():
    shape = make_shape()
    samples = [make_sample(f"{i:016x}", mask, shape, seed=i) for i, mask in enumerate(([0, 0, 1, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1, 1, 1]))]
    batch = build_batch(samples, 7)
    assert batch.sample_ids == [samples[0].id, samples[2].id] and batch.offsets.tolist() == [0, 3, 7]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3] and sorted(batch.rows.tolist()) == [1, 2, 3, 4, 5, 6]
    assert batch.tokens == 15  # all that was read
    assert build_batch(samples[1:2], 7) is None


def test_bad_samples_are_named():
    sample = make_sample("b" * 16, [0, 0, 1, 1, 1, 1], make_shape(), seed=0)
    sample.aux[2, 5] = float("inf")
    with pytest.raises(BadSample, match="b{16}.*aux"):
        build_batch([sample], 3)


def in_fp8(name: str, mask: list[int], seed: int):
    """A sample whose states are rows of e4m3, as an fp8 store gives them."""
    sample = make_sample(name, mask, make_shape(), seed)
    rows, scale = drafter_ops.quantize_rows_fp8(sample.aux.view(-1, HIDDEN))
    final, final_scale = drafter_ops.quantize_rows_fp8(sample.final)
    return StoredSample(name, False, sample.input_ids, sample.loss_mask, rows.view(len(mask), -1), final, sample.final_rows, scale.view(len(mask), -1), final_scale)


def test_fp8_rows_become_floats_on_the_device():
    """Beside a GPU the batch keeps the bytes and to() makes floats of them: the same as when the reader does it."""
    samples = [in_fp8(f"{i:016x}", mask, i) for i, mask in enumerate(([0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1]))]
    kept, plain = build_batch(samples, 4, torch.bfloat16, keep_fp8=True), build_batch(samples, 4, torch.bfloat16)
    assert kept.aux.dtype == torch.uint8 and kept.aux.nbytes * 2 == plain.aux.nbytes
    moved = kept.to(torch.device("cpu"), torch.bfloat16)
    for name in ("aux", "final", "rows", "next_ids", "row_of"):
        assert torch.equal(getattr(moved, name), getattr(plain, name)), name
    assert moved.aux_scale is None and moved.counts == plain.counts


@pytest.mark.parametrize("spoil", [lambda s: s.aux_scale[3].fill_(torch.nan), lambda s: s.final_scale[1].fill_(torch.inf), lambda s: s.aux.view(torch.uint8)[2, 7].fill_(0xFF)])
def test_bad_fp8_samples_are_named(spoil):
    sample = in_fp8("c" * 16, [0, 0, 1, 1, 1, 1], 0)
    spoil(sample)
    for keep in (True, False):
        with pytest.raises(BadSample, match="c{16}.*not finite"):
            build_batch([sample], 3, keep_fp8=keep)


def test_kernels_that_cannot_run_are_refused_where_they_must(monkeypatch):
    cpu = torch.device("cpu")
    assert choose_kernels("auto", cpu) == (False, "PyTorch alone")
    with pytest.raises(UserError, match="train.kernels = 'on', but the device is a CPU"):
        choose_kernels("on", cpu)
    monkeypatch.setattr(drafter_ops, "status", lambda: "the library is missing")
    with pytest.raises(UserError, match="the library is missing"):
        choose_kernels("on", torch.device("cuda"))
    monkeypatch.setenv("AERIE_DRAFTER_OPS", "")
    assert choose_kernels("off", torch.device("cuda")) == (False, "PyTorch alone")
    assert drafter_ops.has_kernel(torch.zeros(1), torch.float32) is False


def test_order_and_packing_are_the_same_again_and_whole():
    lengths = np.array([5, 9, 3, 40, 7, 1])
    assert sorted(epoch_order(6, 0, 0)) == list(range(6)) and epoch_order(6, 0, 0).tolist() == epoch_order(6, 0, 0).tolist()
    assert any(epoch_order(6, 0, 0).tolist() != epoch_order(6, 0, epoch).tolist() for epoch in range(1, 4))
    batches = pack(range(6), lengths, 12)
    assert [index for batch in batches for index in batch] == list(range(6))
    assert all(lengths[batch].sum() <= 12 or len(batch) == 1 for batch in batches)
    plan = make_plan(Train(epochs=3, batch_tokens=12, accumulate=2), np.arange(6), lengths)
    read = [index for step in plan.steps[: plan.epoch_ends[0]] for batch in step for index in batch]
    assert sorted(read) == list(range(6)) and len(plan.epoch_ends) == 3


def test_schedule():
    train = Train(lr=1.0, min_lr_ratio=0.1, warmup_ratio=0.1)
    rates = [learning_rate(train, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == 1.0 and rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:]))


def test_walk_by_hand():
    """Prompt rows 0..2, answer tokens 3..12 (10 of them): prefill gives token 3; 9 are left.

    Row 2 accepts 2: tokens 4, 5, and the target's own 6. Row 5 accepts 0: token 7. Row 6 accepts 3: 8, 9, 10 and 11. Row 10 accepts 3, but one token is left.
    """
    mask = [0, 0, 0] + [1] * 10 + [0]
    accepted = [9, 9, 2, 9, 9, 0, 3, 9, 9, 9, 3, 9, 9, 9]
    walked = walk(np.array(mask), accepted)
    assert (walked.tokens, walked.verifications) == (9, 4) and walked.accept_length == 9 / 4
    assert answer_runs(np.array([1, 1, 0, 1])) == [(0, 2), (3, 4)]
    assert walk(np.array([0, 1, 0]), [3, 3, 3]) == Walked(0, 0)  # an answer of one token is prefill's
    assert walk(np.array([0, 1, 1, 0, 1, 1]), [0] * 6) == Walked(2, 2)  # two turns


def test_the_walk_of_the_first_tokens_is_that_of_a_shorter_answer():
    """What a request with a smaller max_new_tokens sees: the walk over the same answer cut there."""
    random = np.random.default_rng(3)
    for _ in range(50):
        mask = (random.random(60) < 0.7).astype(np.uint8)
        accepted = random.integers(0, 4, 60)
        answers, total = as_text(gains(mask, accepted)), Walked()
        assert len(answers) == len(answer_runs(mask))
        for (start, end), answer in zip(answer_runs(mask), answers):
            total.add(first_tokens(answer, end - start))
            for tokens in range(1, end - start + 1):
                short = np.zeros(60, np.uint8)
                short[start : start + tokens] = 1
                assert first_tokens(answer, tokens) == walk(short, accepted)
        assert total == walk(mask, accepted)


def test_curves_that_look_wrong_are_said():
    window = {"step": 10, "rows": [5, 5], "loss": [0.001, 0.001], "accuracy": [0.9, 0.8]}
    assert "label" in warnings_of([window], [])[0]
    later = {"step": 900, "rows": [5, 5], "loss": [1.0, 1.0], "accuracy": [0.3, 0.6]}
    assert "TTT step 1" in warnings_of([later], [])[0]
    assert not warnings_of([{**later, "accuracy": [0.6, 0.5]}], [])


NAMINGS = {
    "plain": ("model.", "lm_head.weight"), "vision-language": ("model.language_model.", "lm_head.weight"), "kimi": ("language_model.model.", "language_model.lm_head.weight"),
    "tied": ("model.", None),
}  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "shards"])
@pytest.mark.parametrize("naming", NAMINGS)
def test_target_weights_by_name(naming, sharded, tmp_path):
    base, head = NAMINGS[naming]
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{base}embed_tokens.weight": torch.randn(12, HIDDEN, generator=generator).bfloat16(), f"{base}norm.weight": torch.ones(HIDDEN)}
    if head:
        tensors[head] = torch.randn(12, HIDDEN, generator=generator).bfloat16()
    numbers = {"hidden_size": HIDDEN, "vocab_size": 12, "num_hidden_layers": 2, "tie_word_embeddings": head is None}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": numbers} if naming == "kimi" else numbers))
    if sharded:
        names = {name: f"model-{i:05d}.safetensors" for i, name in enumerate(tensors)}
        for name, file in names.items():
            save_file({name: tensors[name]}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    target = TargetWeights(tmp_path)
    assert torch.equal(target.embedding(), tensors[f"{base}embed_tokens.weight"])
    assert torch.equal(target.lm_head(), tensors[head or f"{base}embed_tokens.weight"])
    assert target.config["hidden_size"] == HIDDEN


def test_a_target_without_a_head_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "tie_word_embeddings": False}))
    save_file({"model.embed_tokens.weight": torch.ones(12, HIDDEN)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="LM head"):
        TargetWeights(tmp_path).lm_head()


@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_gradient_that_is_not_finite_stops_the_run_and_is_named(bad):
    """Norms are read a step late; the message names the step that was bad and its sample all the same, also when it was the last one."""
    shape = make_shape()
    samples = [make_sample(f"{i:016x}", [0, 0] + [1] * 8, shape, seed=i) for i in range(4)]
    samples[bad].aux.fill_(1e38)  # finite, but not what comes of it
    train = Train(epochs=1, batch_tokens=10, ttt_steps=2)
    none = np.zeros(0, dtype=np.int64)
    trainer = Trainer(train, make_drafter(shape), make_fixed(shape, 2), FakeStore(samples), np.arange(4), none, None, 2, lambda drafter, found: None)
    trainer.plan.steps = [[[0]], [[1]], [[2]], [[3]]]
    with pytest.raises(UserError, match=f"gradient of step {bad} is not finite.*{samples[bad].id}"):
        trainer.run()
    assert trainer.state.step <= min(bad + 2, 4)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"step": ', b"\xd3\x00\xff"])
def test_a_damaged_checkpoint_is_named(tmp_path, content):
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "state.json").write_bytes(content)
    with pytest.raises(UserError, match="step-00000002 is not a whole checkpoint"):
        read_state(last_checkpoint(tmp_path))


def test_one_training_of_a_run_at_a_time(tmp_path, monkeypatch):
    """A second one is refused; the first removes what killed ones left, and a drafter that was between two renames is there again."""
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path))
    run = RunPaths("one")
    assert one_training(run) is None  # no run yet: nothing is made
    for name in (".drafter.99.old", ".drafter.99.tmp", "checkpoints/.step-00000004.99.tmp", "checkpoints/step-00000002"):
        (run.root / name).mkdir(parents=True)
    (run.root / ".drafter.99.old" / "config.json").write_text("{}")
    handle = one_training(run)
    with pytest.raises(UserError, match="another training of run 'one' is at work"):
        one_training(run)
    assert sorted(str(path.relative_to(run.root)) for path in run.root.rglob("*")) == ["checkpoints", "checkpoints/step-00000002", "drafter", "drafter/config.json"]
    os.close(handle)
    os.close(one_training(run))


def test_a_full_disk_under_a_checkpoint_is_said_as_such(tmp_path, mount_tmpfs):
    root = mount_tmpfs(tmp_path / "small", "256k")
    with pytest.raises(OSError) as caught:
        write_checkpoint(root, 2, 2, {"a": torch.zeros(1 << 20)}, {})
    assert caught.value.errno == errno.ENOSPC and "tensors.safetensors" in caught.value.filename and not list(root.iterdir())
