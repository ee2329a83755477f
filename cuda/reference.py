"""The drafter ops in plain PyTorch: what the kernels must agree with, and what runs where there is no kernel (CPU, other dtypes, no library).

Sums are float32, or float64 for float64 inputs. Inputs are taken as checked (checks.py); `drafter_ops` is the door that checks them.
The tree ops are in reference_tree.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest e4m3 value
FP8_TINY = 1e-30  # floor of a row's largest magnitude: keeps 448 / amax finite and gives a row of zeros a scale
BLOCK_ELEMENTS = 1 << 22  # rows of [N, V] are worked on in blocks of about this size, so that temporaries stay small


def _wide(tensor: Tensor) -> Tensor:
    """float64 stays, everything else becomes float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _row_blocks(rows: int, columns: int) -> list[slice]:
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def _exp_shifted(logits: Tensor, shift: Tensor) -> Tensor:
    """exp(logits - shift) with exp(-inf - anything) = 0, also where shift is -inf."""
    return torch.where(logits == -torch.inf, 0.0, torch.exp(logits - shift))


def log_sum_exp(logits: Tensor) -> Tensor:
    """[N, V] -> [N]; -inf for a row of -inf."""
    top = logits.amax(-1, keepdim=True)
    top = torch.where(torch.isfinite(top), top, 0.0)
    return (top + torch.exp(logits - top).sum(-1, keepdim=True).log()).squeeze(-1)


# --- 1. soft-target cross-entropy -------------------------------------------------------------------------------------------------------------------


def soft_target_ce(
    draft: Tensor, target: Tensor, lse: Tensor | None, top: Tensor, weights: Tensor | None, rows: Tensor | None, renormalize: bool, grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss, argmax match, acceptance mass and in-vocabulary flag of each row; the gradient goes into `grad` (which may be `draft` itself).

    draft [N, Vd], target [M, Vd] logits; lse [M] float32 over the target's full vocabulary (None: over the slice); top [M] int64, the draft id of the target's
    argmax or -1; weights [N] float32; rows [N] int64: row i is judged against target[rows[i]]. With p = exp(target - lse), m = sum p, q = softmax(draft):
    loss = w * (m * lse(draft) - sum p * draft), d loss / d draft = w * (m * q - p), accept = sum min(p, q). renormalize: p / m in loss and gradient.
    A row of weight 0 gives 0, False and a zero gradient. Returns loss [N], match [N] bool, accept [N], in_vocab [N] bool.
    """
    count, columns = draft.shape
    wide = torch.float64 if draft.dtype == torch.float64 else torch.float32
    loss, accept = (torch.zeros(count, dtype=wide, device=draft.device) for _ in range(2))
    match, in_vocab = (torch.zeros(count, dtype=torch.bool, device=draft.device) for _ in range(2))
    for block in _row_blocks(count, columns):
        pick = torch.arange(block.start, block.stop, device=draft.device) if rows is None else rows[block]
        bad = (pick < 0) | (pick >= target.shape[0])  # only with range checks off: such a row is NaN, as in the kernel
        pick = torch.where(bad, 0, pick)
        d = _wide(draft[block])  # [B, Vd]
        t = target[pick].to(wide)
        w = torch.ones(len(d), dtype=wide, device=d.device) if weights is None else weights[block].to(wide)
        live = w != 0
        dmax = d.amax(-1, keepdim=True)
        dmax = torch.where(torch.isfinite(dmax), dmax, 0.0)
        exp_d = torch.exp(d - dmax)
        total = exp_d.sum(-1, keepdim=True)
        q = torch.where(exp_d == 0, 0.0, exp_d / total)
        p = _exp_shifted(t, (t.amax(-1) if lse is None else lse[pick].to(wide)).unsqueeze(-1))
        mass = p.sum(-1, keepdim=True)
        if lse is None:  # divided by the sum rather than shifted by its logarithm: exact also where logits are huge
            p = torch.where(mass > 0, p / mass, p)
            mass = torch.where(mass > 0, 1.0, mass)
        accept[block] = torch.where(live, torch.minimum(p, q).sum(-1), 0.0)
        if renormalize:
            p = torch.where(mass > 0, p / mass, 0.0)
            mass = (mass > 0).to(wide)
        cross = torch.where(p == 0, 0.0, p * (d - dmax)).sum(-1, keepdim=True)
        row_loss = torch.where(total == 0, torch.inf, mass * total.log() - cross)  # no draft logit above -inf: as far away as can be
        row_loss = torch.where(mass == 0, 0.0, row_loss).squeeze(-1)
        loss[block] = torch.where(live, torch.where(bad, torch.nan, w * row_loss), 0.0)
        answer = torch.where(bad, -1, top[pick])
        in_vocab[block] = live & (answer >= 0)
        match[block] = live & (d.argmax(-1) == answer)
        if grad is not None:
            g = w.unsqueeze(-1) * (torch.where(mass == 0, 0.0, mass * q) - p)
            g = torch.where(bad.unsqueeze(-1), torch.nan, g)
            grad[block] = torch.where(live.unsqueeze(-1), g, 0.0).to(grad.dtype)
    return loss, match, accept, in_vocab


def online_update(chunk: Tensor, start: int, running_max: Tensor, running_sum: Tensor, argmax: Tensor) -> None:
    """Fold logits [N, C] of the ids start .. start+C-1 into the running state, in place: max [N], sum of exp(logit - max) [N], argmax [N] int64.

    Ties go to the lowest id if chunks come in ascending order. Start with max = -inf, sum = 0, argmax = -1; log-sum-exp = max + log(sum).
    """
    if chunk.shape[1] == 0:
        return
    for block in _row_blocks(*chunk.shape):
        logits = _wide(chunk[block])
        best, where = logits.max(-1)
        old, total = running_max[block], running_sum[block]
        new = torch.maximum(old, best)
        shift = torch.where(torch.isfinite(new), new, 0.0)
        running_sum[block] = torch.where(total == 0, 0.0, total * torch.exp(old - shift)) + torch.exp(logits - shift.unsqueeze(-1)).sum(-1)
        argmax[block] = torch.where((best > old) | (argmax[block] < 0), where + start, argmax[block])
        running_max[block] = new


# --- 2. drafter input -------------------------------------------------------------------------------------------------------------------------------


def _rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) and 1 / rms(x), wide."""
    x = _wide(x)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * rstd, rstd


def _gather(ids: Tensor, table: Tensor) -> Tensor:
    """table[ids]; NaN for an id outside the table (only with range checks off)."""
    bad = (ids < 0) | (ids >= table.shape[0])
    return torch.where(bad.unsqueeze(-1), torch.nan, table[torch.where(bad, 0, ids)].to(torch.promote_types(table.dtype, torch.float32)))


def drafter_input(ids: Tensor, table: Tensor, state: Tensor, embed_weight: Tensor, state_weight: Tensor, eps: float) -> Tensor:
    """[N, 2H]: RMSNorm(table[ids]) * embed_weight beside RMSNorm(state) * state_weight, rounded once, in the state's dtype."""
    left = _rms(_gather(ids, table), eps)[0] * _wide(embed_weight)
    right = _rms(state, eps)[0] * _wide(state_weight)
    return torch.cat([left, right], -1).to(state.dtype)


def _rms_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm(x) * weight: for x [N, H] and for weight [H], wide."""
    xhat, rstd = _rms(x, eps)
    grad = _wide(grad)
    scaled = grad * _wide(weight)
    return rstd * (scaled - xhat * (scaled * xhat).mean(-1, keepdim=True)), (grad * xhat).sum(0)


def drafter_input_backward(
    grad: Tensor, ids: Tensor, table: Tensor, state: Tensor, embed_weight: Tensor, state_weight: Tensor, eps: float, need_embed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients for the gathered embedding rows [N, H] ([0, H] unless need_embed), state [N, H], embed_weight [H] and state_weight [H]."""
    hidden = state.shape[1]
    rows, embed_weight_grad = _rms_backward(grad[:, :hidden], _gather(ids, table), embed_weight, eps)
    state_grad, state_weight_grad = _rms_backward(grad[:, hidden:], state, state_weight, eps)
    rows = rows if need_embed else rows[:0]
    return rows.to(table.dtype), state_grad.to(state.dtype), embed_weight_grad.to(embed_weight.dtype), state_weight_grad.to(state_weight.dtype)


# --- 3. top-k of the draft logits -------------------------------------------------------------------------------------------------------------------


def draft_topk(logits: Tensor, d2t: Tensor | None, k: int) -> tuple[Tensor, Tensor]:
    """The k best of [N, Vd]: log-probabilities [N, k] float32 in descending order, ids [N, k] int64 of the target (draft id + d2t[draft id]).

    Ties go to the lowest draft id; NaN counts as the largest, as in torch.topk.
    """
    wide = _wide(logits)
    values, ids = torch.sort(wide, dim=-1, descending=True, stable=True)
    values, ids = values[:, :k], ids[:, :k]
    log_probs = values - log_sum_exp(wide).unsqueeze(-1)
    return log_probs.float(), ids.contiguous() if d2t is None else ids + d2t[ids]


# --- 5. rows in fp8 ---------------------------------------------------------------------------------------------------------------------------------


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H] float -> e4m3 [N, H] and scale [N] float32, with x ~ e4m3 * scale and scale = largest magnitude / 448.

    Written as x * (448 / amax) in float32, so that every platform gives the same bits. A row that holds a NaN or an infinity gets scale NaN: it comes back
    as NaN, and nobody takes it for finite.
    """
    wide = x.float()  # [N, H]
    if wide.shape[1] == 0:
        return wide.to(torch.float8_e4m3fn), torch.full((len(x),), FP8_TINY / FP8_MAX, dtype=torch.float32, device=x.device)
    amax = wide.abs().amax(-1, keepdim=True)  # NaN if any is NaN
    finite = torch.isfinite(amax)
    floored = amax.clamp_min(FP8_TINY)
    # tensor / tensor is one rounding everywhere; with a Python number torch may multiply by a reciprocal instead
    largest = torch.full_like(floored, FP8_MAX)
    q = torch.where(finite, wide * (largest / floored), 0.0).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q, torch.where(finite, floored / largest, torch.nan).squeeze(-1)


def dequantize_rows_fp8(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3 [N, H] * scale [N] -> [N, H] in dtype: one float32 product, rounded once."""
    return (q.float() * scale.unsqueeze(-1)).to(dtype)
