"""Other runs of the same target: who made the demo and then leaves RUN=demo out is told which run has what is missing."""

from __future__ import annotations

from .config import Config
from .errors import UserError
from .paths import runs_dir
from .report import read_report


def runs_with(config: Config, part: str) -> list[str]:
    """Names of other runs of this config's target and layers that have `part`, a path below a run's folder; by what their data step wrote of its config."""
    wanted, found = config.as_dict()["target"], []
    for path in sorted(runs_dir().glob(f"*/{part}")):
        root = runs_dir() / path.relative_to(runs_dir()).parts[0]
        try:
            target = read_report(root / "data" / "report.json").get("config", {}).get("target", {})
            same = all(target.get(key) == wanted[key] for key in ("model_path", "aux_layer_ids"))
        except (UserError, AttributeError):  # damaged, or not ours
            continue
        if same and root.name != config.run.name:
            found.append(root.name)
    return found


def hint(config: Config, part: str) -> str:
    """The end of a sentence about a missing `part`: which runs have it, '' where none does."""
    names = runs_with(config, part)
    if not names:
        return ""
    return f"; run {', '.join(names)} of the same target has one: RUN={names[0]} with make, --run {names[0]} by hand"


def refuse_missing_drafter(config: Config) -> None:
    """Raise UserError where the run has no drafter, before anything is made for it."""
    if not config.run.drafter.exists():
        raise UserError(f"drafter folder {config.run.drafter} does not exist; train one with `make train`, or name the folder of another{hint(config, 'drafter/config.json')}")
