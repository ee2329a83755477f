"""The draft vocabulary: which ids, what they cover, and who may use the map."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from aerie.errors import UserError
from aerie.vocab import coverage, load_vocab_map, rank_ids, write_vocab_map


def test_most_frequent_supervised_ids_with_the_forced_ones() -> None:
    rng = np.random.default_rng(0)
    tokens = np.minimum(rng.zipf(1.3, 5000), 299)
    counts = np.bincount(tokens, minlength=300)
    forced = [298, 7]
    ranked = rank_ids(counts, forced, np.zeros(300, np.int64))
    by_count = [token for token, _ in sorted(Counter(tokens.tolist()).items(), key=lambda item: (-item[1], item[0])) if token not in forced]
    assert set(ranked[:2]) == set(forced)
    assert ranked[2:40].tolist() == by_count[:38]
    assert sorted(ranked.tolist()) == list(range(300)), "every id has a place, seen or not"
    share = coverage(counts, ranked, [40, 300, 1000])
    assert share == {40: pytest.approx(np.isin(tokens, ranked[:40]).mean()), 300: 1.0}


def test_unseen_places_go_to_ids_of_the_prompts_then_to_low_ids() -> None:
    counts, others = np.zeros(10, np.int64), np.zeros(10, np.int64)
    counts[5], others[8] = 1, 3
    assert rank_ids(counts, [], others).tolist() == [5, 8, 0, 1, 2, 3, 4, 6, 7, 9]


META = {"tokenizer_hash": "a" * 64, "data_hash": "b" * 64}


def test_offsets_as_sglang_reads_them(tmp_path: Path) -> None:
    chosen = np.array([9, 2, 5, 0])
    write_vocab_map(tmp_path / "map.safetensors", chosen, 12, META)
    found = load_vocab_map(tmp_path / "map.safetensors", "a" * 64, 12, 4)
    assert found.d2t.dtype == np.int64 and found.t2d.dtype == bool
    assert [draft + int(offset) for draft, offset in enumerate(found.d2t)] == [0, 2, 5, 9]
    assert np.flatnonzero(found.t2d).tolist() == [0, 2, 5, 9] and found.metadata["data_hash"] == "b" * 64


def test_another_tokenizer_or_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.safetensors"
    with pytest.raises(UserError, match="does not exist; make it with `make data`"):
        load_vocab_map(path, "a" * 64, 12, 4)
    write_vocab_map(path, np.array([1, 2, 3, 4]), 12, META)
    with pytest.raises(UserError, match="made with another tokenizer"):
        load_vocab_map(path, "c" * 64, 12, 4)
    with pytest.raises(UserError, match="for a vocabulary of 12 tokens, the target has 13"):
        load_vocab_map(path, "a" * 64, 13, 4)
    with pytest.raises(UserError, match="holds 4 draft tokens, draft.vocab_size is 5"):
        load_vocab_map(path, "a" * 64, 12, 5)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - 3])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_vocab_map(path, "a" * 64, 12, 4)
    path.write_bytes(whole[:-1] + b"\x01")  # t2d says 11, d2t does not
    with pytest.raises(UserError, match="do not agree"):
        load_vocab_map(path, "a" * 64, 12, 4)


def test_a_draft_vocabulary_as_large_as_the_targets(tmp_path: Path) -> None:
    write_vocab_map(tmp_path / "map.safetensors", np.arange(12), 12, META)
    assert not load_vocab_map(tmp_path / "map.safetensors", "a" * 64, 12, 32000).d2t.any()
