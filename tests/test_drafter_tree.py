"""The tree ops against a naive walk, for any parent structure, and against each other: references everywhere, kernels on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "cuda"), str(ROOT / "tests")]

import cuda_naive as naive  # noqa: E402
import drafter_ops as ops  # noqa: E402
import reference_tree  # noqa: E402

BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=BOTH)
def device(request):
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("no GPU here")
        assert ops.status() == "loaded", ops.status()
    return request.param


@st.composite
def trees(draw):
    """A batch of trees as the EAGLE worker makes them, or any candidates at all: parents not selected, cycles, unsorted."""
    topk, batch, nodes = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(2, 12))
    steps = draw(st.integers(1, 5))
    columns = 1 + (steps - 1) * topk if steps > 1 else draw(st.sampled_from([0, 1]))
    pool = max(nodes - 1, topk + (steps - 1) * topk * topk)
    parent_list, selected = [], []
    for _ in range(batch):
        parent_list.append([draw(st.integers(-1, pool)) for _ in range(columns)])
        chosen = draw(st.lists(st.integers(0, pool - 1), min_size=nodes - 1, max_size=nodes - 1, unique=draw(st.booleans())))
        limit = columns * topk if columns else topk
        selected.append(sorted(c % limit for c in chosen))
    lengths = [draw(st.integers(0, 40)) for _ in range(batch)]
    return topk, draw(st.integers(0, 6)), parent_list, selected, lengths, columns


def tensors(parent_list, selected, lengths, columns, device):
    parents = torch.tensor(parent_list, dtype=torch.int64, device=device).view(len(selected), columns)
    return parents, torch.tensor(selected, dtype=torch.int64, device=device), torch.tensor(lengths, dtype=torch.int64, device=device)


HYPOTHESIS = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)


@HYPOTHESIS
@given(case=trees(), full=st.booleans())
def test_build_tree_of_any_structure(device, case, full):
    topk, depth, parent_list, selected, lengths, columns = case
    built = ops.build_tree(*tensors(parent_list, selected, lengths, columns, device), topk, depth, full)
    at = 0
    for b, (chosen, length) in enumerate(zip(selected, lengths, strict=True)):
        nodes = len(chosen) + 1
        # a list of parents without entry 0 (one step) has only nodes under the root
        parents = naive.tree_parents(parent_list[b] or [None], chosen, topk)
        width = length + nodes if full else nodes
        for i in range(nodes):
            row = built.mask[at : at + width].tolist()
            at += width
            path, node = [], i
            while node and len(path) < depth:
                path.append(node)
                node = parents[node]
            want = {0, *path}
            assert [c for c in range(nodes) if row[width - nodes + c]] == sorted(want)
            assert all(row[: width - nodes])
            assert built.positions[b * nodes + i].item() == length + len(path)
            children = [j for j in range(1, nodes) if parents[j] == i]
            assert built.retrieve_next_token[b, i].item() == (children[0] if children else -1)
            later = [j for j in range(i + 1, nodes) if parents[i] is not None and parents[j] == parents[i]]
            assert built.retrieve_next_sibling[b, i].item() == (later[0] if later else -1)
            assert built.retrieve_index[b, i].item() == b * nodes + i
    assert at == built.mask.numel()


@HYPOTHESIS
@given(case=trees(), data=st.data())
def test_verify_takes_the_longest_path(device, case, data):
    topk, _, parent_list, selected, lengths, columns = case
    # a parent before its child, as a tree that was built step by step has it: else the walk has no end to compare with
    tree = reference_tree.build_tree(*tensors(parent_list, selected, lengths, columns, "cpu"), topk, 8)
    batch, nodes = tree.retrieve_index.shape
    parents = [naive.tree_parents(parent_list[b] or [None], selected[b], topk) for b in range(batch)]
    if any(p is not None and p >= i for row in parents for i, p in enumerate(row)):
        return
    draw = lambda: torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=batch * nodes, max_size=batch * nodes))).view(batch, nodes)  # noqa: E731
    candidates, target, width = draw(), draw(), data.draw(st.integers(1, 6))
    links = [x.to(device) for x in tree[2:]]
    got = ops.verify_tree_greedy(candidates.to(device), *links, target.to(device), width)
    for b in range(batch):
        node, rows = 0, [b * nodes]
        while len(rows) < width:
            matching = [j for j in range(1, nodes) if parents[b][j] == node and candidates[b, j] == target[b, node]]
            if not matching:
                break
            node = matching[0]  # the first child that the target would have said
            rows.append(b * nodes + node)
        assert got.accept_index[b].tolist() == rows + [-1] * (width - len(rows))
        assert got.accept_token_num[b].item() == len(rows) - 1
        for row in rows:
            assert got.predicts[row].item() == target.flatten()[row].item()
    kept = set(got.accept_index.flatten().tolist())
    assert all(value == 0 for row, value in enumerate(got.predicts.tolist()) if row not in kept)


def test_tree_by_hand(device):
    """Root 10; children 11, 12; 11 has 13, 14; 13 has 15. Two steps back of topk 2."""
    parents = torch.tensor([[-1, 0, 1, 2, 3]], device=device)  # candidates 0, 1 were expanded in step 1, 2 and 3 in step 2
    selected = torch.tensor([[0, 1, 2, 3, 6]], device=device)
    lengths = torch.tensor([7], device=device, dtype=torch.int32)
    tree = ops.build_tree(parents, selected, lengths, 2, 3)
    assert tree.positions.tolist() == [7, 8, 8, 9, 9, 10]
    assert tree.retrieve_next_token[0].tolist() == [1, 3, -1, 5, -1, -1]
    assert tree.retrieve_next_sibling[0].tolist() == [-1, 2, -1, 4, -1, -1]
    mask = tree.mask.view(6, 13)
    assert mask[:, :7].all() and [row.nonzero().flatten().tolist() for row in mask[:, 7:]] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 1, 3, 5]]
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]], device=device)
    target = torch.tensor([[11, 13, 0, 15, 0, 99]], device=device)
    got = ops.verify_tree_greedy(tokens, *tree[2:], target, 4)
    assert got.accept_index.tolist() == [[0, 1, 3, 5]] and got.accept_token_num.tolist() == [3]
    assert got.predicts.tolist() == [11, 13, 0, 15, 0, 99]


def test_tree_buffers_refusals_and_broken_links(device):
    parents, selected = torch.zeros(2, 0, dtype=torch.int64, device=device), torch.tensor([[0, 1], [1, 0]], device=device)
    lengths = torch.tensor([1, 2], device=device)
    tree = ops.build_tree(parents, selected, lengths, 2, 1, seq_lens_sum=3)
    assert tree.positions.tolist() == [1, 2, 2, 2, 3, 3]
    with pytest.raises(ValueError, match="topk = 0 must be 1 or more"):
        ops.build_tree(parents, selected, lengths, 0, 1)
    with pytest.raises(ValueError, match="parent_list has 1 rows, selected_index 2"):
        ops.build_tree(parents[:1], selected, lengths, 2, 1)
    with pytest.raises(ValueError, match="seq_lens has the shape"):
        ops.build_tree(parents, selected, lengths[:1], 2, 1)
    with pytest.raises(ValueError, match="accept_width = 0"):
        ops.verify_tree_greedy(selected, *[selected] * 3, selected, 0)
    with pytest.raises(ValueError, match="retrieve_next_token is"):
        ops.verify_tree_greedy(selected, selected, selected[:, :1], selected, selected, 2)
    empty = ops.build_tree(parents[:0], selected[:0], lengths[:0], 2, 1)
    assert empty.mask.numel() == 0
    assert ops.verify_tree_greedy(selected[:0], *[selected[:0]] * 3, selected[:0], 3).accept_index.shape == (0, 3)
    if device == "cuda":  # links and candidates out of range: no illegal access, no endless walk
        wild = torch.tensor([[7, -9], [1 << 40, 0]], device=device)
        ops.build_tree(torch.full((2, 2), 1 << 40, device=device), wild, lengths, 1, 5)
        loop = torch.tensor([[1, 1], [1, 1]], device=device)
        got = ops.verify_tree_greedy(loop, torch.tensor([[0, 1], [2, 3]], device=device), loop, loop, loop + 1, 6)
        torch.cuda.synchronize()
        assert got.accept_token_num.tolist() == [0, 0]
