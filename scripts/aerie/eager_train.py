"""The plain way to train EAGLE-3: dense masks, concatenated keys of every step, float32 logits of every row. What the fast path is measured against, and checked."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .batches import Batch
from .drafter import Drafter, apply_rope, rms_norm, rope_table
from .unroll import Fixed


class EagerDrafter(nn.Module):
    """The parameters of `drafter`, trained by autograd under autocast to `dtype`."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype):
        super().__init__()
        self.drafter, self.dtype = drafter, dtype
        drafter.fused_grads, drafter._copies = False, {}

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
        """q [T, nq, d]; keys[0] is every row's first step, keys[1..] the later ones, each [T, nkv, d]; mask [T, steps * T] -> [T, nq * d]."""
        shape = self.drafter.shape
        repeat = shape.num_attention_heads // shape.num_key_value_heads
        k, v = (torch.cat(parts).repeat_interleave(repeat, dim=1).transpose(0, 1) for parts in (keys, values))  # [nq, steps * T, d]
        scores = (q.transpose(0, 1) @ k.transpose(1, 2)).float() * shape.scale
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1).to(q.dtype)
        return (weights @ v).transpose(0, 1).flatten(1)

    def loss(self, batch: Batch, fixed: Fixed, divisor: int) -> Tensor:
        """The loss of unroll(), over all rows, with masks for what counts; `divisor` as there."""
        drafter, shape = self.drafter, self.drafter.shape
        device = fixed.embedding.device
        total_rows = len(batch.positions)
        weight = {name: parameter.to(self.dtype) if parameter.dim() == 2 and name in Drafter.MATRICES else parameter for name, parameter in drafter.named_parameters()}
        positions, next_ids, rows = (x.to(device) for x in (batch.positions, batch.next_ids, batch.rows))
        document = torch.repeat_interleave(torch.arange(len(batch.offsets) - 1), batch.offsets.diff()).to(device)
        order = torch.arange(total_rows, device=device)
        causal = (document[:, None] == document[None, :]) & (order[:, None] >= order[None, :])
        final = torch.zeros(total_rows, shape.target_hidden_size, dtype=self.dtype, device=device)
        final[rows] = batch.final.to(device, self.dtype)
        with torch.no_grad():
            target = torch.softmax((final @ fixed.head.head.to(self.dtype).t()).float(), dim=-1)[:, fixed.head.draft_ids]  # [T, Vd]
        cos, sin = rope_table(shape, int(positions.max()) + fixed.steps + 1, device)
        state = batch.aux.to(device, self.dtype) @ weight["fc"].t()
        eps, total = shape.rms_norm_eps, torch.zeros((), device=device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(fixed.steps):
            shifted = torch.clamp(order + step, max=total_rows - 1)
            x = torch.cat([rms_norm(fixed.embedding[next_ids[shifted]].to(self.dtype), weight["embed_norm"], eps), rms_norm(state, weight["state_norm"], eps)], dim=-1)
            fused = x @ torch.cat([weight["qkv_embed"], weight["qkv_state"]], dim=1).t()
            q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in fused.split([shape.q_size, shape.kv_size, shape.kv_size], dim=-1))
            c, s = cos[positions + step], sin[positions + step]
            keys.append(apply_rope(k, c, s))
            values.append(v)
            own = torch.eye(total_rows, dtype=torch.bool, device=device)
            mask = torch.cat([causal, *[own] * step], dim=1)
            attended = self._attend(apply_rope(q, c, s), keys, values, mask)
            middle = state + attended @ weight["o"].t()
            gate, up = (rms_norm(middle, weight["post_norm"], eps) @ weight["gate_up"].t()).chunk(2, dim=-1)
            state = middle + (functional.silu(gate) * up) @ weight["down"].t()
            logits = (rms_norm(state, weight["norm"], eps) @ weight["lm_head"].t()).float()
            wanted = torch.roll(target, -step, dims=0)
            losses = -(wanted * torch.log_softmax(logits, dim=-1)).sum(-1)
            counted = torch.zeros(total_rows, device=device)
            counted[rows[: batch.counts[step]]] = 1.0
            total = total + fixed.decay**step * (losses * counted).sum() / divisor
        return total
