"""AdamW on float32 masters with clipping by the global norm; the clipping factor rides along with the fused update and nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import Train
from .distributed import Group, is_split
from .drafter import Drafter
from .gradient_sum import GradientSum


class Optimizer:
    """zero_grad(), step(lr); `norm` is the last step's gradient norm, a tensor."""

    def __init__(self, drafter: Drafter, train: Train, group: Group = Group()):
        self.drafter, self.max_norm, self.group = drafter, train.max_grad_norm, group
        self.parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        parts = [[p for p in self.parameters if not is_split(p)], [p for p in self.parameters if is_split(p)]]  # AdamW's loops take no mixture
        self.split = bool(parts[1])  # FSDP: it sums the matrices' gradients itself
        self.adam = torch.optim.AdamW(
            [{"params": part} for part in parts if part], lr=train.lr, betas=tuple(train.betas), weight_decay=train.weight_decay, fused=True,
        )  # fmt: skip
        self.sums = GradientSum(drafter, Group() if self.split else group)
        drafter.on_use = self.sums.use
        self.norm: Tensor | None = None

    def zero_grad(self) -> None:
        """Gradients there and zero."""
        if self.split:
            self.adam.zero_grad(set_to_none=True)
        else:
            self.drafter.zero_grads()

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Clip, update the masters, refresh the compute copies. Returns the norm before clipping, not yet waited for."""
        self.sums.finish()
        self.norm, grads = self.split_norm() if self.split else self.plain_norm()
        for group in self.adam.param_groups:
            group["lr"] = lr
        if self.max_norm:
            factor = torch.clamp(self.max_norm / (self.norm + 1e-6), max=1.0)
            if self.norm.is_cuda and not self.split:  # the fused kernel divides gradients by grad_scale as it reads them
                self.adam.grad_scale, self.adam.found_inf = 1.0 / factor, torch.zeros((), device=self.norm.device)
            else:
                torch._foreach_mul_(grads, factor)
        self.adam.step()
        self.drafter.refresh()
        return self.norm

    def plain_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm over all gradients, and they."""
        grads = [parameter.grad for parameter in self.parameters]
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))), grads

    def split_norm(self) -> tuple[Tensor, list[Tensor]]:
        """With FSDP: the norm over all gradients, and what this process holds of them. Sums those that FSDP does not (the vectors')."""
        mine = [parameter.grad.to_local() for parameter in self.parameters if is_split(parameter)]
        whole = [self.group.sum_(parameter.grad) for parameter in self.parameters if not is_split(parameter)]
        square = self.group.sum_(torch.stack(torch._foreach_norm(mine)).square().sum())
        if whole:
            square = square + torch.stack(torch._foreach_norm(whole)).square().sum()
        return square.sqrt(), mine + whole

    def state(self) -> dict[Any, dict[str, Tensor]]:
        """AdamW's own state by parameter."""
        return self.adam.state
