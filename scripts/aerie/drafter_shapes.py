"""Names and shapes of the tensors that SGLang's EAGLE-3 drafter classes read (sglang/srt/models/llama_eagle3.py and kimi_k25_eagle3.py), by our own canonical names."""

from __future__ import annotations

import re
from typing import Any

LLAMA = "LlamaForCausalLMEagle3"
MLA = "Eagle3DeepseekV2ForCausalLM"
ARCHITECTURES = (LLAMA, MLA)

# What the two loaders call the same thing. `model.` before a name is taken by the Llama class alone.
LEGACY = {"midlayer": "layers.0", "aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
HARMLESS = re.compile(r"rotary_emb\.|^t2d$|^embed_tokens\.weight$")  # may be there or not


def canonical_name(name: str, arch: str) -> str:
    """The name that the loader of `arch` makes of a file's tensor name; unknown names come out unchanged."""
    if arch == MLA:
        return re.sub(r"^midlayer\.", "layers.0.", name)
    for old, new in LEGACY.items():
        name = name.replace(old, new)
    return re.sub(r"^model\.(?!lm_head)", "", name)


def _mlp(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.gate_proj.weight": (inner, hidden), f"{prefix}.up_proj.weight": (inner, hidden), f"{prefix}.down_proj.weight": (hidden, inner)}


def _norms(prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}


def expected_tensors(config: dict[str, Any], arch: str, aux_count: int, target_hidden: int) -> dict[str, tuple[int, ...]]:
    """Every tensor that must be in the file, by canonical name: shape as torch stores a Linear, [out, in].

    `config` must hold the keys that check.REQUIRED_KEYS lists for `arch`; embed_tokens, d2t and t2d are checked by check.py, which knows when they are needed.
    """
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, target_hidden * aux_count), "norm.weight": (hidden,)}
    if config.get("bias"):
        shapes["fc.bias"] = (hidden,)
    if config["draft_vocab_size"] is not None:
        shapes["lm_head.weight"] = (config["draft_vocab_size"], hidden)
    if config.get("fc_norm") or config.get("use_aux_norm"):
        shapes |= {f"fc_norm.{index}.weight": (target_hidden,) for index in range(aux_count)}
    if arch == MLA:
        rope, nope, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["v_head_dim"]
        q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
        attention = "layers.0.self_attn"
        return shapes | _norms("layers.0", hidden) | _mlp("layers.0.mlp", hidden, inner) | {
            f"{attention}.q_a_proj.weight": (q_rank, 2 * hidden), f"{attention}.q_a_layernorm.weight": (q_rank,),
            f"{attention}.q_b_proj.weight": (heads * (nope + rope), q_rank), f"{attention}.kv_a_proj_with_mqa.weight": (kv_rank + rope, 2 * hidden),
            f"{attention}.kv_a_layernorm.weight": (kv_rank,), f"{attention}.kv_b_proj.weight": (heads * (nope + value), kv_rank),
            f"{attention}.o_proj.weight": (hidden, heads * value),
        }  # fmt: skip
    if norm_before_fc(config):
        shapes["input_norm.weight"] = (target_hidden * aux_count,)
    rows, kv_rows = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        prefix, width = f"layers.{layer}", 2 * hidden if layer == 0 else hidden
        shapes |= _norms(prefix, hidden) | _mlp(f"{prefix}.mlp", hidden, inner)
        shapes |= {f"{prefix}.self_attn.q_proj.weight": (rows, width), f"{prefix}.self_attn.o_proj.weight": (hidden, rows)}
        shapes |= {f"{prefix}.self_attn.{name}.weight": (kv_rows, width) for name in ("k_proj", "v_proj")}
    return shapes


def norm_before_fc(config: dict[str, Any]) -> bool:
    """Read as SGLang reads it: eagle_config first, then the top level."""
    return bool((config.get("eagle_config") or {}).get("norm_before_fc", config.get("norm_before_fc", False)))


def layers_in_file(names: list[str]) -> int:
    """How many decoder layers the canonical names speak of."""
    return len({match.group(1) for name in names if (match := re.match(r"layers\.(\d+)\.", name))})


def capture_points(target: dict[str, Any], ids: list[int]) -> list[int]:
    """Aux ids -> 'state after N decoder layers', by the rule of the target's family.

    SGLang's set_eagle3_layers_to_capture: most models add one; deepseek_v2 (DeepSeek, Kimi-K2, Kimi-K2.5) only when the first id is 1.
    `target` is the text part of the target's config. Extraction asks the loaded model instead; this is for a folder without a record of that.
    """
    deepseek = "kv_lora_rank" in target and str(target.get("model_type", "")).startswith(("deepseek", "kimi"))
    shift = 1 if not deepseek or ids[:1] == [1] else 0
    return [value + shift for value in ids]


def widths_of_tensors(config: dict[str, Any], arch: str, aux_count: int, found: dict[str, tuple[int, ...]]) -> dict[str, int]:
    """Config keys that say another width than all tensors agree upon: {key: the tensors' number}, {} where there is none or the tensors disagree among themselves.

    found: shapes by canonical name. A key is named alone where it alone explains every shape; else all keys together must.
    """

    def misfits(keys: dict[str, Any]) -> bool:
        expected = expected_tensors(keys, arch, aux_count, keys.get("target_hidden_size", keys["hidden_size"]))
        return any(name in found and found[name] != shape for name, shape in expected.items())

    def rows(name: str, divisor: int = 1) -> int:
        shape = found.get(name) or (0,)
        return 0 if shape[0] % divisor else shape[0] // divisor

    if not misfits(config):
        return {}
    layer, heads = "layers.0.self_attn", config["num_attention_heads"]
    said = {"hidden_size": rows("norm.weight"), "intermediate_size": rows("layers.0.mlp.gate_proj.weight")}
    if arch == MLA:
        nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        said |= {"q_lora_rank": rows(f"{layer}.q_a_layernorm.weight"), "kv_lora_rank": rows(f"{layer}.kv_a_layernorm.weight"),
                 "num_attention_heads": rows(f"{layer}.q_b_proj.weight", nope + rope)}  # fmt: skip
    else:
        width = config["head_dim"]
        said |= {"num_key_value_heads": rows(f"{layer}.k_proj.weight", width), "num_attention_heads": rows(f"{layer}.q_proj.weight", width), "head_dim": rows(f"{layer}.q_proj.weight", heads)}
    lm_head, d2t = rows("lm_head.weight"), found.get("d2t")
    if config["draft_vocab_size"] is not None and d2t in (None, (lm_head,)):
        said["draft_vocab_size"] = lm_head
    said = {key: value for key, value in said.items() if value and value != config[key]}
    for key, value in said.items():
        if not misfits(config | {key: value}):
            return {key: value}
    said = {key: value for key, value in said.items() if key != "head_dim"}  # which of the two is wrong cannot be told; heads are the likelier
    return said if said and not misfits(config | said) else {}
