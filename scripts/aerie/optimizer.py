"""AdamW on float32 masters with clipping by the global norm; the clipping factor rides along with the fused update and nothing waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import Train
from .distributed import Group, whole
from .drafter import Drafter


class Optimizer:
    """zero_grad(), step(lr); `norm` is the last step's gradient norm, a tensor."""

    def __init__(self, drafter: Drafter, train: Train, group: Group = Group()):
        self.drafter, self.max_norm, self.group = drafter, train.max_grad_norm, group
        self.parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
        self.split = any(hasattr(parameter, "full_tensor") for parameter in self.parameters)  # FSDP: its reductions are its own
        self.adam = torch.optim.AdamW(self.parameters, lr=train.lr, betas=tuple(train.betas), weight_decay=train.weight_decay, fused=not self.split)
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
        grads = [parameter.grad for parameter in self.parameters]
        if self.split:
            self.norm = whole(torch.nn.utils.get_total_norm(grads))
        else:
            for grad in grads:
                self.group.sum_(grad)
            self.norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        for group in self.adam.param_groups:
            group["lr"] = lr
        if self.max_norm:
            factor = torch.clamp(self.max_norm / (self.norm + 1e-6), max=1.0)
            if self.split:
                for grad in grads:
                    grad.mul_(float(factor))
            elif self.norm.is_cuda:  # the fused kernel divides gradients by grad_scale as it reads them
                self.adam.grad_scale, self.adam.found_inf = 1.0 / factor, torch.zeros((), device=self.norm.device)
            else:
                torch._foreach_mul_(grads, factor)
        self.adam.step()
        self.drafter.refresh()
        return self.norm

    def state(self) -> dict[Any, dict[str, Tensor]]:
        """AdamW's own state by parameter."""
        return self.adam.state
