"""Training-time test: the drafter run over its own outputs, on the rows that supervised predictions need and on no other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .batches import Batch
from .drafter import Drafter, rope_table
from .ttt_attention import make_layout, ttt_attention
from .ttt_loss import StepCounts, TargetHead, Teacher, head_loss


@dataclass
class Fixed:
    """What training reads and does not change."""

    embedding: Tensor  # [V, H] compute dtype: the target's
    head: TargetHead
    steps: int
    decay: float  # weight of step k: decay ** k
    checkpointing: bool = False


class Rope:
    """cos and sin for positions, grown as needed."""

    def __init__(self, drafter: Drafter, device: torch.device, dtype: torch.dtype):
        self.drafter, self.device, self.dtype = drafter, device, torch.promote_types(dtype, torch.float32)
        self.cos = self.sin = torch.zeros(0)

    def reserve(self, positions: int) -> None:
        """Make sure that positions 0 .. positions-1 are there."""
        if positions > len(self.cos):
            cos, sin = rope_table(self.drafter.shape, (positions + 1023) // 1024 * 1024, self.device)
            self.cos, self.sin = cos.to(self.dtype), sin.to(self.dtype)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [R, d/2] for positions [R]."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def unroll(drafter: Drafter, batch: Batch, fixed: Fixed, rope: Rope, divisor: float, known: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, list[StepCounts], list[Tensor]]:
    """Loss of one batch.

    `divisor` is the number of rows supervised at step 0 in the whole optimiser step, so that the gradient does not depend on how rows fall into batches and ranks.
    `known`: what fixed.head.survey(batch.final) gives, where the caller has it already.
    Returns (loss, counts by step, top draft ids by step [counts[k]]); loss = sum over steps of decay ** k * sum of cross entropies / divisor.
    """
    with torch.no_grad():
        tops, lse = fixed.head.survey(batch.final) if known is None else known
        teacher = Teacher(fixed.head.logits(batch.final, fixed.head.draft_head), lse, fixed.head.to_draft[tops])
    rope.reserve(int(batch.offsets.diff().max()) + fixed.steps)
    engine = (FastEngine if drafter.fast else PlainEngine)(drafter, batch, rope, fixed.steps)
    all_states = drafter.fuse_aux(batch.aux)  # [T, H]
    embed_part, fused, all_states = drafter.first(batch.next_ids, fixed.embedding, all_states)
    engine.first(fused)
    state = take_rows(all_states, batch.rows)
    total: Tensor | float = 0.0
    counts: list[StepCounts] = []
    drafted: list[Tensor] = []
    alive: Tensor | None = None
    head_gradient: list[Tensor] = []
    for step in range(fixed.steps):
        count = batch.counts[step]
        if count == 0:
            break
        state = state[:count]
        embedded = take_rows(embed_part, batch.rows[:count] + step) if step else None
        if fixed.checkpointing and torch.is_grad_enabled():
            normed, state = checkpoint(engine.layer, state, embedded, step, use_reentrant=False)
        else:
            normed, state = engine.layer(state, embedded, step)
        loss, losses, correct, top = head_loss(drafter, normed, teacher, batch.labels(step), fixed.decay**step / divisor, head_gradient)
        total = total + loss
        reached = torch.ones_like(correct) if alive is None else alive[:count]
        alive = correct & reached
        counts.append(StepCounts(count, losses.sum(), correct.sum(), reached.sum(), alive.sum()))
        drafted.append(top)
    return total, counts, drafted


class _TakeRows(torch.autograd.Function):
    """x[index] for an index without repeats: its backward is a plain copy, not an atomic addition."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x [N, ...] by index [R] int64 without repeats."""
    return _TakeRows.apply(x, index)


class PlainEngine:
    """Attention of one unroll in plain PyTorch and its CPU kernel."""

    def __init__(self, drafter: Drafter, batch: Batch, rope: Rope, steps: int):
        self.drafter, self.batch, self.rope = drafter, batch, rope
        self.layout = make_layout(batch.offsets, batch.rows)
        self.positions = batch.positions.index_select(0, batch.rows)
        self.chain: list[Tensor] = []

    def first(self, fused: Tensor) -> None:
        """First-step keys of every row, and the queries of step 0."""
        heads = self.drafter.shape.num_attention_heads
        q, k, v = self.drafter.heads(fused, *self.rope.at(self.batch.positions))
        self.k0, self.v0, self.q = self.layout.keys(k, heads), self.layout.keys(v, heads), take_rows(q, self.batch.rows)

    def layer(self, state: Tensor, embedded: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
        """One TTT step: state [R, H], embedded [R, q + 2 kv] (None at step 0) -> (input of the LM head, the next state)."""
        q = self.q
        if embedded is not None:
            fused, state = self.drafter.project(state, embedded)
            q, k, v = self.drafter.heads(fused, *self.rope.at(self.positions[: len(state)] + step))
            self.chain = [*self.chain[: 2 * step - 2], k, v]  # a recomputed step puts its own keys back
        return self.drafter.after_attention(state, ttt_attention(self.layout, q, self.k0, self.v0, self.chain[: 2 * step], self.drafter.shape.scale))


class FastEngine:
    """The same with the kernels of fast_ops.py."""

    def __init__(self, drafter: Drafter, batch: Batch, rope: Rope, steps: int):
        from .fast_ops import Chain, FlashVarlen, PlainVarlen

        shape = drafter.shape
        flash = batch.aux.is_cuda and drafter.compute_dtype in (torch.bfloat16, torch.float16) and shape.head_dim <= 256
        self.drafter, self.batch, self.rope = drafter, batch, rope
        self.chain = Chain(
            batch.offsets, batch.rows, (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim), steps, drafter.compute_dtype,
            FlashVarlen if flash else PlainVarlen,
        )  # fmt: skip
        self.positions = batch.positions.index_select(0, batch.rows)

    def first(self, fused: Tensor) -> None:
        self.q, self.k0, self.v0 = self.heads(fused, self.batch.positions, 0)

    def heads(self, fused: Tensor, positions: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """fused [R, ...] -> q [T, nq, d] at its rows' own places, k and v [R, nkv, d]; from step 1 on k and v stand in the chain."""
        from .fast_ops import PlaceHeads, RopeSplit

        if self.drafter.shape.arch == "mla":  # latents: rotation and the two up-projections in PyTorch, attention by the kernels
            return PlaceHeads.apply(*self.drafter.heads(fused, *self.rope.at(positions)), self.chain, step)
        return RopeSplit.apply(fused, positions, self.rope.cos, self.rope.sin, self.chain, step)

    def layer(self, state: Tensor, embedded: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
        from .fast_ops import ChainAttention

        q, k, v = self.q, None, None
        if embedded is not None:
            fused, state = self.drafter.project(state, embedded)
            q, k, v = self.heads(fused, self.positions[: len(state)] + step, step)
        attended = ChainAttention.apply(q, self.k0, self.v0, k, v, self.chain, step, len(state), self.drafter.shape.scale)
        return self.drafter.after_attention(state, attended)
