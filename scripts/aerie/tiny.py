"""Tiny random checkpoints in the shapes of real families, with a real tokenizer and chat template: what the tests serve and train on."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .errors import UserError

VOCAB = 512
HIDDEN = 64
LAYERS = 6  # the fewest that leave three different capture points
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|media_pad|>")

# What the tokenizer's merges are learned from: everyday English, some code, some other scripts. The bytes cover everything else.
CORPUS = [
    "the capital of france is paris and the capital of italy is rome", "how do i bake bread at home with flour, water, salt and yeast?",
    "write a short story about the sea and the old man who lived there", "what is the answer to this question? the answer is not so simple.",
    "explain the difference between a list and a tuple in python", "you are a helpful assistant that gives short and correct answers",
    "for i in range(10):\n    print(i)\n", "def add(a, b):\n    return a + b\n", "numbers: 1 2 3 4 5 6 7 8 9 10 100 1000 2024",
    "user system assistant question answer there are their other another because", "ä ö ü é è ñ ç — “quoted” … 你好 世界 привет мир",
]  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.08,
    "max_position_embeddings": 4096, "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0, "use_cache": True,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128,
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 0,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "ep_size": 1, "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
_VISION: dict[str, Any] = {
    "patch_size": 14, "init_pos_emb_height": 8, "init_pos_emb_width": 8, "init_pos_emb_time": 4, "pos_emb_type": "divided_fixed", "merge_kernel_size": [2, 2],
    "video_attn_type": "spatial_temporal", "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "mm_hidden_size": 32, "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-5, "text_hidden_size": HIDDEN, "num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
    "vt_num_attention_heads": 2, "vt_num_hidden_layers": 1, "vt_hidden_size": 32, "vt_intermediate_size": 64,
}  # fmt: skip

# config.json as the real checkpoints write it; kimi_k25 has no vocab_size at the top, and says that no picture will be sent.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "rope_theta": 10000.0, "rope_scaling": None, "mlp_bias": False,
    },
    "qwen3": _COMMON | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "rope_theta": 1000000.0, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None, "max_window_layers": LAYERS,
    },
    "qwen3_moe": _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 128, "rope_theta": 1000000.0, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None, "max_window_layers": LAYERS,
        "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
        "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "deepseek_v3": _DEEPSEEK,
    "kimi_k25": {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "language_model_only": True, "text_config": _DEEPSEEK, "vision_config": _VISION,
        "ignore_index": -100, "media_placeholder_token_id": 5, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip
FAMILIES = tuple(CONFIGS)


def tiny_tokenizer() -> Any:
    """A byte-level BPE tokenizer of at most VOCAB ids, special tokens first, with the chat template; the same bytes every time."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[0],
        clean_up_tokenization_spaces=False, model_max_length=4096,
    )  # fmt: skip


def _vision_weights() -> dict[str, torch.Tensor]:
    """Random weights under the names of Kimi-K2.5's checkpoint for the shapes of _VISION; nothing ever reads them."""
    size, inner, patch = _VISION["vt_hidden_size"], _VISION["vt_intermediate_size"], _VISION["patch_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (size, 3, patch, patch), "vision_tower.patch_embed.proj.bias": (size,),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, size),
        "mm_projector.proj.0.weight": (4 * size, 4 * size), "mm_projector.proj.0.bias": (4 * size,),
        "mm_projector.proj.2.weight": (HIDDEN, 4 * size), "mm_projector.proj.2.bias": (HIDDEN,),
    }  # fmt: skip
    block = "vision_tower.encoder.blocks.0."
    for name, rows, columns in (("wqkv", 3 * size, size), ("wo", size, size), ("mlp.fc0", inner, size), ("mlp.fc1", size, inner)):
        shapes |= {f"{block}{name}.weight": (rows, columns), f"{block}{name}.bias": (rows,)}
    for name in (block + "norm0", block + "norm1", "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"):
        shapes |= {f"{name}.weight": (size,), f"{name}.bias": (size,)}
    return {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}


def _write_weights(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Random weights of a text model into folder/model.safetensors, under the checkpoint's own names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("lm_head.weight"):
                tensor.normal_(0, 0.3)  # logits far enough apart that rounding does not decide the greedy text
            elif "norm" in name:
                tensor.uniform_(0.7, 1.3)  # a norm that is left out or applied twice must show
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0, 0.05)
    model.to(dtype).save_pretrained(folder)


def make_tiny(family: str, folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a random `family` checkpoint (under 20 MB) to `folder`, the same for the same seed; whole or not at all. Returns `folder`.

    Raises UserError for an unknown family or a folder that is already there.
    """
    if family not in CONFIGS:
        raise UserError(f"no tiny model named {family!r}; known: {', '.join(FAMILIES)}")
    if folder.exists():
        raise UserError(f"{folder} is already there; remove it first, or name another folder")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = json.loads(json.dumps(CONFIGS[family]))
    (config.get("text_config") or config)["dtype"] = config["dtype"] = str(dtype).removeprefix("torch.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            _write_weights(temporary, config.get("text_config") or config, dtype)
            if family == "kimi_k25":
                weights = {f"language_model.{name}": tensor for name, tensor in load_file(temporary / "model.safetensors").items()}
                weights |= {name: tensor.to(dtype) for name, tensor in _vision_weights().items()}
                save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tiny_tokenizer().save_pretrained(temporary)
        for path in temporary.iterdir():
            path.chmod(0o644)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
