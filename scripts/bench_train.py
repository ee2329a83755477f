#!/usr/bin/env python3
"""How fast the trainer is, on synthetic states: teacher, unroll, loss, backward, clip, update. Sizes S and K are those of common 8B targets and of Kimi-K2.

With --eager the plain PyTorch version (dense masks, float32 logits of every row) runs beside it and losses are compared; with --profile the step's time is
split by part. Numbers go to --report.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch

from aerie.batches import Batch, build_batch
from aerie.config import Train
from aerie.drafter import Drafter, DrafterShape
from aerie.eager_train import EagerDrafter
from aerie.errors import UserError, run_main
from aerie.ops import gpu_kernel
from aerie.optimizer import Optimizer
from aerie.profile_parts import profile_parts
from aerie.report import write_report
from aerie.ttt_loss import TargetHead
from aerie.unroll import Fixed, Rope, unroll


@dataclass(frozen=True)
class Size:
    """One benchmark: the drafter, the documents of a step."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft: int
    documents: int
    tokens: int  # of each document


SIZES = {
    "S": Size(4096, 14336, 32, 8, 128, 128_256, 32_000, 4, 2048),
    "K": Size(7168, 12288, 64, 64, 128, 163_840, 32_000, 1, 4096),
    "K8": Size(7168, 12288, 64, 64, 128, 163_840, 32_000, 2, 4096),
    "E": Size(4096, 14336, 32, 8, 128, 128_256, 32_000, 1, 2048),  # as much of S as the plain version fits on one GPU
    "demo": Size(576, 1536, 9, 3, 64, 49_152, 8192, 8, 128),
    "tiny": Size(64, 128, 4, 2, 16, 512, 256, 2, 96),
}


@dataclass
class Synthetic:
    """Quacks like store.StoredSample."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor
    final_rows: torch.Tensor

    def aux_float(self, dtype: torch.dtype) -> torch.Tensor:
        return self.aux.to(dtype)

    def final_float(self, dtype: torch.dtype) -> torch.Tensor:
        return self.final.to(dtype)


def answer_mask(length: int, share: float, generator: np.random.Generator) -> np.ndarray:
    """A mask of chat turns, prompt and answer in turn: exactly `share` of the tokens are answers, in runs of 64 to 512 tokens (the last one shorter)."""
    answers: list[int] = []
    left = round(share * length)
    while left > 0:
        answers.append(min(int(generator.integers(64, 513)), left))
        left -= answers[-1]
    cuts = np.sort(generator.integers(0, length - sum(answers) + 1, len(answers) - 1))
    prompts = np.diff(np.concatenate([[0], cuts, [length - sum(answers)]]))
    return np.concatenate([np.concatenate([np.zeros(prompt, np.uint8), np.ones(answer, np.uint8)]) for prompt, answer in zip(prompts, answers)])


def make_batch(size: Size, share: float, steps: int, dtype: torch.dtype, seed: int) -> Batch:
    """Documents of random ids and states."""
    generator = np.random.Generator(np.random.PCG64(seed))
    torch.manual_seed(seed)
    samples = []
    for number in range(size.documents):
        mask = answer_mask(size.tokens, share, generator)
        rows = np.flatnonzero(mask[1:-1] & mask[2:]) + 1
        samples.append(Synthetic(
            f"{number:016x}", torch.from_numpy(generator.integers(0, size.vocab, size.tokens, dtype=np.int32)), torch.from_numpy(mask),
            torch.randn(size.tokens, 3 * size.hidden).to(dtype), torch.randn(len(rows), size.hidden).to(dtype), torch.from_numpy(rows),
        ))  # fmt: skip
    batch = build_batch(samples, steps, dtype)
    assert batch is not None
    return batch


def make_fixed(size: Size, steps: int, dtype: torch.dtype, device: torch.device) -> Fixed:
    """A random target: embedding, head, and the draft vocabulary spread over its ids."""
    generator = torch.Generator(device=device).manual_seed(1)
    head = torch.empty(size.vocab, size.hidden, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
    embedding = torch.empty(size.vocab, size.hidden, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
    ids = torch.linspace(0, size.vocab - 1, size.draft, device=device).long()
    to_draft = torch.full((size.vocab,), -1, device=device)
    to_draft[ids] = torch.arange(size.draft, device=device)
    return Fixed(embedding, TargetHead(head, head[ids].contiguous(), ids, to_draft), steps, 0.8)


def make_drafter(size: Size, dtype: torch.dtype, device: torch.device, fast: bool) -> Drafter:
    """Float32 masters, compute in `dtype`."""
    shape = DrafterShape(
        size.hidden, size.hidden, size.inner, size.heads, size.kv_heads, size.head_dim, size.vocab, size.draft, 3, 1e-5, size.tokens + 64,
        {"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    drafter = Drafter(shape, device=device)
    with torch.no_grad():
        generator = torch.Generator(device=device).manual_seed(0)
        for name, parameter in drafter.named_parameters():
            if name in Drafter.MATRICES:
                parameter.normal_(0, 0.02, generator=generator)
    drafter.set_compute(dtype)
    drafter.fast = fast
    return drafter


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype, share: float, fast: bool, checkpointing: bool) -> dict:
    """Time `args.steps_timed` steps of one size."""
    size = SIZES[name]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    drafter, fixed = make_drafter(size, dtype, device, fast), make_fixed(size, args.ttt, dtype, device)
    fixed.checkpointing = checkpointing
    optimizer = Optimizer(drafter, Train(lr=1e-5))
    batch = make_batch(size, share, args.ttt, dtype, 0).to(device, dtype)
    rope = Rope(drafter, device, dtype)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss, _, _ = unroll(drafter, batch, fixed, rope, float(batch.counts[0]))
        loss.backward()
        optimizer.step(1e-5)
        return loss.detach()

    started = time.perf_counter()
    first = float(step())
    wait(device)
    first_s = time.perf_counter() - started
    for _ in range(args.warmup):
        step()
    wait(device)
    started = time.perf_counter()
    for _ in range(args.steps_timed):
        step()
    wait(device)
    seconds = (time.perf_counter() - started) / args.steps_timed
    result = {
        "size": name, "share": share, "fast": fast, "checkpointing": checkpointing, "tokens": batch.tokens, "supervised_rows": batch.counts[0],
        "step_ms": 1e3 * seconds, "tok_s": batch.tokens / seconds, "first_loss": first, "first_step_s": first_s,
        "kernel_loss": bool(gpu_kernel(batch.final)), "parameters": sum(p.numel() for p in drafter.parameters()),
    }  # fmt: skip
    if device.type == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    if args.profile:
        result["parts_ms"] = profile_parts(step, device)
    return result


def measure_eager(name: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype, share: float) -> dict:
    """The plain version on the same batch: first loss, time, memory."""
    size = SIZES[name]
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    drafter, fixed = make_drafter(size, torch.float32, device, False), make_fixed(size, args.ttt, dtype, device)
    batch = make_batch(size, share, args.ttt, dtype, 0)
    eager = EagerDrafter(drafter, dtype)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-5)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = eager.loss(batch, fixed)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        optimizer.step()
        return loss.detach()

    first = float(step())
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    seconds = time.perf_counter() - started
    result = {"size": name, "share": share, "step_ms": 1e3 * seconds, "tok_s": batch.tokens / seconds, "first_loss": first}
    if device.type == "cuda":
        result["peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
    return result


def line(result: dict) -> str:
    parts = " ".join(f"{key}={value:.1f}" for key, value in result.get("parts_ms", {}).items())
    return (f"{result['size']:>5} share {result['share']:.1f} {'fast' if result.get('fast') else 'plain':<5} {result['step_ms']:9.1f} ms {result['tok_s']:9.0f} tok/s "
            f"{result.get('peak_gb', 0):6.1f} GB loss {result['first_loss']:.5f} {parts}")  # fmt: skip


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
    parser.add_argument("--profile", action="store_true", help="time by part of the step")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--config", default="", help="accepted like every benchmark's; the sizes are this script's own")
    parser.add_argument("--report", default="", metavar="FILE")
    args = parser.parse_args()
    unknown = [name for name in f"{args.sizes},{args.eager}".split(",") if name and name not in SIZES]
    if unknown:
        raise UserError(f"no size named {unknown[0]!r}; known: {', '.join(SIZES)}")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32, "bfloat16": torch.bfloat16, "float32": torch.float32}[args.dtype]
    fast = args.path == "fast" or (args.path == "auto" and device.type == "cuda")
    results, eager, ratio = [], [], {}
    for name in args.sizes.split(","):
        for share in map(float, args.shares.split(",")):
            results.append(measure(name, args, device, dtype, share, fast, args.checkpointing))
            print(line(results[-1]), flush=True)
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
    if args.report:
        write_report(Path(args.report), results=results, eager=eager, ratio=ratio, ttt_steps=args.ttt, torch_threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    run_main(main)
