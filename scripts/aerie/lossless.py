"""Speculation is lossless at temperature 0: the same tokens with and without the drafter, or a difference that rounding explains."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Callable, Sequence

# Two next tokens are a near tie when their log-probabilities are closer than this: a few rounding steps of a logit of ordinary size (up to 32) in that dtype.
NEAR_TIE = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.5}

Margin = Callable[[list[int]], tuple[float, list[int]]]  # ids so far -> how far apart the two likeliest next tokens are, and which two


@dataclass
class Lossless:
    """compared = equal + near_ties + different."""

    compared: int = 0
    equal: int = 0
    near_ties: int = 0
    different: list[str] = field(default_factory=list)  # one sentence each

    def as_dict(self) -> dict:
        return asdict(self)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two token lists differ, a list that ends early included; None when they are equal."""
    for index, (one, other) in enumerate(zip(left, right)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def compare(names: Sequence[str], prompts: Sequence[list[int]], without: Sequence[list[int]], with_drafter: Sequence[list[int]], dtype: str, margin: Margin) -> Lossless:
    """Compare the answers prompt by prompt. At a first difference `margin` asks the target itself how close the two tokens are; later tokens follow another text and say nothing."""
    result = Lossless()
    for name, prompt, left, right in zip(names, prompts, without, with_drafter, strict=True):
        result.compared += 1
        where = first_difference(left, right)
        if where is None:
            result.equal += 1
            continue
        if where >= min(len(left), len(right)):
            result.different.append(f"{name}: {len(left)} tokens without the drafter, {len(right)} with it, equal so far")
            continue
        gap, tokens = margin(prompt + list(left[:where]))
        if gap <= NEAR_TIE[dtype] and {left[where], right[where]} == set(tokens):
            result.near_ties += 1
        else:
            result.different.append(f"{name}: token {where} is {left[where]} without the drafter and {right[where]} with it; the two likeliest, {tokens}, "
                f"are {gap:.4g} apart in log-probability")
    return result
