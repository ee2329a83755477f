"""Where a drafter begins: its shape from config and target, its weights from the target's last layer and head, or from another drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import Config
from .drafter import Drafter, DrafterShape
from .errors import UserError
from .export import from_names, read_drafter
from .target_weights import TargetWeights

EMBED_STD = 0.02  # of the half of q, k, v that reads the embedding, which no layer of the target has


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """rope_type, rope_theta and the type's own numbers, from either spelling of a model's config."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    return rope


def make_shape(config: Config, target: TargetWeights) -> DrafterShape:
    """The drafter's shape: what [draft] says, else the target's own numbers. Raises UserError for numbers that do not go together."""
    model, draft = target.config, config.draft
    hidden = draft.hidden_size or model["hidden_size"]
    heads = draft.num_attention_heads or model["num_attention_heads"]
    kv_heads = draft.num_key_value_heads or (heads if draft.num_attention_heads else model.get("num_key_value_heads") or heads)
    head_dim = draft.head_dim or model.get("head_dim") or hidden // heads
    rope = rope_of(model)
    known = ("default", "yarn") if draft.arch == "mla" else ("default", "linear", "llama3")
    if draft.rope_theta or rope["rope_type"] not in known:  # yarn stretches a trained model; a new layer does without, but in SGLang's MLA class
        rope = {"rope_type": "default", "rope_theta": draft.rope_theta or rope["rope_theta"]}
    latent: dict[str, int] = {}
    if draft.arch == "mla":
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if not all(model.get(name) for name in names):
            raise UserError(f"draft.arch = 'mla' takes {', '.join(names)} from the target, and {target.folder} has none; set draft.arch = 'llama'")
        latent = {name: int(model[name]) for name in names}
        kv_heads, head_dim = heads, latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
        if draft.norm_before_fc:
            raise UserError("draft.norm_before_fc = true: the MLA drafter of SGLang does not read it; set it to false, or use draft.fc_norm")
        if latent["v_head_dim"] > head_dim:
            raise UserError(f"draft.arch = 'mla': v_head_dim {latent['v_head_dim']} above nope + rope {head_dim} is not supported; set draft.arch = 'llama'")
    vocab = model["vocab_size"]
    if heads % kv_heads or head_dim % 2:
        raise UserError(f"draft: {kv_heads} key heads must divide {heads} query heads, and head_dim {head_dim} must be even")
    if hidden != model["hidden_size"]:
        raise UserError(f"draft.hidden_size = {hidden} must be the target's hidden_size {model['hidden_size']}: the drafter reads the target's embeddings")
    longest = draft.max_position_embeddings or 0
    return DrafterShape(
        hidden_size=hidden, target_hidden_size=model["hidden_size"], intermediate_size=draft.intermediate_size or model["intermediate_size"],
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, vocab_size=vocab, draft_vocab_size=min(draft.vocab_size, vocab),
        num_aux=len(config.target.aux_layer_ids), rms_norm_eps=float(model.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=max(longest, int(model.get("max_position_embeddings", 2048))), rope=rope,
        fc_norm=draft.fc_norm, norm_before_fc=draft.norm_before_fc, norm_output=draft.norm_output, arch=draft.arch, **latent,
    )  # fmt: skip


@torch.no_grad()
def init_from_target(drafter: Drafter, target: TargetWeights, head: Tensor, generator: torch.Generator) -> list[str]:
    """Start as the target's last layer behind the last auxiliary state, with the target's norm and head, wherever the shapes fit; the rest stays random.

    head [Vd, H]: the target's LM head on the draft vocabulary. Returns the names of what was taken over.
    """
    layer, shape = target.last_layer(), drafter.shape
    taken: list[str] = []

    def take(name: str, *parts: str) -> None:
        found = [layer.get(f"{part}.weight") for part in parts]
        parameter = getattr(drafter, name)
        if all(part is not None for part in found):
            value = torch.cat(found)  # type: ignore[arg-type]
            if value.shape == parameter.shape and value.is_floating_point():
                parameter.copy_(value)
                taken.append(name)

    if shape.arch == "mla":
        take("qkv_state", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
        take("q_b", "self_attn.q_b_proj")
        take("kv_b", "self_attn.kv_b_proj")
        take("q_a_norm", "self_attn.q_a_layernorm")
        take("kv_a_norm", "self_attn.kv_a_layernorm")
    else:
        take("qkv_state", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    take("o", "self_attn.o_proj")
    take("gate_up", "mlp.gate_proj", "mlp.up_proj")
    take("down", "mlp.down_proj")
    take("state_norm", "input_layernorm")
    take("post_norm", "post_attention_layernorm")
    norm = target.final_norm()
    if norm is not None and norm.shape == drafter.norm.shape:
        drafter.norm.copy_(norm)
        taken.append("norm")
    if head.shape == drafter.lm_head.shape:
        drafter.lm_head.copy_(head)
        taken.append("lm_head")
    if shape.hidden_size == shape.target_hidden_size:
        drafter.fc.zero_()
        drafter.fc[:, -shape.target_hidden_size :].copy_(torch.eye(shape.hidden_size))
        taken.append("fc")
    drafter.qkv_embed.copy_(torch.randn(drafter.qkv_embed.shape, generator=generator) * EMBED_STD)
    return taken


@torch.no_grad()
def start_from(folder: Path, config: Config, drafter: Drafter, head: Tensor, draft_ids: Tensor) -> str:
    """Begin as an existing drafter, our own or a public one in SGLang's layout; returns a sentence about it.

    Its LM head is reordered to this run's draft vocabulary, draft_ids [Vd] int64; ids it does not have get the target's rows, head [Vd, H].
    Raises UserError when it reads other auxiliary layers or has another shape.
    """
    theirs, tensors = read_drafter(folder)
    eagle = theirs.get("eagle_config")
    layers = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
    if layers is not None and list(layers) != config.target.aux_layer_ids:
        raise UserError(f"train.init_from: {folder} reads layers {layers}, target.aux_layer_ids is {config.target.aux_layer_ids}; extract states of its layers, or start without it")
    kept = len(draft_ids)
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value.float()).all()):
            raise UserError(f"train.init_from: {folder}: tensor {name} holds a value that is not finite; name another drafter")
    if "lm_head.weight" in tensors and "d2t" in tensors:
        own = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
        if len(own) and not 0 <= int(own.min()) <= int(own.max()) < drafter.shape.vocab_size:
            raise UserError(f"train.init_from: {folder}: d2t names target ids {int(own.min())} to {int(own.max())}, the target has {drafter.shape.vocab_size}; is it of this target?")
        if tensors["lm_head.weight"].shape != (len(own), head.shape[1]):
            raise UserError(f"train.init_from: {folder}: lm_head.weight is {list(tensors['lm_head.weight'].shape)}, d2t and this target ask for {[len(own), head.shape[1]]}")
        place = torch.full((drafter.shape.vocab_size,), -1)
        place[own] = torch.arange(len(own))
        rows = place[draft_ids]
        taken = head.detach().float().cpu().clone()
        taken[rows >= 0] = tensors["lm_head.weight"][rows[rows >= 0]].float()
        tensors["lm_head.weight"] = taken
        kept = int((rows >= 0).sum())
    from_names(drafter, tensors, str(folder))
    return f"from {folder}, {kept} of {len(draft_ids)} rows of its LM head"
