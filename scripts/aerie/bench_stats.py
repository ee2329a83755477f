"""Numbers of a benchmark pass: acceptance by position, category and context length, percentiles, time a step."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from .generate import Answer, accept_length

CONTEXT_EDGES = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 1 << 30)


def merged(histograms: Sequence[Sequence[int]]) -> list[int]:
    """Histograms of different lengths, added."""
    width = max((len(histogram) for histogram in histograms), default=0)
    return [sum(histogram[index] for histogram in histograms if index < len(histogram)) for index in range(width)]


def acceptance_by_position(histogram: Sequence[int], num_steps: int) -> list[dict[str, float]]:
    """For draft position 1 .. num_steps: the share of verifications that accepted it, and the share among those that accepted the one before.

    `histogram[n]`: verifications that accepted n draft tokens.
    """
    total, rows = sum(histogram), []
    before = total
    for position in range(1, num_steps + 1):
        reached = sum(histogram[position:])
        rows.append({"position": position, "accepted": reached / total if total else 0.0, "given_the_one_before": reached / before if before else 0.0})
        before = reached
    return rows


def by_category(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Pooled accept length of each kind of prompt."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.prompt.category, []).append(answer)
    return {name: {"requests": len(group), "accept_length": accept_length(group)} for name, group in groups.items()}


def by_context(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Pooled accept length by context: the middle of the answer's place, prompt + half the answer. Shows a drafter that fails past some position."""
    rows = []
    for low, high in zip(CONTEXT_EDGES, CONTEXT_EDGES[1:]):
        group = [answer for answer in answers if low <= len(answer.prompt.input_ids) + len(answer.output_ids) // 2 < high]
        if group:
            rows.append({"from": low, "below": high, "requests": len(group), "accept_length": accept_length(group)})
    return rows


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds of a list of seconds."""
    return {"p50": float(np.percentile(values, 50) * 1e3), "p99": float(np.percentile(values, 99) * 1e3)}


def latency(answers: Sequence[Answer]) -> dict[str, Any]:
    """From streamed answers: time to the first token, time between tokens (a chunk's wait divided by its tokens, once for each of them), time a step.

    A step is a verification with its drafting, or a decode step where there is no drafter.
    """
    waits: list[float] = []
    step_seconds, steps = 0.0, 0
    for answer in answers:
        previous_time, previous_count = answer.chunks[0]
        for moment, count in answer.chunks[1:]:
            if count > previous_count:
                waits += [(moment - previous_time) / (count - previous_count)] * (count - previous_count)
                previous_time, previous_count = moment, count
        own_steps = answer.verifications or max(len(answer.output_ids) - 1, 0)
        step_seconds, steps = step_seconds + answer.chunks[-1][0] - answer.chunks[0][0], steps + own_steps
    found: dict[str, Any] = {"requests": len(answers), "time_to_first_token_ms": percentiles([answer.chunks[0][0] for answer in answers])}
    if waits:
        found |= {"inter_token_latency_ms": percentiles(waits), "step_ms": step_seconds / max(steps, 1) * 1e3}
    return found


def drafting_share(plain: dict[str, Any], fast: dict[str, Any]) -> float | None:
    """The share of a verification's time that a plain decode step does not take: drafting, and the wider verification. None without streamed passes."""
    if "step_ms" not in plain or not fast.get("step_ms"):
        return None
    return max(0.0, 1.0 - plain["step_ms"] / fast["step_ms"])


def drafting_share_of_sweep(rows: Sequence[dict[str, Any]]) -> float | None:
    """The share of time in draft steps, from chains of different length: the slope of step time over num_steps times num_steps, over the step time of the longest chain.

    None unless there are two chains (topk 1) of different length with streamed passes.
    """
    chains = {row["num_steps"]: row["step_ms"] for row in rows if row["topk"] == 1 and row.get("step_ms")}
    if len(chains) < 2:
        return None
    steps, times = np.array(sorted(chains), dtype=float), np.array([chains[step] for step in sorted(chains)])
    slope = float(np.polyfit(steps, times, 1)[0])
    return max(0.0, slope * steps[-1] / times[-1])
