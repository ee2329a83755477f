"""The trainer's GPU path: autograd functions around the Triton kernels, PyTorch's flash attention and the drafter ops of cuda/. Numbers as in the plain path, up to rounding.

Buffers that a step's kernels write in place (chain of keys, their gradients) belong to one unroll; backward runs its steps last to first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import triton_kernels as kernels

PROGRAMS = 528  # four a multiprocessor of an H200: enough to hide latency, few enough that the weight gradient's last sum is short


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


class RmsNorm(torch.autograd.Function):
    """x [R, H] -> (norm(x), x): what reads x behind the norm hands its gradient to the same kernel. weight [H] float32."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):
        rows, width = x.shape
        y, rstd = torch.empty(rows, width, dtype=x.dtype, device=x.device), torch.empty(rows, dtype=torch.float32, device=x.device)
        kernels.rms_forward[(rows,)](x, weight, y, rstd, x.stride(0), width, eps, BLOCK=power_of_two(width), num_warps=8)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        return y, x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor | None, dpass: Tensor | None):
        x, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dpass, None, None
        rows, width = x.shape
        programs = min(PROGRAMS, rows)
        dx, dweight = torch.empty(rows, width, dtype=x.dtype, device=x.device), torch.empty(programs, width, dtype=torch.float32, device=x.device)
        dpass = None if dpass is None else dpass.contiguous()
        kernels.rms_backward[(programs,)](
            dy.contiguous(), x, weight, rstd, dy if dpass is None else dpass, dx, dweight, x.stride(0), rows, width, HAS_PASS=dpass is not None,
            BLOCK=power_of_two(width), num_warps=8,
        )  # fmt: skip
        return dx, dweight.sum(0), None


class SiluMul(torch.autograd.Function):
    """gate_up [R, 2I] -> silu(gate) * up [R, I]. Backward overwrites gate_up, which nothing else may read."""

    @staticmethod
    def forward(ctx, gate_up: Tensor):
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, inner, dtype=gate_up.dtype, device=gate_up.device)
        kernels.silu_mul_forward[(rows, -(-inner // 2048))](gate_up, out, inner, BLOCK=2048, num_warps=4)
        ctx.gate_up = gate_up
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate_up, ctx.gate_up = ctx.gate_up, None
        rows, inner = grad.shape
        kernels.silu_mul_backward[(rows, -(-inner // 2048))](grad.contiguous(), gate_up, inner, BLOCK=2048, num_warps=4)
        return gate_up


class FlashVarlen:
    """Causal attention of packed documents through PyTorch's flash kernel (bfloat16, float16; head sizes to 256)."""

    def __init__(self, offsets: Tensor, device: torch.device):
        self.longest = int(offsets.diff().max())
        self.offsets = offsets.to(device=device, dtype=torch.int32, non_blocking=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """q [T, nq, d], k, v [T, nkv, d] -> out [T, nq, d], log-sum-exp [nq, T] float32, what backward wants."""
        out, lse, seed, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, self.offsets, self.offsets, self.longest, self.longest, 0.0, True, False, scale=scale
        )
        return out, lse, (seed, unused)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: tuple[Tensor, Tensor], scale: float) -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, self.offsets, self.offsets, self.longest, self.longest, 0.0, True, *rest, scale=scale
        )


class PlainVarlen:
    """The same, document by document in plain PyTorch: what flash does not take, and the check of the kernels around it."""

    def __init__(self, offsets: Tensor, device: torch.device):
        self.spans = list(zip(offsets[:-1].tolist(), offsets[1:].tolist()))

    @staticmethod
    def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
        """[L, nq, d], [L, nkv, d] -> [nq, L, L] float32 with the future at -inf."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
        return scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float):
        out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
        for a, b in self.spans:
            scores = self._scores(q[a:b], k[a:b], scale)
            lse[:, a:b] = scores.logsumexp(-1)
            values = v[a:b].float().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
            out[a:b] = torch.einsum("hqk,khd->qhd", (scores - lse[:, a:b, None]).exp(), values).to(q.dtype)
        return out, lse, (lse, lse)

    def backward(self, dout, q, k, v, out, lse, rest, scale):
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        groups = q.shape[1] // k.shape[1]
        for a, b in self.spans:
            chance = (self._scores(q[a:b], k[a:b], scale) - lse[:, a:b, None]).exp()  # [nq, L, L]
            grad, keys, values = dout[a:b].float(), *(x[a:b].float().repeat_interleave(groups, dim=1) for x in (k, v))
            delta = (grad * out[a:b].float()).sum(-1).t().unsqueeze(-1)  # [nq, L, 1]
            dscores = chance * (torch.einsum("qhd,khd->hqk", grad, values) - delta) * scale
            dq[a:b] = torch.einsum("hqk,khd->qhd", dscores, keys).to(q.dtype)
            dk[a:b] = torch.einsum("hqk,qhd->khd", dscores, q[a:b].float()).unflatten(1, (-1, groups)).sum(2).to(k.dtype)
            dv[a:b] = torch.einsum("hqk,qhd->khd", chance, grad).unflatten(1, (-1, groups)).sum(2).to(v.dtype)
        return dq, dk, dv


class Chain:
    """One unroll's attention: rows that ask, their own later keys and values, and the gradients of these."""

    def __init__(self, offsets: Tensor, rows: Tensor, heads: tuple[int, int, int], steps: int, dtype: torch.dtype, core: type = FlashVarlen):
        self.rows, self.core, self.total = rows, core(offsets, rows.device), int(offsets[-1])
        self.nq, self.nkv, self.dim = heads
        shape = (max(steps - 1, 1), len(rows), self.nkv, self.dim)
        self.k, self.v = (torch.empty(shape, dtype=dtype, device=rows.device) for _ in range(2))
        self.dk = self.dv = self.dout = None

    def gradients(self) -> None:
        """Backward's own buffers, made when its first step asks."""
        if self.dk is None:
            self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
            self.dout = torch.zeros(self.total, self.nq, self.dim, dtype=self.k.dtype, device=self.k.device)

    def meta(self) -> dict[str, int]:
        """Compile-time sizes of the merge kernels."""
        return {"NQ": self.nq, "NKV": self.nkv, "G_BLOCK": power_of_two(self.nq // self.nkv), "D": self.dim, "D_BLOCK": power_of_two(self.dim)}


class RopeSplit(torch.autograd.Function):
    """fused [R, q + 2 kv] -> q [T, nq, d] (rows that do not ask are 0), k and v [R, nkv, d]; q and k rotated.

    step 0: every row is a key, the first of `asking` rows ask. step k: R rows ask and k, v are plane k-1 of the chain.
    """

    @staticmethod
    def forward(ctx, fused: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, chain: Chain, step: int):
        count, dim = len(fused), chain.dim
        if step:
            k, v, places = chain.k[step - 1, :count], chain.v[step - 1, :count], chain.rows
        else:
            k, v = (torch.empty(count, chain.nkv, dim, dtype=fused.dtype, device=fused.device) for _ in range(2))
            places = torch.arange(count, device=fused.device)
        q = torch.zeros(chain.total, chain.nq, dim, dtype=fused.dtype, device=fused.device)
        kernels.rope_split[(count, chain.nq + 2 * chain.nkv)](
            fused, positions, cos, sin, places, q, k, v, NQ=chain.nq, NKV=chain.nkv, HALF=dim // 2, HALF_BLOCK=power_of_two(dim // 2), BACKWARD=False, num_warps=1,
        )  # fmt: skip
        ctx.save_for_backward(positions, cos, sin)
        ctx.chain, ctx.step, ctx.shape = chain, step, fused.shape
        return q, k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
        """dq [T, nq, d], at its rows' own places; dk and dv [R, nkv, d]."""
        positions, cos, sin = ctx.saved_tensors
        chain, count = ctx.chain, ctx.shape[0]
        dfused = torch.empty(ctx.shape, dtype=dk.dtype, device=dk.device)
        places = chain.rows[:count] if ctx.step else torch.arange(count, device=dk.device)
        kernels.rope_split[(count, chain.nq + 2 * chain.nkv)](
            dfused, positions, cos, sin, places, dq.contiguous(), dk.contiguous(), dv.contiguous(), NQ=chain.nq, NKV=chain.nkv, HALF=chain.dim // 2,
            HALF_BLOCK=power_of_two(chain.dim // 2), BACKWARD=True, num_warps=1,
        )  # fmt: skip
        return dfused, None, None, None, None, None


class PlaceHeads(torch.autograd.Function):
    """The same for heads that are there already (MLA): q, k, v [R, heads, d] -> q [T, nq, d], k and v [R, nkv, d] (contiguous, or in plane step-1 of the chain)."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, chain: Chain, step: int):
        ctx.chain, ctx.step, ctx.count = chain, step, len(q)
        if not step:
            return tuple(x.contiguous().view_as(x) for x in (q, k, v))
        planes = chain.k[step - 1, : len(k)].copy_(k), chain.v[step - 1, : len(v)].copy_(v)
        placed = q.new_zeros(chain.total, *q.shape[1:]).index_copy_(0, chain.rows[: len(q)], q)
        return placed, *(plane.view_as(plane) for plane in planes)

    @staticmethod
    def backward(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
        if ctx.step:
            dq = dq.index_select(0, ctx.chain.rows[: ctx.count])
        return dq, dk, dv, None, None


class ChainAttention(torch.autograd.Function):
    """Attention of step `step`: q [T, nq, d], first-step k0, v0 [T, nkv, d], this step's own k, v (its plane of the chain; None at step 0) -> [count, nq * d]."""

    @staticmethod
    def forward(ctx, q: Tensor, k0: Tensor, v0: Tensor, k: Tensor | None, v: Tensor | None, chain: Chain, step: int, count: int, scale: float):
        out, lse, rest = chain.core.forward(q, k0, v0, scale)
        if lse.shape != (chain.nq, chain.total):
            raise RuntimeError(f"flash attention answered log-sum-exps of shape {list(lse.shape)}, not [heads, rows]: this PyTorch is not known to the trainer; set train.kernels=off")
        compact = torch.empty(count, chain.nq * chain.dim, dtype=q.dtype, device=q.device)
        kernels.merge_forward[(count, chain.nkv)](
            q, out, lse, chain.k, chain.v, chain.rows, compact, chain.k.stride(0), lse.stride(0), scale, count, STEPS=step, num_warps=1, **chain.meta()
        )
        ctx.save_for_backward(q, k0, v0, out, lse, *rest)
        ctx.chain, ctx.step, ctx.count, ctx.scale = chain, step, count, scale
        return compact

    @staticmethod
    def backward(ctx, dcompact: Tensor):
        q, k0, v0, out, lse, *rest = ctx.saved_tensors
        chain, step, count = ctx.chain, ctx.step, ctx.count
        chain.gradients()
        extra = torch.empty(count if step else 0, chain.nq, chain.dim, dtype=q.dtype, device=q.device)
        kernels.merge_backward[(count, chain.nkv)](
            dcompact.contiguous(), q, out, lse, chain.k, chain.v, chain.rows, chain.dout, extra, chain.dk, chain.dv, chain.k.stride(0), lse.stride(0), ctx.scale, count,
            STEPS=step, num_warps=1, **chain.meta(),
        )  # fmt: skip
        dq, dk0, dv0 = chain.core.backward(chain.dout, q, k0, v0, out, lse, tuple(rest), ctx.scale)
        if step:
            dq.index_add_(0, chain.rows[:count], extra)
            return dq, dk0, dv0, chain.dk[step - 1, :count], chain.dv[step - 1, :count], None, None, None, None
        return dq, dk0, dv0, None, None, None, None, None, None
