#!/usr/bin/env python3
"""Extraction on a real GPU, in one go (under four minutes): the client's own ceiling, and what extraction keeps of the server's prefill rate.

Writes OUT/extract_gpu.json, prints a JSON line a part and a summary. To reach: `ratio` 0.85 of part extract, 0.6 of the ceilings at H 7168. ceiling_all_cores: with as many
workers as there are cores. ceiling_small: chats of 230 tokens at H 576, 64 in flight; there samples_s and client_cpu_ms_a_sample (of the main process) count.

usage: tests/gpu/extract_gpu.py OUT [--model FOLDER] [--parts extract ...]     (default: random weights in SmolLM2-135M's shape; speed does not depend on them)
Run by hand on a GPU machine whose Python has SGLang and the capture patch (scripts/00_apply_patch.sh). Each part goes on when another fails.
Without a GPU it goes through the same motions on a tiny model (its numbers then mean nothing).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import capture_gpu  # noqa: E402
from aerie.config import load_config  # noqa: E402
from aerie.servers import end_group, has_gpu, stop_servers  # noqa: E402
from aerie.tiny import CONFIGS  # noqa: E402
from cpu_tools import free_port, write_config  # noqa: E402
from gpu_parts import Parts  # noqa: E402

# A server without FlashAttention's binaries; no decode graphs: extraction asks for one token
ARGS = {
    "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.6, "max-total-tokens": 400000,
    "context-length": 8192, "disable-cuda-graph": True, "chunked-prefill-size": 16384, "max-prefill-tokens": 32768, "max-running-requests": 128, "skip-tokenizer-init": True,
}  # fmt: skip
BUDGET_MB = 2048  # 32 requests of at most 4,000 tokens are 0.6 GB: no dump may be dropped for a full budget


def make_target(folder: Path) -> Path:
    """Random weights in SmolLM2-135M's shape, or a tiny one without a GPU."""
    capture_gpu.SHAPES["extract"] = capture_gpu.SHAPES["smollm2"] if has_gpu() else CONFIGS["llama"]
    return capture_gpu.make_model("extract", folder)


def bench(out: Path, name: str, command: list[str], seconds: float) -> dict[str, Any]:
    """Run one benchmark and end all that it started. Its report with the medians of its rounds; raises RuntimeError with the end of its log."""
    report, log = out / f"{name}.json", out / f"{name}.log"
    with open(log, "wb") as file:
        process = subprocess.Popen([*command, "--report", str(report)], stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"none after {seconds:.0f} s"
        finally:
            end_group(process.pid, 5.0)  # with it a stand-in server; SGLang's server is a group of its own
            process.wait()
    if code != 0:
        raise RuntimeError(f"exit code {code}: {log.read_text(errors='replace')[-500:]}")
    result = json.loads(report.read_text())
    rates = [key for key in ("plain_tok_s", "extract_tok_s", "client_bytes_s", "write_bytes_s") if key in result]
    medians = {f"{key}_median": float(statistics.median(result[key])) for key in rates}
    return {key: value for key, value in result.items() if key != "config"} | medians


def main() -> None:
    names = ["ceiling_tmpfs", "ceiling_disk", "ceiling_small", "extract", "ceiling_all_cores"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=f"in this order (default: {' '.join(names)})")
    parser.add_argument("--seconds", type=float, default=210.0, help="no part begins after that (default: %(default)s)")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["AERIE_RUNS_DIR"] = str(out / "runs")
    roomy = shutil.disk_usage("/dev/shm").free > 12e9  # a container's default is 64 MB
    work = (Path("/dev/shm") if roomy else out) / f"aerie-extract-gpu-{os.getpid()}"
    work.mkdir()
    gpu = has_gpu()
    parts = Parts(out / "extract_gpu.json", args.seconds, gpu=gpu, cores=os.cpu_count(), folder=str(work), free_bytes=shutil.disk_usage(work).free)
    try:
        model = args.model or parts("model", lambda: make_target(work / "model")) or work / "model"
        env = {"SGLANG_HS_DUMP_BUDGET_MB": str(BUDGET_MB if gpu else 64)}
        server = {"port": free_port(), "args": ARGS if gpu else {}, "dump_dir": str(work / "dumps"), "env": env}
        options = {"server": server, "extract": {"max_in_flight": 32}, "target": {"dtype": "bfloat16"}}
        config = write_config(out / "extract.toml", model, [1, 14, 26] if gpu else [1, 2, 4], **options)
        script = [sys.executable, str(ROOT / "scripts" / "bench_extract.py"), "--config", str(config), "--run", "gpu"]
        samples = ["--samples", str(args.samples), "--tokens", *(("300", "4000") if gpu else ("20", "60"))]
        count = min(400, int(shutil.disk_usage(work).free * 0.6 / 66e6)) if gpu else 8  # a dump of 34 MB and its 32 MB in the store lie there together
        ceiling = [*script, "--ceiling", "--dumps", str(work), "--port", str(free_port())]
        wide = [*ceiling, "--tokens", "600", "600", "--samples"]
        commands = {
            "ceiling_tmpfs": [*wide, str(count), "--rounds", "2", "--store", str(work)],
            "ceiling_all_cores": [*wide, str(count), "--rounds", "1", "--store", str(work), "--workers", str(len(os.sched_getaffinity(0)))],
            "ceiling_disk": [*wide, str(max(8, count // 2)), "--rounds", "1", "--store", str(out)],
            "ceiling_small": [
                *ceiling, "--tokens", "230", "230", "--hidden", "576", "--samples", "6000" if gpu else "80", "--rounds", "1", "--store", str(work),
                "--set", "extract.max_in_flight=64",
            ],
            "extract": [*script, *samples, "--rounds", "3", "--store", str(work)],
        }  # fmt: skip
        for name in args.parts:
            parts(name, lambda name=name: bench(out, name, commands[name], 200 if name == "extract" else 80))
    finally:
        stop_servers(load_config(str(out / "extract.toml"), "gpu"))  # nothing to stop unless the benchmark was ended
        for log in (out / "runs" / "gpu" / "logs").glob("*.log"):
            (out / f"server-{log.name}").write_bytes(log.read_bytes()[-300_000:])
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(out / "runs", ignore_errors=True)
        keys = ("ratio", "retries", "plain_tok_s_median", "extract_tok_s_median", "client_bytes_s_median", "write_bytes_s_median", "samples_s", "samples", "workers")
        parts.summary((*keys, "client_cpu_ms_a_sample", "worker_cpu_s_a_gb", "workers_peak_bytes"))


if __name__ == "__main__":
    main()
