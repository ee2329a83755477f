"""Independent references for the drafter ops: naive, float64, on the CPU, written from the definitions and not from cuda/reference.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def soft_target(draft: Tensor, target: Tensor, top: Tensor, lse: Tensor | None, weights: Tensor | None, rows: Tensor | None, renormalize: bool) -> dict[str, Tensor]:
    """Row by row; the gradient by autograd through log_softmax."""
    draft, target, top = draft.detach().cpu().double(), target.cpu().double(), top.cpu()
    out = {"loss": [], "accept": [], "match": [], "in_vocab": [], "grad": []}
    for i in range(len(draft)):
        w = 1.0 if weights is None else float(weights[i])
        j = i if rows is None else int(rows[i])
        if w == 0:
            out["loss"].append(0.0), out["accept"].append(0.0), out["match"].append(False), out["in_vocab"].append(False)
            out["grad"].append(torch.zeros_like(draft[i]))
            continue
        d = draft[i].clone().requires_grad_()
        if not (target[j] > -math.inf).any():
            p = torch.zeros_like(target[j])
        else:
            p = torch.softmax(target[j], 0) if lse is None else (target[j] - lse[j].cpu().double()).exp()
        log_q = torch.log_softmax(d, 0)
        q = log_q.detach().exp()
        mass = p.sum()
        loss_p = p / mass if renormalize and mass > 0 else p
        used = loss_p > 0
        loss = -w * (loss_p[used] * log_q[used]).sum()
        grad = torch.autograd.grad(loss, d)[0] if used.any() else torch.zeros_like(d)
        out["loss"].append(float(loss.detach())), out["grad"].append(grad)
        out["accept"].append(float(torch.minimum(p, q).sum()))
        best = int((d == d.max()).nonzero()[0])
        out["match"].append(best == int(top[j])), out["in_vocab"].append(int(top[j]) >= 0)
    empty = torch.zeros(0, draft.shape[1], dtype=torch.float64)
    grads = torch.stack(out.pop("grad")) if len(draft) else empty
    return {name: torch.tensor(values) for name, values in out.items()} | {"grad": grads}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [N, H] / sqrt(mean square + eps) * weight, as a loop over rows."""
    rows = [row / (torch.dot(row, row) / len(row) + eps) ** 0.5 * weight for row in x]
    return torch.stack(rows) if rows else x * weight


def topk(logits: Tensor, k: int) -> tuple[list[list[float]], list[list[int]]]:
    """Sort every row by (value down, column up)."""
    values, ids = [], []
    for row in logits.detach().cpu().double():
        order = sorted(range(len(row)), key=lambda c: (-float(row[c]), c))[:k]
        total = float(torch.logsumexp(row, 0))
        ids.append(order)
        values.append([float(row[c]) - total for c in order])
    return values, ids


E4M3 = sorted(
    {sign * value for sign in (1, -1) for value in [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]}
)  # every finite e4m3 value


def nearest_e4m3_distance(x: float) -> float:
    """How far the nearest e4m3 value is."""
    return min(abs(x - value) for value in E4M3)


def tree_parents(parent_list: list[int], selected: list[int], topk_: int) -> list[int | None]:
    """Parent node of every node of one tree; None for the root and where the parent was not selected."""
    parents: list[int | None] = [None]
    for candidate in selected:
        block = candidate // topk_
        if block == 0:
            parents.append(0)
        elif parent_list[block] in selected:
            parents.append(selected.index(parent_list[block]) + 1)
        else:
            parents.append(None)
    return parents
