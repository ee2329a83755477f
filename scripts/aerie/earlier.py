"""runs/<run>/earlier/<fingerprint>/: checkpoints and drafter of the training before, kept when one of another config or other data takes their place.

One generation is kept: an older one goes when the new training has written a checkpoint of its own. Set the config back, and training goes on from what is kept.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from .checkpoints import last_checkpoint, read_state
from .errors import UserError
from .paths import RunPaths
from .report import read_report

ROOM = 3  # checkpoints that a training has on the disk at once: the last, the best, and the one that is being written


def fingerprint_of(read: Any, path: Path) -> str:
    """The fingerprint that a checkpoint's state or a training.json names; "unknown" where it names none or is damaged."""
    try:
        found = read(path).get("fingerprint")
    except UserError:
        return "unknown"
    return found if isinstance(found, str) and found.isalnum() else "unknown"


def place_of(run: RunPaths, fingerprint: str, name: str) -> Path:
    """A free place for checkpoints/ or drafter/ of that training; what stood there is removed: it was of the same training."""
    place = run.earlier / fingerprint / name
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def place_of_drafter(run: RunPaths, belongs: str) -> Path | None:
    """Where the drafter that a training is about to replace is kept; None when there is none, or it is the training's own."""
    own = fingerprint_of(read_report, run.drafter / "training.json")
    return place_of(run, own, run.drafter.name) if own != belongs and (run.drafter / "model.safetensors").is_file() else None


def set_aside(run: RunPaths, fresh: str = "") -> Path | None:
    """Keep the run's checkpoints elsewhere: the place; None (and half-written ones removed) when there is no whole one. `fresh`: the fingerprint of a training with --fresh, whose own take_back() will not find."""
    latest = last_checkpoint(run.checkpoints)
    if latest is None:
        shutil.rmtree(run.checkpoints, ignore_errors=True)
        return None
    own = fingerprint_of(read_state, latest)
    place = place_of(run, own + ("-before-fresh" if own == fresh else ""), run.checkpoints.name)
    run.checkpoints.rename(place)
    os.utime(place)
    return place


def about_kept(run: RunPaths, kept: Path | None) -> str:
    """What becomes of the checkpoints that were there, and of those of a generation before; "" when there is none."""
    older = sorted(str(path) for path in run.earlier.glob(f"*/{run.checkpoints.name}") if path != kept)
    gone = f"; one generation is kept: {', '.join(older)} {'goes' if len(older) == 1 else 'go'} when this training has written a checkpoint" if kept and older else ""
    return f"; the checkpoints that were there are kept in {kept}{gone}" if kept else ""


def take_back(run: RunPaths, belongs: str) -> bool:
    """Checkpoints of this training that are kept become the run's own again; those in their place are kept in turn."""
    latest, kept = last_checkpoint(run.checkpoints), run.earlier / belongs / run.checkpoints.name
    if last_checkpoint(kept) is None or latest is not None and fingerprint_of(read_state, latest) == belongs:
        return False
    place = set_aside(run)
    kept.rename(run.checkpoints)
    print(f"the config is set back to that of the checkpoints kept in {kept}: they are taken from there" + (f"; those of the training in between are kept in {place}" if place else ""), flush=True)
    return True


def forget_older(run: RunPaths) -> None:
    """Keep one generation: the checkpoints and the drafter that were put there last."""
    for name in (run.checkpoints.name, run.drafter.name):
        for old in sorted(run.earlier.glob(f"*/{name}"), key=lambda path: path.stat().st_mtime)[:-1]:
            shutil.rmtree(old, ignore_errors=True)
            if not any(old.parent.iterdir()):
                old.parent.rmdir()


def make_space(run: RunPaths, bytes_each: int, fresh: bool) -> None:
    """Raise UserError when the disk does not take a new training's checkpoints beside the ones there; with --fresh these are removed, and it says so."""
    free, need = shutil.disk_usage(run.root).free, ROOM * bytes_each
    if free >= need or last_checkpoint(run.checkpoints) is None:
        return
    if not fresh:
        raise UserError(
            f"the disk of {run.root} has {free / 1e9:.1f} GB free, and a new training's checkpoints take {need / 1e9:.1f} beside those of the training before, which would be kept; "
            "free some space, set the config back, choose another run with --run, or remove them with --fresh"
        )
    print(f"--fresh: the disk has {free / 1e9:.1f} GB free and a training takes {need / 1e9:.1f}, so the checkpoints of the trainings before are removed, not kept", flush=True)
    for old in (run.checkpoints, *run.earlier.glob(f"*/{run.checkpoints.name}")):
        shutil.rmtree(old, ignore_errors=True)
