"""What a config asks of the machine: GPUs by its options, disk and memory by its plan (../plan.py), so that doctor compares with this config and not with the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checks import GIB, Facts

LEAST_DISK = 20 * GIB  # the demo with its packages


@dataclass(frozen=True)
class Needs:
    """In bytes. disk: what the run still has to write; dumps: two dumps of the longest sample; memory: of the host, while a server loads, with a weight file on every
    rank; at_least: there is no weight file yet whose size could be in it."""

    disk: float
    dumps: float
    memory: float
    at_least: bool = False


def ranks_of(args: dict[str, Any]) -> int:
    """GPUs that one server of these SGLang options runs on: tensor times pipeline parallelism, times its copies (dp-size; with data-parallel attention they share
    the tensor-parallel ranks). 1 where an option is no number."""

    def number(*names: str) -> int:
        value = next((args[name] for name in names if name in args), 1)
        return value if isinstance(value, int) and value > 0 else int(value) if str(value).isdigit() and int(value) else 1

    copies = 1 if args.get("enable-dp-attention") else number("dp-size", "dp", "data-parallel-size")
    return number("tp-size", "tp", "tensor-parallel-size") * number("pp-size", "pipeline-parallel-size") * copies


def for_gpus(facts: Facts) -> bool:
    """Whether the config was written for GPUs: parallel over several, or [plan] names some, or server.gpus or train.gpus do."""
    config = facts.config
    return bool(config) and (ranks_of(facts.server_args) > 1 or config.plan.gpus > 0 or bool(config.server.gpus or config.train.gpus))


def needs_of(facts: Facts) -> Needs | None:
    """By the plan of the config; None where it cannot be computed: no config, no packages yet, no target and no plan.shape, amounts not known."""
    config = facts.config
    if not config:
        return None
    try:
        from .. import host_memory
        from .. import plan as planning

        shape, amounts = planning.shape_of(config), planning.read_amounts(config)
        plan = planning.Plan(0, 0.0)
        planning.plan_disk(plan, config, shape, amounts, float("inf"), None)
        aux = len(config.target.aux_layer_ids)
        size = planning.FLOAT_BYTES.get(config.target.dtype, 2)
        at_least = False
        if facts.gpus or for_gpus(facts):
            largest = max(host_memory.weight_files(Path(config.model_path)), default=0)
            at_least = not largest
            chunk = int(facts.server_args.get("chunked-prefill-size", 8192))
            memory = ranks_of(facts.server_args) * (host_memory.GPU_PROCESS + largest) + planning.capture_bytes(shape, aux, chunk, size)["host"]
        else:
            memory = host_memory.CPU_PROCESSES + sum(shape.weight_bytes(1, config.target.dtype).values())
        there = sum(path.stat().st_size for path in config.run.root.rglob("*") if path.is_file())
        longest = min(amounts.longest, config.data.max_tokens) or config.data.max_tokens
        return Needs(max(sum(part.bytes for part in plan.disk) - there, 0), 2 * planning.dump_bytes(shape, aux, config.target.dtype, longest), memory, at_least)
    except Exception:  # whatever is wrong with packages, target or data is said by their own checks, and by `make plan`
        return None
