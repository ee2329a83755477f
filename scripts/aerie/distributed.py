"""Several processes under torchrun: who we are, sums over all, and FSDP2. One process is the group of one, for which everything here does nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Group:
    """Rank and number of the processes that train together."""

    rank: int = 0
    world: int = 1

    def sum_(self, tensor: Tensor) -> Tensor:
        """The tensor becomes its sum over all processes."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait until all processes are here (between CPUs: no GPU is waited for)."""
        self.table([0])

    def table(self, row: list[int]) -> list[list[int]]:
        """Every process's row of whole numbers, in order of rank; goes between CPUs, so that no GPU is waited for."""
        if self.world == 1:
            return [row]
        rows = [torch.empty(len(row), dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(rows, torch.tensor(row, dtype=torch.int64))
        return [each.tolist() for each in rows]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order of rank."""
        values: list[Any] = [value]
        if self.world > 1:
            values = [None] * self.world
            dist.all_gather_object(values, value)
        return values

    def first(self, value: Any) -> Any:
        """The first process's value, in every process: for what all must decide alike."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values)
        return values[0]

    @torch.no_grad()
    def share(self, module: nn.Module) -> None:
        """Every process gets the first one's parameters; nothing else makes sure that they begin equal to the last bit."""
        if self.world > 1:
            for parameter in module.parameters():
                dist.broadcast(parameter, 0)

    def leave(self) -> None:
        """At the end: give the connections back."""
        if self.world > 1:
            dist.destroy_process_group()


def start_group(cuda: bool) -> Group:
    """Join the processes that torchrun started (WORLD_SIZE in the environment): NCCL between GPUs; gloo between CPUs, for counts and decisions also beside GPUs."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Group()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return Group(dist.get_rank(), dist.get_world_size())


def shard(module: nn.Module, compute: torch.dtype, group: Group) -> None:
    """FSDP2: masters, gradients and moments split over the processes; gradients are sums in float32, as without it.

    Vectors (norms) stay whole and float32 in every process, as they are computed with: their gradients are summed by the optimiser.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (group.world,))
    policy = MixedPrecisionPolicy(param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32)
    vectors = {parameter for name, parameter in module.named_parameters() if name not in module.MATRICES}
    fully_shard(module, mesh=mesh, mp_policy=policy, ignored_params=vectors)
    module.set_force_sum_reduction_for_comms(True)  # plain sums: gloo knows no others
    module.set_gradient_divide_factor(1.0)


def is_split(tensor: Tensor) -> bool:
    """Whether this process holds a part of it only."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a split one; a collective."""
    return tensor.full_tensor() if is_split(tensor) else tensor


def like(value: Tensor, other: Tensor) -> Tensor:
    """`value`, whole in every process, split as `other` is."""
    if not is_split(other):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(other.device), other.device_mesh, other.placements)
