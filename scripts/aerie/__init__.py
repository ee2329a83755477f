"""Modules that Aerie's scripts share. Imports point one way: numbered script -> aerie -> libraries."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

# Read when torch loads OpenMP, here and in every process started from here. With OpenMP's default a thread that waits for its sibling spins; where other
# programs want the same cores, that made a decode step ten times slower (measured, LOG.md 2026-11-29).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

SCRIPTS = Path(__file__).resolve().parents[1]
BY_HAND = Path(sys.argv[0]).resolve().parent == SCRIPTS  # one of our scripts was started, not a test or a program of others


def use_venv() -> None:
    """A script started by hand with a Python that lacks our packages goes on with the one that PY names, else that of the venv that VENV names, else that of .venv."""
    tried = os.environ.pop("AERIE_TRIED_PYTHON", "")  # once: a wrapper that starts another Python would be asked for ever
    if find_spec("safetensors") is not None:
        return
    python = shutil.which(os.environ.get("PY") or str(SCRIPTS.parent / (os.environ.get("VENV") or ".venv") / "bin" / "python"))
    if python is not None and python != tried and os.path.abspath(python) != os.path.abspath(sys.executable):
        os.environ["AERIE_TRIED_PYTHON"] = python
        os.execv(python, [python, *sys.argv])


def say_what_is_missing(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: a package that is not installed is one sentence and exit code 2."""
    if not (isinstance(value, ModuleNotFoundError) and value.name and not value.name.startswith("aerie")):
        sys.__excepthook__(kind, value, trace)
        return
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"error: {sys.executable} (Python {version}) has no module {value.name!r}; `make setup` makes a .venv with everything, and the scripts find it; or name "
        "another: VENV=/path/to/venv or PY=/path/to/python in the environment",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    os._exit(2)


if BY_HAND:
    use_venv()
    sys.excepthook = say_what_is_missing
