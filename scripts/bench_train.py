#!/usr/bin/env python3
"""How fast the trainer is, on synthetic states: teacher, unroll, loss, backward, clip, update. Sizes S and K are those of common 8B targets and of Kimi-K2.

With --eager the plain PyTorch version (dense masks, float32 logits of every row, document by document) runs beside it and losses are compared; with --profile
the step's time is split by part; with --loading batches come from a store on disk, and the share of a step that this costs is measured. Under torchrun every process
takes its share of --batches (--parallel says how weights are kept), and the first one reports. Numbers go to --report.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aerie  # noqa: F401  first: it finds the Python that has the packages
import psutil
import torch

from aerie.batches import Batch, build_batch
from aerie.config import Train
from aerie.distributed import Group, start_group
from aerie.eager_train import EagerDrafter
from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.loading_bench import measure_loading
from aerie.ops import choose_kernels, gpu_kernel
from aerie.optimizer import Optimizer
from aerie.profile_parts import profile_parts
from aerie.report import write_report
from aerie.step import add_gradients, spread
from aerie.train_bench import SIZES, Size, make_batch, make_drafter, make_fixed, make_samples, weight_bytes
from aerie.unroll import Rope


CURVE_SETS = 4


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass
class Bench:
    """A drafter on random states, alone or as one of several processes."""

    size: Size
    args: argparse.Namespace
    device: torch.device
    dtype: torch.dtype
    group: Group

    def start(self, fast: bool) -> None:
        """Drafter, target and optimiser; begins again with the same weights."""
        self.drafter = make_drafter(self.size, self.dtype, self.device, fast)
        self.fixed = make_fixed(self.size, self.args.ttt, self.dtype, self.device)
        self.fixed.checkpointing = self.args.checkpointing
        spread(self.drafter, self.args.parallel, self.group)
        self.optimizer = Optimizer(self.drafter, Train(lr=self.args.lr), self.group)
        self.rope = Rope(self.drafter, self.device, self.dtype)

    def batches(self, share: float, seed: int) -> list[Batch]:
        """This process's batches of one step; all processes together have args.batches."""
        places = range(self.group.rank, self.args.batches, self.group.world)
        return [make_batch(self.size, share, self.args.ttt, self.dtype, self.args.batches * seed + place, self.device).to(self.device, self.dtype) for place in places]

    def totals(self, batches: list[Batch]) -> tuple[int, int, int]:
        """Tokens and supervised rows of the step over all processes, and the most batches that one has."""
        table = self.group.table([sum(batch.tokens for batch in batches), sum(batch.counts[0] for batch in batches), len(batches)])
        tokens, rows, _ = (sum(column) for column in zip(*table))
        return tokens, rows, max(row[2] for row in table)

    def step(self, batches: list[Batch], rows: int, passes: int) -> torch.Tensor:
        """Teacher, unroll, loss, backward, sums, clip, update; this process's share of the loss."""
        self.optimizer.zero_grad()
        _, losses = add_gradients(self.drafter, self.optimizer, batches, self.fixed, self.rope, float(rows), passes)
        self.optimizer.step(self.args.lr)
        return sum(losses, torch.zeros((), device=self.device))

    def curve(self, share: float, steps: int) -> list[float]:
        """Loss of each of so many steps over four steps' batches in turn; the last batch of the second step has no supervised row, so it is not there."""
        sets = [self.batches(share, seed) for seed in range(1, CURVE_SETS + 1)]
        if self.args.batches > 1 and self.group.rank == (self.args.batches - 1) % self.group.world:
            del sets[1][-1]
        totals = [self.totals(batches) for batches in sets]
        losses = []
        for number in range(steps):
            _, rows, passes = totals[number % CURVE_SETS]
            losses.append(self.step(sets[number % CURVE_SETS], rows, passes))
        return self.group.sum_(torch.stack(losses).double()).tolist()


def measure(name: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype, share: float, fast: bool, group: Group) -> dict:
    """Time `args.steps_timed` steps of one size."""
    losses = []
    if args.curve:
        curved = Bench(SIZES[name], args, device, dtype, group)
        curved.start(fast)
        losses = curved.curve(share, args.curve)
        del curved
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    bench = Bench(SIZES[name], args, device, dtype, group)
    bench.start(fast)
    batches = bench.batches(share, 0)
    tokens, rows, passes = bench.totals(batches)

    def step() -> torch.Tensor:
        return bench.step(batches, rows, passes)

    started = time.perf_counter()
    first = float(group.sum_(step()))
    first_s = time.perf_counter() - started
    for _ in range(args.warmup):
        step()
    wait(device)
    group.barrier()
    started = time.perf_counter()
    for _ in range(args.steps_timed):
        step()
    wait(device)
    seconds = max(row[0] for row in group.table([int(1e9 * (time.perf_counter() - started))])) / 1e9 / args.steps_timed
    result = {
        "size": name, "share": share, "fast": fast, "checkpointing": args.checkpointing, "tokens": tokens, "supervised_rows": rows,
        "step_ms": 1e3 * seconds, "tok_s": tokens / seconds, "first_loss": first, "first_step_s": first_s,
        "kernel_loss": bool(gpu_kernel(batches[0].final)), "parameters": sum(p.numel() for p in bench.drafter.parameters()),
        "processes": group.world, "batches": args.batches, "parallel": args.parallel if group.world > 1 else "", "curve": losses, "early_sums": bench.optimizer.sums.early,
    }  # fmt: skip
    if device.type == "cuda":
        result["peak_gb_by_rank"] = [row[0] / 2**30 for row in group.table([torch.cuda.max_memory_allocated()])]
        result["peak_gb"] = max(result["peak_gb_by_rank"])
        result["before_gb"] = before / 2**30  # what an earlier size left behind: it is in the peak
    if args.profile:
        result["parts_ms"] = profile_parts(step, device)
    return result


def measure_eager(name: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype, share: float) -> dict:
    """The plain version on the same documents, one after another, since dense masks of all together would not fit: first loss, time, memory."""
    size = SIZES[name]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    drafter, fixed = make_drafter(size, torch.float32, device, False), make_fixed(size, args.ttt, dtype, device)
    batches = [build_batch([sample], args.ttt, dtype) for sample in make_samples(size, share, dtype, 0, device)]
    rows = sum(batch.counts[0] for batch in batches)
    eager = EagerDrafter(drafter, dtype)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=args.lr)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for batch in batches:
            loss = eager.loss(batch, fixed, rows)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        optimizer.step()
        return total

    first = float(step())
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    seconds = time.perf_counter() - started
    result = {"size": name, "share": share, "step_ms": 1e3 * seconds, "tok_s": sum(batch.tokens for batch in batches) / seconds, "first_loss": first}
    if device.type == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def line(result: dict) -> str:
    parts = " ".join(f"{key}={value:.1f}" for key, value in result.get("parts_ms", {}).items())
    return (f"{result['size']:>5} share {result['share']:.1f} {'fast' if result.get('fast') else 'plain':<5} {result['step_ms']:9.1f} ms {result['tok_s']:9.0f} tok/s "
            f"{result.get('peak_gb', 0):6.1f} GB loss {result['first_loss']:.5f} {parts}")  # fmt: skip


def refuse_what_does_not_fit(names: Iterable[str]) -> None:
    """On a CPU: raise UserError for a size whose weights, moments and target matrices alone are more than the memory that is left."""
    free = psutil.virtual_memory().available
    for name in names:
        if (needed := weight_bytes(SIZES[name])) > free:
            raise UserError(f"size {name} needs {needed / 1e9:.0f} GB in float32 for weights, gradients, moments and the target's embedding and head, and {free / 1e9:.0f} GB are free; it is meant for a GPU (on a CPU: --sizes tiny)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="tiny", help=f"comma separated: {', '.join(SIZES)} (default: %(default)s)")
    parser.add_argument("--shares", default="0.7", help="supervised shares, comma separated (default: %(default)s)")
    parser.add_argument("--ttt", type=int, default=7, help="TTT steps (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps-timed", type=int, default=5)
    parser.add_argument("--path", choices=("auto", "fast", "plain"), default="auto", help="auto: the GPU path where there is a GPU")
    parser.add_argument("--checkpointing", action="store_true", help="activation checkpointing")
    parser.add_argument("--eager", default="", metavar="SIZES", help="compare these sizes with the plain PyTorch version")
    parser.add_argument("--loading", default="", metavar="SIZES", help="read these sizes' batches from a store, in bf16 (float32 on a CPU) and in fp8")
    parser.add_argument("--scratch", default=None, metavar="DIR", help="with --loading: where that store lies for the moment (default: the system's)")
    parser.add_argument("--profile", action="store_true", help="time by part of the step")
    parser.add_argument("--batches", type=int, default=0, help="batches of a step, over all processes (default: one each)")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp", help="as train.parallel, under torchrun")
    parser.add_argument("--curve", type=int, default=0, metavar="STEPS", help="first the losses of so many steps, with a step in which the last batch has no supervised row")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--config", default="", help="accepted like every benchmark's; the sizes are this script's own")
    parser.add_argument("--report", default="", metavar="FILE")
    args = parser.parse_args()
    unknown = [name for name in f"{args.sizes},{args.eager},{args.loading}".split(",") if name and name not in SIZES]
    if unknown:
        raise UserError(f"no size named {unknown[0]!r}; known: {', '.join(SIZES)}")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}[args.dtype]
    if device.type == "cpu":
        refuse_what_does_not_fit(filter(None, f"{args.sizes},{args.eager},{args.loading}".split(",")))
    fast = args.path == "fast" or (args.path == "auto" and device.type == "cuda")
    group = start_group(device.type == "cuda")
    choose_kernels("auto" if fast else "off", device)
    if group.rank:
        sys.stdout = open(os.devnull, "w")  # the first process speaks for all
    args.batches = args.batches or group.world
    if args.batches < group.world or (args.eager and group.world > 1):
        raise UserError(f"{group.world} processes: --batches must be {group.world} or more (it is {args.batches}), and --eager wants one")
    results, eager, loading, ratio, failed = [], [], [], {}, []
    for name in filter(None, args.sizes.split(",")):
        for share in map(float, args.shares.split(",")):
            try:
                results.append(measure(name, args, device, dtype, share, fast, group))
            except (torch.OutOfMemoryError, RuntimeError) as exc:  # with one process the other sizes are still wanted; the exit code says that one failed
                if group.world > 1:
                    raise
                failed.append(f"{name} {share}: {type(exc).__name__}: {str(exc)[:200]}")
                print(f"FAILED {failed[-1]}", flush=True)
                continue
            print(line(results[-1]), flush=True)
    for name in filter(None, args.loading.split(",")):
        for stored in (str(dtype)[6:], "fp8"):
            loading.append(measure_loading(name, float(args.shares.split(",")[0]), args.ttt, device, dtype, fast, stored, args.steps_timed, args.scratch))
            one = loading[-1]
            print(f"{name:>5} from a store in {stored}: {one['step_ms']:.1f} ms a step, {one['resident_ms']:.1f} with the batches there: loading costs {one['share']:.1%}", flush=True)
    for name in filter(None, args.eager.split(",")):
        share = float(args.shares.split(",")[0])
        try:
            eager.append(measure_eager(name, args, device, dtype, share))
        except torch.OutOfMemoryError as exc:
            print(f"{name}: the plain version does not fit: {str(exc)[:120]}", flush=True)
            continue
        print(f"eager {line(eager[-1])}", flush=True)
        ours = next((result for result in results if result["size"] == name and result["share"] == share), None)
        if ours:
            ratio[name] = {"speed": ours["tok_s"] / eager[-1]["tok_s"], "loss_difference": abs(ours["first_loss"] - eager[-1]["first_loss"]) / eager[-1]["first_loss"]}
            if "peak_gb" in ours:
                ratio[name]["memory"] = ours["peak_gb"] / eager[-1]["peak_gb"]
            print(f"{name} against eager: {json.dumps(ratio[name])}", flush=True)
    group.leave()
    if args.report and not group.rank:
        write_report(Path(args.report), results=results, eager=eager, loading=loading, ratio=ratio, failed=failed, ttt_steps=args.ttt, torch_threads=torch.get_num_threads())
    return EXIT_FAILED if failed else 0


if __name__ == "__main__":
    run_main(main)
