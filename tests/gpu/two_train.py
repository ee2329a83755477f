#!/usr/bin/env python3
"""Training on two GPUs (about four minutes): DDP and FSDP2 against one GPU, sizes S and K of bench_train.py, and a run that changes its number of processes.

Run by hand on a machine with two GPUs: tests/gpu/two_train.py OUT [--parts one ddp-S ...]. Every part goes on when another fails. Writes OUT/two_train.json, prints a
JSON line a part. To reach: `ratio` 1.8 of the ddp parts, `curve_difference` 0.001 over 50 steps (one of them without a supervised row on the second GPU). SGLang is not
needed. Without a GPU: the same motions on tiny sizes over gloo (its numbers then mean nothing).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
from aerie.config import Config, load_config  # noqa: E402
from aerie.tiny import CONFIGS, make_tiny  # noqa: E402
from cpu_tools import write_config  # noqa: E402
from gpu_parts import Parts, begin, kill_tree  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from train_runs import SCRIPT, torchrun, write_run  # noqa: E402

GPU = torch.cuda.is_available()
SIZES = ("S", "K") if GPU else ("tiny",)
CURVE, TIMED, TTT = (50, 20, 7) if GPU else (8, 3, 3)
LLAMA = CONFIGS["llama"] | {
    "hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2816, "vocab_size": 4096,
    "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
UNTIL = ROOT / "tests" / "train_until.py"


LIVE: set[subprocess.Popen] = set()


def end(process: subprocess.Popen) -> None:
    """Nothing of its group is left, and of what it started: torchrun's workers have sessions of their own, and hold their GPUs long after it was killed."""
    LIVE.discard(process)
    if process.poll() is None:
        kill_tree(process.pid)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def call(command: list[str], log: Path, seconds: float, **env: str) -> str:
    """Run to the end; its output. Raises RuntimeError with the end of its log; a torchrun that hangs is ended with all its processes."""
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | env, start_new_session=True)
        LIVE.add(process)
        try:
            code: Any = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"none after {seconds:.0f} s"
        finally:
            end(process)
    text = log.read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"exit code {code}: {text[-500:]}")
    return text


class Benches:
    """bench_train.py in one process and in two, and what it said."""

    def __init__(self, out: Path):
        self.out = out
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, name: str, size: str, batches: int, processes: int, parallel: str = "ddp", curve: int = CURVE, gpu: int | None = None) -> dict[str, Any]:
        """One call; the result of its one size."""
        report = self.out / f"bench-{name}.json"
        words = [
            str(ROOT / "scripts" / "bench_train.py"), "--sizes", size, "--ttt", str(TTT), "--batches", str(batches), "--curve", str(curve),
            "--steps-timed", str(TIMED), "--lr", "1e-4",
            "--parallel", parallel, "--report", str(report),
        ]  # fmt: skip
        command = torchrun(processes, words) if processes > 1 else [sys.executable, *words]
        call(command, self.out / f"bench-{name}.log", 100.0, **({"CUDA_VISIBLE_DEVICES": str(gpu)} if gpu is not None and GPU else {}))
        self.results[name] = json.loads(report.read_text())["results"][0]
        return self.results[name]

    def alone(self) -> dict[str, Any]:
        """One GPU each, at the same time: the curve with both GPUs' batches in every step, and the rate with one batch a step."""
        problems: list[str] = []

        def lane(number: int, size: str) -> None:
            try:
                self.run(f"one-{size}", size, 1, 1, curve=0, gpu=number)
                self.run(f"both-{size}", size, 2, 1, gpu=number)
            except Exception as exc:
                problems.append(f"{size}: {exc}")

        threads = [threading.Thread(target=lane, args=pair, daemon=True) for pair in enumerate(SIZES)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        keys = ("tok_s", "step_ms", "peak_gb", "parameters", "kernel_loss")
        found = {f"{name}_{key}": result[key] for name, result in self.results.items() for key in keys if key in result}
        if problems:
            found["failed"] = "; ".join(problems)
        return found

    def together(self, size: str, parallel: str) -> dict[str, Any]:
        """Two GPUs, one batch each."""
        found = self.run(f"{parallel}-{size}", size, 2, 2, parallel)
        result = {key: found[key] for key in ("tok_s", "step_ms", "first_step_s", "early_sums", "peak_gb", "peak_gb_by_rank", "before_gb", "curve") if key in found}
        one, both = (self.results.get(f"{kind}-{size}") for kind in ("one", "both"))
        if one:
            result |= {"ratio": found["tok_s"] / one["tok_s"], "one_tok_s": one["tok_s"], "one_peak_gb": one.get("peak_gb", 0.0)}
        if both:  # the stricter measure: one GPU that does both batches before each update
            result |= {"ratio_same_global_batch": found["tok_s"] / both["tok_s"], "one_curve": both["curve"]}
            curve = both["curve"]
            result |= {"curve_difference": max(abs(a - b) / b for a, b in zip(found["curve"], curve)), "steps": len(curve)}
            result["loss_fell"] = 1 - curve[(CURVE - 1) // 4 * 4] / curve[0]  # the same four steps' batches in turn
        return result


class Chain:
    """One GPU, then two with all weights each, then two with split weights, then one: against one GPU alone."""

    def __init__(self, out: Path):
        self.out = out
        self.configs: dict[str, Config] = {}

    def make(self) -> str:
        """A target and a store of random states, the same for both runs."""
        model = self.out / "chain-model"
        if GPU:
            import capture_gpu

            capture_gpu.SHAPES["chain"] = LLAMA
            capture_gpu.make_model("chain", model)
        else:
            make_tiny("llama", model)
        options = {"ttt_steps": TTT, "epochs": 4, "batch_tokens": 2048 if GPU else 64, "lr": 1e-4, "eval_samples": 4, "checkpoint_every": 1, "stop_server": False}
        for name in ("alone", "chain"):
            path = write_config(self.out / f"chain-{name}.toml", model, [1, 2, 4], draft={"vocab_size": 128}, train=options)
            self.configs[name] = load_config(str(path), f"two-{name}")
            write_run(self.configs[name], samples=120 if GPU else 13, heldout=4, length=160 if GPU else 24)
        return str(model)

    def link(self, name: str, run: str, processes: int, until: int = 0, gpu: int | None = None, **train: Any) -> float:
        """One stretch, to the checkpoint of step `until` or to the end."""
        config = self.configs[run]
        script = [str(UNTIL), str(until)] if until else [str(SCRIPT)]
        sets = [word for key, value in (train | {"accumulate": 2 // processes}).items() for word in ("--set", f"train.{key}={value}")]
        words = [*script, "--config", str(config.path), "--run", config.run.name, *sets]
        command = torchrun(processes, words) if processes > 1 else [sys.executable, *words]
        text = call(command, self.out / f"chain-{name}.log", 90.0, **({"CUDA_VISIBLE_DEVICES": str(gpu)} if gpu is not None and GPU else {}))
        if name not in ("alone", "first") and "resumed from" not in text:
            raise RuntimeError(f"{name} did not go on from a checkpoint: {text[-300:]}")
        return 0.0

    def all(self) -> dict[str, Any]:
        """The four stretches, the run alone beside the first one; then losses of every step and the last weights."""
        problems: list[str] = []

        def alone() -> None:
            try:
                self.link("alone", "alone", 1, gpu=1)
            except Exception as exc:
                problems.append(str(exc))

        thread = threading.Thread(target=alone, daemon=True)
        thread.start()
        self.link("first", "chain", 1, 6, gpu=0)
        thread.join()
        if problems:
            raise RuntimeError(problems[0])
        self.link("ddp", "chain", 2, 10)
        self.link("fsdp", "chain", 2, 14, parallel="fsdp")
        self.link("last", "chain", 1, gpu=0)
        return self.compare()

    def compare(self) -> dict[str, Any]:
        reports, weights = [], []
        for name in ("alone", "chain"):
            run = self.configs[name].run
            reports.append(json.loads((run.drafter / "report.json").read_text()))
            weights.append(load_file(sorted(run.checkpoints.glob("step-*"))[-1] / "tensors.safetensors"))
        losses = [[entry["loss"][0] for entry in report["history"]] for report in reports]
        differences = [abs(a - b) / max(abs(a), 1e-9) for a, b in zip(*losses)]
        worst = max(float((weights[1][name] - value).norm() / value.norm()) for name, value in weights[0].items() if name.startswith("model."))
        return {
            "steps": len(losses[0]), "same_steps": len(losses[0]) == len(losses[1]), "loss_difference": max(differences), "losses": losses, "weights_difference": worst,
            "same_samples": reports[0]["samples"] == reports[1]["samples"], "accept_lengths": [report["predicted_accept_length"] for report in reports],
        }  # fmt: skip


def main() -> None:
    names = ["links", "one", *(f"{parallel}-{size}" for parallel in ("ddp", "fsdp") for size in SIZES), "chain"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=f"in this order (default: {' '.join(names)})")
    parser.add_argument("--skip", nargs="+", choices=names, default=[], metavar="PART")
    parser.add_argument("--seconds", type=float, default=400.0, help="no part begins after that (default: %(default)s)")
    args = parser.parse_args()
    out = args.out.absolute()
    begin(out, out / "runs")
    report = out / ("two_chain.json" if args.parts == ["chain"] else "two_train.json")
    parts = Parts(report, args.seconds, torch=torch.__version__, gpus=torch.cuda.device_count(), cores=os.cpu_count())
    benches, chain = Benches(out), Chain(out)

    def links() -> dict[str, Any]:
        text = call(torchrun(2, [str(ROOT / "tests" / "gpu" / "all_reduce.py")]), out / "links.log", 60.0)
        topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout if GPU else ""
        found = next(line for line in reversed(text.splitlines()) if line.startswith("{"))  # NCCL and torchrun may have had the last word
        return {**json.loads(found), "topology": topology}

    try:
        for name in (name for name in args.parts if name not in args.skip):
            if name == "links":
                parts(name, links)
            elif name == "one":
                parts(name, benches.alone)
            elif name == "chain":
                parts("chain data", chain.make)
                parts(name, chain.all)
            else:
                parallel, _, size = name.partition("-")
                parts(name, lambda parallel=parallel, size=size: benches.together(size, parallel))
    finally:
        for process in list(LIVE):
            end(process)
        keys = [f"{kind}-{size}_{key}" for kind in ("one", "both") for size in SIZES for key in ("tok_s", "peak_gb")]
        parts.summary((
            "gb_s", "ratio", "ratio_same_global_batch", "tok_s", "one_tok_s", "curve_difference", "loss_fell", "steps", "early_sums", "peak_gb", "one_peak_gb", "loss_difference",
            "weights_difference",
            "same_steps", "same_samples", *keys,
        ))  # fmt: skip


if __name__ == "__main__":
    main()
