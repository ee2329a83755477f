"""SGLang platform plugin (entry-point group `sglang.srt.platforms`): runs SGLang 0.5.23 on any x86 CPU.

Found through this folder on PYTHONPATH (how scripts/aerie/servers.py starts a server) or through the copy that `make setup` installs where there is no GPU.
"""

from __future__ import annotations

import os
import sys


def wanted() -> bool:
    """Whether this process serves on the CPU. AERIE_CPU_PLATFORM=1 asks for it, =0 forbids it; unset, it is so where torch sees no CUDA device."""
    asked = os.environ.get("AERIE_CPU_PLATFORM", "")
    if asked in ("0", "1"):
        return asked == "1"
    import torch

    return not torch.cuda.is_available()


def activate() -> str | None:
    """The platform class when this process serves on the CPU, else None: a GPU server never sees this plugin."""
    if not wanted():
        return None
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # SGLang compiles small functions of its samplers at the first request, seconds each
    sys.modules.setdefault("flashinfer", None)  # SGLang does without it here; importing it takes two seconds
    return "aerie_cpu_platform.cpu:AerieCpuPlatform"
