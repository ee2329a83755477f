"""A target's shape from its config.json: parameters by part, bytes a GPU under tensor parallelism, bytes of KV a token. Reads no weights.

Facts of public models that the plan needs before they are downloaded lie in configs/shapes/NAME.json: the keys of their own config.json that are read here, no others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import UserError
from .identity import read_model_config, text_config
from .paths import CONFIGS

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CHECKPOINT_BYTES = 12  # a parameter of the drafter: master and both moments of AdamW, float32


def _number(config: dict[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        if isinstance(config.get(name), int) and config[name] >= (1 if default is None else 0):
            return config[name]
    if default is None:
        raise UserError(f"the model's config.json has no {names[0]} above 0; the plan cannot be computed for it")
    return default


@dataclass(frozen=True)
class Quantisation:
    """How the matrices of decoder layers are stored; the embedding, the LM head, norms and routers stay plain."""

    bytes_per_weight: float
    ignored: tuple[str, ...] = ()  # names, or re:patterns, of modules that stay plain

    def covers(self, module: str) -> bool:
        """Whether a module of that full name is quantised."""
        return not any(re.match(item[3:], module) if item.startswith("re:") else item in module for item in self.ignored)


def read_quantisation(config: dict[str, Any]) -> Quantisation | None:
    """From quantization_config: FP8 (also in blocks), compressed-tensors of 4 or 8 bits; None when the weights are plain."""
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        return None
    try:
        method = raw.get("quant_method", "")
        if method == "fp8":
            block = raw.get("weight_block_size")
            return Quantisation(1 + (4 / (block[0] * block[1]) if block else 0), tuple(raw.get("modules_to_not_convert") or ()))
        if method == "compressed-tensors":
            weights = next(iter(raw["config_groups"].values()))["weights"]
            group = weights.get("group_size") or 0
            return Quantisation(weights["num_bits"] / 8 + (2 / group if group > 0 else 0), tuple(raw.get("ignore") or ()))
    except (AttributeError, LookupError, TypeError, StopIteration, ZeroDivisionError):
        raise UserError(f"the model's quantization_config cannot be read ({str(raw)[:200]}); the plan cannot be computed for it") from None
    raise UserError(f"quantisation {method!r} is not known to the plan (fp8, compressed-tensors), which cannot be computed for it")


@dataclass(frozen=True)
class Shape:
    """What the memory model needs of a target. Sizes in elements; `config` is the text model's config.json."""

    name: str
    config: dict[str, Any]
    vision: dict[str, Any]
    quantisation: Quantisation | None
    file_bytes: int = 0  # of the safetensors, where the folder is there; 0: computed from the shapes alone

    @property
    def hidden(self) -> int:
        return _number(self.config, "hidden_size")

    @property
    def inner(self) -> int:
        return _number(self.config, "intermediate_size")

    @property
    def layers(self) -> int:
        return _number(self.config, "num_hidden_layers")

    @property
    def vocab(self) -> int:
        return _number(self.config, "vocab_size")

    @property
    def heads(self) -> int:
        return _number(self.config, "num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return _number(self.config, "num_key_value_heads", default=self.heads)

    @property
    def head_dim(self) -> int:
        return _number(self.config, "head_dim", default=self.hidden // self.heads)

    @property
    def is_mla(self) -> bool:
        return bool(self.config.get("kv_lora_rank"))

    @property
    def experts(self) -> int:
        return _number(self.config, "n_routed_experts", "num_experts", "num_local_experts", default=0)

    @property
    def experts_per_token(self) -> int:
        return _number(self.config, "num_experts_per_tok", default=0)

    @property
    def expert_size(self) -> int:
        return _number(self.config, "moe_intermediate_size", default=_number(self.config, "intermediate_size"))

    @property
    def dense_layers(self) -> int:
        return _number(self.config, "first_k_dense_replace", default=0) if self.experts else self.layers

    @property
    def context(self) -> int:
        return _number(self.config, "max_position_embeddings", default=0)

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", False))

    def attention_parameters(self, tp: int = 1) -> float:
        """A layer's attention matrices on one rank: heads are split, MLA's down-projections are on every rank."""
        if not self.is_mla:
            kv_heads = max(self.kv_heads / tp, 1)
            return self.hidden * self.head_dim * (2 * self.heads / tp + 2 * kv_heads)
        c = self.config
        nope, rope, value, latent = (_number(c, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        query_rank = c.get("q_lora_rank") or 0
        query = self.hidden * query_rank + query_rank * self.heads * (nope + rope) / tp if query_rank else self.hidden * self.heads * (nope + rope) / tp
        return query + self.hidden * (latent + rope) + latent * self.heads * (nope + value) / tp + self.heads * value * self.hidden / tp

    def parameters(self, tp: int = 1) -> dict[str, tuple[str, float]]:
        """part -> (a module's full name that stands for it, parameters on one rank)."""
        moe_layers = self.layers - self.dense_layers
        shared = _number(self.config, "n_shared_experts", default=0)
        parts = {
            "embedding": ("model.embed_tokens", self.vocab * self.hidden / tp),
            "attention": ("model.layers.1.self_attn.o_proj", self.layers * self.attention_parameters(tp)),
            "dense MLP": ("model.layers.0.mlp.up_proj", self.dense_layers * 3 * self.hidden * _number(self.config, "intermediate_size") / tp),
            "experts": ("model.layers.1.mlp.experts.0.up_proj", moe_layers * self.experts * 3 * self.hidden * self.expert_size / tp),
            "shared experts": ("model.layers.1.mlp.shared_experts.up_proj", moe_layers * shared * 3 * self.hidden * self.expert_size / tp),
            "router": ("model.layers.1.mlp.gate", moe_layers * self.experts * self.hidden),
            "LM head": ("lm_head", 0 if self.tied else self.vocab * self.hidden / tp),
            "vision": ("vision_tower", self._vision_parameters()),
        }
        return {name: value for name, value in parts.items() if value[1]}

    def _vision_parameters(self) -> float:
        """Kimi's vision tower and projector, held whole by every rank; other towers are not counted."""
        if "vt_hidden_size" not in self.vision:
            return 0
        wide, inner, depth = (_number(self.vision, name) for name in ("vt_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers"))
        merged = wide * 4
        return depth * (4 * wide * wide + 2 * wide * inner) + merged * merged + merged * self.hidden

    def part_bytes(self, tp: int, float_bytes: int) -> dict[str, float]:
        """Bytes a GPU by part, from the shapes alone; float_bytes: of a plain weight as served. MLA's absorbed copies of kv_b count as attention."""
        sizes = {}
        for part, (module, count) in self.parameters(tp).items():
            plain = part in ("embedding", "router", "LM head", "vision") or self.quantisation is None or not self.quantisation.covers(module)
            sizes[part] = count * (float_bytes if plain else self.quantisation.bytes_per_weight)
        if self.is_mla:
            c = self.config
            absorbed = _number(c, "kv_lora_rank") * self.heads / tp * (_number(c, "qk_nope_head_dim") + _number(c, "v_head_dim"))
            sizes["attention"] += self.layers * absorbed * float_bytes
        return sizes

    def weight_bytes(self, tp: int, dtype: str) -> dict[str, float]:
        """Bytes a GPU by part. Where the safetensors are there, parts are scaled so that their sum over one GPU equals the files."""
        served = FLOAT_BYTES.get(dtype, 2)
        sizes = self.part_bytes(tp, served)
        if self.file_bytes:
            stored = FLOAT_BYTES.get(str(self.config.get("dtype") or self.config.get("torch_dtype") or "bfloat16").removeprefix("torch."), 2)
            in_files = sum(count * (stored if self.quantisation is None or not self.quantisation.covers(module) else self.quantisation.bytes_per_weight)
                           for part, (module, count) in self.parameters(1).items())  # fmt: skip
            scale = (self.file_bytes - self.unloaded_bytes(stored)) / in_files
            sizes = {part: size * scale for part, size in sizes.items()}
        return sizes

    def unloaded_bytes(self, stored: int) -> float:
        """Bytes in the files that the target never loads: DeepSeek's own multi-token prediction layers."""
        extra = _number(self.config, "num_nextn_predict_layers", default=0)
        if not extra:
            return 0
        each = 1 if self.quantisation else stored
        expert = 3 * self.hidden * self.expert_size
        return extra * ((self.experts + _number(self.config, "n_shared_experts", default=0)) * expert + self.attention_parameters() + 2 * self.hidden * self.hidden) * each

    def kv_bytes(self, tp: int, dtype: str, kv_dtype: str = "auto") -> float:
        """Bytes of KV a token on one GPU: MLA's latent is on every rank, other heads are split."""
        size = 1 if kv_dtype.startswith("fp8") else FLOAT_BYTES.get(dtype if kv_dtype == "auto" else "bfloat16", 2)
        if self.is_mla:
            return self.layers * (_number(self.config, "kv_lora_rank") + _number(self.config, "qk_rope_head_dim")) * size
        return self.layers * 2 * max(self.kv_heads / tp, 1) * self.head_dim * size


def shape_from(raw: dict[str, Any], name: str, file_bytes: int = 0) -> Shape:
    """From a whole config.json."""
    text = {**raw, **text_config(raw)}
    return Shape(name, text, raw.get("vision_config") or {}, read_quantisation(text), file_bytes)


def load_shape(model_path: str, shape_name: str = "", todo: str = "download the model") -> Shape:
    """The model's own folder where it is there, else configs/shapes/NAME.json. Raises UserError when there is neither; `todo` says how to get the folder."""
    folder = Path(model_path)
    if (folder / "config.json").is_file():
        index = folder / "model.safetensors.index.json"
        size = 0
        if index.is_file():
            try:
                size = int(json.loads(index.read_text(encoding="utf-8")).get("metadata", {}).get("total_size", 0))
            except (ValueError, RecursionError, AttributeError, TypeError):
                raise UserError(f"{index} is not a safetensors index; download the model again") from None
        return shape_from(read_model_config(folder), folder.name, size or sum(path.stat().st_size for path in folder.glob("*.safetensors")))
    path = CONFIGS / "shapes" / f"{shape_name}.json"
    if not shape_name or not path.is_file():
        raise UserError(f"{model_path} has no config.json, and plan.shape names no file of configs/shapes; {todo}, or set plan.shape")
    return shape_from(json.loads(path.read_text(encoding="utf-8")), shape_name)
