"""The drafter ops for the scripts: `from aerie.ops import drafter_ops` finds <root>/cuda by this file's own place."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

CUDA = Path(__file__).resolve().parents[2] / "cuda"


def _load() -> ModuleType:
    # not a package named `cuda`: NVIDIA's own Python packages take that name
    if str(CUDA) not in sys.path:
        sys.path.append(str(CUDA))
    return importlib.import_module("drafter_ops")


drafter_ops = _load()
