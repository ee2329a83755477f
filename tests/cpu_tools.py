"""Helpers of the tests that serve: configs in a temporary folder, free ports, one /generate call."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import requests
import torch
from aerie.config import Config, load_config
from aerie.ports import free_port
from safetensors.torch import load_file, save_file

# Ids whose capture points are 2, 3 and 5 of the six layers. deepseek_v2 captures at the id (unless the first is 1), llama and qwen at id + 1.
AUX_LAYER_IDS = {"llama": [1, 2, 4], "qwen3": [1, 2, 4], "qwen3_moe": [1, 2, 4], "deepseek_v3": [2, 3, 5], "kimi_k25": [2, 3, 5]}
CAPTURE_POINTS = [2, 3, 5]


def gpu_benchmark_table(out: Path) -> str:
    """What scripts/gpu_benchmark.sh prints last, of the reports in `out`."""
    script = (Path(__file__).resolve().parents[1] / "scripts" / "gpu_benchmark.sh").read_text(encoding="utf-8")
    code = script.split("<<'TABLE'\n", 1)[1].split("\nTABLE\n", 1)[0]
    return subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=True, timeout=60).stdout


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {_toml(item)}' for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def write_config(path: Path, model: Path | str, aux_layer_ids: list[int], **sections: dict[str, Any]) -> Path:
    """A config file for `model` with free ports, float32 and small servers; `sections` (target=..., server=...) add to it or override it."""
    base: dict[str, dict[str, Any]] = {
        "target": {"model_path": str(model), "aux_layer_ids": aux_layer_ids, "dtype": "float32"},
        "server": {"port": free_port(), "ready_timeout_s": 240.0, "args": {"context-length": 2048}},
        "serve": {"port": free_port()},
        "bench": {"baseline_port": free_port()},
    }
    for name, table in sections.items():
        merged = base.setdefault(name, {})
        for key, value in table.items():
            merged[key] = merged[key] | value if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items()) for name, table in base.items()))
    return path


def tiny_config(folder: Path, model: Path, family: str, run: str, **sections: dict[str, Any]) -> Config:
    """The loaded config of a tiny model, in folder/<run>.toml."""
    return load_config(str(write_config(folder / f"{run}.toml", model, AUX_LAYER_IDS[family], **sections)), run)


def generate(url: str, input_ids: list[int] | list[list[int]], max_new_tokens: int = 16, rid: str | None = None, timeout: float = 180.0, **fields: Any) -> Any:
    """One greedy /generate call that never ends early; `fields` go into the request (return_logprob=True, ...)."""
    body = {"input_ids": input_ids, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}, **fields}
    if rid is not None:
        body["rid"] = rid
    answer = requests.post(f"{url}/generate", json=body, timeout=timeout)
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:500]}"
    return answer.json()


def repeating_drafter(folder: Path, target: Path, aux_layer_ids: list[int], draft_ids: list[int], dtype: torch.dtype = torch.float32) -> Path:
    """A LlamaForCausalLMEagle3 folder, untrained, that proposes the tokens (of `draft_ids`) which the text so far repeats.

    Its attention is nearly uniform and hands on the embeddings, its head compares with the target's embeddings. Tiny random targets repeat
    themselves, so that some drafts are accepted at every depth, and most are not.
    """
    config = json.loads((target / "config.json").read_text())
    text = config.get("text_config", config)
    hidden, vocab, draft_ids = text["hidden_size"], text["vocab_size"], sorted(draft_ids)
    head_dim, inner = 16, 2 * hidden
    embedding = next(tensor for name, tensor in load_file(target / "model.safetensors").items() if name.endswith("embed_tokens.weight")).float()
    eye, zero = torch.eye(hidden), torch.zeros(hidden, hidden)
    noise = torch.Generator().manual_seed(0)
    ids = torch.tensor(draft_ids)
    weights = {
        "fc.weight": torch.randn(hidden, 3 * hidden, generator=noise) * 1e-3,
        "midlayer.self_attn.q_proj.weight": torch.randn(hidden, 2 * hidden, generator=noise) * 0.05,
        "midlayer.self_attn.k_proj.weight": torch.randn(hidden, 2 * hidden, generator=noise) * 0.05,
        "midlayer.self_attn.v_proj.weight": torch.cat([eye, zero], dim=1), "midlayer.self_attn.o_proj.weight": eye,
        "midlayer.mlp.gate_proj.weight": torch.zeros(inner, hidden), "midlayer.mlp.up_proj.weight": torch.zeros(inner, hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, inner),
        "lm_head.weight": torch.nn.functional.normalize(embedding[ids], dim=1) * 4,
    }  # fmt: skip
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = torch.ones(hidden)
    weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    weights["d2t"] = ids - torch.arange(len(draft_ids))
    weights["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1,
        "num_attention_heads": hidden // head_dim, "num_key_value_heads": hidden // head_dim, "head_dim": head_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "vocab_size": vocab, "draft_vocab_size": len(draft_ids), "max_position_embeddings": text["max_position_embeddings"], "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2, "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": aux_layer_ids},
    }))  # fmt: skip
    return folder
