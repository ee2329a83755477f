#!/usr/bin/env python3
"""Extraction on a real GPU, in one go (under four minutes): what it keeps of the server's prefill rate, and the client's own ceiling.

Writes JSON into OUT, prints a table.

usage: tests/gpu/extract_gpu.py OUT [--model FOLDER]     (default: random weights in SmolLM2-135M's shape; speed does not depend on them)
Run by hand on a GPU machine whose Python has SGLang and the capture patch (scripts/00_apply_patch.sh). Each part goes on when another fails.
Without a GPU it goes through the same motions on a tiny model (its numbers then mean nothing).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from aerie.servers import has_gpu  # noqa: E402
from aerie.tiny import make_tiny  # noqa: E402
from cpu_tools import free_port, write_config  # noqa: E402

SHAPE = {
    "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": 49152,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 100000.0,
}  # fmt: skip
# A server without FlashAttention's binaries; no decode graphs: extraction asks for one token
ARGS = {
    "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.6, "max-total-tokens": 400000,
    "context-length": 8192,
    "disable-cuda-graph": True, "chunked-prefill-size": 16384, "max-prefill-tokens": 32768, "max-running-requests": 128, "skip-tokenizer-init": True,
}  # fmt: skip


def make_model(folder: Path) -> Path:
    if not has_gpu():
        return make_tiny("llama", folder)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, dtype="bfloat16")).to(torch.bfloat16).save_pretrained(folder)
    return folder


def part(name: str, out: Path, command: list[str], seconds: float) -> dict:
    """Run one benchmark; its report, or what went wrong."""
    start = time.monotonic()
    report = out / f"{name}.json"
    try:
        with open(out / f"{name}.log", "wb") as log:
            code = subprocess.run([*command, "--report", str(report)], stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False).returncode
        result = json.loads(report.read_text()) if code == 0 else {"error": f"exit code {code}: {(out / f'{name}.log').read_text(errors='replace')[-600:]}"}
    except subprocess.TimeoutExpired:
        result = {"error": f"no end after {seconds:.0f} s"}
    print(f"{name}: {time.monotonic() - start:.0f} s, ratio {result.get('ratio', result.get('error'))}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--samples", type=int, default=400)
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["AERIE_RUNS_DIR"] = str(out / "runs")
    roomy = shutil.disk_usage("/dev/shm").free > 12e9  # a container's default is 64 MB
    work = (Path("/dev/shm") if roomy else out) / f"aerie-extract-gpu-{os.getpid()}"
    work.mkdir()
    print(f"{os.cpu_count()} cores; stores and dumps in {work} ({shutil.disk_usage(work).free / 1e9:.0f} GB free)", flush=True)
    model = args.model or make_model(work / "model")
    gpu = has_gpu()
    server = {"port": free_port(), "args": ARGS if gpu else {}, "dump_dir": str(work / "dumps")}
    options = {"server": server, "extract": {"max_in_flight": 32}, "target": {"dtype": "bfloat16"}}
    config = write_config(out / "extract.toml", model, [1, 14, 26] if gpu else [1, 2, 4], **options)
    bench = [sys.executable, str(ROOT / "scripts" / "bench_extract.py"), "--config", str(config), "--run", "gpu"]
    size = ["--samples", str(args.samples), "--tokens", *(("300", "4000") if gpu else ("20", "60"))]
    count = "120" if gpu else "8"
    ceiling = [*bench, "--ceiling", "--dumps", str(work), "--samples", count, "--tokens", "600", "600", "--port", str(free_port())]
    parts = {
        "ceiling_tmpfs": part("ceiling_tmpfs", out, [*ceiling, "--rounds", "2", "--store", str(work)], 60),
        "ceiling_disk": part("ceiling_disk", out, [*ceiling, "--rounds", "1", "--store", str(out)], 60),
        "extract": part("extract", out, [*bench, *size, "--rounds", "3", "--store", str(work)], 200),
    }  # fmt: skip
    subprocess.run(["rm", "-rf", str(work), str(out / "runs")], check=False)
    (out / "extract_gpu.json").write_text(json.dumps(parts, indent=2))
    print(f"{'part':<16}{'ratio':>8}  numbers")
    for name, result in parts.items():
        numbers = {key: [round(value) for value in result[key]] for key in ("plain_tok_s", "extract_tok_s", "client_bytes_s", "write_bytes_s") if key in result}
        print(f"{name:<16}{result.get('ratio', float('nan')):>8.3f}  {numbers or result.get('error')}")


if __name__ == "__main__":
    main()
