"""The drafter: one decoder layer over [embedding, state], as SGLang computes it: LlamaForCausalLMEagle3 (sglang/srt/models/llama_eagle3.py), or with the latent
attention of DeepSeek and Kimi Eagle3DeepseekV2ForCausalLM (kimi_k25_eagle3.py).

Inside, q, k and v are one matrix, split into the half that reads the token's embedding and the half that reads the state: the embedding's half is computed once
for all TTT steps. The export has SGLang's names (see export.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import Tensor, nn

from . import ops
from .errors import UserError


@dataclass(frozen=True)
class DrafterShape:
    """Every number that fixes the drafter's tensors and its forward."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # of the target: rows of the embedding
    draft_vocab_size: int
    num_aux: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=dict, hash=False)  # rope_type, rope_theta, and what the type needs
    fc_norm: bool = False  # a norm for each auxiliary state
    norm_before_fc: bool = False  # one norm over all of them
    norm_output: bool = False  # the next step reads the state after the final norm, not before it
    arch: str = "llama"  # or mla; then head_dim is that of queries and keys, nope + rope
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def fused_size(self) -> int:
        """Width of what embedding and state are projected to: q, k, v, or their latents."""
        return self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim if self.arch == "mla" else self.q_size + 2 * self.kv_size

    @property
    def attended_size(self) -> int:
        """Width of what attention hands to the output projection."""
        return self.num_attention_heads * (self.v_head_dim if self.arch == "mla" else self.head_dim)

    @property
    def rope_dim(self) -> int:
        """How much of a head is rotated."""
        return self.qk_rope_head_dim if self.arch == "mla" else self.head_dim

    @property
    def scale(self) -> float:
        """What scores are multiplied by; DeepSeek's yarn sharpens them with the context's stretch."""
        scale = self.head_dim**-0.5
        if self.rope.get("rope_type") == "yarn":
            scale *= yarn_mscale(float(self.rope["factor"]), float(self.rope.get("mscale_all_dim", 0.0))) ** 2
        return scale


def yarn_mscale(factor: float, mscale: float) -> float:
    """How much yarn enlarges what it stretches by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def yarn_frequencies(rope: dict[str, Any], dim: int, inverse: Tensor) -> tuple[Tensor, float]:
    """DeepSeek's yarn (sglang/srt/layers/rotary_embedding/rope_variant.py): slow pairs are stretched, fast ones kept, a ramp between."""
    factor, theta, old = float(rope["factor"]), float(rope["rope_theta"]), float(rope["original_max_position_embeddings"])

    def pair(turns: float) -> float:  # the pair that turns so often over the old context
        return dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair(float(rope.get("beta_fast", 32)))), 0)
    high = min(math.ceil(pair(float(rope.get("beta_slow", 1)))), dim - 1)
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    size = yarn_mscale(factor, float(rope.get("mscale", 1.0))) / yarn_mscale(factor, float(rope.get("mscale_all_dim", 0.0)))
    return inverse / factor * stretched + inverse * (1 - stretched), size


def inverse_frequencies(rope: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """[dim/2] float32 and the factor on cos and sin, for rope types default, linear, llama3 (the formulas of transformers' modeling_rope_utils)."""
    kind = rope.get("rope_type", rope.get("type", "default")) or "default"
    inverse = 1.0 / (float(rope.get("rope_theta", 10000.0)) ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":
        return inverse / float(rope["factor"]), 1.0
    if kind == "llama3":
        factor, low, high, old = (float(rope[key]) for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
        wavelength = 2 * math.pi / inverse
        smooth = ((old / wavelength - low) / (high - low)).clamp(0, 1)
        return inverse / factor * (1 - smooth) + inverse * smooth, 1.0
    if kind == "yarn":
        return yarn_frequencies(rope, dim, inverse)
    raise UserError(f"rope type {kind!r} is not supported for the drafter (default, linear, llama3; yarn with MLA); set draft.rope_theta to use plain rope")


def rope_table(shape: DrafterShape, positions: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """cos, sin [positions, rope_dim/2] float32."""
    inverse, factor = inverse_frequencies(shape.rope, shape.rope_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves (neox style). x [R, heads, d]; cos, sin [R, d/2] of x's compute precision."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def apply_rope_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours (DeepSeek's style): pairs (2i, 2i + 1). x [R, heads, d]; cos, sin [R, d/2]."""
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] in any dtype, weight [H]; computed in float32 (or x's own precision where that is higher), answered in x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


class _GradLinear(torch.autograd.Function):
    """x @ weight.T whose weight gradient is added straight into the master's .grad (float32), not handed through autograd."""

    @staticmethod
    def forward(ctx, x: Tensor, master: Tensor, weight: Tensor, add: Tensor | None, added: Callable[[], None] | None):
        ctx.save_for_backward(x, weight)
        ctx.master, ctx.has_add, ctx.added = master, add is not None, added
        return torch.addmm(add, x, weight.t()) if add is not None else x @ weight.t()

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        accumulate(ctx.master.grad, grad, x)
        if ctx.added is not None:
            ctx.added()
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, (grad if ctx.has_add else None), None


def accumulate(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """total [out, in] float32 += grad.T [out, R] @ x [R, in]."""
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x)
    elif x.is_cuda:
        torch.addmm(total, grad.t(), x, out_dtype=total.dtype, out=total)
    else:
        total.add_(grad.t() @ x)


class Drafter(nn.Module):
    """Parameters in master precision. `compute(name)` is the matrix as the GEMMs read it: the master itself, or its copy in the compute dtype."""

    MATRICES = ("fc", "qkv_embed", "qkv_state", "q_b", "kv_b", "o", "gate_up", "down", "lm_head")

    def __init__(self, shape: DrafterShape, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"):
        super().__init__()
        self.shape = shape
        h, inner, aux = shape.hidden_size, shape.intermediate_size, shape.target_hidden_size * shape.num_aux
        sizes: dict[str, tuple[int, ...]] = {
            "fc": (h, aux), "qkv_embed": (shape.fused_size, h), "qkv_state": (shape.fused_size, h), "o": (h, shape.attended_size),
            "gate_up": (2 * inner, h), "down": (h, inner), "lm_head": (shape.draft_vocab_size, h),
            "embed_norm": (h,), "state_norm": (h,), "post_norm": (h,), "norm": (h,),
        }  # fmt: skip
        if shape.arch == "mla":
            sizes |= {
                "q_b": (shape.q_size, shape.q_lora_rank), "kv_b": (shape.num_attention_heads * (shape.qk_nope_head_dim + shape.v_head_dim), shape.kv_lora_rank),
                "q_a_norm": (shape.q_lora_rank,), "kv_a_norm": (shape.kv_lora_rank,),
            }  # fmt: skip
        if shape.fc_norm:
            sizes["fc_norm"] = (shape.num_aux, shape.target_hidden_size)
        if shape.norm_before_fc:
            sizes["input_norm"] = (aux,)
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(size, dtype=dtype, device=device)))
        self.compute_dtype = dtype
        self._copies: dict[str, Tensor] = {}
        self.fused_grads = False  # weight gradients straight into .grad: one process or manual all-reduce; not under FSDP
        self.fast = False  # the GPU path's own kernels (fast_ops.py)
        self.on_use: Callable[[str], Callable[[], None] | None] = lambda name: None  # GradientSum.use, where several processes train

    @torch.no_grad()
    def reset(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Matrices from a normal distribution, norms at one."""
        for name, parameter in self.named_parameters():
            if name in self.MATRICES:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * std)
            else:
                parameter.fill_(1.0)

    def forward(self, function: Any, *args: Any) -> Any:
        """function(self, *args) as one forward of the module: FSDP gathers the weights around it."""
        return function(self, *args)

    def set_compute(self, dtype: torch.dtype, fused_grads: bool = True) -> None:
        """Compute in `dtype`; with fused_grads every matrix has a zeroed .grad that backward adds to."""
        self.compute_dtype, self.fused_grads = dtype, fused_grads
        self._copies = {}
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """After the masters changed: bring the copies in the compute dtype up to date."""
        for name, master in self.named_parameters():
            if name not in self.MATRICES:
                continue
            if master.dtype != self.compute_dtype and self.fused_grads:
                if name not in self._copies:
                    self._copies[name] = torch.empty_like(master, dtype=self.compute_dtype, requires_grad=False)
                self._copies[name].copy_(master)

    def zero_grads(self) -> None:
        """Every .grad of what is trained there and zero."""
        for parameter in self.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def compute(self, name: str) -> Tensor:
        """The matrix in the compute dtype."""
        master = getattr(self, name)
        return self._copies[name] if name in self._copies else master.to(self.compute_dtype)

    def linear(self, x: Tensor, name: str, add: Tensor | None = None) -> Tensor:
        """x [R, in] @ matrix.T (+ add [R, out])."""
        master = getattr(self, name)
        if self.fused_grads and torch.is_grad_enabled() and master.requires_grad:
            return _GradLinear.apply(x, master, self.compute(name).detach(), add, self.on_use(name))
        weight = self.compute(name)
        return torch.addmm(add, x, weight.t()) if add is not None else x @ weight.t()

    def fuse_aux(self, aux: Tensor) -> Tensor:
        """Target states [R, num_aux * Ht] -> the drafter's state [R, H]."""
        shape = self.shape
        if shape.norm_before_fc:
            aux = rms_norm(aux, self.input_norm, shape.rms_norm_eps)
        if shape.fc_norm:
            parts = aux.chunk(shape.num_aux, dim=-1)
            aux = torch.cat([rms_norm(part, self.fc_norm[i], shape.rms_norm_eps) for i, part in enumerate(parts)], dim=-1)
        return self.linear(aux, "fc")

    def first(self, ids: Tensor, embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """TTT step 0 of all rows. ids [T] int64, embedding [V, H], state [T, H].

        Returns (the embedding's share of q, k, v, which later steps read again [T, q + 2 kv], q, k, v as project() gives them, the state as the residual reads it).
        """
        if ops.gpu_kernel(state) and embedding.dtype == state.dtype:  # gather and both norms in one pass
            both = ops.drafter_ops.OPS.drafter_input(ids, embedding, state, self.embed_norm, self.state_norm, self.shape.rms_norm_eps)  # [T, 2H]
            embedded, normed = both.split(state.shape[1], dim=-1)
        else:
            embedded = self.norm_fork(embedding.index_select(0, ids), self.embed_norm)[0]
            normed, state = self.norm_fork(state, self.state_norm)
        embed_part = self.linear(embedded, "qkv_embed")
        return embed_part, self.linear(normed, "qkv_state", add=embed_part), state

    def project(self, state: Tensor, embed_part: Tensor) -> tuple[Tensor, Tensor]:
        """state [R, H], embed_part [R, q + 2 kv] -> (q, k, v side by side, not rotated [R, q + 2 kv], the state as the residual reads it)."""
        normed, state = self.norm_fork(state, self.state_norm)
        return self.linear(normed, "qkv_state", add=embed_part), state

    def heads(self, fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """fused [R, q + 2 kv], cos and sin [R, d/2] -> q [R, nq, d], k, v [R, nkv, d], q and k rotated. MLA: v is padded to d with zeros."""
        shape = self.shape
        if shape.arch == "mla":
            return self._latent_heads(fused, cos, sin)
        q, k, v = fused.split([shape.q_size, shape.kv_size, shape.kv_size], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in (q, k, v))
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def _latent_heads(self, fused: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Latents [R, q_lora + kv_lora + rope] -> q, k, v [R, heads, nope + rope], as DeepseekV2AttentionMLA's unabsorbed form."""
        shape = self.shape
        q_a, kv_a, k_rope = fused.split([shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim], dim=-1)
        q = self.linear(self.norm_fork(q_a, self.q_a_norm)[0], "q_b").unflatten(-1, (shape.num_attention_heads, -1))
        kv = self.linear(self.norm_fork(kv_a, self.kv_a_norm)[0], "kv_b").unflatten(-1, (shape.num_attention_heads, -1))
        q_nope, q_rope = q.split([shape.qk_nope_head_dim, shape.qk_rope_head_dim], dim=-1)
        k_nope, v = kv.split([shape.qk_nope_head_dim, shape.v_head_dim], dim=-1)
        k_rope = apply_rope_pairs(k_rope.unsqueeze(1), cos, sin).expand(-1, shape.num_attention_heads, -1)
        q = torch.cat([q_nope, apply_rope_pairs(q_rope, cos, sin)], dim=-1)
        return q, torch.cat([k_nope, k_rope], dim=-1), nn.functional.pad(v, (0, shape.head_dim - shape.v_head_dim))

    def norm_fork(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x, x): read x from here on from the second, so that the fused kernel sums its gradients."""
        if self.fast:
            from .fast_ops import RmsNorm

            return RmsNorm.apply(x, weight, self.shape.rms_norm_eps)
        return rms_norm(x, weight, self.shape.rms_norm_eps), x

    def gated(self, gate_up: Tensor) -> Tensor:
        """[R, 2I] -> silu(gate) * up [R, I]."""
        if self.fast:
            from .fast_ops import SiluMul

            return SiluMul.apply(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def after_attention(self, state: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """state [R, H] (the residual), attended [R, nq * d] -> (input of the LM head, state of the next step), both [R, H]."""
        if self.shape.arch == "mla":
            attended = attended.unflatten(-1, (-1, self.shape.head_dim))[..., : self.shape.v_head_dim].flatten(-2)
        normed, middle = self.norm_fork(self.linear(attended, "o", add=state), self.post_norm)
        out = self.linear(self.gated(self.linear(normed, "gate_up")), "down", add=middle)
        normed, out = self.norm_fork(out, self.norm)
        return normed, (normed if self.shape.norm_output else out)
