"""Tiny target and drafter folders for the tests of checking and serving: random weights, real layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB, LAYERS = 64, 96, 4, 2, 16, 320, 96, 6
LLAMA_TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
MLA_TARGET = LLAMA_TARGET | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip


def write_target(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A target's config.json and something that is its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or LLAMA_TARGET))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": {f"w{index}": index for index in range(VOCAB)}}}))
    return folder


def llama_drafter(dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Config and tensors of a drafter that fits LLAMA_TARGET in every point."""
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(dtype)

    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False, "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True},
    }  # fmt: skip
    tensors = {
        "fc.weight": rand(HIDDEN, 3 * HIDDEN), "norm.weight": torch.ones(HIDDEN, dtype=dtype), "lm_head.weight": rand(DRAFT_VOCAB, HIDDEN),
        "d2t": ids - torch.arange(DRAFT_VOCAB), "t2d": t2d,
        "midlayer.self_attn.q_proj.weight": rand(HEADS * HEAD_DIM, 2 * HIDDEN), "midlayer.self_attn.k_proj.weight": rand(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": rand(KV_HEADS * HEAD_DIM, 2 * HIDDEN), "midlayer.self_attn.o_proj.weight": rand(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": rand(INNER, HIDDEN), "midlayer.mlp.up_proj.weight": rand(INNER, HIDDEN), "midlayer.mlp.down_proj.weight": rand(HIDDEN, INNER),
        **{f"midlayer.{name}.weight": torch.ones(HIDDEN, dtype=dtype) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    }  # fmt: skip
    return config, tensors


def mla_drafter() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The same with the attention of kimi_k25_eagle3.py."""
    config, tensors = llama_drafter()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        del tensors[f"midlayer.self_attn.{name}.weight"]
    for key in ("num_key_value_heads", "head_dim"):
        del config[key]
    config |= {key: MLA_TARGET[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    config |= {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "deepseek_v3"}
    shapes = {
        "q_a_proj": (32, 2 * HIDDEN), "q_a_layernorm": (32,), "q_b_proj": (HEADS * 24, 32), "kv_a_proj_with_mqa": (24, 2 * HIDDEN), "kv_a_layernorm": (16,),
        "kv_b_proj": (HEADS * 32, 16), "o_proj": (HIDDEN, HEADS * 16),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(8)
    tensors |= {f"midlayer.self_attn.{name}.weight": torch.randn(*shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return config, tensors


def write_drafter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], training: dict[str, Any] | None = None) -> Path:
    """A drafter's folder as the trainer exports it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    if training is not None:
        (folder / "training.json").write_text(json.dumps(training))
    return folder
