"""Held-out samples: loss and accuracy by TTT step, and the predicted accept length by the walk of the design."""

from __future__ import annotations

from typing import Any, Iterable, Sequence

import numpy as np
import torch

from .batches import Batch, Reader, supervised_depth
from .distributed import Group
from .drafter import Drafter
from .ttt_loss import StepCounts
from .unroll import Fixed, Rope, unroll
from .walk import Walked, as_text, gains, pooled, walk


class Window:
    """Counts summed over a window of batches; ratios are taken of the sums, never of ratios."""

    def __init__(self, steps: int):
        self.steps = steps
        self.rows = [0] * steps
        self.sums: list[torch.Tensor | None] = [None] * steps

    def add(self, counts: Sequence[StepCounts]) -> None:
        """Sums stay on the device: nothing is waited for."""
        for step, one in enumerate(counts):
            self.rows[step] += one.rows
            now = torch.stack([one.loss.double(), one.correct.double(), one.reached.double(), one.accepted.double()])
            before = self.sums[step]
            self.sums[step] = now if before is None else before + now

    def reduce(self, group: Group, device: torch.device) -> None:
        """Sum over all processes."""
        if group.world == 1:
            return
        values = [[0.0] * 4 if one is None else one.tolist() for one in self.sums]
        total = torch.tensor([[rows, *row] for rows, row in zip(self.rows, values)], dtype=torch.float64, device=device)
        group.sum_(total)
        self.rows, self.sums = [int(rows) for rows in total[:, 0]], list(total[:, 1:])

    def metrics(self) -> dict[str, list[float]]:
        """By TTT step: loss, accuracy, and acceptance given that all earlier steps were right."""
        rows = np.array(self.rows, dtype=float)
        loss, correct, reached, accepted = np.array([[0.0] * 4 if one is None else one.tolist() for one in self.sums]).T

        def ratio(a: np.ndarray, b: np.ndarray) -> list[float]:
            return [float(x / y) if y else 0.0 for x, y in zip(a, b)]

        return {"rows": [int(x) for x in rows], "loss": ratio(loss, rows), "accuracy": ratio(correct, rows), "acceptance": ratio(accepted, reached)}


def accepted_by_row(batch: Batch, drafted: Sequence[torch.Tensor], fixed: Fixed) -> np.ndarray:
    """[T] int64: how many draft tokens in a row match the text, for a chain that starts at each flat row."""
    total = torch.zeros(len(batch.positions), dtype=torch.int64, device=batch.rows.device)
    alive: torch.Tensor | None = None
    for step, top in enumerate(drafted):
        rows = batch.rows[: len(top)]
        right = fixed.head.draft_ids[top] == batch.text_ids[rows + step]
        alive = right if alive is None else right & alive[: len(top)]
        total[rows] += alive
    return total.cpu().numpy()


@torch.no_grad()
def evaluate(drafter: Drafter, store: Any, reader: Reader, batches: Iterable[Sequence[int]], fixed: Fixed, rope: Rope, num_steps: int) -> dict[str, Any]:
    """Metrics over these samples; `num_steps` draft tokens a verification, as serving drafts. The store gives the masks to walk. `walks`: by sample, walk.as_text()"""
    window, walked, possible = Window(num_steps), Walked(), Walked()
    own = Fixed(fixed.embedding, fixed.head, num_steps, fixed.decay)
    masks, walks = {}, {}
    device = fixed.embedding.device
    samples = 0
    for indices in batches:
        batch = reader.build(indices)
        if batch is None:
            continue
        masks = {sample.id: sample.loss_mask for sample in (store.get(index) for index in indices)}
        batch = batch.to(device, drafter.compute_dtype)
        _, counts, drafted = drafter(unroll, batch, own, rope, 1.0)
        window.add(counts)
        accepted = accepted_by_row(batch, drafted, own)
        for document, name in enumerate(batch.sample_ids):
            first, last = batch.offsets[document : document + 2].tolist()
            mask = np.asarray(masks[name])
            padded = np.zeros(len(mask), dtype=np.int64)
            padded[: last - first] = accepted[first:last]
            answers = gains(mask, padded)
            walks[name] = as_text(answers)
            walked.add(pooled(answers))
            possible.add(walk(mask, supervised_depth(mask, num_steps)))
            samples += 1
    return {
        "samples": samples, **window.metrics(), "walked_tokens": walked.tokens, "verifications": walked.verifications,
        "predicted_accept_length": walked.accept_length, "possible_accept_length": possible.accept_length, "walks": walks,
    }  # fmt: skip
