"""Samples of the store -> packed batches: what is supervised, which rows are worked on, in which order they are read."""

from __future__ import annotations

import math
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from .errors import UserError
from .ops import drafter_ops


def supervised_depth(loss_mask: np.ndarray, steps: int) -> np.ndarray:
    """How many TTT steps of each row are supervised: [T] int64, 0..steps.

    Row t is supervised at step k while token[t+1] .. token[t+2+k] are all the assistant's.
    """
    length = len(loss_mask)
    borders = np.flatnonzero(np.asarray(loss_mask) == 0)
    ends = np.concatenate([borders, [length]])
    run = ends[np.searchsorted(ends, np.arange(length))] - np.arange(length)  # assistant tokens from here on
    ahead = np.concatenate([run[1:], np.zeros(min(length, 1), dtype=run.dtype)])
    return np.clip(ahead - 1, 0, steps)


@dataclass
class Batch:
    """Documents end to end. Flat row i belongs to one document; rows that no supervised prediction needs are not there."""

    sample_ids: list[str]
    offsets: Tensor  # [D+1] int64, on the CPU
    positions: Tensor  # [T] int64: row in its document
    next_ids: Tensor  # [T] int64: token[t+1], what step 0 reads
    text_ids: Tensor  # [T] int64: token[t+2], what step 0 predicts in the text
    aux: Tensor  # [T, num_aux * Ht]; with aux_scale the bytes (uint8) of e4m3
    final: Tensor  # [R, Ht]: final[t+1] of each supervised row, in the order of `rows`; with final_scale likewise
    rows: Tensor  # [R] int64: flat rows supervised at step 0, those supervised longest first: step k works on the first counts[k]
    counts: list[int]  # supervised rows by TTT step
    row_of: Tensor  # [T] int64: flat row -> its place in `rows`, -1 for a row without supervision
    tokens: int = 0  # of the whole samples, prompt and unused ends included
    aux_scale: Tensor | None = None  # [T, num_aux] float32: an fp8 store's rows, which to() makes floats on the device
    final_scale: Tensor | None = None  # [R] float32

    def labels(self, step: int) -> Tensor:
        """[counts[step]] int64: where in `rows` (and so in `final`) each row's label of this step stands: row t at step k is taught what row t+k is at step 0."""
        return self.row_of[self.rows[: self.counts[step]] + step]

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On the device, states in the compute dtype."""
        wait_not = {"non_blocking": True}

        def states(rows: Tensor, scale: Tensor | None) -> Tensor:
            rows = rows.to(device, **wait_not)
            return rows.to(dtype) if scale is None else from_fp8(rows, scale.to(device, **wait_not), dtype)

        return Batch(
            self.sample_ids, self.offsets, self.positions.to(device, **wait_not), self.next_ids.to(device, **wait_not), self.text_ids.to(device, **wait_not),
            states(self.aux, self.aux_scale), states(self.final, self.final_scale), self.rows.to(device, **wait_not),
            self.counts, self.row_of.to(device, **wait_not), self.tokens,
        )  # fmt: skip

    def pin(self) -> Batch:
        """In page-locked memory, so that copies to a GPU do not wait."""
        for name in ("positions", "next_ids", "text_ids", "aux", "final", "rows", "row_of", "aux_scale", "final_scale"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).pin_memory())
        return self


class Mover:
    """Brings batches to the device, states in `dtype`. On a GPU by a stream of its own: the copies run beside the steps before, which the host is ahead of."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Batch) -> Batch:
        if self.stream is None:
            return batch.to(self.device, self.dtype)
        with torch.cuda.stream(self.stream):
            moved = batch.to(self.device, self.dtype)
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self.stream)
        for value in vars(moved).values():
            if isinstance(value, Tensor) and value.is_cuda:
                value.record_stream(now)  # its memory is not given away before the step that reads it is over
        return moved


def from_fp8(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of e4m3 [N, A * H] uint8 and scale [N] or [N, A] float32 -> [N, A * H] in `dtype`."""
    wide = rows.view(torch.float8_e4m3fn).view(scale.numel(), -1)
    return drafter_ops.dequantize_rows_fp8(wide, scale.reshape(-1), dtype).view(len(rows), -1)


def all_finite(states: Tensor, scale: Tensor | None) -> bool:
    """Whether states as floats, or as bytes of e4m3 with their scale, hold neither NaN nor infinity."""
    if scale is not None:
        return bool(torch.isfinite(scale).all()) and not bool(((states & 0x7F) == 0x7F).any())
    # one sum at memory speed says it for nearly all; only a sum that is not finite is looked at value by value
    return math.isfinite(float(states.sum(dtype=torch.float32))) or bool(torch.isfinite(states).all())


class BadSample(Exception):
    """A sample that cannot be trained on; the text says why."""

    def __init__(self, sample: str, reason: str):
        super().__init__(f"sample {sample}: {reason}")
        self.sample = sample


def as_numpy(x: Any) -> np.ndarray:
    """A tensor or an array as an array."""
    return x.numpy() if isinstance(x, Tensor) else np.asarray(x)


def build_batch(samples: Sequence[Any], steps: int, dtype: torch.dtype = torch.float32, keep_fp8: bool = False) -> Batch | None:
    """Pack samples of the store (store.StoredSample), states in `dtype`; keep_fp8 leaves an fp8 store's rows as they are, for to() on a GPU.

    None when none of them has a supervised row. Raises BadSample.
    """
    ids, documents, auxes, finals, flat_rows, depths, positions, next_ids, text_ids = [], [], [], [], [], [], [], [], []
    aux_scales: list[Tensor] = []
    final_scales: list[Tensor] = []
    start = tokens = 0
    for sample in samples:
        input_ids, mask = as_numpy(sample.input_ids).astype(np.int64), as_numpy(sample.loss_mask)
        depth = supervised_depth(mask, steps)
        supervised = np.flatnonzero(depth)
        tokens += len(input_ids)
        if not len(supervised):
            continue
        used = int(supervised[-1]) + 1  # rows 0..used-1: keys of what is supervised
        final_rows = as_numpy(sample.final_rows)
        places = np.searchsorted(final_rows, supervised + 1)
        if len(final_rows) == 0 or places.max() >= len(final_rows) or not np.array_equal(final_rows[places], supervised + 1):
            raise BadSample(sample.id, "a supervised row has no final state in the store")
        at = torch.from_numpy(places)
        aux_scale = final_scale = None
        if keep_fp8 and sample.aux_scale is not None:
            aux, aux_scale = sample.aux[:used].view(torch.uint8), sample.aux_scale[:used]
            final, final_scale = sample.final.view(torch.uint8)[at], sample.final_scale[at]
            aux_scales.append(aux_scale)
            final_scales.append(final_scale)
        else:
            aux, final = sample.aux_float(dtype)[:used], sample.final_float(dtype)[at]
        for name, states, scale in (("aux", aux, aux_scale), ("final", final, final_scale)):
            if not all_finite(states, scale):
                raise BadSample(sample.id, f"{name} holds a value that is not finite")
        ids.append(sample.id)
        documents.append(used)
        auxes.append(aux)
        finals.append(final)
        flat_rows.append(supervised + start)
        depths.append(depth[supervised])
        positions.append(np.arange(used))
        next_ids.append(input_ids[1 : used + 1])
        text_ids.append(input_ids[2 : used + 2])
        start += used
    if not ids:
        return None
    depth, rows = np.concatenate(depths), np.concatenate(flat_rows)
    order = np.argsort(-depth, kind="stable")
    rows, by_depth = rows[order], torch.from_numpy(order)
    row_of = np.full(start, -1)
    row_of[rows] = np.arange(len(rows))
    return Batch(
        sample_ids=ids,
        offsets=torch.tensor([0, *np.cumsum(documents)]),
        positions=torch.from_numpy(np.concatenate(positions)),
        next_ids=torch.from_numpy(np.concatenate(next_ids)),
        text_ids=torch.from_numpy(np.concatenate(text_ids)),
        aux=torch.cat(auxes),
        final=torch.cat(finals)[by_depth],
        rows=torch.from_numpy(rows),
        counts=[int((depth > step).sum()) for step in range(steps)],
        row_of=torch.from_numpy(row_of),
        tokens=tokens,
        aux_scale=torch.cat(aux_scales) if aux_scales else None,
        final_scale=torch.cat(final_scales)[by_depth] if final_scales else None,
    )


def pack(order: Sequence[int], lengths: np.ndarray, budget: int) -> list[list[int]]:
    """Samples in the given order, cut into batches of at most `budget` rows; a longer sample is a batch of its own."""
    batches: list[list[int]] = []
    room = 0
    for index in order:
        length = int(lengths[index])
        if not batches or length > room:
            batches.append([])
            room = budget
        batches[-1].append(int(index))
        room -= length
    return batches


def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of one epoch: the same for the same seed and epoch, so that a resumed run reads what it would have read."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(count)


class Reader:
    """Reads samples and builds batches ahead of the trainer, in threads. Bad samples are left out, named and counted; above the limit the run stops."""

    def __init__(self, store: Any, steps: int, max_bad: int, dtype: torch.dtype = torch.float32, pin: bool = False, ahead: int = 4):
        self.store, self.steps, self.max_bad, self.dtype, self.pin, self.ahead = store, steps, max_bad, dtype, pin, ahead
        self.bad: dict[str, str] = {}
        self._lock = threading.Lock()

    def build(self, indices: Sequence[int]) -> Batch | None:
        """The batch of these samples without the bad ones."""
        samples = [self.store.get(index) for index in indices]
        while samples:
            try:
                batch = build_batch(samples, self.steps, self.dtype, keep_fp8=self.pin)  # a GPU makes floats of fp8 rows itself: half the bytes to copy
                return batch.pin() if batch is not None and self.pin else batch
            except BadSample as exc:
                with self._lock:
                    if exc.sample not in self.bad:
                        self.bad[exc.sample] = str(exc)
                        print(f"warning: skipped {exc}", flush=True)
                if len(self.bad) > self.max_bad:
                    raise UserError(f"{len(self.bad)} bad samples, more than train.max_bad_samples = {self.max_bad}; the last: {exc}; look at it with store_tool.py") from None
                samples = [sample for sample in samples if sample.id != exc.sample]
        return None

    def read(self, batches: Sequence[Sequence[int]]) -> Iterator[Batch | None]:
        """Batches in order, up to `ahead` of them built before they are asked for: by one thread on a CPU, whose cores train, by `ahead` beside a GPU."""
        device = ({"initializer": torch.cuda.set_device, "initargs": (torch.cuda.current_device(),)}) if self.pin else {}  # else pinning would open the first GPU in every process
        pool = ThreadPoolExecutor(self.ahead if self.pin else 1, thread_name_prefix="reader", **device)
        waiting: deque = deque()
        left = iter(batches)
        try:
            while True:
                while len(waiting) < self.ahead and (indices := next(left, None)) is not None:
                    waiting.append(pool.submit(self.build, indices))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
