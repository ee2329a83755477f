"""Attention of training-time test without T x T masks.

A query of step k at row t sees the first-step keys of rows 0..t of its document and its own later ones, one a step (a diagonal). The causal part runs through a
fused kernel that also gives the log-sum-exp; the diagonals are merged into it. Backward: with the merged log-sum-exp and output handed to the kernel's own
backward, its probabilities are those of the whole softmax, so the causal gradients come out right without a kernel of our own.
"""

from __future__ import annotations

import torch
from torch import Tensor

NO_ROW = 1e4  # log-sum-exp of a row that asks for nothing: all its probabilities become 0


class PaddedLayout:
    """Documents padded to one length, for PyTorch's CPU kernel (float32, float64, bfloat16). Padding lies behind each document, where causality hides it."""

    def __init__(self, offsets: Tensor, rows: Tensor):
        """offsets [D+1] int64: where documents begin in the flat rows; rows [R] int64: the flat rows that ask, in any order."""
        lengths = offsets.diff()
        self.documents, self.longest = len(lengths), int(lengths.max())
        document = torch.repeat_interleave(torch.arange(self.documents), lengths)
        place = torch.arange(int(offsets[-1])) - offsets[document] + document * self.longest  # flat row -> padded row
        self.key_index, self.query_index = place, place[rows]
        self.repeat = 1

    def _pad(self, x: Tensor, index: Tensor, fill: float = 0.0) -> Tensor:
        """[N, heads, d] -> [D, heads, L, d]."""
        out = x.new_full((self.documents * self.longest, *x.shape[1:]), fill).index_copy(0, index, x)
        return out.view(self.documents, self.longest, *x.shape[1:]).transpose(1, 2)

    def keys(self, x: Tensor, query_heads: int) -> Tensor:
        """First-step keys or values [T, nkv, d] -> [D, nq, L, d], once a batch."""
        return self._pad(x.repeat_interleave(query_heads // x.shape[1], dim=1), self.key_index)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q [R, nq, d] -> out [R, nq, d], log-sum-exp [R, nq]."""
        count = len(q)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(self._pad(q, self.query_index[:count]), k, v, 0.0, True, scale=scale)
        return self._take(out, count), self._take(lse.unsqueeze(-1), count).squeeze(-1)

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q [R, nq, d], k and v as keys() gave them."""
        index, count = self.query_index[: len(q)], len(q)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            self._pad(grad, index), self._pad(q, index), k, v, self._pad(out, index), self._pad(lse.unsqueeze(-1), index, NO_ROW).squeeze(-1), 0.0, True, scale=scale,
        )  # fmt: skip
        return self._take(grads[0], count), grads[1], grads[2]

    def _take(self, x: Tensor, count: int) -> Tensor:
        """[D, heads, L, d] -> the first `count` asking rows, [R, heads, d]."""
        return x.transpose(1, 2).flatten(0, 1)[self.query_index[:count]]


class _TTTAttention(torch.autograd.Function):
    """q [R, nq, d], k0 and v0 in the layout's form, then k_1, v_1, .. k_n, v_n [>=R, nkv, d] of the row's own chain -> [R, nq, d]."""

    @staticmethod
    def forward(ctx, layout, scale: float, q: Tensor, k0: Tensor, v0: Tensor, *chain: Tensor):
        count, heads, dim = q.shape
        out, lse = layout.forward(q, k0, v0, scale)
        if chain:
            keys, values = stack_chain(chain, count)  # [R, nkv, n, d]
            wide = torch.promote_types(q.dtype, torch.float32)
            grouped = q.view(count, keys.shape[1], -1, dim)  # [R, nkv, G, d]
            scores = (grouped @ keys.transpose(-1, -2)).to(wide).flatten(1, 2) * scale  # [R, nq, n]
            merged = torch.logsumexp(torch.cat([lse.to(wide).unsqueeze(-1), scores], dim=-1), dim=-1)  # [R, nq]
            chance = (scores - merged.unsqueeze(-1)).exp()
            own = chance.to(q.dtype).view(count, keys.shape[1], -1, chance.shape[-1]) @ values
            out = out * (lse - merged).exp().unsqueeze(-1).to(out.dtype) + own.flatten(1, 2)
            lse = merged.to(lse.dtype)
        ctx.layout, ctx.scale = layout, scale
        ctx.save_for_backward(q, k0, v0, out, lse, *chain)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k0, v0, out, lse, *chain = ctx.saved_tensors
        count, heads, dim = q.shape
        grad = grad.contiguous()
        dq, dk0, dv0 = ctx.layout.backward(grad, q, k0, v0, out, lse, ctx.scale)
        chain_grads: list[Tensor] = []
        if chain:
            keys, values = stack_chain(chain, count)
            wide = torch.promote_types(q.dtype, torch.float32)
            groups = keys.shape[1]
            q4, grad4 = q.view(count, groups, -1, dim), grad.view(count, groups, -1, dim)
            scores = (q4 @ keys.transpose(-1, -2)).to(wide) * ctx.scale  # [R, nkv, G, n]
            chance = (scores - lse.view(count, groups, -1, 1)).exp()
            delta = (grad.to(wide) * out.to(wide)).sum(-1).view(count, groups, -1, 1)
            dscores = (chance * ((grad4 @ values.transpose(-1, -2)).to(wide) - delta) * ctx.scale).to(q.dtype)
            dq = dq + (dscores @ keys).flatten(1, 2)
            dkeys = dscores.transpose(-1, -2) @ q4  # [R, nkv, n, d]
            dvalues = chance.to(q.dtype).transpose(-1, -2) @ grad4
            for i in range(len(chain) // 2):
                for source, part in ((chain[2 * i], dkeys[:, :, i]), (chain[2 * i + 1], dvalues[:, :, i])):
                    chain_grads.append(part if len(source) == count else torch.cat([part, part.new_zeros(len(source) - count, *part.shape[1:])]))
        return None, None, dq, dk0, dv0, *chain_grads


def stack_chain(chain: tuple[Tensor, ...] | list[Tensor], count: int) -> tuple[Tensor, Tensor]:
    """The first `count` rows of k_1, v_1, k_2, v_2, ... -> keys, values [R, nkv, n, d]."""
    return torch.stack([k[:count] for k in chain[::2]], dim=2), torch.stack([v[:count] for v in chain[1::2]], dim=2)


def ttt_attention(layout, q: Tensor, k0: Tensor, v0: Tensor, chain: list[Tensor], scale: float) -> Tensor:
    """Attention of one TTT step. q [R, nq, d] of the layout's first R asking rows; returns [R, nq * d]."""
    return _TTTAttention.apply(layout, scale, q, k0, v0, *chain).flatten(1)


class DocumentLayout:
    """Document by document in plain PyTorch: any device, dtype and head size. Scores of one document's asking rows live at a time."""

    def __init__(self, offsets: Tensor, rows: Tensor):
        self.spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist()))
        self.rows = rows
        document = torch.bucketize(rows, offsets[1:].to(rows.device), right=True)
        self.asking = [(document == number).nonzero().squeeze(1) for number in range(len(self.spans))]

    def keys(self, x: Tensor, query_heads: int) -> Tensor:
        """First-step keys or values [T, nkv, d] -> [T, nq, d]."""
        return x.repeat_interleave(query_heads // x.shape[1], dim=1)

    def _scores(self, number: int, index: Tensor, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """[nq, Rd, L] in at least float32, the future at -inf."""
        a, b = self.spans[number]
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("qhd,khd->hqk", q[index].to(wide), k[a:b].to(wide)) * scale
        future = torch.arange(a, b, device=q.device) > self.rows[index].unsqueeze(1)
        return scores.masked_fill(future, -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """q [R, nq, d] -> out [R, nq, d], log-sum-exp [R, nq]."""
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
        for number, (a, b) in enumerate(self.spans):
            index = self.asking[number][self.asking[number] < len(q)]
            scores = self._scores(number, index, q, k, scale)
            sums = scores.logsumexp(-1)  # [nq, Rd]
            out[index] = torch.einsum("hqk,khd->qhd", (scores - sums.unsqueeze(-1)).exp(), v[a:b].to(scores.dtype)).to(q.dtype)
            lse[index] = sums.t()
        return out, lse

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q [R, nq, d], k and v as keys() gave them."""
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for number, (a, b) in enumerate(self.spans):
            index = self.asking[number][self.asking[number] < len(q)]
            chance = (self._scores(number, index, q, k, scale) - lse[index].t().unsqueeze(-1)).exp()
            wide = chance.dtype
            own = grad[index].to(wide)
            delta = (own * out[index].to(wide)).sum(-1).t().unsqueeze(-1)
            dscores = chance * (torch.einsum("qhd,khd->hqk", own, v[a:b].to(wide)) - delta) * scale
            dq[index] = torch.einsum("hqk,khd->qhd", dscores, k[a:b].to(wide)).to(q.dtype)
            dk[a:b] = torch.einsum("hqk,qhd->khd", dscores, q[index].to(wide)).to(k.dtype)
            dv[a:b] = torch.einsum("hqk,qhd->khd", chance, own).to(v.dtype)
        return dq, dk, dv


def make_layout(offsets: Tensor, rows: Tensor) -> PaddedLayout | DocumentLayout:
    """PyTorch's CPU kernel on a CPU; elsewhere document by document (the GPU's fast path does not come here)."""
    return PaddedLayout(offsets, rows) if rows.device.type == "cpu" else DocumentLayout(offsets, rows)
