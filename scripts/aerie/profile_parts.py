"""The time of one training step by part: kernels sorted by name."""

from __future__ import annotations

from collections import defaultdict
from typing import Callable

import torch

PARTS = (  # first match wins
    ("attention", ("flash", "fmha", "merge_forward", "merge_backward", "rope_split", "scaled_dot_product")),
    ("loss", ("soft_target", "reduce_kernel", "softmax", "logsumexp", "argmax", "online", "ArgMax", "aerie_")),
    ("update", ("multi_tensor", "adam", "foreach", "lpnorm")),
    ("matrices", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "aten::mm", "aten::addmm", "splitK")),
    ("norms and gate", ("rms_", "silu", "drafter_input", "add_weight_sums")),
)


def part_of(name: str) -> str:
    """Which part a kernel belongs to."""
    lowered = name.lower()
    for part, words in PARTS:
        if any(word.lower() in lowered for word in words):
            return part
    return "rest"


def profile_parts(step: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of device (or CPU) time by part, of one step; also the largest kernels of the rest, and the wall time as `wall`."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[ProfilerActivity.CPU, activity] if cuda else [activity]) as profiler:
        step()
        if cuda:
            torch.cuda.synchronize()
    parts: dict[str, float] = defaultdict(float)
    others: dict[str, float] = {}
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if cuda else event.self_cpu_time_total
        if cuda and event.device_type.name != "CUDA":
            continue
        parts[part_of(event.key)] += microseconds / 1e3
        if part_of(event.key) == "rest":
            others[event.key] = microseconds / 1e3
    for name, value in sorted(others.items(), key=lambda item: -item[1])[:6]:
        parts[f"rest: {name[:60]}"] = value
    return dict(sorted(parts.items(), key=lambda item: -item[1]))
