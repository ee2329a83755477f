"""Forward and backward of one optimiser step, in one process or in several: what the trainer and its benchmarks share."""

from __future__ import annotations

from typing import Any, Callable, Sequence

from torch import Tensor

from .batches import Batch
from .distributed import Group, shard
from .drafter import Drafter
from .optimizer import Optimizer
from .ttt_loss import StepCounts
from .unroll import Fixed, Rope, unroll


def spread(drafter: Drafter, parallel: str, group: Group) -> None:
    """Before the optimiser is made: the same weights in every process, or with parallel = "fsdp" each process's part of them."""
    group.share(drafter)
    if parallel == "fsdp" and group.world > 1:
        drafter.set_compute(drafter.compute_dtype, fused_grads=False)
        shard(drafter, drafter.compute_dtype, group)
    drafter.refresh()


def add_gradients(
    drafter: Drafter, optimizer: Optimizer, batches: Sequence[Any], fixed: Fixed, rope: Rope, divisor: float, passes: int = 0,
    move: Callable[[Any, int], Batch] = lambda batch, place: batch, known: Callable[[Batch], tuple[Tensor, Tensor] | None] = lambda batch: None,
) -> tuple[list[list[StepCounts]], list[Tensor]]:  # fmt: skip
    """Adds the gradients of this process's batches together; returns the counts of each, and each loss (a tensor, not waited for).

    `divisor`: supervised rows of the whole step, over all processes. `passes`: the most batches that any process has; FSDP's collectives want as many passes in
    each of them. `move(batch, place)` brings a batch to the device; `known(batch)` is unroll()'s.
    """
    counts, losses = [], []
    for place, batch in enumerate(batches):
        moved = move(batch, place)
        if place == len(batches) - 1:
            optimizer.sums.last_forward()
        loss, one, _ = drafter(unroll, moved, fixed, rope, divisor, known(moved))
        optimizer.sums.forward_done()
        loss.backward()
        counts.append(one)
        losses.append(loss.detach())
    for _ in range(passes - len(batches) if optimizer.split else 0):
        drafter(lambda module: sum(parameter.sum() for parameter in module.parameters()) * 0.0).backward()
    return counts, losses
