"""report.json beside each output: command, versions, config, counts, rates, peak memory."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import UserError

PACKAGES = ("torch", "sglang", "transformers", "safetensors", "numpy")


def write_json(path: Path, data: Any) -> None:
    """Write JSON under a temporary name, fsync, rename: the file is old or new, never torn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", errors="backslashreplace") as file:  # a path that is no UTF-8 becomes an escape that JSON knows
            json.dump(data, file, indent=2, ensure_ascii=False, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_report(path: Path, step: str = "the step that writes it") -> dict[str, Any]:
    """A report or another small JSON file of a run; {} when it is not there. Raises UserError when it is damaged: `step` says what to run again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as exc:
        raise UserError(f"{path} cannot be read ({getattr(exc, 'strerror', None) or exc}); remove it and run {step} again") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no JSON object; remove it and run {step} again")
    return found


def versions() -> dict[str, str | None]:
    """Installed versions by package name, without importing any of them (the trainer never imports sglang)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def peak_memory_bytes() -> int:
    """This process's highest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name() -> str:
    """The GPU's name if torch is already imported and sees one, else the processor's."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.cuda.get_device_name()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    return platform.machine()


def base_report() -> dict[str, Any]:
    """What every report starts with."""
    return {
        "command": [sys.executable, *sys.argv],
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "device": device_name(),
        "versions": versions(),
    }


def write_report(path: Path, **content: Any) -> dict[str, Any]:
    """Write base_report() + content + peak memory to `path`; returns what was written."""
    report = {**base_report(), **content, "peak_memory_bytes": peak_memory_bytes()}
    write_json(path, report)
    return report
