"""Named parts of a run by hand on a GPU machine: a failing part is written down and the others go on; one JSON line a part, one summary at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

from aerie.servers import end_group


class Parts:
    """Runs parts, keeps their results in `file` (rewritten after each), and knows how much of `seconds` is left."""

    def __init__(self, file: Path, seconds: float, **about: Any):
        self.file, self.seconds, self.begin = file, seconds, time.monotonic()
        self.results: dict[str, dict[str, Any]] = {"about": about}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.begin

    def __call__(self, name: str, function: Callable[[], Any]) -> Any:
        """What `function` returned (a dict is kept as the part's result); None when it failed or no time is left to begin it."""
        if self.elapsed > self.seconds:
            self._keep(name, {"skipped": f"the {self.seconds:.0f} s of this run are over"}, 0.0)
            return None
        start = time.monotonic()
        try:
            value = function()
            result = value if isinstance(value, dict) else {"done": str(value)[:200]}
        except Exception as exc:
            traceback.print_exc()
            value, result = None, {"failed": f"{type(exc).__name__}: {exc}"[:600]}
        self._keep(name, result, time.monotonic() - start)
        return value

    def _keep(self, name: str, result: dict[str, Any], seconds: float) -> None:
        self.results[name] = {**result, "seconds": round(seconds, 1), "ended_at": round(self.elapsed, 1)}
        print(json.dumps({"part": name, **scalars(self.results[name])}), flush=True)
        self.file.write_text(json.dumps(self.results, indent=1, default=str))

    def summary(self, keys: tuple[str, ...]) -> None:
        """One JSON object for the whole run: of each part its `keys`, and whatever failed or was skipped."""
        wanted, parts = {*keys, "failed", "skipped", "seconds"}, {name: scalars(result) for name, result in self.results.items() if name != "about"}
        short = {name: {key: value for key, value in result.items() if key in wanted} for name, result in parts.items()}
        print(json.dumps({"summary": short, "seconds": round(self.elapsed, 1), "file": str(self.file)}, indent=1), flush=True)


def call(log: Path, command: list[str], seconds: float) -> dict[str, Any]:
    """Run a command with its output in `log`; what it said last. Raises RuntimeError with the log's end when it fails or takes longer than `seconds`.

    What it leaves running in sessions of their own (servers) stays when it ends by itself; else nothing of its process group goes on without it.
    """
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"none after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                end_group(process.pid, 8.0)  # enough for a stream's two ends; `timeout -k 25` around a script allows no more
            process.wait()
    text = log.read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"exit code {code}: {text[-700:]}")
    return {"last": text.strip().splitlines()[-1][:150]}


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and everything below it, also what has a session of its own."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    tree = [pid]
    for each in tree:
        tree += [child for child, parent in parents.items() if parent == each]
    for each in tree:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def make(out: Path, target: str, config: Path, run: str, seconds: float) -> dict[str, Any]:
    """call() of `make TARGET` as a user types it."""
    command = ["make", "--no-print-directory", "-C", str(Path(__file__).resolve().parents[2]), target, f"CONFIG={config}", f"RUN={run}", f"PY={sys.executable}"]
    return call(out / f"make-{target}.log", command, seconds)


def scalars(result: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a result, numbers to four digits."""
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in result.items() if isinstance(value, (str, int, float, bool))}


def without_multicast() -> dict[str, str]:
    """Environment of everything that runs over several GPUs: no NVLink multicast, which not every shared host allows."""
    return {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def end_on_sigterm() -> None:
    """A `timeout` around the script ends it as its own end does: servers are stopped, the summary is printed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def begin(out: Path, runs: Path) -> None:
    """The start of a script for several GPUs: it ends what it started on SIGTERM, `out` is there, and all it starts keeps its runs in `runs` and asks no hub."""
    end_on_sigterm()
    out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"AERIE_RUNS_DIR": str(runs), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | without_multicast()
