"""Where things lie: the repository, and what one run makes."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from .errors import UserError
from .rid import RUN_PATTERN

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def python_path(folder: Path, known: str | None = None) -> str:
    """PYTHONPATH with `folder` before what it says; `known` in place of this process's own."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH") if known is None else known])])


def runs_dir() -> Path:
    """The folder of all runs: AERIE_RUNS_DIR, or runs/ in the repository."""
    return expanded(os.environ.get("AERIE_RUNS_DIR") or str(ROOT / "runs")).absolute()


@dataclass(frozen=True)
class RunPaths:
    """The folders of one run. Nothing is created here."""

    name: str

    def __post_init__(self) -> None:
        if self.name == "models":
            raise UserError("run name 'models' is taken: runs/models holds the targets; choose another (RUN=... or --run)")
        if not RUN_PATTERN.fullmatch(self.name):
            raise UserError(f"run name {self.name!r} does not fit: use letters, digits, _ and -, at most 48 (RUN=... or --run)")

    @property
    def root(self) -> Path:
        return runs_dir() / self.name

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def drafter(self) -> Path:
        return self.root / "drafter"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def earlier(self) -> Path:
        return self.root / "earlier"

    @property
    def bench(self) -> Path:
        return self.root / "bench"

    @property
    def logs(self) -> Path:
        return self.root / "logs"


def expanded(value: str) -> Path:
    """The path with ~ put in. Raises UserError for the home of a user that is not there."""
    try:
        return Path(value).expanduser()
    except RuntimeError:
        raise UserError(f"{value} names the home of a user that is not here; write the whole path") from None


def resolve_model(value: str) -> str:
    """A model folder: absolute or ~ as it is, else under the repository (runs/ follows AERIE_RUNS_DIR), else as written (no folder: prepare_target() refuses it)."""
    path = expanded(value)
    if path.is_absolute():
        return str(path)
    if path.parts and path.parts[0] == "runs":
        return str(runs_dir().joinpath(*path.parts[1:]))
    if (ROOT / path).exists():
        return str(ROOT / path)
    return value


def resolve_input(value: str) -> Path:
    """An input file named in a config: absolute or ~ as it is, else under the repository, else under the current folder."""
    path = expanded(value)
    if path.is_absolute() or not (ROOT / path).exists():
        return path
    return ROOT / path


def lock_folder(folder: Path, busy: str) -> tuple[int, bool]:
    """Lock a folder for this process: (the handle that holds the lock until it is closed, False on a file system that locks no folders).

    Raises UserError(busy) when another process holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise UserError(busy) from None
    except OSError:
        return handle, False
    return handle, True
