"""The draft vocabulary: the most frequent supervised token ids, with the markers forced in. File: data/vocab_map.safetensors.

Tensors: d2t [Vd] int64 offsets (target id = draft id + d2t[draft id]), t2d [V] bool; as SGLang's LlamaForCausalLMEagle3 reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Sequence

import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import UserError
from .samples import save_atomic

COVERAGE_SIZES = (8192, 16384, 32768, 65536)


class VocabMap(NamedTuple):
    """A draft vocabulary and what it was made from."""

    d2t: np.ndarray  # [Vd] int64
    t2d: np.ndarray  # [V] bool
    metadata: dict[str, str]


def rank_ids(counts: np.ndarray, forced: Sequence[int], other_counts: np.ndarray) -> np.ndarray:
    """All token ids, best first: the forced ones, then by supervised count, then by count elsewhere (prompts), then by id (low ids are early merges)."""
    forced_first = np.zeros(len(counts), bool)
    forced_first[list(forced)] = True
    return np.lexsort((np.arange(len(counts)), -other_counts, -counts, ~forced_first))


def coverage(counts: np.ndarray, ranked: np.ndarray, sizes: Sequence[int]) -> dict[int, float]:
    """Share of supervised tokens that the first `size` ids of `ranked` cover, for each size up to the vocabulary's."""
    total = max(int(counts.sum()), 1)
    return {size: float(counts[ranked[:size]].sum() / total) for size in sizes if size <= len(counts)}


def write_vocab_map(path: Path, chosen: np.ndarray, vocab_size: int, metadata: dict[str, str]) -> None:
    """Write d2t and t2d for the chosen target ids (any order; the draft ids follow the target ids' order)."""
    ids = np.sort(chosen).astype(np.int64)
    t2d = np.zeros(vocab_size, bool)
    t2d[ids] = True
    tensors = {"d2t": ids - np.arange(len(ids)), "t2d": t2d}
    save_atomic(path, tensors, {"kind": "aerie-vocab-map", "format": "1", "vocab_size": str(vocab_size), "draft_vocab_size": str(len(ids)), **metadata})


def load_vocab_map(path: Path, tokenizer_hash: str, vocab_size: int, draft_vocab_size: int) -> VocabMap:
    """Read and check a map. Raises UserError for one of another tokenizer or size, or one that is not consistent."""
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            if metadata.get("kind") != "aerie-vocab-map":
                raise UserError(f"{path} is no vocabulary map of Aerie; make it with `make data`")
            d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; make it with `make data`") from None
    except (SafetensorError, OSError) as exc:
        raise UserError(f"{path} is not a whole safetensors file ({exc}); make it again with `make data`") from None
    if metadata["tokenizer_hash"] != tokenizer_hash:
        raise UserError(
            f"{path} was made with another tokenizer ({metadata['tokenizer_hash'][:12]}) than the states' ({tokenizer_hash[:12]}); make it again with `make data`"
        )
    if t2d.shape != (vocab_size,):
        raise UserError(f"{path} is for a vocabulary of {len(t2d)} tokens, the target has {vocab_size}; make it again with `make data`")
    if len(d2t) != min(draft_vocab_size, vocab_size):
        raise UserError(f"{path} holds {len(d2t)} draft tokens, draft.vocab_size is {draft_vocab_size}; make it again with `make data`, or set draft.vocab_size={len(d2t)}")
    ids = d2t + np.arange(len(d2t))
    if not np.array_equal(ids, np.flatnonzero(t2d)):
        raise UserError(f"{path}: d2t and t2d do not agree; make it again with `make data`")
    return VocabMap(d2t, t2d, metadata)
