"""The PyTorch functions in place of SGLang's Triton steps, against plain loops."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("AERIE_CPU_PLATFORM", "1")

speculation = pytest.importorskip("aerie_cpu_platform.speculation", reason="SGLang is not installed")

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


def table_of(batch):
    return torch.arange(100, 100 + 6 * 40, dtype=torch.int32).view(6, 40), torch.randperm(6)[:batch]


@settings(max_examples=50, deadline=None)
@given(LENGTHS, st.integers(1, 3), st.integers(1, 4))
def test_draft_and_verify_slots(lengths, topk, steps):
    table, pool = table_of(len(lengths))
    out = torch.zeros(len(lengths) * topk * steps, dtype=torch.int64)
    positions = torch.zeros(len(lengths) * topk, dtype=torch.int64)
    speculation.assign_draft_cache_locs(pool, table, torch.tensor(lengths), out, topk, steps, positions=positions)
    assert out.tolist() == [int(table[row, length + i]) for row, length in zip(pool, lengths) for i in range(topk * steps)]
    assert positions.tolist() == [length for length in lengths for _ in range(topk)]
    start = torch.tensor(lengths)
    got = speculation.gather_cache_locs(
        req_pool_indices=pool, req_to_token=table, start_offset=start, end_offset=start + steps, batch_size=len(lengths), draft_token_num=steps, device="cpu"
    )
    assert got.tolist() == [int(table[row, length + i]) for row, length in zip(pool, lengths) for i in range(steps)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=4))
def test_new_slots_go_to_their_rows(spans):
    table, pool = table_of(len(spans))
    want, fresh = table.clone(), 1000
    for row, (start, count) in zip(pool, spans):
        for i in range(count):
            want[row, start + i] = fresh
            fresh += 1
    starts, ends = torch.tensor([a for a, _ in spans]), torch.tensor([a + b for a, b in spans])
    speculation.assign_req_to_token_pool(pool, table, starts, ends, torch.arange(1000, fresh), len(spans))
    assert torch.equal(table, want)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_accepted_rows_and_bonus_tokens(accepted):
    batch, width, nodes = len(accepted), 4, 6
    index = torch.full((batch, width), -1, dtype=torch.int32)
    for b, count in enumerate(accepted):
        index[b, :count] = torch.arange(count) * 1 + b * nodes
    slots = torch.arange(500, 500 + batch * nodes)
    packed = torch.zeros(batch * width, dtype=torch.int64)
    speculation.fill_accept_out_cache_loc(index, slots, packed, batch * width)
    kept = [int(slots[i]) for row in index.tolist() for i in row if i >= 0]
    assert packed.tolist() == kept + [0] * (batch * width - len(kept))
    front = torch.zeros(batch * width, dtype=torch.int64)
    speculation.fill_front_out_cache_loc(torch.tensor(accepted), slots, front)
    assert front.tolist()[: sum(accepted)] == [500 + b * nodes + i for b, count in enumerate(accepted) for i in range(count)]
    tokens = torch.arange(batch * width, dtype=torch.int32).view(batch, width) * 10
    bonus = torch.zeros(batch, dtype=torch.int32)
    speculation.fill_bonus_tokens(tokens, torch.tensor(accepted), bonus, width, batch)
    assert bonus.tolist() == [int(tokens[b, count - 1]) for b, count in enumerate(accepted)]


def test_renormalised_probabilities_by_hand():
    probs = torch.tensor([[0.5, 0.25, 0.15, 0.1]])
    torch.testing.assert_close(speculation.top_k_renorm(probs, torch.tensor([2])), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))
    torch.testing.assert_close(speculation.top_k_renorm(probs, torch.tensor([1 << 30])), probs)
    torch.testing.assert_close(speculation.top_p_renorm(probs, torch.tensor([0.6])), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))
    torch.testing.assert_close(speculation.top_p_renorm(probs, torch.tensor([0.01])), torch.tensor([[1.0, 0, 0, 0]]))
    torch.testing.assert_close(speculation.top_p_renorm(probs, torch.tensor([1.0])), probs)


def test_drawn_tokens_follow_the_distribution_and_are_never_impossible():
    probs = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    coins = (torch.arange(10_000) + 0.5) / 10_000
    drawn = speculation.draw(probs.expand(1, 10_000, 6), coins.unsqueeze(0))
    assert torch.bincount(drawn[0], minlength=6).tolist() == [0, 5000, 0, 3000, 2000, 0]
    assert speculation.draw(probs.view(1, 1, 6), torch.tensor([[0.0]])).item() == 1
    assert speculation.draw(probs.view(1, 1, 6), torch.tensor([[1 - 2**-24]])).item() == 4


def test_the_reference_is_found_in_this_checkout(monkeypatch, pytestconfig):
    for root in (str(pytestconfig.rootpath), ""):
        monkeypatch.setenv("AERIE_ROOT", root)
        assert speculation.load_reference_tree().__file__ == str(pytestconfig.rootpath / "cuda" / "reference_tree.py")
