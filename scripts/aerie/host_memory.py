"""Host memory before a launch: a server that is killed for memory while it loads says nothing, it is only gone (exit code -9)."""

from __future__ import annotations

from pathlib import Path

from .config import Config
from .errors import UserError
from .identity import read_model_config, text_config
from .servers import has_gpu, server_args, tensor_parallel

GB = 1e9
CPU_PROCESSES = 3.5 * GB  # SGLang's three processes without weights on a CPU: 4.3 GB were seen with 0.54 GB of weights
GPU_PROCESS = 4.0 * GB  # one rank on a GPU: CUDA context, imports, staging
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weight_files(folder: Path) -> list[int]:
    """Sizes of the weight files in a folder, [] where there is none."""
    return [path.stat().st_size for path in folder.glob("*.safetensors")] if folder.is_dir() else []


def needed_bytes(config: Config, mode: str, gpu: bool) -> float:
    """Host memory that the server of `mode` takes at least. On a CPU the weights stay there; on a GPU each rank holds one file of them at a time."""
    target = weight_files(Path(config.model_path))
    drafter = weight_files(config.run.drafter) if mode == "serving" else []
    if gpu:
        args = server_args(config, mode)
        return tensor_parallel(args) * (GPU_PROCESS + max(target + drafter, default=0))
    from .check import served_dtype  # imports torch, which `make doctor` does without

    model = text_config(read_model_config(config.model_path))
    own = str(model.get("dtype") or model.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    growth = BYTES.get(served_dtype(model, config.target.dtype), 2) / BYTES.get(own, 2)
    return CPU_PROCESSES + sum(target) * growth + sum(drafter)


def refuse_short_memory(config: Config, mode: str, available: float | None = None) -> None:
    """Raise UserError when less host memory is free than the server needs to load."""
    if available is None:
        import psutil

        available = psutil.virtual_memory().available
    needed = needed_bytes(config, mode, has_gpu())
    if available < needed:
        raise UserError(f"{available / GB:.1f} GB of host memory are free, the {mode} server of {config.model_path} needs about {needed / GB:.1f} GB to "
            f"load; end other servers (make stop) or other programs first")
