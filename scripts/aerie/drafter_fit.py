"""A start by least squares, for small data: the drafter begins as the best linear guess of the next state, and training only has to improve on it.

State x[t] is the last auxiliary state. With self-attention on the token's own embedding (equal embeddings attract each other, and their values are equal too)
the layer computes x[t] + W [norm(embedding of token[t+1]), norm(x[t])], fitted to x[t+1]; the LM head reads the guess through a second fit to the target's final
state. Both are ridge regressions over a sample of the store, of the rank that the value heads have.
"""

from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import Tensor

from .drafter import Drafter, rms_norm

MAX_ROWS = 60_000  # enough for a few thousand unknowns a column
MAX_WIDTH = 2048  # above it the normal equations cost more than the training they save
SELF_SCORE = 12.0  # of a query with its own key; other tokens score around 0


def ridge(x: Tensor, y: Tensor, strength: float) -> Tensor:
    """[in, out] that minimises |x w - y|^2 + strength * rows * |w|^2. x [N, in], y [N, out]."""
    gram = x.t() @ x
    gram.diagonal().add_(strength * len(x))
    return torch.linalg.solve(gram, x.t() @ y)


def gather(samples: Iterable[Any], embedding: Tensor, hidden: int) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """x[t], embedding of token[t+1], x[t+1] [N, H] of neighbouring rows, and where the target's final[t+1] is known: (row among these, final)."""
    now, tokens, following, rows, finals, count = [], [], [], [], [], 0
    for sample in samples:
        last = sample.aux_float(torch.float32)[1:, -hidden:]  # row 0 is a sink with huge values in most models
        if len(last) < 2:
            continue
        ids = torch.as_tensor(sample.input_ids).long()
        now.append(last[:-1])
        following.append(last[1:])
        tokens.append(embedding[ids[2:]].float())
        final_rows = torch.as_tensor(sample.final_rows)
        keep = final_rows >= 2
        rows.append(final_rows[keep] - 2 + count)
        finals.append(sample.final_float(torch.float32)[keep])
        count += len(last) - 1
        if count >= MAX_ROWS:
            break
    return torch.cat(now), torch.cat(tokens), torch.cat(following), (torch.cat(rows), torch.cat(finals))


@torch.no_grad()
def fit_drafter(drafter: Drafter, samples: Iterable[Any], embedding: Tensor, head: Tensor, generator: torch.Generator, strength: float = 0.01) -> bool:
    """Set the drafter's weights by the fit; False when its shape does not allow it (then nothing is changed). head [Vd, H]: the target's, on the draft vocabulary."""
    shape = drafter.shape
    h, d, groups = shape.hidden_size, shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
    if shape.arch != "llama" or h != shape.target_hidden_size or h > MAX_WIDTH or d > h or shape.fc_norm or shape.norm_before_fc or shape.norm_output:
        return False
    x, e, y, (rows, finals) = gather(samples, embedding, h)
    ones = torch.ones(h)
    features = torch.cat([rms_norm(e, ones, shape.rms_norm_eps), rms_norm(x, ones, shape.rms_norm_eps)], dim=-1)  # [N, 2H]
    weight = ridge(features, y - x, strength)  # [2H, H]
    rank = min(shape.kv_size, h)
    change = features @ weight
    directions = torch.linalg.eigh(change.t() @ change).eigenvectors[:, -rank:]  # [H, rank]: where the fitted change varies most
    guess = x + change @ directions @ directions.t()
    readout = ridge(rms_norm(guess[rows], ones, shape.rms_norm_eps), finals, strength)  # [H, H]
    for name in ("embed_norm", "state_norm", "post_norm", "norm"):
        getattr(drafter, name).fill_(1.0)
    drafter.fc.zero_()
    drafter.fc[:, -h:].copy_(torch.eye(h))
    value = torch.zeros(shape.kv_size, 2 * h)
    value[:rank] = (weight @ directions).t()
    projections = torch.linalg.qr(torch.randn(h, h, generator=generator)).Q[: min(shape.kv_size, h)]  # rows of an orthogonal matrix, d to a head
    if len(projections) < shape.kv_size:
        projections = projections.repeat(-(-shape.kv_size // h), 1)[: shape.kv_size]
    # |projection of a normed embedding|^2 is about d, its score d / sqrt(d) times the factor squared
    keys = projections * (SELF_SCORE / d**0.5) ** 0.5
    query = torch.randn(shape.num_attention_heads, d, 2 * h, generator=generator) * 0.02
    query[::groups] = torch.cat([keys, torch.zeros_like(keys)], dim=1).view(shape.num_key_value_heads, d, 2 * h)
    drafter.o.zero_()
    out = torch.zeros(h, shape.kv_size)
    out[:, :rank] = directions
    drafter.o.view(h, shape.num_attention_heads, d)[:, ::groups] = out.view(h, shape.num_key_value_heads, d).to(drafter.o)
    qkv = torch.cat([query.view(shape.q_size, 2 * h), torch.cat([keys, torch.zeros_like(keys)], dim=1), value])
    drafter.qkv_embed.copy_(qkv[:, :h])
    drafter.qkv_state.copy_(qkv[:, h:])
    drafter.down.zero_()
    drafter.lm_head.copy_(head.float().cpu() @ readout.t())
    return True
