"""Run as a script on a GPU: the fast path against the plain path in float32 and bfloat16, losses and every gradient. Prints a line a case, exit code 1 when one differs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "scripts")]

import torch
from train_helpers import make_sample, make_shape

from aerie.batches import build_batch
from aerie.drafter import Drafter
from aerie.ttt_loss import TargetHead
from aerie.unroll import Fixed, Rope, unroll


def run(shape, dtype, fast: bool, device: torch.device, masks: list[list[int]], steps: int):
    drafter = Drafter(shape, device=device)
    generator = torch.Generator().manual_seed(0)
    drafter.reset(generator, 0.08)
    drafter.set_compute(dtype)
    drafter.fast = fast
    drafter.zero_grads()
    head = (0.1 * torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)).to(device, dtype)
    ids = torch.arange(0, shape.vocab_size, shape.vocab_size // shape.draft_vocab_size)[: shape.draft_vocab_size].to(device)
    to_draft = torch.full((shape.vocab_size,), -1, device=device)
    to_draft[ids] = torch.arange(len(ids), device=device)
    fixed = Fixed(torch.randn(shape.vocab_size, shape.hidden_size, generator=generator).to(device, dtype), TargetHead(head, head[ids].contiguous(), ids, to_draft), steps, 0.8)
    samples = [make_sample(f"{i:016x}", mask, shape, seed=i) for i, mask in enumerate(masks)]
    batch = build_batch(samples, steps, dtype).to(device, dtype)
    loss, counts, _ = unroll(drafter, batch, fixed, Rope(drafter, device, dtype), float(batch.counts[0]))
    loss.backward()
    grads = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    with torch.no_grad():  # as an evaluation does: without gradients there are top tokens, and they must say the same
        _, again, drafted = unroll(drafter, batch, fixed, Rope(drafter, device, dtype), float(batch.counts[0]))
    correct = [int(one.correct) for one in counts]
    assert [int(one.correct) for one in again] == correct, f"hits with gradients {correct}, without {[int(one.correct) for one in again]}"
    assert [len(top) for top in drafted] == batch.counts[: len(drafted)] and all(0 <= int(top.min()) and int(top.max()) < len(ids) for top in drafted)
    assert all(torch.equal(parameter.grad, grads[name]) for name, parameter in drafter.named_parameters()), "an evaluation changed gradients"
    return loss.item(), grads, correct


# the heads of Kimi and DeepSeek: 192 wide for queries and keys, 128 for values
LATENT = {
    "arch": "mla", "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 192,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


def main() -> int:
    device = torch.device("cuda")
    masks = [[0] * 30 + [1] * 90, [0] * 5 + [1] * 40 + [0] * 20 + [1] * 64, [1] * 12, [0, 0, 1, 1, 0]]
    bad = 0
    for options in ({}, {"num_key_value_heads": 4}, {"head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 2}, {"fc_norm": True, "norm_output": True}, LATENT):
        shape = make_shape(**{"hidden_size": 256, "target_hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 2048, "draft_vocab_size": 1024, **options})
        truth = run(shape, torch.float32, False, torch.device("cpu"), masks, 5)
        plain_error = 0.0
        for dtype, fast in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False), (torch.bfloat16, True)):
            loss, grads, correct = run(shape, dtype, fast, device, masks, 5)
            worst, name = max(((grads[n].cpu() - truth[1][n]).norm().item() / truth[1][n].norm().item(), n) for n in grads)
            # in bfloat16 the plain path's own rounding is the measure: the fast path may not be further off
            limit = 2e-3 if dtype == torch.float32 else max(6e-2, 1.3 * plain_error) if fast else 0.2
            plain_error = 0.0 if fast else worst
            ok = worst < limit and abs(loss - truth[0]) < 1e-3 * abs(truth[0]) + (0 if dtype == torch.float32 else 4e-3)
            bad += not ok
            print(f"{'ok ' if ok else 'BAD'} {options} {str(dtype)[6:]} {'fast' if fast else 'plain'}: loss {loss:.6f} ({truth[0]:.6f}), worst gradient {worst:.2e} ({name}), hits {correct} {truth[2]}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
