"""Predicted against served: training's walk over held-out answers, for the very prompts that a benchmark or a warm-up sent."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Sequence

from .config import Config
from .errors import UserError
from .generate import Answer, accept_length
from .report import read_report
from .walk import WALK_FILE, Walked, first_tokens


class Same(NamedTuple):
    """Both numbers over the same prompts, tokens a verification."""

    predicted: float
    served: float
    prompts: int


GAINS = re.compile(r"([1-9][0-9]{0,8}( [1-9][0-9]{0,8})*)?")  # an answer of walk.as_text(); one of a single token has no verification


def length_or_none(value: Any) -> float | None:
    """An accept length that something can be compared with. Training says 0 where its held-out answers had nothing to verify."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0 else None


def read_walks(path: Path) -> dict[str, list[str]]:
    """walk.json; {} where it is missing or not as training writes it: then there is one number to compare with, over all of training's samples."""
    try:
        walks = read_report(path)["walks"]
        return walks if all(isinstance(answers, list) and all(map(GAINS.fullmatch, answers)) for answers in walks.values()) else {}
    except (UserError, KeyError, AttributeError, TypeError):
        return {}


@dataclass(frozen=True)
class Prediction:
    """What the drafter's folder says of its accept length."""

    accept_length: float | None  # over all samples of training's evaluation; None where training said nothing
    comparable: bool  # training drafted as this config serves: a chain of as many steps
    walks: dict[str, list[str]]  # by held-out sample: walk.as_text(); empty for a drafter from elsewhere

    @classmethod
    def load(cls, config: Config) -> Prediction:
        """From training.json and walk.json."""
        training = read_report(config.run.drafter / "training.json", "`make train`")
        comparable = config.serve.topk == 1 and training.get("num_steps", config.serve.num_steps) == config.serve.num_steps
        return cls(length_or_none(training.get("predicted_accept_length")), comparable, read_walks(config.run.drafter / WALK_FILE) if comparable else {})

    def compare(self, answers: Sequence[Answer]) -> Same | None:
        """Over the answers to held-out prompts (prompts_of) that training walked; None when there is none."""
        walked, chosen = Walked(), []
        for answer in answers:
            sample, _, number = answer.prompt.id.rpartition(".")
            if sample in self.walks and int(number) < len(self.walks[sample]):
                walked.add(first_tokens(self.walks[sample][int(number)], answer.prompt.max_new_tokens))
                chosen.append(answer)
        served = accept_length(chosen)
        return Same(walked.accept_length, served, len(chosen)) if walked.verifications and served is not None else None
