"""Gradients summed over processes (DDP) while backward still runs.

A matrix is used in every TTT step, and its gradient grows in place until the backward of its last use. So uses are counted in the forward of an optimiser
step's last batch and counted down in its backward; at nought the sum is started, and the links work while backward goes on. The order of the sums is fixed,
since every process must start them alike; what cannot be started early (vectors, everything in a process without a batch, matrices that activation
checkpointing uses twice) is started at the end.
"""

from __future__ import annotations

from collections import Counter
from typing import Callable

import torch.distributed as dist

from .distributed import Group
from .drafter import Drafter

ORDER = ("lm_head", "down", "gate_up", "o", "q_b", "kv_b", "qkv_state", "qkv_embed", "fc")  # as backward finishes them; the head's is made in forward


class GradientSum:
    """last_forward() and forward_done() around an optimiser step's last forward, finish() before the update. Does nothing in a group of one."""

    def __init__(self, drafter: Drafter, group: Group):
        self.trained = {name: parameter for name, parameter in drafter.named_parameters() if parameter.requires_grad}
        self.active = group.world > 1
        self.order = [name for name in ORDER if name in self.trained] + sorted(set(self.trained) - set(ORDER))
        self.armed = False
        self.uses: Counter[str] = Counter()
        self.ready: set[str] = set()
        self.works: list[dist.Work] = []
        self.early = 0  # sums of the last step that were started before backward had ended

    def last_forward(self) -> None:
        """From here on uses count: no batch of this step comes after this one."""
        self.armed = self.active

    def use(self, name: str) -> Callable[[], None] | None:
        """A matrix is used; what to call when that use's backward has added to its gradient, None when nobody counts."""
        if not self.armed:
            return None
        self.uses[name] += 1
        return lambda: self._added(name)

    def forward_done(self) -> None:
        """The head's gradient is whole: it is made with the loss."""
        if self.armed:
            self.ready.add("lm_head")
            self._start()

    def _added(self, name: str) -> None:
        self.uses[name] -= 1
        if not self.uses[name]:
            self.ready.add(name)
            self._start()

    def _start(self, everything: bool = False) -> None:
        while len(self.works) < len(self.order) and (everything or self.order[len(self.works)] in self.ready):
            self.works.append(dist.all_reduce(self.trained[self.order[len(self.works)]].grad, async_op=True))

    def finish(self) -> None:
        """Every gradient is the sum over all processes (on a GPU: for what is enqueued from here on)."""
        if not self.active:
            return
        self.early = len(self.works)
        self._start(everything=True)
        for work in self.works:
            work.wait()
        self.armed, self.works = False, []
        self.uses.clear()
        self.ready.clear()
