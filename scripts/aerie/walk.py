"""The predicted accept length: a walk over held-out answers exactly as the server would go, tokens pooled over verifications."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np


@dataclass
class Walked:
    """Tokens gained after prefill's own, and verifications they took."""

    tokens: int = 0
    verifications: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens a verification; 0 when there was none."""
        return self.tokens / self.verifications if self.verifications else 0.0

    def add(self, other: Walked) -> None:
        """Pool another walk's counts."""
        self.tokens += other.tokens
        self.verifications += other.verifications


def answer_runs(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """[start, end) of each run of assistant tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(loss_mask, dtype=np.int8), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist()))


def walk(loss_mask: np.ndarray, accepted: Sequence[int] | np.ndarray) -> Walked:
    """Walk every answer of one sample.

    accepted[t]: how many draft tokens in a row match the text when a chain starts at row t (0 where nothing is supervised). The server starts at the last
    prompt row with the answer's first token known, accepts n, gains n + 1 (the target's own token too), and stops at the answer's end.
    """
    total = Walked()
    for start, end in answer_runs(loss_mask):
        if start == 0:  # no prompt row to start from
            continue
        row, left = start - 1, end - start - 1
        while left > 0:
            gained = min(int(accepted[row]) + 1, left)
            total.add(Walked(gained, 1))
            left -= gained
            row += gained
    return total
