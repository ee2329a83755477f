"""A result and how it is printed; the facts that several checks read."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Iterator

from ..errors import UserError
from ..nvidia import ask, gpu_rows, visible
from ..paths import ROOT

GIB = 1 << 30
PINNED = ("sglang", "torch", "transformers", "safetensors", "numpy", "requests", "tqdm", "psutil")

# Asked of the venv's Python in one go; versions come from metadata, so nothing heavy is imported.
PROBE = r"""
import importlib.metadata as m, importlib.util, json, pathlib, re, sys
names = sys.argv[1].split(",")
found = {}
for name in names:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: found[name] = None
needs = {}
if found.get("torch"):
    needs = {re.split(r"[ ;=<>!~]", r)[0]: r for r in m.requires("torch") or [] if r.startswith("triton")}
spec = importlib.util.find_spec("torch")
cuda = None
if spec and spec.origin:
    text = (pathlib.Path(spec.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda[^=]*= *'([^']*)'", text, re.M)
    cuda = match.group(1) if match else None
print(json.dumps({"python": sys.version.split()[0], "packages": found, "torch_needs": needs, "torch_cuda": cuda}))
"""


@dataclass(frozen=True)
class Result:
    """ok: True a tick, False a cross with what to do, None a note."""

    ok: bool | None
    name: str
    detail: str = ""
    todo: str = ""


def pins() -> dict[str, str]:
    """name -> version from requirements.txt."""
    return dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", (ROOT / "requirements.txt").read_text(), re.M))


@dataclass
class Gpu:
    """One line of nvidia-smi."""

    index: int
    name: str
    capability: tuple[int, int]  # (0, 0): not said
    total: int  # bytes; 0: not said
    used: int
    bar1: int  # bytes of BAR1; 0: not said


@dataclass
class Facts:
    """Looked up once."""

    python: str
    probe: dict[str, Any] | None
    config: Any  # aerie.config.Config, or None
    config_error: str
    driver: str = ""
    gpus: list[Gpu] = field(default_factory=list)  # those that CUDA_VISIBLE_DEVICES leaves
    hidden: int = 0  # how many it does not
    smi_says: str = ""  # a sentence of nvidia-smi in place of a GPU: one that is lost, or a driver that does not run

    @property
    def sm120(self) -> bool:
        return any(gpu.capability[0] == 12 for gpu in self.gpus)

    @property
    def server_args(self) -> dict[str, Any]:
        """Options of every server of the config."""
        return {**self.config.server.args, **self.config.serve.args} if self.config else {}

    @cached_property
    def needs(self) -> Any:
        """needs.Needs of the config, or None where they cannot be computed; the run's folder is walked for them."""
        from .needs import needs_of

        return needs_of(self)

    def version(self, package: str) -> str:
        """Installed version, or an empty text."""
        return (self.probe or {}).get("packages", {}).get(package) or ""

    @classmethod
    def gather(cls, python: str, config_name: str, run_name: str, overrides: list[str]) -> Facts:
        default = ROOT / ".venv" / "bin" / "python"
        python = python or (str(default) if default.exists() else sys.executable)
        code, text = ask([python, "-c", PROBE, ",".join({*pins(), "triton", "flashinfer-python", "sglang-kernel"})], 60)
        try:
            probe = json.loads(text.strip().rpartition("\n")[2]) if code == 0 else None
        except ValueError:  # a program that is no Python
            probe = None
        probe = probe if isinstance(probe, dict) else None
        config, error = None, ""
        try:
            from ..config import load_config  # needs Python 3.11 (tomllib)

            config = load_config(config_name, run_name, overrides)
        except (UserError, ImportError) as exc:
            error = str(exc)
        facts = cls(python, probe, config, error)
        facts._ask_driver()
        return facts

    def _ask_driver(self) -> None:
        rows = gpu_rows("name", "compute_cap", "memory.total", "memory.used", "driver_version")
        shown = visible(rows)
        self.hidden = len(rows) - len(shown)
        bars = [int(value) << 20 for value in re.findall(r"BAR1 Memory Usage\s+Total\s+: (\d+) MiB", ask(["nvidia-smi", "-q", "-d", "MEMORY"])[1])]
        for row in shown:
            index, _, name, capability, total, used, driver = row
            major, _, minor = capability.partition(".")
            place = rows.index(row)
            self.gpus.append(Gpu(int(index), name, (number(major), number(minor)), number(total) << 20, number(used) << 20, bars[place] if place < len(bars) else 0))
            self.driver = driver
        listed = ask(["nvidia-smi", "-L"])[1].splitlines()
        self.smi_says = next((line.strip() for line in listed if line.strip() and not re.match(r"GPU \d+:| +MIG ", line)), "")


def version_tuple(text: str) -> tuple[int, ...]:
    """'580.126.09' -> (580, 126, 9)."""
    return tuple(int(part) for part in re.findall(r"\d+", text))


def number(text: str) -> int:
    """A whole number of nvidia-smi; 0 for "[N/A]" and the like."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0


def free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds `path` or its nearest parent."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def results_of(check: Callable[[Facts], Iterator[Result]], facts: Facts) -> Iterator[Result]:
    """What a check yields; a path or a file that it cannot use is a cross too, and the other checks go on."""
    try:
        yield from check(facts)
    except (UserError, OSError) as exc:
        yield Result(False, check.__name__.removeprefix("check_").replace("_", " "), str(exc))


def print_results(title: str, results: list[Result]) -> None:
    """✓, ✗ or · a line; under a cross what to do. Colours on a terminal alone."""
    colours = {True: "\033[32m", False: "\033[31m", None: "\033[33m"} if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else {}
    end = "\033[0m" if colours else ""
    print(f"\n{title}")
    for result in results:
        mark = {True: "✓", False: "✗", None: "·"}[result.ok]
        print(f"  {colours.get(result.ok, '')}{mark}{end} {result.name}{': ' + result.detail if result.detail else ''}")
        if result.todo and result.ok is not True:
            print(f"      {result.todo}")
