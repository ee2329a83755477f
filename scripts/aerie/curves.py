"""Curves of a training run as a PNG, and warnings when they look wrong."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

LEAK_LOSS = 0.05  # nats: below it so early the label is among the inputs
LEAK_STEPS = 20


class Curves:
    """TensorBoard files, where the package is installed."""

    def __init__(self, folder: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.writer = None
            print("tensorboard is not installed: no TensorBoard files (curves.png and report.json have the same numbers)", flush=True)
            return
        try:
            self.writer = SummaryWriter(str(folder))
        except UnicodeEncodeError:  # its file names are UTF-8 alone
            self.writer = None
            print("no TensorBoard files: this locale is not UTF-8, and the run's path is not ASCII (set LC_ALL=C.UTF-8)", flush=True)

    def add(self, kind: str, numbers: dict[str, Any]) -> None:
        """One window of training or one evaluation."""
        if self.writer is not None:
            try:
                self._add(kind, numbers)
            except OSError as exc:  # the same numbers are in report.json: no reason to end a training
                self.writer = None
                print(f"warning: no more TensorBoard files ({exc.strerror}: {exc.filename or 'while writing them'})", flush=True)

    def _add(self, kind: str, numbers: dict[str, Any]) -> None:
        for name, value in numbers.items():
            if isinstance(value, list):
                for step, item in enumerate(value):
                    self.writer.add_scalar(f"{kind}/{name}/{step}", item, numbers["step"])
            elif name not in ("step", "samples"):
                self.writer.add_scalar(f"{kind}/{name}", value, numbers["step"])

    def close(self) -> None:
        """Write what is left."""
        if self.writer is not None:
            with suppress(OSError):
                self.writer.close()


def warnings_of(history: list[dict[str, Any]], evals: list[dict[str, Any]]) -> list[str]:
    """Sentences about curves that no sound run has."""
    found = []
    for window in history:
        if window["step"] <= LEAK_STEPS and window["rows"][0] and window["loss"][0] < LEAK_LOSS:
            found.append(f"the loss was {window['loss'][0]:.4f} at step {window['step']} already: the label may be among the inputs (alignment, mask), or the data repeats itself")
            break
    for kind, entries in (("training", history), ("held-out", evals)):
        if entries and len(entries[-1]["accuracy"]) > 1 and entries[-1]["rows"][1]:
            first, second = entries[-1]["accuracy"][:2]
            if second > first + 0.02:
                found.append(f"{kind} accuracy of TTT step 1 ({second:.3f}) is above step 0 ({first:.3f}): step 0 may be shifted against its labels")
    return found


def draw_curves(path: Path, history: list[dict[str, Any]], evals: list[dict[str, Any]]) -> None:
    """Loss and accuracy by TTT step on training windows and held-out samples, and the predicted accept length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4))
    for axis, key in ((axes[0], "loss"), (axes[1], "accuracy")):
        for entries, style, name in ((history, "-", "training"), (evals, "--", "held out")):
            for step in range(min(4, len(entries[0][key]) if entries else 0)):
                how = {"alpha": 0.45, "linewidth": 1.0} if style == "-" else {"linewidth": 1.6}
                mark = "o" if style == "--" else "." if len(entries) < 20 else ""
                axis.plot([e["step"] for e in entries], [e[key][step] for e in entries], style, color=f"C{step}", marker=mark, markersize=4, label=f"{name}, TTT step {step}", **how)
        axis.set_xlabel("optimiser step")
        axis.set_title(key)
        if history or evals:
            axis.legend(fontsize=7)
    axes[2].plot([e["step"] for e in evals], [e["predicted_accept_length"] for e in evals], marker="o", color="C2")
    axes[2].set_title("predicted accept length (walk, held out)")
    axes[2].set_xlabel("optimiser step")
    figure.tight_layout()
    temporary = path.with_name(f".{path.stem}.tmp.png")
    try:
        figure.savefig(temporary, dpi=110)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
        pyplot.close(figure)
