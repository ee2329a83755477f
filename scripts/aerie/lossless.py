"""Speculation is lossless at temperature 0: the same tokens with and without the drafter, or a difference that rounding explains."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Callable, Sequence

# Two texts differ at a near tie when both tokens lie within this of the likeliest one, in log-probability:
# a few rounding steps of a logit of ordinary size (up to 32) in that dtype.
NEAR_TIE = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.5}
ROUNDING = 1e-5  # of a log-probability: distances in bf16 are whole steps of its logits, give or take that, and one that is exactly the bound lies within it
CONTROL_QUESTIONS = 64  # distances asked for the control of one prompt set, at most

Distance = Callable[[list[int], int, int], float]  # ids so far, two next tokens -> how far the less likely lies below the likeliest of all, in log-probability


@dataclass
class Control:
    """What the server without the drafter changes from one of its own passes to the next."""

    compared: int = 0
    different: int = 0
    far: float = 0.0  # of the different ones those that are no near tie; no whole number where not all were asked for
    noise: float = 0.0  # the largest distance at a first difference


@dataclass
class Lossless:
    """compared = equal + near_ties + different."""

    compared: int = 0
    equal: int = 0
    near_ties: int = 0
    different: list[str] = field(default_factory=list)  # one sentence each
    allowed: float = 0.0  # the largest distance of a near tie
    control: Control = field(default_factory=Control)
    unexplained: int = 0  # texts that are different, beyond what the control explains: none may be

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two token lists differ, a list that ends early included; None when they are equal."""
    for index, (one, other) in enumerate(zip(left, right)):
        if one != other:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def run_control(prompts: Sequence[list[int]], plain: Sequence[list[int]], others: Sequence[Sequence[list[int]]], allowed: float, distance: Distance) -> Control:
    """The plain server against itself: texts of its `others` passes, each over the first of the prompts or all, compared with `plain`.

    Of more than CONTROL_QUESTIONS differences, evenly spaced ones are asked for. A text that ends early has no distance, and an infinite one (the server
    computed NaN, or the token is not among the likeliest) is no rounding: both are far, neither adds to the noise.
    """
    found, early, questions = Control(), 0, []
    for texts in others:
        for prompt, left, right in zip(prompts, plain, texts):
            found.compared += 1
            where = first_difference(left, right)
            if where is None:
                continue
            found.different += 1
            if where < min(len(left), len(right)):
                questions.append((prompt + list(left[:where]), left[where], right[where]))
            else:
                early += 1
    every = max(math.ceil(len(questions) / CONTROL_QUESTIONS), 1)
    distances = [distance(*question) for question in questions[::every]]
    far = sum(each > allowed + ROUNDING for each in distances)
    found.far = early + (far * len(questions) / len(distances) if distances else 0)
    found.noise = max(filter(math.isfinite, distances), default=0.0)
    return found


def compare(
    names: Sequence[str], prompts: Sequence[list[int]], without: Sequence[list[int]], with_drafter: Sequence[list[int]], dtype: str, distance: Distance,
    others: Sequence[Sequence[list[int]]] = (),
) -> Lossless:  # fmt: skip
    """Compare the answers prompt by prompt; later tokens than the first difference follow another text and say nothing.

    There the target itself is asked for the distance of the two tokens. A mixture of experts in bf16 routes otherwise in another batch, and its logits then
    change by far more than their rounding: so the plain server's `others` passes are compared too, and as large a share of far differences, twice over and one
    more, is not held against the drafter. In float32, and where the plain server never changes a text by itself that far, every one is.
    """
    result = Lossless(allowed=NEAR_TIE[dtype])
    result.control = run_control(prompts, without, others, result.allowed, distance)
    for name, prompt, left, right in zip(names, prompts, without, with_drafter, strict=True):
        result.compared += 1
        where = first_difference(left, right)
        if where is None:
            result.equal += 1
            continue
        if where >= min(len(left), len(right)):
            result.different.append(f"{name}: {len(left)} tokens without the drafter, {len(right)} with it, equal so far")
            continue
        below = distance(prompt + list(left[:where]), left[where], right[where])
        if below <= result.allowed + ROUNDING:
            result.near_ties += 1
        else:
            result.different.append(f"{name}: token {where} is {left[where]} without the drafter and {right[where]} with it; the less likely of the two is "
                f"{below:.4g} below the likeliest token in log-probability, a near tie is within {result.allowed:.4g}")
    far = result.control.far
    explained = 1 + math.floor(2 * far / result.control.compared * result.compared) if far and dtype != "float32" else 0
    result.unexplained = max(0, len(result.different) - explained)
    return result


def in_words(found: dict[str, Any], who: str, between: str, alone: str) -> str:
    """Lossless.as_dict() as one line. `who` changes texts `between` its passes; `alone`: what there was only one of, where the control is empty."""
    said, control = f"{found['compared']} compared, {found['equal']} equal, {found['near_ties']} near ties, {len(found['different'])} different", found["control"]
    if not control["compared"]:
        return f"{said} (no control: {alone})"
    by = f", by up to {control['noise']:.3g} in log-probability, {control['far']:.3g} of them by more than a near tie" if control["different"] else ""
    return f"{said} ({who} alone changes {control['different']} of {control['compared']} texts {between}{by})"
