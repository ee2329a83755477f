"""The naive reference of training: the alignment rule of the design as loops over samples, rows and steps, on tensors by SGLang's names. Shares no code with the trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import Tensor


@dataclass
class Numbers:
    """What the reference needs to know of a drafter."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float = 1e-5
    theta: float = 10000.0
    num_aux: int = 3
    options: set[str] = field(default_factory=set)  # fc_norm, norm_before_fc, norm_output
    latent: tuple[int, int, int, int, int] | None = None  # MLA: q_lora_rank, kv_lora_rank, nope, rope, v
    yarn: dict | None = None  # MLA: the target's rope


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """x [heads, d], neox style: pairs (i, i + d/2)."""
    half = x.shape[-1] // 2
    out = []
    for i in range(half):
        angle = torch.tensor(position / theta ** (2 * i / x.shape[-1]), dtype=x.dtype)
        out.append((x[:, i] * torch.cos(angle) - x[:, i + half] * torch.sin(angle), x[:, i + half] * torch.cos(angle) + x[:, i] * torch.sin(angle)))
    return torch.stack([a for a, _ in out] + [b for _, b in out], dim=-1)


def fused_state(w: dict[str, Tensor], n: Numbers, aux: Tensor) -> Tensor:
    if "norm_before_fc" in n.options:
        aux = norm(aux, w["input_norm.weight"], n.eps)
    if "fc_norm" in n.options:
        aux = torch.cat([norm(part, w[f"fc_norm.{i}.weight"], n.eps) for i, part in enumerate(aux.chunk(n.num_aux))])
    return w["fc.weight"] @ aux


def yarn_frequency(i: int, d: int, yarn: dict) -> float:
    """Radians a position of pair i under yarn: below pair `low` as trained, above `high` divided by the factor."""
    theta, old = yarn["rope_theta"], yarn["original_max_position_embeddings"]
    low, high = (d * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (yarn["beta_fast"], yarn["beta_slow"]))
    low, high = max(math.floor(low), 0), min(math.ceil(high), d - 1)
    ramp = min(max((i - low) / max(high - low, 0.001), 0), 1)
    plain = theta ** (-2 * i / d)
    return plain * (1 - ramp) + plain / yarn["factor"] * ramp


def yarn_size(yarn: dict, name: str) -> float:
    return 0.1 * yarn[name] * math.log(yarn["factor"]) + 1


def rotate_pairs(x: Tensor, position: int, n: Numbers) -> Tensor:
    """x [heads, d], DeepSeek's style: pairs (2i, 2i + 1)."""
    out = torch.zeros_like(x)
    for i in range(x.shape[-1] // 2):
        frequency = yarn_frequency(i, x.shape[-1], n.yarn) if n.yarn else n.theta ** (-2 * i / x.shape[-1])
        size = yarn_size(n.yarn, "mscale") / yarn_size(n.yarn, "mscale_all_dim") if n.yarn else 1.0
        cos, sin = math.cos(position * frequency) * size, math.sin(position * frequency) * size
        out[:, 2 * i] = x[:, 2 * i] * cos - x[:, 2 * i + 1] * sin
        out[:, 2 * i + 1] = x[:, 2 * i + 1] * cos + x[:, 2 * i] * sin
    return out


def project_latent(w: dict[str, Tensor], n: Numbers, x: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [heads, nope + rope], v [heads, v] of multi-head latent attention."""
    _, kv_rank, nope, rope, v_dim = n.latent
    attention = "midlayer.self_attn."
    q = (w[attention + "q_b_proj.weight"] @ norm(w[attention + "q_a_proj.weight"] @ x, w[attention + "q_a_layernorm.weight"], n.eps)).view(n.heads, nope + rope)
    latent = w[attention + "kv_a_proj_with_mqa.weight"] @ x
    kv = (w[attention + "kv_b_proj.weight"] @ norm(latent[:kv_rank], w[attention + "kv_a_layernorm.weight"], n.eps)).view(n.heads, nope + v_dim)
    shared = rotate_pairs(latent[kv_rank:].view(1, rope), position, n)
    q = torch.cat([q[:, :nope], rotate_pairs(q[:, nope:], position, n)], dim=-1)
    return q, torch.cat([kv[:, :nope], shared.repeat(n.heads, 1)], dim=-1), kv[:, nope:]


def project(w: dict[str, Tensor], n: Numbers, embedding: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.cat([norm(embedding, w["midlayer.input_layernorm.weight"], n.eps), norm(state, w["midlayer.hidden_norm.weight"], n.eps)])
    if n.latent:
        return project_latent(w, n, x, position)
    q, k, v = ((w[f"midlayer.self_attn.{name}_proj.weight"] @ x).view(-1, n.head_dim) for name in "qkv")
    return rotate(q, position, n.theta), rotate(k, position, n.theta), v


def layer(w: dict[str, Tensor], n: Numbers, state: Tensor, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(logits over the draft vocabulary, the state that the next step reads)."""
    heads = []
    for head in range(n.heads):
        group = head // (n.heads // n.kv_heads)
        scores = torch.stack([q[head] @ key[group] for key in keys]) / n.head_dim**0.5
        if n.yarn:
            scores = scores * yarn_size(n.yarn, "mscale_all_dim") ** 2
        weights = torch.softmax(scores, dim=0)
        heads.append(sum(weight * value[group] for weight, value in zip(weights, values)))
    middle = state + w["midlayer.self_attn.o_proj.weight"] @ torch.cat(heads)
    inner = norm(middle, w["midlayer.post_attention_layernorm.weight"], n.eps)
    gate = w["midlayer.mlp.gate_proj.weight"] @ inner
    out = middle + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * (w["midlayer.mlp.up_proj.weight"] @ inner))
    normed = norm(out, w["norm.weight"], n.eps)
    return w["lm_head.weight"] @ normed, normed if "norm_output" in n.options else out


def reference(w: dict[str, Tensor], n: Numbers, samples: list, embedding: Tensor, head: Tensor, draft_ids: Tensor, steps: int, decay: float) -> SimpleNamespace:
    """samples: input_ids [T], loss_mask [T], aux [T, A*H], final_all [T, H]. Returns loss, logits by (sample, row, step), and the counts by step."""
    w = {name.replace("layers.0.", "midlayer."): value for name, value in w.items()}
    total, logits, first_rows = 0.0, {}, 0
    rows, correct = [0] * steps, [0] * steps
    for sample in samples:
        ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
        first = []  # first-step state, q, k, v of every row that has a next token
        for t in range(len(ids) - 1):
            state = fused_state(w, n, sample.aux[t])
            first.append((state, *project(w, n, embedding[ids[t + 1]], state, t)))
        for t in range(len(ids)):
            if not (t + 2 < len(ids) and mask[t + 1] and mask[t + 2]):
                continue
            first_rows += 1
            state, q, _, _ = first[t]
            keys, values = [first[s][2] for s in range(t + 1)], [first[s][3] for s in range(t + 1)]
            for k in range(steps):
                if t + 2 + k >= len(ids) or not all(mask[t + 1 : t + 3 + k]):
                    break
                if k:
                    q, key, value = project(w, n, embedding[ids[t + 1 + k]], state, t + k)
                    keys, values = keys + [key], values + [value]
                out, state = layer(w, n, state, q, keys, values)
                target = head @ sample.final_all[t + 1 + k]
                teacher = torch.softmax(target, dim=0)[draft_ids]
                total = total - decay**k * (teacher * torch.log_softmax(out, dim=0)).sum()
                logits[sample.id, t, k] = out.detach()
                rows[k] += 1
                correct[k] += int(draft_ids[out.argmax()] == target.argmax())
    return SimpleNamespace(loss=total / max(first_rows, 1), logits=logits, rows=rows, correct=correct)
