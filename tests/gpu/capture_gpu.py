#!/usr/bin/env python3
"""Capture on a real GPU, in one go (about five minutes): correctness against transformers, cost, fp8, overlap; writes OUT/capture_gpu.json and prints a table.

Run by hand on a GPU machine whose Python has SGLang: tests/gpu/capture_gpu.py OUT [--model FOLDER]. Every part goes on when another fails.
Targets: random weights in the shape of SmolLM2-135M (or --model, for example the real one), and a random DeepSeek-V3 of 8 layers and hidden size 2048.
Without a GPU it goes through the same motions on tiny models (its numbers then mean nothing).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from aerie import capture_bench, dumps  # noqa: E402
from aerie.config import Config, load_config  # noqa: E402
from aerie.servers import Server, dump_dir  # noqa: E402
from aerie.tiny import CONFIGS, tiny_tokenizer  # noqa: E402
from capture_reference import Client, random_prompt  # noqa: E402
from cpu_tools import free_port, write_config  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": CONFIGS["llama"] | {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
        "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True, "initializer_range": 0.04,
    },
    "deepseek": CONFIGS["deepseek_v3"] | {
        "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 4, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 8192, "initializer_range": 0.02,
        "rope_scaling": CONFIGS["deepseek_v3"]["rope_scaling"] | {"factor": 8.0},
    },
}  # fmt: skip
LAYER_IDS = {"smollm2": [1, 14, 26], "deepseek": [2, 4, 6]}
LENGTHS, VOCAB = (2, 77, 512, 1500, 7000), 30000
LOADS = {"smollm2": (768, 1024, 64), "deepseek": (384, 1024, 64)}  # prompts a round, mean tokens, in flight
# Options of a GPU server without FlashAttention's binaries; no decode graphs: nothing here decodes
ARGS = {
    "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.6, "max-total-tokens": 262144,
    "context-length": 8192, "disable-cuda-graph": True, "chunked-prefill-size": 4096, "max-running-requests": 256, "skip-tokenizer-init": True, "sleep-on-idle": True,
}  # fmt: skip
DEVICE = "cuda"
if not torch.cuda.is_available():
    DEVICE, LENGTHS, VOCAB, SHAPES = "cpu", (2, 77, 300), 320, {"deepseek": CONFIGS["deepseek_v3"]}
    LAYER_IDS, ARGS, LOADS = {"deepseek": [2, 3, 5]}, {"chunked-prefill-size": 256, "skip-tokenizer-init": True}, dict.fromkeys(SHAPES, (12, 64, 4))


def make_model(name: str, folder: Path) -> Path:
    """Random bf16 weights, drawn on the GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name] | {"dtype": "bfloat16"}))
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.7, 1.3)  # a norm left out or applied twice must show
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def config_of(work: Path, name: str, model: Path, kind: str) -> Config:
    """A config whose server is one of: capture, fp8 (their plain twins come from capture_bench)."""
    run = f"gpu-{name}-{kind}"
    memory = Path("/dev/shm")
    folder = (memory if shutil.disk_usage(memory).free > 8 << 30 else work / "dumps") / f"aerie-{run}"
    path = write_config(
        work / f"{run}.toml", model, LAYER_IDS[name], target={"dtype": "bfloat16"}, extract={"dtype": "fp8" if kind == "fp8" else "model"},
        server={"args": ARGS, "ready_timeout_s": 240.0, "port": free_port(), "dump_dir": str(folder), "cpu_args": {"mem-fraction-static": 0.7}}, bench={"baseline_port": free_port(), "side_by_side": True},
    )  # fmt: skip
    return load_config(str(path), run)


def reference(model_folder: Path, prompts: list[list[int]]) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Transformers on the GPU in bf16: states as in capture_reference.reference_states, and the LM head."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).to(DEVICE).eval()
    with torch.no_grad():
        states = [[state[0].float().cpu() for state in model.model(torch.tensor([ids], device=DEVICE), output_hidden_states=True, use_cache=False).hidden_states] for ids in prompts]
    return states, model.lm_head.weight.detach().float().cpu()


def row_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[T] relative error of each row."""
    return (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def check_states(found: list[dumps.Dump], states: list[list[torch.Tensor]], points: list[int]) -> dict[str, Any]:
    """Median row error of each capture point, and of the states one layer before and after; `right` when the own layer is nearest by far."""
    result: dict[str, Any] = {"points": {}, "right": True}
    for place, point in enumerate(points):
        errors = {}
        for other in (point - 1, point, point + 1):
            rows = torch.cat([row_errors(dump.aux_float()[:, place * dump.final.shape[1] : (place + 1) * dump.final.shape[1]], each[other]) for dump, each in zip(found, states)])
            errors[other] = float(rows.median())
        result["points"][point] = {"own": errors[point], "one_before": errors[point - 1], "one_after": errors[point + 1]}
        result["right"] &= errors[point] < 0.06 and 2 * errors[point] < min(errors[point - 1], errors[point + 1])
    rows = torch.cat([row_errors(dump.final_float(), each[-1]) for dump, each in zip(found, states)])
    result["final"] = {"median": float(rows.median()), "q99": float(rows.quantile(0.99))}
    result["right"] &= result["final"]["median"] < 0.08
    return result


def capture_all(client: Client, prompts: list[list[int]], together: bool) -> list[dumps.Dump]:
    return client.capture_together(prompts) if together else [client.capture(ids) for ids in prompts]


def check_target(server: Server, config: Config, model: Path, prompts: list[list[int]], states: list[list[torch.Tensor]], head: torch.Tensor) -> dict[str, Any]:
    """States alone and together against transformers; chunked and mixed against alone; final times the LM head against the server's own first token."""
    client = Client(server)
    alone = capture_all(client, prompts, False)
    together = capture_all(client, prompts * 3, True)
    points = json.loads(alone[0].metadata["capture_points"])
    result = {"alone": check_states(alone, states, points), "together": check_states(together, states * 3, points), "capture_points": points}
    agree = rows = 0
    for ids in prompts:
        rid = client.rid(ids)
        answer = client.post(rid, ids, return_logprob=True, logprob_start_len=max(0, len(ids) - 128), top_logprobs_num=1).json()["meta_info"]
        choice = (client.dump(rid, ids).final_float()[-130:] @ head.T).argmax(dim=-1)
        for back, entry in enumerate(reversed(answer["input_top_logprobs"])):
            if entry and back + 2 <= len(choice):
                rows += 1
                agree += int(choice[-2 - back]) == entry[0][1]
    result["final_argmax_agrees"] = agree / max(rows, 1)
    result["right"] = result["alone"]["right"] and result["together"]["right"] and result["final_argmax_agrees"] > (0.9 if alone[0].metadata["dtype"] == "fp8" else 0.97)
    return result


class Parts:
    """Runs named parts; a failing one is written down and the others go on."""

    def __init__(self, out: Path):
        self.out, self.result, self.begin = out, {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else "none"}, time.monotonic()

    def __call__(self, name: str, part: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            value = part()
            self.result[name] = value if isinstance(value, (dict, str)) else "done"
        except Exception as exc:
            value = None
            traceback.print_exc()
            self.result[name] = {"failed": repr(exc)}
        print(f"[{time.monotonic() - self.begin:.0f} s] {name}: {time.monotonic() - start:.1f} s", flush=True)
        (self.out / "capture_gpu.json").write_text(json.dumps(self.result, indent=1, default=str))
        return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a Llama target's folder in place of the random one of SmolLM2's shape")
    parser.add_argument("--work", type=Path, default=Path("/tmp/capture_gpu"), help="models, runs, configs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["AERIE_RUNS_DIR"] = str(args.work / "runs")
    os.environ["HF_HUB_OFFLINE"] = "1"
    parts = Parts(args.out)
    parts("patch", lambda: subprocess.run([str(ROOT / "scripts" / "00_apply_patch.sh")], env=os.environ | {"PY": sys.executable}, check=True, capture_output=True, text=True).stdout.strip())
    models = {name: args.model if args.model and name == "smollm2" else parts(f"{name} model", lambda name=name: make_model(name, args.work / "models" / name)) for name in SHAPES}
    configs = {(name, kind): config_of(args.work, name, Path(model), kind) for name, model in models.items() if model for kind in ("capture", "fp8")}
    servers: dict[tuple[str, str], Server] = {}
    try:
        for (name, kind), config in configs.items():
            servers[name, kind] = capture_bench.start(config, True)
            if kind == "capture":
                servers[name, "plain"] = capture_bench.start(config, False)
        prompts = [random_prompt(length, length, VOCAB) for length in LENGTHS]
        states = {name: parts(f"{name} reference", lambda name=name: reference(Path(models[name]), prompts)) for name in models if models[name]}
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        for key, server in servers.items():
            parts(f"{' '.join(key)} ready", lambda server=server: server.wait_ready(240) or "yes")
        for name in models:
            if not states.get(name):
                continue
            for kind in ("capture", "fp8"):
                parts(f"{name} {kind} states", lambda name=name, kind=kind: check_target(servers[name, kind], configs[name, kind], models[name], prompts, *states[name]))
            parts(f"{name} fp8 error", lambda name=name: fp8_error(Client(servers[name, "capture"]), Client(servers[name, "fp8"]), prompts))
        for name, load in LOADS.items():
            for kind in ("capture", "fp8"):
                parts(f"{name} {kind} cost", lambda name=name, kind=kind, load=load: cost(configs[name, kind], servers[name, "plain"], servers[name, kind], *load))
    finally:
        for server in servers.values():
            (args.out / f"{server.config.run.name}-{server.record['url'].rpartition(':')[2]}.log").write_bytes(server.log.read_bytes()[-300_000:])
            server.stop()
        table(parts.result)


def cost(config: Config, plain: Server, capture: Server, requests: int, tokens: int, concurrency: int) -> dict[str, Any]:
    """bench_capture's measurement on servers that are already there."""
    found = capture_bench.measure(config, plain, capture, capture_bench.make_prompts(config, requests, tokens), concurrency, 4)
    return {**found, "dump_dir": str(dump_dir(config))}


def fp8_error(exact: Client, quantised: Client, prompts: list[list[int]]) -> dict[str, float]:
    """Relative error of fp8 rows against the same prompts' bf16 dumps, and the bytes of both."""
    pairs = [(exact.capture(ids), quantised.capture(ids)) for ids in prompts]
    aux = torch.cat([row_errors(low.aux_float(), high.aux_float()) for high, low in pairs])
    final = torch.cat([row_errors(low.final_float(), high.final_float()) for high, low in pairs])
    sizes = [np.sum([pair[side].nbytes for pair in pairs]) for side in (0, 1)]
    return {"aux_median": float(aux.median()), "aux_max": float(aux.max()), "final_median": float(final.median()), "bytes_ratio": float(sizes[1] / sizes[0])}


def table(result: dict[str, Any]) -> None:
    """The short version."""
    for name, value in result.items():
        if isinstance(value, dict) and "failed" in value:
            print(f"{name:28} FAILED {value['failed'][:200]}")
        elif name.endswith("states"):
            own = ", ".join(f"{point}: {entry['own']:.4f} (neighbours {min(entry['one_before'], entry['one_after']):.3f})" for point, entry in value["alone"]["points"].items())
            print(f"{name:28} {'right' if value['right'] else 'WRONG'}; {own}; final {value['alone']['final']['median']:.4f}; argmax agrees {value['final_argmax_agrees']:.4f}")
        elif name.endswith("cost"):
            counters = value["counters"]
            print(
                f"{name:28} ratio {value['ratio']:.3f}: {value['plain_tok_s']:.0f} -> {value['capture_tok_s']:.0f} tok/s; copies {counters.get('copy_s', 0):.2f} s of {value['capture_seconds']:.2f} s, "
                f"our code {value['hook_share_of_wall']:.1%}, files {counters.get('write_s', 0):.2f} s, waits {counters.get('waits', 0):.0f}, dropped {counters.get('dropped', 0):.0f}, failed {value['failed_requests']}"
            )
        elif name.endswith("error"):
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
