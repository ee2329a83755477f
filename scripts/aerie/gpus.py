"""Which GPUs a process gets: server.gpus and train.gpus become CUDA_VISIBLE_DEVICES of what is started."""

from __future__ import annotations

import os
from typing import Mapping, Sequence

from .config import Config
from .errors import UserError

STARTED = "AERIE_TRAIN_GPUS"  # in the environment of processes that train.gpus started: CUDA_VISIBLE_DEVICES is theirs already


def visible_devices(gpus: Sequence[int], key: str, environ: Mapping[str, str] = os.environ) -> str:
    """CUDA_VISIBLE_DEVICES for these GPUs, counted from 0 among those that our own environment shows. Raises UserError where it shows fewer."""
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in shown.split(",") if name.strip()]
    if not names:
        return shown  # all are hidden, and stay so
    if max(gpus) >= len(names):
        raise UserError(f"{key} = {list(gpus)} counts among the GPUs of CUDA_VISIBLE_DEVICES={shown!r}, and that shows {len(names)}; unset it, or choose others")
    return ",".join(names[gpu] for gpu in gpus)


def apart(config: Config) -> bool:
    """Whether server and trainer have GPUs of their own."""
    return bool(config.server.gpus) and bool(config.train.gpus) and not set(config.server.gpus) & set(config.train.gpus)


def training_env(gpus: Sequence[int], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the environment of a trainer on these GPUs has on top of ours; empty where it is set already.

    Raises UserError under a torchrun of the user's own: then that says which GPUs.
    """
    if not gpus or STARTED in environ:
        return {}
    if "WORLD_SIZE" in environ:
        raise UserError(f"train.gpus = {list(gpus)} starts the processes itself; start 03_train.py without torchrun, or with --set train.gpus=[]")
    return {"CUDA_VISIBLE_DEVICES": visible_devices(gpus, "train.gpus", environ), STARTED: ",".join(map(str, gpus))}


def refuse_missing(gpus: Sequence[int], device: str, seen: int) -> None:
    """Raises UserError where train.gpus names GPUs and PyTorch, which is shown those alone, sees fewer. train.device = "cpu" says that as many CPU processes are meant."""
    if gpus and device != "cpu" and seen < len(gpus):
        sees = f"{seen} of them" if seen else "no GPU"
        raise UserError(f"train.gpus = {list(gpus)}, but PyTorch sees {sees} here; set it to GPUs that nvidia-smi lists, or to [] for one process on what is here (`make doctor` says more)")
