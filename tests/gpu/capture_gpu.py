#!/usr/bin/env python3
"""Capture on a real GPU, in one go: correctness against transformers, cost, fp8, overlap.

Writes OUT/capture_gpu.json, prints a JSON line a part and a summary; every part goes on when another fails. By hand, where Python has SGLang and a GPU:
tests/gpu/capture_gpu.py OUT [--model FOLDER] [--parts smollm2-capture ...]

Targets: random weights in the shape of SmolLM2-135M (or --model, for example the real one), and a random DeepSeek-V3 of 8 layers and hidden size 2048.

A part is one server. capture, fp8: prefill rate with our names against the same server without them (`ratio`, see capture_bench.summary()), and states against transformers and
`final` against the server's own choices; for fp8 the states come first. plain: the same prompts on a server with capture off; `ratio` there is capture's rate over this one's. The
first two servers start together (over a minute; on a fresh machine, where kernels are compiled, over two); rates are measured while no server starts or works; while states are
checked the next one starts. `--parts deepseek-capture smollm2-capture deepseek-fp8` takes at most seven minutes: a rate takes a minute and a quarter when its interval is narrow enough by
then, else a minute and a half; the last one what is left.
Without a GPU: the same motions on a tiny model, one server at a time (its numbers then mean nothing).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from aerie import capture_bench, dumps  # noqa: E402
from aerie.config import Config, load_config  # noqa: E402
from aerie.final_proof import THRESHOLD, FinalProof, logprob_request  # noqa: E402
from aerie.servers import Server, dump_dir  # noqa: E402
from aerie.tiny import CONFIGS, tiny_tokenizer  # noqa: E402
from capture_reference import Client, random_prompt  # noqa: E402
from cpu_tools import free_port, write_config  # noqa: E402
from gpu_parts import Parts, end_on_sigterm  # noqa: E402

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
LOADS = {"smollm2": (512, 1024, 64), "deepseek": (384, 1024, 64)}  # prompts, mean tokens, in flight
MEASURE_S, PLAIN_S = 45.0, 20.0  # a rate is measured for so long at least; that of a server with capture off
COST_S, END_S = 95.0, 14.0  # no further pair of blocks begins after so long, nor so short a time before the end; END_S is for that pair, the counters and the server's end
# Everything in flight fits: 128 requests of 1,024 tokens on the mean, or three of each length, at 16 KB a token are 2.1 GB. Nothing may be dropped.
BUDGET_MB, WIDTH = 4096, capture_bench.WIDTH
# What decides comes first: no part begins once the time is over
PARTS = [("smollm2", "capture"), ("deepseek", "capture"), ("deepseek", "fp8"), ("smollm2", "plain"), ("deepseek", "plain"), ("smollm2", "fp8")]
# Options of a GPU server without FlashAttention's binaries; no decode graphs: nothing here decodes
ARGS = {
    "attention-backend": "triton", "sampling-backend": "pytorch", "grammar-backend": "none", "mem-fraction-static": 0.6, "max-total-tokens": 262144,
    "context-length": 8192, "disable-cuda-graph": True, "chunked-prefill-size": 4096, "max-running-requests": 256, "skip-tokenizer-init": True, "sleep-on-idle": True,
}  # fmt: skip
DEVICE = "cuda"
if not torch.cuda.is_available():
    DEVICE, LENGTHS, VOCAB, SHAPES = "cpu", (2, 77, 300), 320, {"deepseek": CONFIGS["deepseek_v3"]}
    LAYER_IDS, ARGS, LOADS = {"deepseek": [2, 3, 5]}, {"chunked-prefill-size": 256, "skip-tokenizer-init": True}, dict.fromkeys(SHAPES, (12, 64, 4))
    BUDGET_MB, MEASURE_S, PLAIN_S, WIDTH, PARTS = 64, 0.0, 0.0, 0.0, [("deepseek", kind) for kind in ("capture", "fp8", "plain")]


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
    """A config whose extraction server is that of one part."""
    run = f"gpu-{name}-{kind}"
    memory = Path("/dev/shm")
    folder = (memory if shutil.disk_usage(memory).free > 8 << 30 else work / "dumps") / f"aerie-{run}"
    server = {
        "args": ARGS, "ready_timeout_s": 240.0, "port": free_port(), "dump_dir": str(folder), "cpu_args": {"mem-fraction-static": 0.7},
        "env": {"SGLANG_HS_DUMP_BUDGET_MB": str(BUDGET_MB)},
    }  # fmt: skip
    extract = {"dtype": "fp8" if kind == "fp8" else "model"}
    path = write_config(work / f"{run}.toml", model, LAYER_IDS[name], target={"dtype": "bfloat16"}, extract=extract, server=server, bench={"baseline_port": free_port()})
    return load_config(str(path), run)


def load_of(config: Config, name: str, seconds: float, limit_s: float = math.inf) -> capture_bench.Load:
    """What LOADS says is asked of this target's server."""
    requests, tokens, concurrency = LOADS[name]
    return capture_bench.Load(capture_bench.make_prompts(config, requests, tokens), concurrency, seconds, limit_s, width=WIDTH)


def reference(model_folder: Path, prompts: list[list[int]], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Transformers on the GPU: states as in capture_reference.reference_states."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).to(DEVICE).eval()
    with torch.no_grad():
        outputs = (model.model(torch.tensor([ids], device=DEVICE), output_hidden_states=True, use_cache=False) for ids in prompts)
        return [[state[0].float().cpu() for state in output.hidden_states] for output in outputs]


def row_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """[T] relative error of each row."""
    return (found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)


def rounding(states: list[list[torch.Tensor]], rounded: list[list[torch.Tensor]], point: int) -> float:
    """Median row error that bf16 alone makes: transformers in bf16 against transformers in float32. A mixture of experts that routes a row otherwise makes it large."""
    return float(torch.cat([row_errors(low[point], high[point]) for low, high in zip(rounded, states)]).median())


def check_states(found: list[dumps.Dump], states: list[list[torch.Tensor]], rounded: list[list[torch.Tensor]], points: list[int], fp8: bool) -> dict[str, Any]:
    """Median row error of each capture point against float32, and of the states one layer before and after; `right` when no error is over twice what bf16 makes
    (in fp8 0.03 more: its own rounding, see patches/README.md), and the own layer is nearest by far."""
    result: dict[str, Any] = {"points": {}, "right": True}
    more = 0.03 if fp8 else 0.0
    for place, point in enumerate(points):
        errors = {}
        for other in (point - 1, point, point + 1):
            rows = torch.cat([row_errors(dump.aux_float()[:, place * dump.final.shape[1] : (place + 1) * dump.final.shape[1]], each[other]) for dump, each in zip(found, states)])
            errors[other] = float(rows.median())
        result["points"][point] = {"own": errors[point], "rounding": rounding(states, rounded, point), "one_before": errors[point - 1], "one_after": errors[point + 1]}
        result["right"] &= errors[point] < 2 * result["points"][point]["rounding"] + more and 2 * errors[point] < min(errors[point - 1], errors[point + 1])
    rows = torch.cat([row_errors(dump.final_float(), each[-1]) for dump, each in zip(found, states)])
    result["final"] = {"median": float(rows.median()), "q99": float(rows.quantile(0.99)), "rounding": rounding(states, rounded, -1)}
    result["right"] &= result["final"]["median"] < 2 * result["final"]["rounding"] + more
    return result


class Targets:
    """Models and their reference states, made when first needed."""

    def __init__(self, work: Path, model: Path | None):
        self.work, self.folders = work, {"smollm2": model} if model else {}
        self.prompts = [random_prompt(length, length, VOCAB) for length in LENGTHS]
        self.states: dict[str, tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]] = {}

    def folder(self, name: str) -> Path:
        if name not in self.folders:
            self.folders[name] = make_model(name, self.work / "models" / name)
        return self.folders[name]

    def reference(self, name: str) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """States by transformers in float32 and in bf16."""
        if name not in self.states:
            high, low = (reference(self.folder(name), self.prompts, dtype) for dtype in (torch.float32, torch.bfloat16))
            self.states[name] = high, low
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
        return self.states[name]


class Run:
    """The parts in order; at most one server works, and at most one more starts."""

    def __init__(self, parts: Parts, targets: Targets, out: Path, todo: list[tuple[str, str]]):
        self.parts, self.targets, self.out, self.todo = parts, targets, out, todo
        self.configs: dict[tuple[str, str], Config] = {}
        self.servers: dict[tuple[str, str], Server] = {}
        self.costs: dict[tuple[str, str], dict[str, Any]] = {}
        self.exact: dict[str, list[dumps.Dump]] = {}  # the capture part's dumps, for the error of fp8

    def start(self, key: tuple[str, str]) -> str:
        """Start this part's server unless it is starting already; returns at once."""
        if key not in self.servers:
            name, kind = key
            self.configs[key] = config_of(self.targets.work, name, self.targets.folder(name), kind)
            self.servers[key] = capture_bench.start(self.configs[key], kind != "plain")
        return self.servers[key].url

    def all(self) -> None:
        """Every part; whatever happens no server is left."""
        try:
            for key in self.todo[: 2 if DEVICE == "cuda" else 1]:
                self.parts(f"{'-'.join(key)} start", lambda key=key: self.start(key))
            for place, key in enumerate(self.todo):
                self.part(key, self.todo[place + 1] if place + 1 < len(self.todo) else None)
                self.end(key)
        finally:
            for key in list(self.servers):
                self.end(key)

    def part(self, key: tuple[str, str], after: tuple[str, str] | None) -> None:
        name, kind = key
        label = f"{name}-{kind}"
        if self.parts(f"{label} start", lambda: self.start(key)) is None:
            return
        if kind != "plain":
            self.parts(f"{name} reference", lambda: f"{len(self.targets.reference(name)[0])} prompts")  # while the server starts
        if after and after[0] != name and DEVICE == "cuda":
            self.parts(f"{after[0]} model", lambda: str(self.targets.folder(after[0])))
            if after[1] != "plain":
                self.parts(f"{after[0]} reference", lambda: f"{len(self.targets.reference(after[0])[0])} prompts")
        if self.parts(f"{label} ready", lambda: self.servers[key].wait_ready(240) or "yes") is None:
            return
        for other in set(self.servers) - {key}:
            self.parts(f"{'-'.join(other)} ready", lambda other=other: self.servers[other].wait_ready(240) or "yes")
        if kind == "fp8":  # its states decide, its rate is what may be cut short
            self.states(key)
        self.parts(f"{label} cost", lambda: self.plain_cost(key) if kind == "plain" else self.cost(key))
        if after and DEVICE == "cuda" and self.parts.elapsed < self.parts.seconds:
            self.parts(f"{'-'.join(after)} start", lambda: self.start(after))
        if kind == "capture":
            self.states(key)

    def states(self, key: tuple[str, str]) -> None:
        self.parts(f"{'-'.join(key)} load", lambda: self.load(key))
        self.parts(f"{'-'.join(key)} states", lambda: self.check(key))

    def end(self, key: tuple[str, str]) -> None:
        """Stop a part's server and keep the end of its log."""
        server = self.servers.pop(key, None)
        if server is not None:
            (self.out / f"{'-'.join(key)}.log").write_bytes(server.log.read_bytes()[-300_000:])
            server.stop()
            shutil.rmtree(dump_dir(self.configs[key]), ignore_errors=True)

    def cost(self, key: tuple[str, str]) -> dict[str, Any]:
        """The same server with our names and without: nothing else differs between the blocks."""
        config, server = self.configs[key], self.servers[key]
        limit = min(COST_S, self.parts.seconds - self.parts.elapsed - END_S)
        found = capture_bench.measure(config, server, server, load_of(config, key[0], MEASURE_S, limit))
        found |= {"dropped": int(found["counters"].get("dropped", 0)), "errors": int(found["counters"].get("errors", 0)), "dump_dir": str(dump_dir(config))}
        self.costs[key] = found
        return found

    def load(self, key: tuple[str, str]) -> dict[str, Any]:
        """Many requests at once, every dump checked (token ids, finiteness, what else the client checks): a row of another batch shows here."""
        requests, tokens, _ = LOADS[key[0]]
        client = Client(self.servers[key])
        prompts = [ids.tolist() for ids in capture_bench.make_prompts(self.configs[key], min(requests, 128), tokens)]
        return {"checked_dumps": len(client.capture_together(prompts)), "checked_rows": sum(map(len, prompts))}

    def plain_cost(self, key: tuple[str, str]) -> dict[str, Any]:
        """The capture part's prompts on a server with capture off, against that part's rates."""
        found = capture_bench.plain_rate(self.servers[key], load_of(self.configs[key], key[0], PLAIN_S))
        rate = found["plain_tok_s"]
        result: dict[str, Any] = {"plain_server_tok_s": rate, "blocks_tok_s": found["blocks_tok_s"], "failed_requests": found["failed_requests"]}
        with_capture = self.costs.get((key[0], "capture"))
        if with_capture:
            result |= {"ratio": with_capture["capture_tok_s"] / rate, "ratio_without_names": with_capture["plain_tok_s"] / rate}
        return result

    def check(self, key: tuple[str, str]) -> dict[str, Any]:
        """States alone and together against transformers; `final` times the LM head against the server's own choices, near ties counted as the product does."""
        name, kind = key
        client, prompts, (states, rounded) = Client(self.servers[key]), self.targets.prompts, self.targets.reference(name)
        alone = [client.capture(ids) for ids in prompts]
        together = client.capture_together(prompts * 3)
        points = json.loads(alone[0].metadata["capture_points"])
        result: dict[str, Any] = {"capture_points": points}
        result |= {"alone": check_states(alone, states, rounded, points, kind == "fp8"), "together": check_states(together, states * 3, rounded * 3, points, kind == "fp8")}
        proof = FinalProof(str(self.targets.folder(name)))
        for ids in prompts:
            rid = client.rid(ids)
            answer = client.post(rid, ids, **logprob_request(len(ids))).json()
            dump = client.dump(rid, ids)
            proof.compare(dump.final_float(), answer, dump.identity()["dtype"])
        result |= {"final_rows": proof.tally.compared, "final_equal": proof.tally.equal, "final_near_ties": proof.tally.near_ties, "final_share": proof.tally.share}
        result["right"] = result["alone"]["right"] and result["together"]["right"] and proof.tally.share >= THRESHOLD
        for point, entry in result["alone"]["points"].items():
            result[f"error_at_{point}"] = entry["own"]
        if kind == "capture":
            self.exact[name] = alone
        elif name in self.exact:
            result |= fp8_error(self.exact[name], alone)
        return result


def fp8_error(exact: list[dumps.Dump], quantised: list[dumps.Dump]) -> dict[str, float]:
    """Relative error of fp8 rows against the same prompts' bf16 dumps, and the bytes of both."""
    pairs = list(zip(exact, quantised))
    aux = torch.cat([row_errors(low.aux_float(), high.aux_float()) for high, low in pairs])
    final = torch.cat([row_errors(low.final_float(), high.final_float()) for high, low in pairs])
    sizes = [np.sum([pair[side].nbytes for pair in pairs]) for side in (0, 1)]
    errors = {"fp8_aux_median": aux.median(), "fp8_aux_max": aux.max(), "fp8_final_median": final.median(), "fp8_bytes_ratio": sizes[1] / sizes[0]}
    return {name: float(value) for name, value in errors.items()}


def main() -> None:
    names = [f"{name}-{kind}" for name, kind in PARTS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="a Llama target's folder in place of the random one of SmolLM2's shape")
    parser.add_argument("--work", type=Path, default=Path("/tmp/capture_gpu"), help="models, runs, configs")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART", help=f"in this order (default: {' '.join(names)})")
    parser.add_argument("--no-patch", action="store_true", help="leave the installed SGLang as it is")
    parser.add_argument("--seconds", type=float, default=420.0, help="no part begins after that (default: %(default)s)")
    args = parser.parse_args()
    end_on_sigterm()
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"AERIE_RUNS_DIR": str(args.work / "runs"), "HF_HUB_OFFLINE": "1"}
    gpu = torch.cuda.get_device_name() if DEVICE == "cuda" else "none"
    parts = Parts(args.out / "capture_gpu.json", args.seconds, torch=torch.__version__, gpu=gpu, cores=os.cpu_count())
    if not args.no_patch:
        patch = [str(ROOT / "scripts" / "00_apply_patch.sh")]
        parts("patch", lambda: subprocess.run(patch, env=os.environ | {"PY": sys.executable}, check=True, capture_output=True, text=True).stdout.strip())
    try:
        Run(parts, Targets(args.work, args.model), args.out, [PARTS[names.index(name)] for name in args.parts]).all()
    finally:
        rates = (
            "ratio", "ratio_low", "ratio_high", "pairs", "ratio_of_neighbours", "neighbours_low", "neighbours_high", "ratio_of_fastest", "forward_ratio", "cpu_ratio", "ratio_without_names",
            "plain_tok_s", "capture_tok_s", "plain_server_tok_s", "hook_share_of_wall", "dump_lag_q95_s", "left_out_s", "held_back",
        )  # fmt: skip
        parts.summary((*rates, "right", "final_share", "checked_dumps", "dropped", "failed_requests"))


if __name__ == "__main__":
    main()
