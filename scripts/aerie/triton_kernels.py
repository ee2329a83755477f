"""Triton kernels of the trainer's GPU path: norm, gated activation, rope, and the merge of TTT's diagonals into attention. Imported where there is a GPU."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_forward(x, weight, y, rstd, x_stride, width, eps, BLOCK: tl.constexpr):
    """One row a program: y = x * rsqrt(mean(x^2) + eps) * weight; rstd [R] float32 is kept for backward."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    value = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value) / width + eps)
    tl.store(rstd + row, scale)
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * width + cols, (value * scale * gain).to(y.dtype.element_ty), mask=mask)


@triton.jit
def rms_backward(dy, x, weight, rstd, dpass, dx, dweight, x_stride, rows, width, HAS_PASS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows program_id, program_id + P, ...: dx (plus the gradient that passes the norm by) and this program's share of dweight [P, width]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    gain = tl.load(weight + cols, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(program, rows, programs):  # row * width stays below 2^31: a batch has thousands of rows
        grad = tl.load(dy + row * width + cols, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row)
        normed = tl.load(x + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32) * scale
        total += grad * normed
        grad = grad * gain
        out = scale * (grad - normed * (tl.sum(grad * normed) / width))
        if HAS_PASS:
            out += tl.load(dpass + row * width + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + row * width + cols, out.to(dx.dtype.element_ty), mask=mask)
    tl.store(dweight + program.to(tl.int64) * width + cols, total, mask=mask)


@triton.jit
def silu_mul_forward(gate_up, out, inner, BLOCK: tl.constexpr):
    """out [R, I] = silu(gate) * up, from gate_up [R, 2I]."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < inner
    gate = tl.load(gate_up + row * 2 * inner + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * inner + cols, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_mul_backward(grad, gate_up, inner, BLOCK: tl.constexpr):
    """The gradient replaces gate_up in place."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < inner
    base = gate_up + row * 2 * inner + cols
    gate = tl.load(base, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(base + inner, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * inner + cols, mask=mask, other=0.0).to(tl.float32)
    chance = tl.sigmoid(gate)
    tl.store(base, (g * up * chance * (1 + gate * (1 - chance))).to(gate_up.dtype.element_ty), mask=mask)
    tl.store(base + inner, (g * gate * chance).to(gate_up.dtype.element_ty), mask=mask)


@triton.jit
def rope_split(fused, positions, cos, sin, rows, q, k, v, NQ: tl.constexpr, NKV: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, BACKWARD: tl.constexpr):
    """A (row, head) a program. Forward: fused [R, (NQ + 2 NKV) d] -> q at row rows[r] of its buffer, k and v at row r, q and k rotated.

    Backward: the gradients of q (at row r), k and v (at row r) are turned back and written into fused.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = tl.arange(0, HALF_BLOCK)
    mask = cols < HALF
    source = fused + (row * (NQ + 2 * NKV) + head) * (2 * HALF) + cols
    if head < NQ:
        place = tl.load(rows + row).to(tl.int64)
        target = q + (place * NQ + head) * (2 * HALF) + cols
    elif head < NQ + NKV:
        target = k + (row * NKV + head - NQ) * (2 * HALF) + cols
    else:
        target = v + (row * NKV + head - NQ - NKV) * (2 * HALF) + cols
    if BACKWARD:
        first, second = tl.load(target, mask=mask, other=0.0), tl.load(target + HALF, mask=mask, other=0.0)
    else:
        first, second = tl.load(source, mask=mask, other=0.0), tl.load(source + HALF, mask=mask, other=0.0)
    if head < NQ + NKV:
        position = tl.load(positions + row)
        c = tl.load(cos + position * HALF + cols, mask=mask, other=0.0)
        s = tl.load(sin + position * HALF + cols, mask=mask, other=0.0)
        if BACKWARD:
            s = -s
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * c - b * s).to(fused.dtype.element_ty), (b * c + a * s).to(fused.dtype.element_ty)
    if BACKWARD:
        tl.store(source, first, mask=mask)
        tl.store(source + HALF, second, mask=mask)
    else:
        tl.store(target, first, mask=mask)
        tl.store(target + HALF, second, mask=mask)


@triton.jit
def merge_forward(
    q, out, lse, chain_k, chain_v, rows, compact, chain_stride, lse_stride, scale, count,
    STEPS: tl.constexpr, NQ: tl.constexpr, NKV: tl.constexpr, G_BLOCK: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """A (row, key head) a program: the causal part's out and lse at row rows[r] are merged with the row's own STEPS later keys, in place; compact [R, NQ d] gets a copy.

    q, out [T, NQ, d]; lse [NQ, T] float32; chain_k, chain_v: STEPS planes of [>=R, NKV, d], chain_stride apart.
    """
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G: tl.constexpr = NQ // NKV
    heads, cols = tl.arange(0, G_BLOCK), tl.arange(0, D_BLOCK)
    hmask, cmask = heads < G, cols < D
    mask = hmask[:, None] & cmask[None, :]
    place = tl.load(rows + row).to(tl.int64)
    at = (place * NQ + group * G + heads[:, None]) * D + cols[None, :]
    lse_at = (group * G + heads).to(tl.int64) * lse_stride + place
    acc = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)  # [G, d]
    if STEPS > 0:
        query = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
        top = tl.load(lse + lse_at, mask=hmask, other=0.0)
        total = tl.full([G_BLOCK], 1.0, tl.float32)
        for step in tl.static_range(STEPS):
            base = step * chain_stride + (row * NKV + group) * D + cols
            key = tl.load(chain_k + base, mask=cmask, other=0.0).to(tl.float32)
            value = tl.load(chain_v + base, mask=cmask, other=0.0).to(tl.float32)
            score = tl.sum(query * key[None, :], axis=1) * scale
            higher = tl.maximum(top, score)
            keep, add = tl.exp(top - higher), tl.exp(score - higher)
            acc = acc * keep[:, None] + add[:, None] * value[None, :]
            total = total * keep + add
            top = higher
        acc = acc / total[:, None]
        tl.store(lse + lse_at, top + tl.log(total), mask=hmask)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(compact + (row * NQ + group * G + heads[:, None]) * D + cols[None, :], acc.to(compact.dtype.element_ty), mask=mask)


@triton.jit
def merge_backward(
    dcompact, q, out, lse, chain_k, chain_v, rows, dout, dq, dchain_k, dchain_v, chain_stride, lse_stride, scale, count,
    STEPS: tl.constexpr, NQ: tl.constexpr, NKV: tl.constexpr, G_BLOCK: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr,
):  # fmt: skip
    """dcompact [R, NQ d] is scattered into dout [T, NQ, d]; dq [R, NQ, d] gets the chain's share; dchain_k, dchain_v (planes as the chain) are added to."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    G: tl.constexpr = NQ // NKV
    heads, cols = tl.arange(0, G_BLOCK), tl.arange(0, D_BLOCK)
    hmask, cmask = heads < G, cols < D
    mask = hmask[:, None] & cmask[None, :]
    place = tl.load(rows + row).to(tl.int64)
    at = (place * NQ + group * G + heads[:, None]) * D + cols[None, :]
    own = (row * NQ + group * G + heads[:, None]) * D + cols[None, :]
    raw = tl.load(dcompact + own, mask=mask, other=0.0)
    tl.store(dout + at, raw, mask=mask)
    if STEPS > 0:
        grad = raw.to(tl.float32)
        query = tl.load(q + at, mask=mask, other=0.0).to(tl.float32)
        delta = tl.sum(grad * tl.load(out + at, mask=mask, other=0.0).to(tl.float32), axis=1)
        whole = tl.load(lse + (group * G + heads).to(tl.int64) * lse_stride + place, mask=hmask, other=0.0)
        dquery = tl.zeros([G_BLOCK, D_BLOCK], tl.float32)
        for step in tl.static_range(STEPS):
            base = step * chain_stride + (row * NKV + group) * D + cols
            key = tl.load(chain_k + base, mask=cmask, other=0.0).to(tl.float32)
            value = tl.load(chain_v + base, mask=cmask, other=0.0).to(tl.float32)
            chance = tl.where(hmask, tl.exp(tl.sum(query * key[None, :], axis=1) * scale - whole), 0.0)
            dscore = chance * (tl.sum(grad * value[None, :], axis=1) - delta) * scale
            dquery += dscore[:, None] * key[None, :]
            dkey = tl.sum(dscore[:, None] * query, axis=0)
            dvalue = tl.sum(chance[:, None] * grad, axis=0)
            dkey += tl.load(dchain_k + base, mask=cmask, other=0.0).to(tl.float32)
            dvalue += tl.load(dchain_v + base, mask=cmask, other=0.0).to(tl.float32)
            tl.store(dchain_k + base, dkey.to(dchain_k.dtype.element_ty), mask=cmask)
            tl.store(dchain_v + base, dvalue.to(dchain_v.dtype.element_ty), mask=cmask)
        tl.store(dq + own, dquery.to(dq.dtype.element_ty), mask=mask)
