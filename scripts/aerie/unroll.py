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
    shape, rows = drafter.shape, batch.rows
    with torch.no_grad():
        tops, lse = fixed.head.survey(batch.final) if known is None else known
        teacher = Teacher(fixed.head.logits(batch.final, fixed.head.draft_head), lse, fixed.head.to_draft[tops])
        embeddings = fixed.embedding.index_select(0, batch.next_ids)
    rope.reserve(int(batch.offsets.diff().max()) + fixed.steps)
    all_states = drafter.fuse_aux(batch.aux)  # [T, H]
    embed_part = drafter.embed_part(embeddings)  # [T, q + 2 kv]
    q, k, v = drafter.qkv(all_states, embed_part, *rope.at(batch.positions))
    layout = make_layout(batch.offsets, rows)
    k0, v0 = layout.keys(k, shape.num_attention_heads), layout.keys(v, shape.num_attention_heads)
    state, q = all_states.index_select(0, rows), q.index_select(0, rows)
    positions = batch.positions.index_select(0, rows)
    chain: list[Tensor] = []
    total: Tensor | float = 0.0
    counts: list[StepCounts] = []
    drafted: list[Tensor] = []
    alive: Tensor | None = None
    scale = shape.head_dim**-0.5

    def layer(state: Tensor, q: Tensor, k0: Tensor, v0: Tensor, *chain: Tensor) -> tuple[Tensor, Tensor]:
        return drafter.after_attention(state, ttt_attention(layout, q, k0, v0, list(chain), scale))

    for step in range(fixed.steps):
        count = batch.counts[step]
        if count == 0:
            break
        if step:
            state = state[:count]
            q, k, v = drafter.qkv(state, embed_part.index_select(0, rows[:count] + step), *rope.at(positions[:count] + step))
            chain += [k, v]
        if fixed.checkpointing and torch.is_grad_enabled():
            normed, state = checkpoint(layer, state, q, k0, v0, *chain, use_reentrant=False)
        else:
            normed, state = layer(state, q, k0, v0, *chain)
        labels = batch.labels(step)
        loss, losses, correct, top = head_loss(drafter, normed, teacher, labels, fixed.decay**step / divisor)
        total = total + loss
        reached = torch.ones_like(correct) if alive is None else alive[:count]
        alive = correct & reached
        counts.append(StepCounts(count, losses.sum(), correct.sum(), reached.sum(), alive.sum()))
        drafted.append(top)
    return total, counts, drafted
