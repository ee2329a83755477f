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
from .report import write_json


def to_names(drafter: Drafter) -> dict[str, Tensor]:
    """The parameters by SGLang's names."""
    shape, h = drafter.shape, drafter.shape.hidden_size
    qkv = torch.cat([drafter.qkv_embed.detach(), drafter.qkv_state.detach()], dim=1)  # [q + 2 kv, 2H]: embedding first, as SGLang concatenates
    q, k, v = qkv.split([shape.q_size, shape.kv_size, shape.kv_size])
    gate, up = drafter.gate_up.detach().split(shape.intermediate_size)
    named = {
        "fc.weight": drafter.fc, "midlayer.input_layernorm.weight": drafter.embed_norm, "midlayer.hidden_norm.weight": drafter.state_norm,
        "midlayer.self_attn.q_proj.weight": q, "midlayer.self_attn.k_proj.weight": k, "midlayer.self_attn.v_proj.weight": v,
        "midlayer.self_attn.o_proj.weight": drafter.o, "midlayer.post_attention_layernorm.weight": drafter.post_norm,
        "midlayer.mlp.gate_proj.weight": gate, "midlayer.mlp.up_proj.weight": up, "midlayer.mlp.down_proj.weight": drafter.down,
        "norm.weight": drafter.norm, "lm_head.weight": drafter.lm_head,
    }  # fmt: skip
    if shape.fc_norm:
        named |= {f"fc_norm.{i}.weight": drafter.fc_norm[i] for i in range(shape.num_aux)}
    if shape.norm_before_fc:
        named["input_norm.weight"] = drafter.input_norm
    assert h * 2 == qkv.shape[1]
    return {name: value.detach() for name, value in named.items()}


@torch.no_grad()
def from_names(drafter: Drafter, named: dict[str, Tensor], where: str) -> None:
    """Fill the parameters from tensors by SGLang's names (also `layers.0.`). Raises UserError naming what is missing or does not fit."""
    named = {name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): value for name, value in named.items()}

    def get(name: str, like: tuple[int, ...]) -> Tensor:
        if name not in named:
            raise UserError(f"{where}: tensor {name} is missing; this folder is no drafter of this shape")
        if tuple(named[name].shape) != like:
            raise UserError(f"{where}: tensor {name} is {list(named[name].shape)}, this config's drafter has {list(like)}; set [draft] to the shape of that drafter")
        return named[name]

    for name, own in to_names(drafter).items():
        get(name, tuple(own.shape))
    shape, h = drafter.shape, drafter.shape.hidden_size
    attention = "midlayer.self_attn."
    qkv = torch.cat([named[f"{attention}{part}_proj.weight"] for part in "qkv"])
    drafter.qkv_embed.copy_(qkv[:, :h])
    drafter.qkv_state.copy_(qkv[:, h:])
    drafter.gate_up.copy_(torch.cat([named["midlayer.mlp.gate_proj.weight"], named["midlayer.mlp.up_proj.weight"]]))
    simple = {
        "fc": "fc", "embed_norm": "midlayer.input_layernorm", "state_norm": "midlayer.hidden_norm", "o": f"{attention}o_proj",
        "post_norm": "midlayer.post_attention_layernorm", "down": "midlayer.mlp.down_proj", "norm": "norm", "lm_head": "lm_head",
    }  # fmt: skip
    for own, name in simple.items():
        getattr(drafter, own).copy_(named[f"{name}.weight"])
    if shape.fc_norm:
        drafter.fc_norm.copy_(torch.stack([named[f"fc_norm.{i}.weight"] for i in range(shape.num_aux)]))
    if shape.norm_before_fc:
        drafter.input_norm.copy_(named["input_norm.weight"])


def drafter_config(shape: DrafterShape, aux_layer_ids: list[int], target: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """config.json. Rope stands in both spellings: transformers 5 reads rope_parameters, older readers rope_theta and rope_scaling."""
    scaling = {key: value for key, value in shape.rope.items() if key != "rope_theta"}
    name = str(dtype).removeprefix("torch.")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": shape.hidden_size, "target_hidden_size": shape.target_hidden_size,
        "intermediate_size": shape.intermediate_size, "num_hidden_layers": 1, "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads, "head_dim": shape.head_dim, "hidden_act": "silu", "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size, "draft_vocab_size": shape.draft_vocab_size, "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope["rope_theta"], "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": shape.rope, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bias": False,
        "num_aux_hidden_states": shape.num_aux, "fc_norm": shape.fc_norm, "norm_output": shape.norm_output, "norm_before_fc": shape.norm_before_fc,
        "initializer_range": 0.02, "use_cache": True, "dtype": name, "torch_dtype": name,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(aux_layer_ids), "use_aux_hidden_state": True, "norm_before_fc": shape.norm_before_fc},
    }  # fmt: skip
    config |= {key: target[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if target.get(key) is not None}
    return config


def export_drafter(folder: Path, drafter: Drafter, draft_ids: Tensor, aux_layer_ids: list[int], target: dict[str, Any], dtype: torch.dtype, training: dict[str, Any]) -> None:
    """Write config.json, model.safetensors and training.json. The folder is replaced as a whole: it is the old drafter or the new one.

    draft_ids [Vd] int64: draft id -> target id, rising.
    """
    tensors = {name: value.to(dtype).cpu().contiguous() for name, value in to_names(drafter).items()}
    draft_ids = draft_ids.cpu()
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    kept = torch.zeros(drafter.shape.vocab_size, dtype=torch.bool)
    kept[draft_ids] = True
    tensors["t2d"] = kept
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        with open(temporary / "model.safetensors", "rb") as file:
            os.fsync(file.fileno())
        write_json(temporary / "config.json", drafter_config(drafter.shape, aux_layer_ids, target, dtype))
        write_json(temporary / "training.json", training)
        if folder.exists():
            for keep in ("report.json", "curves.png"):
                if (folder / keep).is_file():
                    shutil.copy2(folder / keep, temporary / keep)
            folder.rename(old)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def read_drafter(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors of a drafter's folder. Raises UserError naming the file."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is no drafter's folder: it has no config.json") from None
    except json.JSONDecodeError as exc:
        raise UserError(f"{folder}/config.json is not valid JSON ({exc})") from None
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
