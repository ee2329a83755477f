"""SGLang platform plugin (entry-point group `sglang.srt.platforms`): runs SGLang 0.5.23 on any x86 CPU.

Found through this folder on PYTHONPATH (how scripts/aerie/servers.py starts a server) or through the copy that `make setup` installs where there is no GPU.
"""

from __future__ import annotations

import os


def activate() -> str | None:
    """The platform class when this process serves on the CPU, else None: a GPU server never sees this plugin.

    AERIE_CPU_PLATFORM=1 asks for it, =0 forbids it; unset, it is used where torch sees no CUDA device.
    """
    wanted = os.environ.get("AERIE_CPU_PLATFORM", "")
    if wanted == "0":
        return None
    if wanted != "1":
        import torch

        if torch.cuda.is_available():
            return None
    return "aerie_cpu_platform.cpu:AerieCpuPlatform"
