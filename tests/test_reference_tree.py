"""The tree references against a plain walk over Python lists, and against SGLang's own Triton kernels run by Triton's interpreter."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_tree import build_tree, tree_parents, verify_tree_greedy


@st.composite
def drafts(draw, max_topk: int = 4, max_steps: int = 4):
    """A draft as SGLang's worker makes it: topk candidates a step, of which any that were expanded go on; then D - 1 of all candidates are kept.

    Kept candidates need not have kept parents: with real scores they always have, here a broken tree is drawn too.
    """
    topk, steps = draw(st.integers(1, max_topk)), draw(st.integers(1, max_steps))
    parent_row, count = [-1, *range(topk)], topk  # the first step's candidates are the root's
    for _ in range(1, steps):
        fresh = list(range(count, count + topk * topk))  # topk candidates below each of the topk expanded ones
        count += len(fresh)
        parent_row += sorted(draw(st.permutations(fresh))[:topk])  # those that are expanded in the next step
    parent_row = parent_row[: 1 + topk * (steps - 1)] if steps > 1 else []
    drafted = draw(st.integers(1, min(count, 12)))
    selected = sorted(draw(st.permutations(range(count)))[:drafted])
    return topk, steps, parent_row, selected


def naive_parents(topk, parent_row, selected):
    """Parent of each node; None where the parent was not kept."""
    parents = [-1]
    for candidate in selected:
        block = candidate // topk
        if block == 0:
            parents.append(0)
        else:
            parent = parent_row[block]
            parents.append(selected.index(parent) + 1 if parent in selected else None)
    return parents


def naive_tree(topk, steps, parent_row, selected, length):
    parents = naive_parents(topk, parent_row, selected)
    nodes = len(parents)
    mask, depth = [], []
    for node in range(nodes):
        row, at, level = [False] * nodes, node, 0
        row[0] = True
        while at not in (0, None) and level < steps:
            row[at] = True
            at, level = parents[at], level + 1
        mask.append(row)
        depth.append(level)
    children = [[child for child in range(1, nodes) if parents[child] == node] for node in range(nodes)]
    first = [kids[0] if kids else -1 for kids in children]
    sibling = [-1] * nodes
    for kids in children:
        for left, right in zip(kids, kids[1:]):
            sibling[left] = right
    return mask, [length + level for level in depth], first, sibling


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(drafts(), st.integers(0, 9)), min_size=1, max_size=3), st.data())
def test_build_and_verify_agree_with_plain_walks(items, data):
    # one batch has one topk, depth and width: take the first draft's, with other lengths and, per request, other kept candidates
    (topk, steps, parent_row, selected), _ = items[0]
    count = topk + (steps - 1) * topk * topk
    kept = [selected] + [sorted(data.draw(st.permutations(range(count)))[: len(selected)]) for _ in items[1:]]
    lengths = [length for _, length in items]
    batch, nodes = len(items), len(selected) + 1
    parent_list = torch.tensor([parent_row] * batch, dtype=torch.int64).view(batch, -1)
    chosen, seq_lens = torch.tensor(kept), torch.tensor(lengths)
    tree = build_tree(parent_list, chosen, seq_lens, topk, steps, full_mask=False)
    full = build_tree(parent_list, chosen, seq_lens, topk, steps, full_mask=True)
    cells = 0
    for b in range(batch):
        mask, positions, first, sibling = naive_tree(topk, steps, parent_row, kept[b], lengths[b])
        assert tree.mask.view(batch, nodes, nodes)[b].tolist() == mask
        assert tree.positions.view(batch, nodes)[b].tolist() == positions
        assert tree.retrieve_next_token[b].tolist() == first
        assert tree.retrieve_next_sibling[b].tolist() == sibling
        width = lengths[b] + nodes
        part = full.mask[cells : cells + nodes * width].view(nodes, width)
        assert part[:, : lengths[b]].all() and part[:, lengths[b] :].tolist() == mask
        cells += nodes * width
    assert cells == full.mask.numel()
    assert torch.equal(tree.retrieve_index, torch.arange(batch * nodes).view(batch, nodes))

    tokens = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes), min_size=batch, max_size=batch)))
    target = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=nodes, max_size=nodes), min_size=batch, max_size=batch)))
    got = verify_tree_greedy(tokens, tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling, target, steps + 1)
    for b in range(batch):
        parents = naive_parents(topk, parent_row, kept[b])
        path = [0]
        while len(path) <= steps:
            kids = [n for n in range(1, nodes) if parents[n] == path[-1] and tokens[b, n] == target[b, path[-1]]]
            if not kids:
                break
            path.append(kids[0])
        assert got.accept_index[b].tolist() == [b * nodes + n for n in path] + [-1] * (steps + 1 - len(path))
        assert got.accept_token_num[b] == len(path) - 1
        expected = [int(target[b, n]) if n in path else 0 for n in range(nodes)]
        assert got.predicts[b * nodes : (b + 1) * nodes].tolist() == expected


def test_a_chain_by_hand():
    parent_list = torch.tensor([[-1, 0, 1]])  # topk 1, 3 steps
    assert tree_parents(parent_list, torch.tensor([[0, 1, 2]]), 1).tolist() == [[-1, 0, 1, 2]]
    tree = build_tree(parent_list, torch.tensor([[0, 1, 2]]), torch.tensor([7]), 1, 3, full_mask=False)
    assert tree.positions.tolist() == [7, 8, 9, 10]
    assert tree.retrieve_next_token.tolist() == [[1, 2, 3, -1]] and tree.retrieve_next_sibling.tolist() == [[-1] * 4]
    assert torch.equal(tree.mask.view(4, 4), torch.ones(4, 4).tril().bool())
    taken = verify_tree_greedy(torch.tensor([[5, 6, 7, 8]]), tree.retrieve_index, tree.retrieve_next_token, tree.retrieve_next_sibling, torch.tensor([[6, 7, 1, 2]]), 4)
    assert taken.accept_index.tolist() == [[0, 1, 2, -1]] and taken.accept_token_num.tolist() == [2] and taken.predicts.tolist() == [6, 7, 1, 0]


def test_one_step_has_an_empty_parent_list():
    tree = build_tree(torch.empty(2, 0, dtype=torch.int64), torch.tensor([[0, 2], [1, 2]]), torch.tensor([3, 4]), 3, 1, full_mask=False)
    assert tree.retrieve_next_token.tolist() == [[1, -1, -1]] * 2 and tree.retrieve_next_sibling.tolist() == [[-1, 2, -1]] * 2


INTERPRETED = """
    import sys
    import torch
    sys.path.insert(0, sys.argv[1])
    from reference_tree import build_tree, verify_tree_greedy
    from sglang.kernels.ops.speculative.spec_tree import TreeMaskMode, sgl_build_tree_kernel_triton, verify_tree_greedy_triton

    generator = torch.Generator().manual_seed(0)
    rand = lambda high, *shape: torch.randint(high, shape, generator=generator)
    for topk, steps, nodes in [(1, 3, 4), (2, 3, 6), (3, 2, 7), (4, 3, 10), (2, 1, 3)]:
        for batch in (1, 3):
            scores, expanded, parents, count = [], None, [torch.arange(-1, topk).expand(batch, -1)], topk
            for step in range(1, steps):
                parents.append(torch.stack([torch.randperm(topk * topk, generator=generator)[:topk].sort().values + count for _ in range(batch)]))
                count += topk * topk
            parent_list = torch.cat(parents[:-1], dim=1) if len(parents) > 1 else torch.empty(batch, 0, dtype=torch.long)
            selected = torch.stack([torch.randperm(count, generator=generator)[: nodes - 1].sort().values for _ in range(batch)])
            if parent_list.shape[1] == 0:
                parent_list = torch.empty(batch, 1, dtype=torch.long).fill_(-1)  # the interpreter needs an address
            lengths = rand(20, batch)
            for mode, full in ((TreeMaskMode.FULL_MASK, True), (TreeMaskMode.QLEN_ONLY, False)):
                mine = build_tree(parent_list, selected, lengths, topk, steps, full_mask=full)
                mask = torch.ones(mine.mask.numel(), dtype=torch.bool)
                links = torch.full((3, batch, nodes), -1)
                positions = torch.empty(batch * nodes, dtype=torch.long)
                sgl_build_tree_kernel_triton(parent_list, selected, lengths, mask, positions, *links, topk, steps, nodes, mode)
                assert torch.equal(mask, mine.mask) and torch.equal(positions, mine.positions), (topk, steps, nodes, full)
                for a, b in zip(links, (mine.retrieve_index, mine.retrieve_next_token, mine.retrieve_next_sibling)):
                    assert torch.equal(a, b), (topk, steps, nodes, full)
            tokens, target = rand(3, batch, nodes), rand(3, batch, nodes)
            predicts = torch.zeros(batch * nodes, dtype=torch.int32)
            accepted = torch.full((batch, steps + 1), -1, dtype=torch.int32)
            number = torch.empty(batch, dtype=torch.int32)
            verify_tree_greedy_triton(predicts, accepted, number, tokens, *links, target)
            mine = verify_tree_greedy(tokens, *links, target, steps + 1)
            assert torch.equal(predicts, mine.predicts) and torch.equal(accepted, mine.accept_index) and torch.equal(number, mine.accept_token_num)
    print("agreed")
"""


@pytest.mark.slow
def test_agrees_with_sglangs_kernels_under_the_interpreter(pytestconfig):
    environment = os.environ | {"TRITON_INTERPRET": "1", "AERIE_CPU_PLATFORM": "0", "SGLANG_USE_CPU_ENGINE": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(INTERPRETED), str(pytestconfig.rootpath / "cuda")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "agreed" in done.stdout, done.stderr[-2000:]
