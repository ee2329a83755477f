"""The predicted accept length: a walk over held-out answers exactly as the server would go, tokens pooled over verifications."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

WALK_FILE = "walk.json"  # in the drafter's folder: as_text() by held-out sample, for the prompts that a benchmark or a warm-up sends


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


def gains(loss_mask: np.ndarray, accepted: Sequence[int] | np.ndarray) -> list[list[int]]:
    """Walk every answer of one sample: for each run of assistant tokens the tokens gained by each verification.

    accepted[t]: how many draft tokens in a row match the text when a chain starts at row t (0 where nothing is supervised). The server starts at the last
    prompt row with the answer's first token known, accepts n, gains n + 1 (the target's own token too), and stops at the answer's end.
    """
    found: list[list[int]] = []
    for start, end in answer_runs(loss_mask):
        found.append([])
        if start == 0:  # no prompt row to start from
            continue
        row, left = start - 1, end - start - 1
        while left > 0:
            found[-1].append(min(int(accepted[row]) + 1, left))
            left -= found[-1][-1]
            row += found[-1][-1]
    return found


def pooled(answers: Sequence[Sequence[int]]) -> Walked:
    """The counts of gains() of one sample."""
    return Walked(sum(map(sum, answers)), sum(map(len, answers)))


def walk(loss_mask: np.ndarray, accepted: Sequence[int] | np.ndarray) -> Walked:
    """The counts of one sample's answers together; arguments as for gains()."""
    return pooled(gains(loss_mask, accepted))


def as_text(answers: Sequence[Sequence[int]]) -> list[str]:
    """gains() for a JSON file: one text an answer, not one line a number."""
    return [" ".join(map(str, answer)) for answer in answers]


def first_tokens(answer: str, tokens: int) -> Walked:
    """The counts for the first `tokens` of one answer of as_text(): what a request with that max_new_tokens sees."""
    total, left = Walked(), tokens - 1  # prefill gives the first
    for gained in map(int, answer.split()):
        if left <= 0:
            break
        total.add(Walked(min(gained, left), 1))
        left -= gained
    return total
