"""Modules that Aerie's scripts share. Imports point one way: numbered script -> aerie -> libraries."""

import os
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
    """A script started by hand with a Python that lacks our packages goes on with the one of .venv, where there is one. PY in the environment: that one or none."""
    venv = SCRIPTS.parent / ".venv" / "bin" / "python"
    if "PY" not in os.environ and find_spec("safetensors") is None and venv.exists() and Path(sys.prefix) != venv.parents[1]:
        os.execv(venv, [str(venv), *sys.argv])


def say_what_is_missing(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
    """sys.excepthook: a package that is not installed is one sentence and exit code 2."""
    if not (isinstance(value, ModuleNotFoundError) and value.name and not value.name.startswith("aerie")):
        sys.__excepthook__(kind, value, trace)
        return
    version = ".".join(map(str, sys.version_info[:3]))
    print(
        f"error: {sys.executable} (Python {version}) has no module {value.name!r}; `make setup` makes a .venv with everything, and the scripts find it; or start "
        "this one with the Python that has the packages",
        file=sys.stderr, flush=True,
    )  # fmt: skip
    os._exit(2)


if BY_HAND:
    use_venv()
    sys.excepthook = say_what_is_missing
