"""The drafter ops for the scripts: `from aerie.ops import drafter_ops` finds <root>/cuda by this file's own place."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from .errors import UserError

CUDA = Path(__file__).resolve().parents[2] / "cuda"


def _load() -> ModuleType:
    # not a package named `cuda`: NVIDIA's own Python packages take that name
    if str(CUDA) not in sys.path:
        sys.path.append(str(CUDA))
    return importlib.import_module("drafter_ops")


drafter_ops = _load()


def gpu_kernel(tensor: torch.Tensor) -> bool:
    """Whether the library of cuda/ is built and its kernels take this tensor (bfloat16 on a GPU)."""
    return drafter_ops.has_kernel(tensor, torch.bfloat16)


def choose_kernels(wish: str, device: torch.device) -> tuple[bool, str]:
    """train.kernels for this device: (whether the Triton kernels of fast_ops.py run, a word on what runs). Call it before any op: `off` keeps cuda/ out too.

    Raises UserError where `on` cannot be had.
    """
    if wish == "off":
        os.environ["AERIE_DRAFTER_OPS"] = "reference"
        return False, "PyTorch alone"
    triton, library = importlib.util.find_spec("triton") is not None, drafter_ops.status()
    if wish == "on" and (device.type != "cuda" or not triton or library != "loaded"):
        why = "the device is a CPU" if device.type != "cuda" else "triton is not installed" if not triton else library
        raise UserError(f"train.kernels = 'on', but {why}; set train.kernels=auto to train without")
    if device.type != "cuda":
        return False, "PyTorch alone"
    return triton, f"{'Triton kernels' if triton else 'PyTorch, triton is not installed'}; drafter ops: {library}"
