"""Training while the store is being written: each shard once, in the order it appears, said to be consumed once a checkpoint holds its steps."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np

from .batches import Reader, epoch_order, pack
from .errors import UserError
from .evaluate import Window
from .extract_plan import Plan as ExtractPlan
from .progress import Progress
from .shards import Shard
from .store import Store, StreamingStore, open_shard, shard_paths
from .trainer import State, Trainer, learning_rate

EVALUATIONS = 4  # over the whole stream, where train.eval_every does not say otherwise
POLL_S = 0.5


def present(stream: StreamingStore) -> list[Shard]:
    """The shards that are there now; the extraction may just be deleting those that were consumed. Raises UserError for a damaged one."""
    shards = []
    for path in shard_paths(stream.path):
        try:
            shards.append(open_shard(path))
        except UserError:
            if path.exists() or path.name not in stream.consumed():
                raise
    return shards


def wait_for_heldout(stream: StreamingStore, planned: int, say: Callable[[str], None], patience_s: float = 120.0) -> Store:
    """The held-out samples, which come first and stay. Waits until all `planned` are there, or `patience_s` longer than the first training shard."""
    since = 0.0
    said = False
    while True:
        manifest, complete = stream.manifest(), stream.complete()
        shards = present(stream) if manifest else []
        heldout = [shard for shard in shards if shard.heldout.all()]
        found = sum(len(shard.ids) for shard in heldout)
        if manifest and (complete or found >= planned and len(shards) > len(heldout)):
            return Store(stream.path, manifest, heldout)
        if len(shards) > len(heldout):
            since = since or time.monotonic()
            if time.monotonic() - since > patience_s:
                say(f"{found} of {planned} held-out samples are there; going on without the others")
                return Store(stream.path, manifest, heldout)
        if not said:
            say(f"waiting for the first shards in {stream.path}")
            said = True
        time.sleep(POLL_S)


def total_steps(plan: ExtractPlan, batch_tokens: int, accumulate: int) -> int:
    """How many optimiser steps the whole stream will be, about: what the learning rate's schedule runs over."""
    tokens = sum(job.tokens for job in plan.jobs if not job.heldout)
    return max(1, math.ceil(tokens / (batch_tokens * accumulate)))


class StreamTrainer(Trainer):
    """One pass over a StreamingStore. `store` and `heldout` are the held-out samples (wait_for_heldout)."""

    def __init__(self, stream: StreamingStore, steps: int, train: Any, drafter: Any, fixed: Any, store: Store, checkpoints: Path, num_steps: int, on_best: Any):
        if train.epochs != 1:
            raise UserError(f"a stream is read once: set train.epochs = 1 (it is {train.epochs}), or train after the extraction")
        super().__init__(train, drafter, fixed, store, np.zeros(0, np.int64), np.arange(len(store)), checkpoints, num_steps, on_best)
        self.stream = stream
        self.plan.steps = [[] for _ in range(steps)]  # only their number counts here
        self.plan.epoch_ends = []
        self.trained: list[str] = []  # shards whose steps are done
        self.saved: list[str] = []  # of these: in a checkpoint

    def resume_stream(self, trained: list[str]) -> None:
        """After resume(): the shards that the checkpoint holds. One that consumed.log lacks (killed in between) is said to be consumed now."""
        self.trained, self.saved = list(trained), list(trained)
        self._consume()

    def _consume(self) -> None:
        for name in sorted(set(self.saved) - self.stream.consumed()):
            self.stream.consume(name)

    def _checkpoint(self) -> None:
        """Save, and let the extraction delete what is in it."""
        if self.trained != self.saved:
            self.extra_state["trained_shards"] = list(self.trained)
            self.save(self.state.seconds)
            self.saved = list(self.trained)
            self._consume()

    def _idle(self) -> bool:
        """Nothing new is there: perhaps because the folder is full of shards that only a checkpoint can free."""
        self._checkpoint()
        return True

    def run(self, progress: Progress | None = None) -> State:
        """Until the extraction is complete and every shard is trained on (train.early_stop does not apply: the extraction would wait for ever)."""
        state, train = self.state, self.train
        every = train.eval_every or max(1, len(self.plan.steps) // EVALUATIONS)
        last_saved = state.step
        for store in self.stream.shards(POLL_S, self._idle):
            name = store.shards[0].path.name
            training = np.flatnonzero(~store.heldout)
            if not len(training) or name in self.trained:
                continue
            since, window = time.monotonic(), Window(self.fixed.steps)
            self.reader = Reader(store, self.fixed.steps, train.max_bad_samples, self.drafter.compute_dtype, pin=self.device.type == "cuda")
            self.reader.bad = dict(state.bad)
            order = training[epoch_order(len(training), train.seed, int(name[6:12]))]
            batches = pack(order, store.lengths, train.batch_tokens)
            flat = self.reader.read(batches)
            due = False
            try:
                for start in range(0, len(batches), train.accumulate):
                    group = [batch for _ in batches[start : start + train.accumulate] if (batch := next(flat)) is not None]
                    for one in self.one_step(group):
                        window.add(one)
                    state.step += 1
                    due = due or state.step % every == 0
                    for batch in group:
                        state.samples += len(batch.sample_ids)
                        state.tokens += batch.tokens
                        state.rows += batch.counts[0]
                        if progress is not None:
                            progress.update(len(batch.sample_ids), batch.tokens)
            finally:
                flat.close()
            state.bad = dict(self.reader.bad)
            state.seconds += time.monotonic() - since
            state.history.append({"step": state.step, "lr": learning_rate(train, state.step - 1, len(self.plan.steps)), **window.metrics()})
            self.trained.append(name)
            if due:
                self.evaluate()
            if state.step - last_saved >= train.checkpoint_every:
                last_saved = state.step
                self._checkpoint()
        self.check_norm()
        if not state.evals or state.evals[-1]["step"] != state.step or state.best < 0:
            self.evaluate()
        self._checkpoint()
        return state
