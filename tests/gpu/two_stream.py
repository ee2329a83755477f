#!/usr/bin/env python3
"""Target on one GPU, trainer on the other, through the streaming store (about seven minutes on a fresh machine): `make all` with extract.keep_gb, as a user calls it.

Run by hand on a machine with two GPUs whose Python has SGLang and the capture patch: tests/gpu/two_stream.py OUT. Every part goes on when another fails. Writes
OUT/two_stream.json, prints a JSON line a part; where `make all` fails or its time ends, with what was reached by then. The target is random, in SmolLM2-135M's shape with the
tiny tokenizer's vocabulary. Without a GPU: a tiny one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from aerie.config import load_config  # noqa: E402
from aerie.nvidia import gpu_rows  # noqa: E402
from aerie.servers import has_gpu, stop_servers  # noqa: E402
from aerie.tiny import CONFIGS, VOCAB  # noqa: E402
from cpu_tools import write_config  # noqa: E402
from gpu_parts import Parts, begin, make  # noqa: E402

GPU = has_gpu()
ARGS = {
    "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.5, "max-total-tokens": 131072, "context-length": 2048,
    "cuda-graph-bs-decode": [1, 8, 64], "max-running-requests": 64,
}  # fmt: skip
CHATS, HELDOUT, KEEP_GB, SHARD_GB = (320, 20, 0.04, 0.004) if GPU else (20, 4, 0.0012, 0.0002)


def make_target(folder: Path) -> str:
    """Random weights; bf16 on a GPU."""
    import capture_gpu

    capture_gpu.SHAPES["stream"] = capture_gpu.SHAPES["smollm2"] | {"vocab_size": VOCAB} if GPU else CONFIGS["llama"]
    return str(capture_gpu.make_model("stream", folder))


def gpus_of(word: str) -> dict[str, list[int]]:
    """CUDA_VISIBLE_DEVICES of the processes whose command line holds `word`: value -> their ids."""
    found: dict[str, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word not in (folder / "cmdline").read_text().replace("\0", " "):
                continue
            environ = dict(line.partition("=")[::2] for line in (folder / "environ").read_text().split("\0"))
        except (OSError, UnicodeDecodeError):
            continue
        found.setdefault(environ.get("CUDA_VISIBLE_DEVICES", "all"), []).append(int(folder.name))
    return found


class Watch(threading.Thread):
    """While it runs: memory in use on each GPU at its highest, and which GPUs the extraction server and the trainer were shown."""

    def __init__(self, run: str, port: int):
        super().__init__(daemon=True)
        self.run_name, self.port, self.over = run, port, threading.Event()
        self.server: set[str] = set()
        self.used: dict[int, int] = {}
        self.trainer: set[str] = set()

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.server |= set(gpus_of(f"--port {self.port}"))
            self.trainer |= {value for value, pids in gpus_of("03_train.py").items() if any(self.run_name in self.line(pid) for pid in pids)}
            if GPU:
                for index, _, used in gpu_rows("memory.used"):
                    self.used[int(index)] = max(self.used.get(int(index), 0), int(used))

    @staticmethod
    def line(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=440.0, help="no longer than that (default: %(default)s)")
    args = parser.parse_args()
    out = args.out.absolute()
    begin(out, out / "runs")
    run = f"two-stream-{os.getpid()}"
    prompts = [json.loads(line) for line in (ROOT / "configs" / "demo_prompts.jsonl").read_text().splitlines()[:CHATS]]
    (out / "chats.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    path = write_config(
        out / f"{run}.toml", out / "stream-model", [1, 14, 26] if GPU else [1, 2, 4], target={"dtype": "bfloat16" if GPU else "float32"},
        server={"args": ARGS if GPU else {}, "gpus": [0], "ready_timeout_s": 300.0},
        bench={"concurrency": [4], "max_new_tokens": 24, "samples": 8, "requests_per_slot": 1, "rounds": 1, "latency": False, "side_by_side": GPU},
        data={"inputs": [str(out / "chats.jsonl")], "max_new_tokens": 96 if GPU else 16, "heldout": HELDOUT, "max_tokens": 1024, "concurrency": 64 if GPU else 8},
        extract={"proof_samples": 8, "keep_gb": KEEP_GB, "shard_gb": SHARD_GB}, draft={"vocab_size": 256},
        train={"gpus": [1], "ttt_steps": 7 if GPU else 3, "epochs": 1, "batch_tokens": 2048 if GPU else 256, "eval_samples": HELDOUT, "lr": 1e-3, "checkpoint_every": 5, "device": "auto" if GPU else "cpu"},
    )  # fmt: skip
    config = load_config(str(path), run)
    parts = Parts(out / "two_stream.json", args.seconds, gpu=GPU, cores=os.cpu_count())

    def report(part: str) -> dict[str, Any]:
        """A step's report; empty where it was not reached."""
        path = config.run.root / part / "report.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    def whole() -> dict[str, Any]:
        watch = Watch(run, config.server.port)
        watch.start()
        try:
            said = make(out, "all", path, run, args.seconds)
        except RuntimeError as exc:
            said = {"failed": str(exc)}
        finally:
            watch.over.set()
            watch.join(5)
        data, train, store, bench = map(report, ("data", "drafter", "store", "bench"))
        consumed = len(set((config.run.store / "consumed.log").read_text().split())) if (config.run.store / "consumed.log").exists() else 0
        wanted = data["splits"]["train"]["rows"] if data else -1
        texts = bench.get("lossless") or {}
        return {
            **said, "accounting": store.get("accounting"), "server_losses": store.get("server_losses"), "trained_samples": train.get("samples", 0), "train_samples": wanted, "consumed_shards": consumed,
            "server_gpus": ",".join(sorted(watch.server)), "trainer_gpus": ",".join(sorted(watch.trainer)), "used_mib": watch.used, "trainer_peak_bytes": train.get("peak_gpu_bytes", 0),
            "train_tok_s": train.get("train_tok_s"), "extract_tok_s": store.get("extract_tok_s"), "predicted": bench.get("predicted_accept_length"), "served": bench.get("accept_length"),
            "texts": f"{texts.get('equal')} of {texts.get('compared')} equal",
            "right": train.get("samples") == wanted and consumed > 0 and store.get("server_losses") == 0 and watch.server == {"0"} and watch.trainer == {"1"},
        }  # fmt: skip

    try:
        parts("target", lambda: make_target(out / "stream-model"))
        parts("all", whole)
    finally:
        stop_servers(config)
        for log in config.run.logs.glob("*.log"):
            (out / f"server-{log.name}").write_bytes(log.read_bytes()[-100_000:])
        shutil.rmtree(config.run.store, ignore_errors=True)
        parts.summary((
            "right", "accounting", "server_losses", "trained_samples", "train_samples", "consumed_shards", "server_gpus", "trainer_gpus", "train_tok_s", "extract_tok_s", "trainer_peak_bytes",
            "predicted", "served", "texts", "last",
        ))  # fmt: skip


if __name__ == "__main__":
    main()
