"""Teacher, LM head and loss, on supervised rows only and in chunks: logits live for one chunk, and the head's gradient is made while they do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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

    def top_tokens(self, final: Tensor) -> Tensor:
        """The target's own next token [R] int64, over its whole vocabulary."""
        rows = chunk_rows(len(self.head), final.device)
        return torch.cat([self.logits(part, self.head).argmax(-1) for part in final.split(rows)]) if len(final) else final.new_zeros(0, dtype=torch.int64)

    def teach(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """Logits over the draft vocabulary [R, Vd] in the compute dtype and their log-sum-exp [R] float32."""
        logits = self.logits(final, self.draft_head)
        rows = chunk_rows(logits.shape[1], final.device)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return logits, torch.cat([part.to(wide).logsumexp(-1) for part in logits.split(rows)])


@dataclass
class StepCounts:
    """Sums of one TTT step; tensors, so that nothing waits for the device."""

    rows: int
    loss: Tensor  # sum of cross entropies
    correct: Tensor  # rows whose top draft token is the target's top token
    reached: Tensor  # rows whose every earlier step was correct
    accepted: Tensor  # of those, correct here too


class _HeadLoss(torch.autograd.Function):
    """weight * sum over rows of cross entropy(teacher, head(normed)); also per-row losses and top tokens. Its backward takes a gradient of 1 alone."""

    @staticmethod
    def forward(ctx, normed: Tensor, master: Tensor, head: Tensor, teacher: Tensor, teacher_lse: Tensor, labels: Tensor, weight: float, fused: bool):
        count, width = len(normed), len(head)
        wide = torch.promote_types(normed.dtype, torch.float32)
        losses = torch.empty(count, dtype=wide, device=normed.device)
        tops = torch.empty(count, dtype=torch.int64, device=normed.device)
        needs = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        dnormed = torch.empty_like(normed) if needs else None
        dhead = None
        if needs and ctx.needs_input_grad[1]:
            dhead = master.grad if fused else torch.zeros_like(master)
        step = chunk_rows(width, normed.device)
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            logits = (normed[part] @ head.t()).to(wide)  # [c, Vd]
            chosen = labels[part]
            chances = (teacher[chosen].to(wide) - teacher_lse[chosen].unsqueeze(-1)).exp_()
            tops[part] = logits.argmax(-1)
            lse = logits.logsumexp(-1)
            losses[part] = lse - torch.linalg.vecdot(chances, logits)
            if needs:
                logits.sub_(lse.unsqueeze(-1)).exp_().sub_(chances).mul_(weight)  # now the gradient
                grad = logits.to(normed.dtype)
                torch.mm(grad, head, out=dnormed[part])
                if dhead is not None:
                    accumulate(dhead, grad, normed[part])
        ctx.save_for_backward(dnormed, None if fused else dhead)
        ctx.mark_non_differentiable(losses, tops)
        return losses.sum() * weight, losses, tops

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        dnormed, dhead = ctx.saved_tensors
        return dnormed, dhead, None, None, None, None, None, None


def head_loss(drafter: Drafter, normed: Tensor, teacher: Tensor, teacher_lse: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of one TTT step.

    normed [R, H] compute dtype; teacher [N, Vd] logits with log-sum-exp [N]; labels [R] int64: each row's row in teacher.
    Returns (weight * sum of cross entropies, cross entropies [R], top draft ids [R]). Backward assumes that the first is added to the loss as it is.
    """
    return _HeadLoss.apply(normed, drafter.lm_head, drafter.compute("lm_head").detach(), teacher, teacher_lse, labels, weight, drafter.fused_grads)
