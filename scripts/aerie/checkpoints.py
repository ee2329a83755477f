"""Checkpoints of training: weights, optimiser, schedule, RNG, position in the data. A folder that is there is whole; the last and the best are kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .distributed import Group, like, whole
from .drafter import Drafter
from .errors import UserError
from .paths import RunPaths, lock_folder
from .report import write_json
from .samples import settle, system_errors
from .shard_writer import chunked_rows, digest, fsync_folder, states_sum
from .shards import byte_rows

STATE = "state.json"


def folder_of(root: Path, step: int) -> Path:
    """checkpoints/step-00000120"""
    return root / f"step-{step:08d}"


def one_training(run: RunPaths) -> int | None:
    """One training of a run at a time, until this process ends (the file handle that it returns holds the lock); what a killed one left half-written is removed.

    Raises UserError when another one is at work.
    """
    if not run.root.is_dir():
        return None
    handle, locked = lock_folder(run.root, f"another training of run {run.name!r} is at work; wait for it, end it, or choose another run with --run")
    if not locked:
        return handle
    for old in run.root.glob(f".{run.drafter.name}.*.old"):  # killed between two renames of export_drafter(): the drafter that was
        if not run.drafter.exists():
            old.rename(run.drafter)
    leftovers = (f".{run.drafter.name}.*.tmp", f".{run.drafter.name}.*.old", ".overfit.*.tmp", ".overfit.*.old", f"{run.checkpoints.name}/.step-*.tmp")
    for leftover in (path for pattern in leftovers for path in run.root.glob(pattern)):
        shutil.rmtree(leftover, ignore_errors=True)
    return handle


def sum_of(tensors: dict[str, Tensor]) -> str:
    """16 hex digits of all names, dtypes, shapes and bytes, at memory speed: a changed bit in weights or moments would be trained on without a word."""
    parts = []
    for name in sorted(tensors):
        tensor = tensors[name]
        rows = byte_rows(tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1))
        hashes = [part for _, _, part in chunked_rows([rows])]
        parts.append(f"{name} {tensor.dtype} {list(tensor.shape)} {states_sum(np.concatenate([np.zeros(0, np.uint64), *hashes]))}")
    return digest("\n".join(parts).encode())


def signed(state: dict[str, Any]) -> dict[str, Any]:
    """The state with a checksum of itself."""
    plain = json.loads(json.dumps({key: value for key, value in state.items() if key != "sum"}, default=str))  # as it is read back
    return {**plain, "sum": digest(json.dumps(plain, sort_keys=True).encode())}


def save_checkpoint(root: Path, step: int, best_step: int, drafter: Drafter, optimizer: torch.optim.Optimizer, state: dict[str, Any], group: Group = Group()) -> Path:
    """Write step's folder under a temporary name, rename it, then remove all others but the best's. `state` must be plain JSON values.

    Every process must call this; the first one writes.
    """
    tensors = {"rng": torch.get_rng_state()}
    for name, parameter in drafter.named_parameters():
        state_of = optimizer.state.get(parameter, {})
        for key, value in ((f"model.{name}", parameter.detach()), *((f"optimizer.{name}.{key}", value) for key, value in state_of.items())):
            full = whole(value)  # one at a time: with FSDP no GPU holds more than one of them whole
            if group.rank == 0:
                tensors[key] = full.cpu()
    if group.rank == 0:
        write_checkpoint(root, step, best_step, tensors, state)
    group.barrier()
    return folder_of(root, step)


def write_checkpoint(root: Path, step: int, best_step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """The writing part of save_checkpoint()."""
    final = folder_of(root, step)
    temporary = root / f".{final.name}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tensors = {name: value.contiguous() for name, value in tensors.items()}
        with system_errors(final / "tensors.safetensors"):
            save_file(tensors, temporary / "tensors.safetensors")
        settle(temporary / "tensors.safetensors")
        write_json(temporary / STATE, signed({**state, "step": step, "best_step": best_step, "tensors_sum": sum_of(tensors)}))
        fsync_folder(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        fsync_folder(root)  # before the others go
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for other in root.glob("step-*"):
        if other not in (final, folder_of(root, best_step)):
            shutil.rmtree(other, ignore_errors=True)


def last_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint, or None."""
    found = sorted(path for path in root.glob("step-*") if (path / STATE).is_file())
    return found[-1] if found else None


def read_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint."""
    try:
        found = json.loads((folder / STATE).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"{STATE} holds no JSON object")
        if signed(found) != found:
            raise ValueError(f"{STATE} does not match its checksum")
        return found
    except (OSError, ValueError, RecursionError) as exc:
        raise UserError(f"{folder} is not a whole checkpoint ({exc}); remove it and resume again") from None


@torch.no_grad()
def load_checkpoint(folder: Path, drafter: Drafter, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Put weights, optimiser state and RNG back; returns state.json. Raises UserError when the folder is not of this drafter."""
    state = read_state(folder)
    try:
        tensors = load_file(folder / "tensors.safetensors")
    except (OSError, SafetensorError) as exc:
        raise UserError(f"{folder} is not a whole checkpoint ({exc}); remove it and resume again") from None
    if state["tensors_sum"] != sum_of(tensors):
        raise UserError(f"{folder} is not a whole checkpoint (tensors.safetensors does not match its checksum); remove it and resume again")
    optimizer_state: dict[int, dict[str, Tensor]] = {}
    order = [id(parameter) for part in optimizer.param_groups for parameter in part["params"]] if optimizer is not None else []
    for name, parameter in drafter.named_parameters():
        saved = tensors.get(f"model.{name}")
        if saved is None or saved.shape != parameter.shape:
            raise UserError(f"{folder} holds a drafter of another shape ({name}: {list(saved.shape) if saved is not None else 'missing'}, this one {list(parameter.shape)}); "
                            "start anew without --resume, or set [draft] back")
        parameter.copy_(like(saved, parameter))
        prefix = f"optimizer.{name}."
        own = {key.removeprefix(prefix): like(value, parameter) if value.dim() else value for key, value in tensors.items() if key.startswith(prefix)}
        if own and id(parameter) in order:
            optimizer_state[order.index(id(parameter))] = own
    if optimizer_state:
        full = optimizer.state_dict()
        full["state"] = optimizer_state
        optimizer.load_state_dict(full)
    torch.set_rng_state(tensors["rng"])
    return state
