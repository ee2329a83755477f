"""Teacher, LM head and loss, on supervised rows only and in chunks: logits live for one chunk, and the head's gradient is made while they do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import ops
from .drafter import Drafter, accumulate

CHUNK_BYTES = 256 << 20  # of float32 logits at a time
CPU_CHUNK_BYTES = 16 << 20  # stays near the caches


def chunk_rows(width: int, device: torch.device) -> int:
    """How many rows of `width` logits are worked on at a time."""
    return max(16, (CHUNK_BYTES if device.type == "cuda" else CPU_CHUNK_BYTES) // (4 * width))


@dataclass
class TargetHead:
    """What turns `final` into the teacher's distribution."""

    head: Tensor  # [V, H] compute dtype
    draft_head: Tensor  # [Vd, H]: its rows of the draft vocabulary
    draft_ids: Tensor  # [Vd] int64: draft id -> target id
    to_draft: Tensor  # [V] int64: target id -> draft id, -1 outside
    logit_scale: float = 1.0
    soft_cap: float = 0.0

    def logits(self, final: Tensor, weight: Tensor) -> Tensor:
        """[R, rows of weight], the compute dtype."""
        logits = final @ weight.t()
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return self.soft_cap * torch.tanh(logits / self.soft_cap) if self.soft_cap else logits

    def survey(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Over the whole vocabulary, in chunks of rows: the target's next token [R] int64 and the log-sum-exp [R] float32."""
        tops, sums = [], []
        wide = torch.promote_types(final.dtype, torch.float32)
        for part in final.split(chunk_rows(len(self.head), final.device)):
            logits = self.logits(part, self.head)
            if ops.gpu_kernel(logits):  # one read of the logits, no copy of them in float32
                found = ops.drafter_ops.OnlineTarget(len(logits), logits.device)
                ops.drafter_ops.OPS.online_update_(logits, 0, found.maximum, found.total, found.argmax)
                tops.append(found.argmax)
                sums.append(found.lse)
                continue
            tops.append(logits.argmax(-1))
            sums.append(logits.to(wide).logsumexp(-1))
        return torch.cat(tops), torch.cat(sums)


@dataclass
class Teacher:
    """What the rows of one batch are taught."""

    logits: Tensor  # [N, Vd] compute dtype
    lse: Tensor  # [N] float32: over the target's whole vocabulary
    wanted: Tensor  # [N] int64: draft id of the target's own next token, -1 outside the draft vocabulary


@dataclass
class StepCounts:
    """Sums of one TTT step; tensors, so that nothing waits for the device."""

    rows: int
    loss: Tensor  # sum of cross entropies
    correct: Tensor  # rows whose top draft token is the target's top token
    reached: Tensor  # rows whose every earlier step was correct
    accepted: Tensor  # of those, correct here too


class _HeadLoss(torch.autograd.Function):
    """weight * sum over rows of the cross entropy against the teacher; backward takes a gradient of 1 alone. Also losses, hits and top tokens by row.

    With p = exp(teacher - lse) and m = sum of p over the draft vocabulary: loss = m * lse(logits) - sum p * logits. A row whose target is mostly outside the
    draft vocabulary weighs little: nothing that the drafter can say there would be accepted.
    """

    @staticmethod
    def forward(ctx, normed: Tensor, master: Tensor, head: Tensor, teacher: Teacher, labels: Tensor, weight: float, fused: bool, learning: bool, collected: list[Tensor]):
        count, width = len(normed), len(head)
        wide = torch.promote_types(normed.dtype, torch.float32)
        losses = torch.empty(count, dtype=wide, device=normed.device)
        hits = torch.empty(count, dtype=torch.bool, device=normed.device)
        needs = learning and (ctx.needs_input_grad[0] or ctx.needs_input_grad[1])  # the latter is true of parameters under no_grad too
        kernel = needs and ops.gpu_kernel(normed)  # losses, hits and gradient in one pass over the logits, but no top tokens
        tops = torch.empty(0 if kernel else count, dtype=torch.int64, device=normed.device)
        dnormed = torch.empty_like(normed) if needs else None
        dhead = ctx.dhead = None
        if needs and ctx.needs_input_grad[1]:
            if fused:
                dhead = master.grad
            elif collected:
                (dhead,) = collected
            else:  # the unroll's first step hands out the gradient of all of them: one tensor, summed in float32
                dhead = ctx.dhead = torch.zeros_like(master, dtype=torch.promote_types(master.dtype, torch.float32))
                collected.append(dhead)
        step = chunk_rows(width, normed.device)
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            logits, chosen = normed[part] @ head.t(), labels[part]  # [c, Vd]
            if kernel:
                weights = torch.full((len(logits),), weight, dtype=torch.float32, device=logits.device)
                loss, hits[part], _, _ = ops.drafter_ops.OPS.soft_target_ce_(logits, teacher.logits, teacher.lse, teacher.wanted, weights, chosen, False)
                losses[part] = loss / weight
                grad = logits  # the kernel's gradient stands where the logits were
            else:
                tops[part] = logits.argmax(-1)
                hits[part] = tops[part] == teacher.wanted[chosen]
                logits = logits.to(wide)
                chances = (teacher.logits[chosen].to(wide) - teacher.lse[chosen].unsqueeze(-1)).exp_()
                mass = chances.sum(-1)
                lse = logits.logsumexp(-1)
                losses[part] = mass * lse - torch.linalg.vecdot(chances, logits)
                if needs:
                    shift = mass.log() - lse  # m * softmax = exp(logits - lse + log m); a mass of 0 gives 0
                    grad = logits.add_(shift.unsqueeze(-1)).exp_().sub_(chances).mul_(weight).to(normed.dtype)
            if needs:
                torch.mm(grad, head, out=dnormed[part])
                if dhead is not None:
                    accumulate(dhead, grad, normed[part])
        ctx.save_for_backward(dnormed)
        ctx.mark_non_differentiable(losses, hits, tops)
        return losses.sum() * weight, losses, hits, tops

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        (dnormed,) = ctx.saved_tensors
        return dnormed, ctx.dhead, None, None, None, None, None, None, None


def head_loss(
    drafter: Drafter, normed: Tensor, teacher: Teacher, labels: Tensor, weight: float, collected: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loss of one TTT step.

    normed [R, H] compute dtype; labels [R] int64: each row's row in the teacher; collected: one list for all steps of an unroll, empty at first.
    Returns (weight * sum of cross entropies, cross entropies [R], hits [R] bool, top draft ids [R] int64: none where gradients are made by the kernel).
    Backward assumes that the first is added to the loss as it is.
    """
    return _HeadLoss.apply(normed, drafter.lm_head, drafter.compute("lm_head").detach(), teacher, labels, weight, drafter.fused_grads, torch.is_grad_enabled(), collected)
