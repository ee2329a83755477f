"""The training loop: order, schedule, optimiser, evaluation, checkpoints."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch

from .batches import Batch, Mover, Reader, epoch_order, pack
from .checkpoints import load_checkpoint, save_checkpoint
from .config import Train
from .distributed import Group, whole
from .drafter import Drafter
from .errors import UserError
from .evaluate import Window, evaluate
from .optimizer import Optimizer
from .progress import Progress
from .step import add_gradients, spread
from .unroll import Fixed, Rope


WINDOWS = 100  # how many points the training curves have


def learning_rate(train: Train, step: int, total: int) -> float:
    """Linear warm-up, then cosine down to min_lr_ratio of the peak. `step` counts from 0."""
    warmup = max(1, round(train.warmup_ratio * total))
    if step < warmup:
        return train.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total - warmup)
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


@dataclass
class Plan:
    """Which samples each optimiser step reads: [step][batch of the step][sample]. Made from lengths and seed alone, so a resumed run has the same."""

    steps: list[list[list[int]]]
    epoch_ends: list[int]  # step numbers after which an epoch is over


def make_plan(train: Train, indices: np.ndarray, lengths: np.ndarray, world: int = 1) -> Plan:
    """`indices` are the training samples, `lengths` of all samples in the store; each of `world` processes takes `accumulate` batches a step."""
    together = train.accumulate * world
    steps: list[list[list[int]]] = []
    ends = []
    for epoch in range(train.epochs):
        order = indices[epoch_order(len(indices), train.seed, epoch)]
        batches = pack(order, lengths, train.batch_tokens)
        steps += [batches[i : i + together] for i in range(0, len(batches), together)]
        ends.append(len(steps))
    return Plan(steps, ends)


@dataclass
class State:
    """What a run knows beside weights; plain values, they go into checkpoints."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    rows: int = 0
    seconds: float = 0.0
    best: float = -1.0
    best_step: int = 0
    walks: dict[str, list[str]] = field(default_factory=dict)  # of the best step, by held-out sample: walk.as_text()
    without_better: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)  # training windows
    evals: list[dict[str, Any]] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)


class Norm:
    """A gradient norm on its way from the device: reading it waits for its own step, not for what was asked for since."""

    def __init__(self, norm: torch.Tensor):
        self.value, self.there = norm, None
        if norm.is_cuda:
            self.value = torch.empty(norm.shape, dtype=norm.dtype, pin_memory=True).copy_(norm, non_blocking=True)
            self.there = torch.cuda.Event()
            self.there.record()

    def finite(self) -> bool:
        if self.there is not None:
            self.there.synchronize()
        return bool(torch.isfinite(self.value))


class Trainer:
    """Runs a plan over a store. `on_best(drafter, evaluation)` is called whenever the predicted accept length is the best so far; its walks are state.walks."""

    def __init__(
        self, train: Train, drafter: Drafter, fixed: Fixed, store: Any, training: np.ndarray, heldout: np.ndarray, checkpoints: Path | None,
        num_steps: int, on_best: Callable[[Drafter, dict[str, Any]], None], group: Group = Group(),
    ):  # fmt: skip
        self.group = group
        self.train, self.drafter, self.fixed, self.store = train, drafter, fixed, store
        self.device, self.num_steps, self.checkpoints, self.on_best = fixed.embedding.device, num_steps, checkpoints, on_best
        lengths = np.asarray(store.lengths)
        self.plan = make_plan(train, training, lengths, group.world)
        self.heldout = pack(heldout[: train.eval_samples], lengths, train.batch_tokens)
        cuda = self.device.type == "cuda"
        self.reader = Reader(store, fixed.steps, train.max_bad_samples, drafter.compute_dtype, pin=cuda)
        self.eval_reader = Reader(store, num_steps, train.max_bad_samples, drafter.compute_dtype, pin=cuda)
        self.rope = Rope(drafter, self.device, drafter.compute_dtype)
        drafter.lm_head.requires_grad_(train.train_lm_head)
        spread(drafter, train.parallel, group)
        self.optimizer = Optimizer(drafter, train, group)
        self.surveyed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # by sample, rows in order: the same in every epoch
        self.state = State()
        self.stop_reason = ""
        self.read: list[int] = [0, 0, 0]  # rows, samples and tokens of the last step, of all processes
        self.mover = Mover(self.device, drafter.compute_dtype)
        self.norms: deque[tuple[int, Norm, list[str]]] = deque()  # gradient norms not yet looked at, with step and samples
        self.window_steps = max(1, math.ceil(len(self.plan.steps) / WINDOWS))
        self.on_numbers: Callable[[str, dict[str, Any]], None] = lambda kind, numbers: None  # each window of training ("train") and each evaluation ("eval")
        self.extra_state: dict[str, Any] = {}  # goes into every checkpoint
        self.on_saved: Callable[[], None] = lambda: None  # a checkpoint is whole

    def resume(self, folder: Path) -> None:
        """Go on where the checkpoint stands. Raises UserError when the plan has changed since."""
        saved = load_checkpoint(folder, self.drafter, self.optimizer.adam)
        if saved["plan_steps"] != len(self.plan.steps):
            raise UserError(f"{folder} belongs to a run of {saved['plan_steps']} steps, this one has {len(self.plan.steps)}: data or [train] changed; set them back, or start anew without --resume")
        names = State.__dataclass_fields__
        self.state = State(**{key: value for key, value in saved.items() if key in names})
        self.reader.bad = dict(self.state.bad)
        self.drafter.refresh()
        if saved["num_steps"] != self.num_steps:  # a walk of other steps: its accept lengths cannot be compared
            print(f"serve.num_steps was {saved['num_steps']} and is {self.num_steps}: the evaluations until here are dropped", flush=True)
            self.state.evals.clear()
            self.forget_best()

    def forget_best(self) -> None:
        """The next evaluation's drafter is the best one."""
        self.state.best, self.state.best_step, self.state.walks, self.state.without_better = -1.0, 0, {}, 0

    def run(self, progress: Progress | None = None) -> State:
        """Train to the plan's end, or until early stopping."""
        state, train = self.state, self.train
        todo = [step[self.group.rank :: self.group.world] for step in self.plan.steps[state.step :]]
        flat = self.reader.read([batch for step in todo for batch in step])
        window, since = Window(self.fixed.steps), time.monotonic()
        try:
            for batches in todo:
                group = [next(flat) for _ in batches]
                counts = self.one_step([batch for batch in group if batch is not None])
                state.step += 1
                rows, samples, tokens = self.read
                state.rows, state.samples, state.tokens = state.rows + rows, state.samples + samples, state.tokens + tokens
                if progress is not None:
                    progress.update(samples, tokens)
                for one in counts:
                    window.add(one)
                epoch_end = state.step in self.plan.epoch_ends
                due = epoch_end if not train.eval_every else state.step % train.eval_every == 0
                if epoch_end or state.step % self.window_steps == 0 or state.step == len(self.plan.steps):
                    window.reduce(self.group, self.device)
                    state.history.append({"step": state.step, "lr": learning_rate(train, state.step - 1, len(self.plan.steps)), **window.metrics()})
                    self.on_numbers("train", state.history[-1])
                    window = Window(self.fixed.steps)
                if due or state.step == len(self.plan.steps):
                    state.seconds += time.monotonic() - since
                    self.evaluate()
                    since = time.monotonic()
                if self.checkpoints and (epoch_end or state.step % train.checkpoint_every == 0 or state.step == len(self.plan.steps)):
                    self.save(state.seconds + time.monotonic() - since)
                if train.early_stop and state.without_better >= train.early_stop:
                    self.stop_reason = f"no better predicted accept length in {state.without_better} evaluations"
                    break
        finally:
            flat.close()
        self.check_norm()
        if not todo and state.best < 0:  # nothing was left to do but this
            self.evaluate()
        return state

    def one_step(self, batches: list[Any]) -> list[Any]:
        """Forward, backward and update on these batches together. Returns the counts of each."""
        drafter, train = self.drafter, self.train
        mine = [[batch.counts[0], len(batch.sample_ids), batch.tokens] for batch in batches]
        table = self.group.table([*([sum(column) for column in zip(*mine)] or [0, 0, 0]), len(batches)])
        self.read = rows, _, _ = [sum(column) for column in zip(*table)][:3]
        if not rows:
            return []
        self.check_norm(keep=1)
        self.optimizer.zero_grad()
        counts, _ = add_gradients(drafter, self.optimizer, batches, self.fixed, self.rope, float(rows), max(row[3] for row in table), self.moved, self.known)
        norm = self.optimizer.step(learning_rate(train, self.state.step, len(self.plan.steps)))
        self.norms.append((self.state.step, Norm(norm), [name for batch in batches for name in batch.sample_ids]))
        return counts

    def moved(self, batch: Batch, place: int) -> Batch:
        """The batch on the device, with this run's noise; `place` in its step, counted in this process."""
        moved = self.mover(batch)
        if self.train.aux_noise:
            moved.aux = self.noisy(moved.aux, self.group.rank + self.group.world * place)
        return moved

    def noisy(self, aux: torch.Tensor, batch: int) -> torch.Tensor:
        """aux [T, A*H] with noise in proportion to each state's root mean square; the same for the same seed, step and batch."""
        seed = int(np.random.SeedSequence([self.train.seed, self.state.step, batch]).generate_state(1)[0])
        generator = torch.Generator(device=aux.device).manual_seed(seed)
        parts = aux.unflatten(-1, (self.drafter.shape.num_aux, -1))
        size = parts.float().pow(2).mean(-1, keepdim=True).sqrt() * self.train.aux_noise
        noise = torch.randn(parts.shape, generator=generator, device=aux.device, dtype=torch.float32)
        return (parts + size * noise).to(aux.dtype).flatten(-2)

    def check_norm(self, keep: int = 0) -> None:
        """Whether the gradients of all steps but the last `keep` were finite. With 1 the device has the last step to work on meanwhile."""
        while len(self.norms) > keep:
            step, norm, samples = self.norms.popleft()
            if not norm.finite():
                raise UserError(f"the gradient of step {step} is not finite; lower train.lr, or look at the samples {', '.join(samples[:3])} with store_tool.py")

    def known(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The target's own next tokens and log-sum-exps of the batch's rows. On a CPU they are kept by sample: the whole head costs as much as the drafter there."""
        if self.device.type != "cpu" or self.train.epochs == 1:
            return None
        order = torch.argsort(batch.rows)
        if not all(name in self.surveyed for name in batch.sample_ids):
            tops, sums = self.fixed.head.survey(batch.final)
            documents = torch.bucketize(batch.rows[order], batch.offsets, right=True) - 1
            for document, name in enumerate(batch.sample_ids):
                mine = order[documents == document]
                self.surveyed[name] = (tops[mine], sums[mine])
            return tops, sums
        tops, sums = (torch.cat([self.surveyed[name][i] for name in batch.sample_ids]) for i in range(2))
        place = torch.argsort(order)
        return tops[place], sums[place]

    def evaluate(self) -> None:
        """Walk the held-out samples; keep the best."""
        state = self.state
        if not self.heldout:
            return
        self.check_norm()
        found = {"step": state.step, **evaluate(self.drafter, self.store, self.eval_reader, self.heldout, self.fixed, self.rope, self.num_steps)}
        found = self.group.first(found)  # two GPUs may round apart, and what follows is for all
        walks = found.pop("walks")
        if not found["verifications"]:  # then 0.000 would be the best of all, and the first drafter the last
            print("warning: no held-out sample has an answer that can be drafted; the last weights are exported", flush=True)
            self.heldout = []
            return
        if self.optimizer.split:
            self.drafter.reshard()  # a forward without backward leaves the gathered weights in place of the split ones
        state.evals.append(found)
        self.on_numbers("eval", found)
        if found["predicted_accept_length"] > state.best:
            state.best, state.best_step, state.walks, state.without_better = found["predicted_accept_length"], state.step, walks, 0
            self.on_best(self.full_drafter(), found)
        else:
            state.without_better += 1
            if self.group.rank == 0:
                better = f"the one of step {state.best_step} with {state.best:.3f} stays"
                print(f"step {state.step}: predicted accept length {found['predicted_accept_length']:.3f}; {better}", flush=True)

    @torch.no_grad()
    def full_drafter(self) -> Drafter:
        """The drafter itself, or with FSDP its weights gathered on the CPU; every process must call this."""
        if not self.optimizer.split:
            return self.drafter
        full = Drafter(self.drafter.shape)
        for (_, mine), (_, split) in zip(full.named_parameters(), self.drafter.named_parameters()):
            mine.copy_(whole(split))
        return full

    def save(self, seconds: float) -> None:
        """A checkpoint of now."""
        self.check_norm()
        state = self.state
        state.bad = {name: reason for bad in self.group.gather(self.reader.bad) for name, reason in bad.items()}
        plain = {name: getattr(state, name) for name in State.__dataclass_fields__} | {"seconds": seconds, "plan_steps": len(self.plan.steps), "num_steps": self.num_steps} | self.extra_state
        save_checkpoint(self.checkpoints, state.step, state.best_step, self.drafter, self.optimizer.adam, plain, self.group)
        self.on_saved()
