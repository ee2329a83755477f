"""Proof of `final`: argmax(lm_head(final[t])) against what the server itself answers for position t.

It catches a wrong norm, shift, request or truncated prefix with one cheap number; wrong auxiliary layers are caught by prove.py.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, Sequence

import torch

from .target_weights import TargetWeights

ROWS = 128  # the last rows of a prompt that are compared: the server computes logits for no more than these
VOCABULARY_CHUNK = 16384
THRESHOLD = 0.99  # below this the run stops

# Two logits this close, relative to the larger one, are the same number to a server that works in the dumps' dtype: its choice between them is no sign of a
# wrong state. One step of the dtype; fp8 rows carry about 3% of noise. States of another row, layer or norm are off by far more.
NEAR_TIE = {"float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7, "fp8": 2.0**-4}


def logprob_request(tokens: int) -> dict[str, Any]:
    """What to add to a /generate request of `tokens` tokens so that its answer names the server's choice at the last ROWS positions."""
    return {"return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": max(0, tokens - ROWS)}


def server_choices(answer: dict[str, Any], tokens: int) -> dict[int, int]:
    """{row: token}: the server's most likely token after each row.

    Entry i of input_top_logprobs is about token start + i, so it is the choice of the row before.

    Raises KeyError or ValueError when the answer has another form.
    """
    entries = answer["meta_info"]["input_top_logprobs"]
    choices = {}
    for back, entry in enumerate(reversed(entries)):
        row = tokens - 2 - back
        if entry and row >= 0:
            choices[row] = int(entry[0][1])
    choices[tokens - 1] = int(answer["output_ids"][0])
    return choices


def choice_gaps(final: torch.Tensor, head: torch.Tensor, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Our argmax [R] int64, and by how much its logit beats that of `choices` [R], relative to it [R] float32 (0 where they are the same token)."""
    final = final.to(torch.float32)
    ours = argmax_logits(final, head)
    best, theirs = ((final * head[tokens].to(torch.float32)).sum(dim=1) for tokens in (ours, choices))
    return ours, (best - theirs) / best.abs().clamp_min(1e-6)


def argmax_logits(final: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """[R, H] and [V, H] -> [R] int64, in float32, without ever holding all logits."""
    final = final.to(torch.float32)
    best = torch.full((len(final),), float("-inf"))
    choice = torch.zeros(len(final), dtype=torch.int64)
    for start in range(0, len(head), VOCABULARY_CHUNK):
        value, index = (final @ head[start : start + VOCABULARY_CHUNK].to(torch.float32).T).max(dim=1)
        better = value > best
        choice = torch.where(better, index + start, choice)
        best = torch.where(better, value, best)
    return choice


class Tally(NamedTuple):
    """Compared rows, those with the server's own choice, and near ties (NEAR_TIE): one moment's numbers, which belong together."""

    samples: int = 0
    compared: int = 0
    equal: int = 0
    near_ties: int = 0

    @property
    def share(self) -> float:
        """Rows with the server's choice, near ties included, of all compared; 1 before the first."""
        return (self.equal + self.near_ties) / self.compared if self.compared else 1.0

    def refuted(self, at_least: int = 200) -> bool:
        """Whether enough rows were compared and too few are equal."""
        return self.compared >= at_least and self.share < THRESHOLD

    def plus(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(*(mine + more for mine, more in zip(self, other, strict=True)))

    def sentence(self) -> str:
        """For the log and for the error."""
        return f"argmax(lm_head(final)) equals the server's own choice at {self.equal:,} of {self.compared:,} positions of {self.samples} samples, {self.near_ties:,} more are near ties ({self.share:.2%})"


def compare_choices(final: torch.Tensor, head: torch.Tensor, choices: dict[int, int], rows: Sequence[int], dtype: str) -> Tally:
    """One sample: final [R, H] float are the states of `rows`, all of them keys of `choices`; dtype: what the states were stored in (a key of NEAR_TIE)."""
    theirs = torch.tensor([choices[row] for row in rows], dtype=torch.int64)
    ours, gaps = choice_gaps(final, head, theirs)
    near = (ours != theirs) & (gaps <= NEAR_TIE[dtype])
    return Tally(1, len(rows), int((ours == theirs).sum()), int(near.sum()))


class FinalProof:
    """Compares samples from several threads; `tally` is read from any thread, whole at every moment."""

    def __init__(self, model_path: str):
        self.model_path = model_path
        self.tally = Tally()
        self._head: torch.Tensor | None = None
        self._lock = threading.Lock()

    def compare(self, final: torch.Tensor, answer: dict[str, Any], dtype: str) -> None:
        """Add one sample: final [T, H] float, the server's answer to a request with logprob_request(), and the dump's dtype (a key of NEAR_TIE)."""
        choices = server_choices(answer, len(final))
        rows = sorted(choices)
        with self._lock:  # one at a time: each uses all cores
            if self._head is None:
                self._head = TargetWeights(self.model_path).lm_head()
            self.tally = self.tally.plus(compare_choices(final[rows], self._head, choices, rows, dtype))
