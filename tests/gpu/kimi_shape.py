#!/usr/bin/env python3
"""The whole way on a target of Kimi's widths, in one go (about eight minutes on one GPU of 141 GB): `make data extract train check serve bench` as a user calls them.

The target has random weights: DeepSeek-V3's architecture, hidden size 7168 and the other widths of Kimi-K2, but 8 layers, fewer experts and the vocabulary of the
tokenizer (SmolLM2's, in the folder that scripts/prepare_target.py makes). Its text is noise, so the accept length says nothing; that every part fits together at these sizes does.

Run by hand on a machine whose Python has SGLang and the capture patch: tests/gpu/kimi_shape.py OUT. Every part goes on when another fails. Writes OUT/kimi_shape.json,
prints a JSON line a part. Without a GPU: the same motions on a tiny DeepSeek-V3.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from aerie.config import load_config  # noqa: E402
from aerie.servers import has_gpu, stop_servers  # noqa: E402
from aerie.tiny import CONFIGS  # noqa: E402
from capture_gpu import SHAPES, make_model  # noqa: E402
from cpu_tools import write_config  # noqa: E402
from gpu_parts import Parts, begin, make  # noqa: E402

GPU = has_gpu()
# configs/shapes/kimi-k2-instruct.json, but 8 of 61 layers, 32 of 384 experts (in DeepSeek's groups), SmolLM2's vocabulary: 23 GB in bf16
WIDE = CONFIGS["deepseek_v3"] | {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 64, "num_key_value_heads": 64,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 32, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "vocab_size": 49152, "max_position_embeddings": 8192, "initializer_range": 0.02,
    "rope_scaling": CONFIGS["deepseek_v3"]["rope_scaling"] | {"factor": 8.0},
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
ARGS = {
    "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.6, "max-total-tokens": 65536, "context-length": 4096,
    "cuda-graph-bs-decode": [1, 8, 32], "max-running-requests": 32,
}  # fmt: skip
CHATS, HELDOUT, NEW_TOKENS = (192, 16, 160) if GPU else (16, 4, 16)


def make_target(folder: Path, tokenizer: Path | None) -> str:
    """Random bf16 weights; with `tokenizer`, a model's folder, its tokenizer and chat template in place of the tiny one."""
    SHAPES["wide"] = WIDE if GPU else CONFIGS["deepseek_v3"]
    if GPU and tokenizer is None:
        raise FileNotFoundError("name the folder of SmolLM2's tokenizer: --tokenizer runs/models/smollm2-135m")
    make_model("wide", folder)
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            (folder / name).unlink(missing_ok=True)
            if (tokenizer / name).is_file():
                shutil.copy(tokenizer / name, folder / name)
    return f"{sum(file.stat().st_size for file in folder.glob('*.safetensors')) / 1e9:.1f} GB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a model's folder; its tokenizer's ids must lie below 49,152")
    parser.add_argument("--work", type=Path, default=Path("/tmp/kimi_shape"), help="runs; the model goes to /dev/shm where that has room")
    parser.add_argument("--seconds", type=float, default=560.0, help="no part begins after that (default: %(default)s)")
    args = parser.parse_args()
    out, work = args.out.absolute(), args.work.absolute()
    begin(out, work / "runs")
    run = f"kimi-shape-{os.getpid()}"
    memory = Path("/dev/shm")
    model = (memory if shutil.disk_usage(memory).free > 40e9 else work) / run
    path = write_config(
        work / f"{run}.toml", model, [2, 4, 6] if GPU else [2, 3, 5], target={"dtype": "bfloat16" if GPU else "float32"},
        server={"args": ARGS if GPU else {}, "ready_timeout_s": 300.0},
        data={"inputs": ["configs/demo_prompts.jsonl"], "max_new_tokens": NEW_TOKENS, "heldout": HELDOUT, "limit": CHATS, "max_tokens": 1024, "concurrency": 32 if GPU else 8},
        extract={"proof_samples": 8},
        draft={"vocab_size": 32000 if GPU else 256, "intermediate_size": 12288 if GPU else 128, "num_attention_heads": 64 if GPU else 4,
               "num_key_value_heads": 64 if GPU else 4, "head_dim": 128 if GPU else 16, "init": "random"},
        train={"ttt_steps": 7 if GPU else 3, "epochs": 2, "batch_tokens": 4096 if GPU else 256, "eval_samples": HELDOUT, "checkpoint_every": 100000},
        serve={"draft_attention_backend": "triton" if GPU else ""},
        bench={"concurrency": [1, 8], "max_new_tokens": 64 if GPU else 8, "samples": HELDOUT, "side_by_side": True, "latency": False},
    )  # fmt: skip
    config = load_config(str(path), run)
    parts = Parts(out / "kimi_shape.json", args.seconds, gpu=GPU, cores=os.cpu_count(), architecture=WIDE if GPU else CONFIGS["deepseek_v3"])

    def step(target: str, seconds: float, folder: str, *keys: str) -> dict[str, Any]:
        """`make TARGET` and numbers of its report, which may be there although it failed: the benchmark writes it before it refuses a text."""
        try:
            said = make(out, target, path, run, seconds)
        except RuntimeError as exc:
            said = {"failed": str(exc)}
        file = config.run.root / folder / "report.json"
        report = json.loads(file.read_text()) if file.is_file() else {}
        return said | {key: report[key] for key in keys if key in report}

    plain = None
    try:
        parts("target", lambda: make_target(model, args.tokenizer))
        parts("data", lambda: step("data", 300, "data", "answer_tok_s", "splits"))
        parts("extract", lambda: step("extract", 120, "store", "extract_tok_s", "accounting", "bytes"))
        parts("train", lambda: step("train", 200, "drafter", "train_tok_s", "drafter_parameters", "peak_gpu_bytes", "predicted_accept_length", "tokens"))
        parts("check", lambda: make(out, "check", path, run, 60))
        with open(out / "baseline.log", "wb") as file:
            command = [str(ROOT / "scripts" / "04_serve.sh"), str(path), "--run", run, "--without-drafter", "--background"]
            plain = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | {"PY": sys.executable})
        parts("serve", lambda: make(out, "serve", path, run, 240))
        parts("baseline", lambda: f"exit code {plain.wait(240)}")
        parts("bench", lambda: step("bench", 200, "bench", "accept_length", "predicted_accept_length", "sets"))
    finally:
        if plain is not None and plain.poll() is None:
            plain.kill()
        for log in config.run.logs.glob("*.log"):
            (out / f"server-{log.name}").write_bytes(log.read_bytes()[-200_000:])
        stop_servers(config)
        shutil.rmtree(model, ignore_errors=True)
        shutil.rmtree(config.run.root, ignore_errors=True)
        parts.summary((
            "done", "answer_tok_s", "extract_tok_s", "accounting", "train_tok_s", "drafter_parameters", "peak_gpu_bytes", "predicted_accept_length", "accept_length", "last",
        ))  # fmt: skip


if __name__ == "__main__":
    main()
