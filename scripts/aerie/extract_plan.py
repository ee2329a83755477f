"""What an extraction asks for: which samples, in which order, how many bytes; and the accounting that must add up."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Sequence

import numpy as np

from .errors import UserError
from .samples import Sample, SampleFile
from .store import supervised_rows

BLOCK = 256  # samples sorted among themselves: longest first, so that the last requests are short ones
IDENTITY_KEYS = ("tokenizer_hash", "template_hash", "mask_rule")  # from the data file's metadata into the store's manifest


@dataclass(frozen=True)
class Job:
    """One sample to ask for."""

    id: str
    heldout: bool
    index: int  # in its data file
    tokens: int
    final_rows: int


@dataclass
class Plan:
    """All samples of data/train and data/heldout: each is a job, or skipped for a reason."""

    files: dict[bool, SampleFile]  # heldout? -> file
    jobs: list[Job] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    samples: int = 0  # all, repeats included
    data_hash: str = ""  # over ids and split, whatever the order

    def sample(self, job: Job) -> Sample:
        """Ids and mask of a job."""
        return self.files[job.heldout][job.index]

    def identity(self) -> dict[str, str]:
        """The data's part of the store's identity."""
        metadata = self.files[False].metadata
        return {key: metadata.get(key, "") for key in IDENTITY_KEYS} | {"data_hash": self.data_hash}


def make_plan(folder: Path, all_final_rows: bool = False) -> Plan:
    """Read data/train.safetensors and data/heldout.safetensors (which a data set of other origin need not have). Raises UserError for a missing or foreign file.

    Identical samples are asked for once; a training sample that is also held out is held out. A sample without a supervised prediction is skipped.
    """
    files = {False: SampleFile(folder / "train.safetensors")}
    if (folder / "heldout.safetensors").exists():
        files[True] = SampleFile(folder / "heldout.safetensors")
        for key in (*IDENTITY_KEYS, "pair"):
            if files[True].metadata.get(key) != files[False].metadata.get(key):
                raise UserError(f"{files[True].path} and {files[False].path} differ in {key}: they are from two runs of the data step; run `make data` again")
    elif files[False].metadata.get("heldout_rows", "0") != "0":
        raise UserError(f"{folder / 'heldout.safetensors'} is missing, and {files[False].path} was made beside {files[False].metadata['heldout_rows']} held-out rows; run `make data` again")
    plan = Plan(files)
    seen: dict[str, bool] = {}
    for heldout in (True, False):
        if heldout not in files:
            continue
        file = files[heldout]
        for index in range(len(file)):
            plan.samples += 1
            sample = file[index]
            if sample.id in seen:
                plan.skipped["repeated" if seen[sample.id] == heldout else "also held out"] += 1
                continue
            seen[sample.id] = heldout
            supervised = len(supervised_rows(sample.loss_mask))
            if supervised == 0:
                plan.skipped["nothing to supervise"] += 1
                continue
            tokens = len(sample.input_ids)
            plan.jobs.append(Job(sample.id, heldout, index, tokens, tokens if all_final_rows else supervised))
    plan.data_hash = hashlib.sha256("".join(sorted(f"{sample}{int(heldout)}\n" for sample, heldout in seen.items())).encode()).hexdigest()
    return plan


def order(jobs: Sequence[Job], seed: int = 0) -> list[Job]:
    """Held-out samples first (streaming keeps them in shards of their own), then a fixed shuffle, longest first within each block of it."""
    shuffled = sorted(jobs, key=lambda job: job.id)  # the same whatever the order of the data file
    random.Random(seed).shuffle(shuffled)
    result = []
    for heldout in (True, False):
        part = [job for job in shuffled if job.heldout == heldout]
        for start in range(0, len(part), BLOCK):
            result.extend(sorted(part[start : start + BLOCK], key=lambda job: -job.tokens))
    return result


def choose(
    plan: Plan, done: Iterable[str], failed: Iterable[str], limit: int = 0, start_from: int = 0, only_failed: bool = False
) -> tuple[list[Job], Counter[str]]:
    """The jobs that are left, ordered, and how many the options leave out for now. `start_from` counts in the training file, `limit` counts what is left."""
    done, failed = set(done), set(failed)
    left_out: Counter[str] = Counter()
    todo = []
    for job in plan.jobs:
        if job.id in done:
            continue
        if only_failed and job.id not in failed:
            left_out["not failed before"] += 1
        elif not job.heldout and job.index < start_from:
            left_out["before --start-from"] += 1
        else:
            todo.append(job)
    ordered = order(todo)
    if limit and len(ordered) > limit:
        left_out["beyond --limit"] += len(ordered) - limit
        ordered = ordered[:limit]
    return ordered, left_out


def state_bytes(jobs: Iterable[Job], layers: int, hidden: int, item: int) -> int:
    """Bytes of the states of `jobs` in the store; `item` is bytes a value."""
    return sum((job.tokens * layers + job.final_rows) * hidden * item for job in jobs)


def lengths_line(jobs: Sequence[Job]) -> str:
    """'1,234 tokens in 12 samples of 40 to 300 (median 101)'."""
    lengths = np.array([job.tokens for job in jobs], np.int64)
    if not len(lengths):
        return "no samples"
    return f"{int(lengths.sum()):,} tokens in {len(lengths):,} samples of {lengths.min():,} to {lengths.max():,} tokens (median {int(np.median(lengths)):,})"
