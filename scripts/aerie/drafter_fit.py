"""A start by least squares, for small data: the drafter begins as the best simple guess of the next state, and training only has to improve on it.

State x[t] is the last auxiliary state. Two kinds of heads make the guess, with weights that come from ridge regressions over the run's own states:

    own heads        attend to their own row: query and key are one projection of the token's embedding, so equal embeddings attract each other, and their
                     values are equal too. Value: W [norm(embedding of token[t+1]), norm(x[t])], fitted to x[t+1] - x[t].
    looking back     attend to earlier rows r where the target read the same token after a similar state: key from x[r], as far as it tells token[r] and
                     x[r-1]; query from the embedding of token[t+1] and x[t]. Value: x[r], which is what the target made of that token there.

The LM head reads the guess through one more fit to the target's final state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable

import torch
from torch import Tensor

from .drafter import Drafter, inverse_frequencies, rms_norm

MAX_ROWS = 60_000  # enough for a few thousand unknowns a column
MAX_WIDTH = 2048  # above it the normal equations cost more than the training they save
SELF_SCORE = 12.0  # of a query with its own key; other tokens score around 0
TOKEN_SCORE, STATE_SCORE = 10.0, 20.0  # of a row that read the same token, after the same state
NEAR = 300  # tokens over which the looking heads' positions may turn by a radian at most


def ridge(x: Tensor, y: Tensor, strength: float) -> Tensor:
    """[in, out] that minimises |x w - y|^2 + strength * rows * |w|^2. x [N, in], y [N, out]."""
    gram = x.t() @ x
    gram.diagonal().add_(strength * len(x))
    return torch.linalg.solve(gram, x.t() @ y)


def spread(x: Tensor, count: int) -> Tensor:
    """[H, count]: the directions in which x [N, H] varies most, half whitened, so that the strongest do not decide alone."""
    values, vectors = torch.linalg.eigh(x.t() @ x / len(x))
    return vectors[:, -count:] * values[-count:].clamp(min=1e-12) ** -0.25


@dataclass
class Document:
    """Rows 1.. of one sample: row 0 is a sink with huge values in most models."""

    x: Tensor  # [L, H] last auxiliary state
    read: Tensor  # [L, H] normed embedding of token[t], what the target read at the row
    next: Tensor  # [L, H] normed embedding of token[t+1]
    final_rows: Tensor  # [F]: rows among these
    final: Tensor  # [F, H]


def gather(samples: Iterable[Any], embedding: Tensor, hidden: int, eps: float) -> list[Document]:
    """Up to MAX_ROWS rows of the samples."""
    documents: list[Document] = []
    rows = 0
    for sample in samples:
        x = sample.aux_float(torch.float32)[1:-1, -hidden:]  # the last row has no next token
        if len(x) < 3 or not bool(torch.isfinite(x).all()):
            continue
        tokens = rms_norm(embedding[torch.as_tensor(sample.input_ids).long()].float(), torch.ones(hidden), eps)
        final_rows = torch.as_tensor(sample.final_rows)
        keep = (final_rows >= 2) & (final_rows <= len(x))
        documents.append(Document(x, tokens[1:-1], tokens[2:], final_rows[keep] - 1, sample.final_float(torch.float32)[keep]))
        rows += len(x)
        if rows >= MAX_ROWS:
            break
    return documents


@dataclass
class Looking:
    """Scores of the looking heads: ([next, norm x] @ query) . (norm x @ key), both with H = hidden rows each."""

    query: Tensor  # [2H, c]
    key: Tensor  # [H, c]


def fit_looking(documents: list[Document], width: int, eps: float, strength: float) -> Looking:
    """Query and key of `width` columns, half for the token, half for the state before it; scaled so that their product is the score itself."""
    hidden = documents[0].x.shape[1]
    ones = torch.ones(hidden)
    normed = [rms_norm(one.x, ones, eps) for one in documents]
    here, before = torch.cat([n[1:] for n in normed]), torch.cat([n[:-1] for n in normed])
    read = torch.cat([one.read[1:] for one in documents])
    half = width // 2
    token_side, state_side = spread(read - read.mean(0), half), spread(before - before.mean(0), width - half)
    query, key = torch.zeros(2 * hidden, width), torch.zeros(hidden, width)
    for columns, rows, target, side, score in (
        (slice(0, half), slice(0, hidden), read, token_side, TOKEN_SCORE), (slice(half, width), slice(hidden, 2 * hidden), before, state_side, STATE_SCORE),
    ):  # fmt: skip
        size = float(((target - target.mean(0)) @ side).pow(2).sum(-1).mean())
        query[rows, columns] = side * (score / size) ** 0.5
        key[:, columns] = ridge(here, target, strength) @ side * (score / size) ** 0.5
    # what all rows have in common would score everywhere alike; taken out along the mean state, which every normed state carries
    mean = here.mean(0)
    axis = mean / mean.pow(2).sum()
    key -= torch.outer(axis, mean @ key)
    return Looking(query, key)


def look_back(one: Document, looking: Looking, eps: float) -> Tensor:
    """[L, H]: what the looking heads bring to each row."""
    normed = rms_norm(one.x, torch.ones(one.x.shape[1]), eps)
    scores = torch.cat([one.next, normed], dim=-1) @ looking.query @ (normed @ looking.key).t()
    scores = scores.masked_fill(torch.ones(len(scores), len(scores), dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(scores, dim=-1) @ normed


def slow_columns(drafter: Drafter) -> Tensor:
    """The columns of a head that rope turns by less than a radian over NEAR tokens: matches at a distance keep their score there."""
    inverse, _ = inverse_frequencies(drafter.shape.rope, drafter.shape.head_dim)
    slow = (inverse * NEAR < 1.0).nonzero().squeeze(1)
    return torch.cat([slow, slow + drafter.shape.head_dim // 2])


@torch.no_grad()
def fit_drafter(drafter: Drafter, samples: Iterable[Any], embedding: Tensor, head: Tensor, generator: torch.Generator, strength: float = 0.01) -> bool:
    """Set the drafter's weights by the fit; False when its shape does not allow it (then nothing is changed). head [Vd, H]: the target's, on the draft vocabulary.

    With at least three key heads a third of them look back, the others are own heads; more key heads give the fit more rank.
    """
    shape = drafter.shape
    h, d, kv, eps = shape.hidden_size, shape.head_dim, shape.num_key_value_heads, shape.rms_norm_eps
    plain = not (shape.fc_norm or shape.norm_before_fc or shape.norm_output)
    if shape.arch != "llama" or h != shape.target_hidden_size or h > MAX_WIDTH or d > h or not plain:
        return False
    documents = gather(samples, embedding, h, eps)
    if sum(len(one.x) for one in documents) < 100:
        return False
    slow = slow_columns(drafter)
    lookers = kv // 3 if len(slow) >= 16 else 0
    own = kv - lookers
    ones = torch.ones(h)
    looking = fit_looking(documents, len(slow), eps, strength) if lookers else None
    found = [look_back(one, looking, eps)[:-1] for one in documents] if looking else []
    features = [torch.cat([one.next[:-1], rms_norm(one.x[:-1], ones, eps)], dim=-1) for one in documents]  # [L-1, 2H]
    full = torch.cat([torch.cat(pair, dim=-1) for pair in zip(features, found)] if looking else features)
    x = torch.cat([one.x[:-1] for one in documents])
    weight = ridge(full, torch.cat([one.x[1:] for one in documents]) - x, strength)  # [2H or 3H, H]

    def part(rows: slice, rank: int) -> tuple[Tensor, Tensor]:
        """value [rank, rows], out [H, rank]: the fit's share of these features, cut to the directions where it varies most."""
        change = full[:, rows] @ weight[rows]
        directions = torch.linalg.eigh(change.t() @ change).eigenvectors[:, -min(rank, h) :]  # [H, rank]
        value, out = torch.zeros(rank, rows.stop - rows.start), torch.zeros(h, rank)
        value[: directions.shape[1]], out[:, : directions.shape[1]] = (weight[rows] @ directions).t(), directions
        return value, out

    own_value, own_out = part(slice(0, 2 * h), own * d)
    guess = x + full[:, : 2 * h] @ own_value.t() @ own_out.t()
    keys = torch.linalg.qr(torch.randn(h, h, generator=generator)).Q.repeat(-(-own * d // h), 1)[: own * d]  # rows of orthogonal matrices, d to a head
    keys = torch.cat([keys, torch.zeros_like(keys)], dim=1).view(own, d, 2 * h) * (SELF_SCORE / d**0.5) ** 0.5
    queries, values, outs = keys.clone(), own_value.view(own, d, 2 * h), own_out.view(h, own, d)
    if looking:
        value, out = part(slice(2 * h, 3 * h), lookers * d)
        guess = guess + full[:, 2 * h :] @ value.t() @ out.t()
        factor = d**0.25  # attention divides scores by sqrt(d)
        look_query, look_key = torch.zeros(d, 2 * h), torch.zeros(d, 2 * h)
        look_query[slow], look_key[slow, h:] = looking.query.t() * factor, looking.key.t() * factor
        queries = torch.cat([queries, look_query.expand(lookers, -1, -1)])
        keys = torch.cat([keys, look_key.expand(lookers, -1, -1)])
        values = torch.cat([values, torch.cat([torch.zeros(lookers, d, h), value.view(lookers, d, h)], dim=-1)])
        outs = torch.cat([outs, out.view(h, lookers, d)], dim=1)
    lengths = [len(one.x) for one in documents]
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0) - torch.arange(len(documents))  # where a document's guesses begin; its last row has none
    rows = torch.cat([one.final_rows[one.final_rows >= 1] - 1 + start for one, start in zip(documents, starts)])
    finals = torch.cat([one.final[one.final_rows >= 1] for one in documents])
    readout = ridge(rms_norm(guess[rows], ones, eps), finals, strength)  # [H, H]
    for name in ("embed_norm", "state_norm", "post_norm", "norm"):
        getattr(drafter, name).fill_(1.0)
    drafter.fc.zero_()
    drafter.fc[:, -h:].copy_(torch.eye(h))
    groups = shape.num_attention_heads // kv
    query = torch.randn(kv, groups, d, 2 * h, generator=generator) * 0.02  # further heads of a group begin without a say
    query[:, 0] = queries
    fused = torch.cat([query.view(shape.q_size, 2 * h), keys.reshape(shape.kv_size, 2 * h), values.reshape(shape.kv_size, 2 * h)])
    drafter.qkv_embed.copy_(fused[:, :h])
    drafter.qkv_state.copy_(fused[:, h:])
    drafter.o.zero_()
    drafter.o.view(h, kv, groups, d)[:, :, 0].copy_(outs)
    drafter.down.zero_()
    drafter.lm_head.copy_(head.float().cpu() @ readout.t())
    return True
