"""The drafter as a folder that SGLang loads (LlamaForCausalLMEagle3), and such a folder read back."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .drafter import Drafter, DrafterShape
from .errors import UserError
from .identity import read_model_config
from .report import write_json
from .samples import settle, system_errors
from .walk import WALK_FILE


ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
SIMPLE = {  # parameters that keep their form
    "fc": "fc", "embed_norm": "midlayer.input_layernorm", "state_norm": "midlayer.hidden_norm", "o": "midlayer.self_attn.o_proj",
    "post_norm": "midlayer.post_attention_layernorm", "down": "midlayer.mlp.down_proj", "norm": "norm", "lm_head": "lm_head", "input_norm": "input_norm",
    "q_b": "midlayer.self_attn.q_b_proj", "kv_b": "midlayer.self_attn.kv_b_proj", "q_a_norm": "midlayer.self_attn.q_a_layernorm",
    "kv_a_norm": "midlayer.self_attn.kv_a_layernorm",
}  # fmt: skip


def fused_parts(shape: DrafterShape) -> dict[str, int]:
    """The rows of [qkv_embed, qkv_state] by SGLang's names."""
    if shape.arch == "mla":
        return {"q_a_proj": shape.q_lora_rank, "kv_a_proj_with_mqa": shape.kv_lora_rank + shape.qk_rope_head_dim}
    return {"q_proj": shape.q_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}


def to_names(drafter: Drafter) -> dict[str, Tensor]:
    """The parameters by SGLang's names."""
    shape, parameters = drafter.shape, dict(drafter.named_parameters())
    named = {f"{name}.weight": parameters[own] for own, name in SIMPLE.items() if own in parameters}
    fused = torch.cat([drafter.qkv_embed.detach(), drafter.qkv_state.detach()], dim=1)  # [.., 2H]: embedding first, as SGLang concatenates
    parts = fused_parts(shape)
    named |= {f"midlayer.self_attn.{name}.weight": part for name, part in zip(parts, fused.split(list(parts.values())))}
    named["midlayer.mlp.gate_proj.weight"], named["midlayer.mlp.up_proj.weight"] = drafter.gate_up.detach().split(shape.intermediate_size)
    if shape.fc_norm:
        named |= {f"fc_norm.{i}.weight": drafter.fc_norm[i] for i in range(shape.num_aux)}
    if shape.arch == "mla":  # that class's loader knows the layer by this name alone
        named = {name.replace("midlayer.", "layers.0.", 1): value for name, value in named.items()}
    return {name: value.detach() for name, value in named.items()}


@torch.no_grad()
def from_names(drafter: Drafter, named: dict[str, Tensor], where: str) -> None:
    """Fill the parameters from tensors by SGLang's names (midlayer. or layers.0.). Raises UserError naming what is missing or does not fit."""

    def plain(name: str) -> str:
        return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)

    named = {plain(name): value for name, value in named.items()}
    for name, own in to_names(drafter).items():
        found = named.get(plain(name))
        if found is None:
            raise UserError(f"{where}: tensor {name} is missing; this folder is no drafter of this shape")
        if found.shape != own.shape:
            raise UserError(f"{where}: tensor {name} is {list(found.shape)}, this config's drafter has {list(own.shape)}; set [draft] to the shape of that drafter")
    shape, h = drafter.shape, drafter.shape.hidden_size
    fused = torch.cat([named[f"midlayer.self_attn.{name}.weight"] for name in fused_parts(shape)])
    drafter.qkv_embed.copy_(fused[:, :h])
    drafter.qkv_state.copy_(fused[:, h:])
    drafter.gate_up.copy_(torch.cat([named["midlayer.mlp.gate_proj.weight"], named["midlayer.mlp.up_proj.weight"]]))
    for own, parameter in drafter.named_parameters():
        if own in SIMPLE:
            parameter.copy_(named[f"{SIMPLE[own]}.weight"])
    if shape.fc_norm:
        drafter.fc_norm.copy_(torch.stack([named[f"fc_norm.{i}.weight"] for i in range(shape.num_aux)]))


def drafter_config(shape: DrafterShape, aux_layer_ids: list[int], target: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json. Rope stands in both spellings: transformers 5 reads rope_parameters, older readers rope_theta and rope_scaling."""
    scaling = {key: value for key, value in shape.rope.items() if key != "rope_theta"}
    name = str(dtype).removeprefix("torch.")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[shape.arch]], "model_type": "llama" if shape.arch == "llama" else "deepseek_v3", "hidden_size": shape.hidden_size, "target_hidden_size": shape.target_hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads, "head_dim": shape.head_dim, "hidden_act": "silu", "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size, "draft_vocab_size": shape.draft_vocab_size, "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope["rope_theta"], "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": shape.rope, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bias": False,
        "num_aux_hidden_states": shape.num_aux, "fc_norm": shape.fc_norm, "norm_output": shape.norm_output, "norm_before_fc": shape.norm_before_fc,
        "initializer_range": 0.02, "use_cache": True, "dtype": name, "torch_dtype": name,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layer_ids), "use_aux_hidden_state": True, "norm_before_fc": shape.norm_before_fc},
    }  # fmt: skip
    if shape.arch == "mla":
        config |= {
            "q_lora_rank": shape.q_lora_rank, "kv_lora_rank": shape.kv_lora_rank, "qk_nope_head_dim": shape.qk_nope_head_dim, "head_dim": shape.qk_rope_head_dim,
            "qk_rope_head_dim": shape.qk_rope_head_dim, "v_head_dim": shape.v_head_dim, "first_k_dense_replace": 1,
        }  # fmt: skip
    config |= {key: target[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if target.get(key) is not None}
    return config


def export_drafter(folder: Path, drafter: Drafter, draft_ids: Tensor, aux_layer_ids: list[int], target: dict[str, Any], dtype: torch.dtype, training: dict[str, Any],
                   walks: dict[str, list[str]] | None = None, keep: Path | None = None) -> None:  # fmt: skip
    """Write config.json, model.safetensors, training.json and, with `walks`, walk.json (walk.as_text() by held-out sample). The folder is replaced as a whole: it is the old drafter or the new one.

    keep: where the old folder goes, with its report; without it the old one is removed, and the new one has its report until a new one is written.
    draft_ids [Vd] int64: draft id -> target id, rising.
    """
    tensors = {name: value.to(dtype).cpu().contiguous() for name, value in to_names(drafter).items()}
    draft_ids = draft_ids.cpu()
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    kept = torch.zeros(drafter.shape.vocab_size, dtype=torch.bool)
    kept[draft_ids] = True
    tensors["t2d"] = kept
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = keep or folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with system_errors(folder / "model.safetensors"):
            save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        settle(temporary / "model.safetensors")
        write_json(temporary / "config.json", drafter_config(drafter.shape, aux_layer_ids, target, dtype))
        write_json(temporary / "training.json", training)
        if walks:
            write_json(temporary / WALK_FILE, {"num_steps": training["num_steps"], "walks": walks})
        if folder.exists():
            for name in ("report.json", "curves.png"):
                if not keep and (folder / name).is_file():
                    shutil.copy2(folder / name, temporary / name)
            folder.rename(old)
        temporary.rename(folder)
    finally:
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        if not keep:
            shutil.rmtree(old, ignore_errors=True)


def read_drafter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors of a drafter's folder. Raises UserError naming the file."""
    try:
        config = read_model_config(folder)
    except UserError as exc:
        raise UserError(f"{folder} is no drafter's folder: {exc}") from None
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} holds no safetensors file")
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as exc:
            raise UserError(f"{path} is not a whole safetensors file ({exc})") from None
    return config, tensors
