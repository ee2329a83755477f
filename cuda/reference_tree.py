"""Plain-PyTorch references for the speculative tree: build and greedy verification.

The semantics are those of SGLang 0.5.23's own ops (`build_tree_kernel_efficient` and `verify_tree_greedy`, called from
sglang/srt/speculative/eagle_utils.py). The CPU platform serves with these functions, and the CUDA kernels are checked against them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tree(NamedTuple):
    """A batch of draft trees; node 0 is the root (the last token that is certain), nodes 1..D-1 are the drafted tokens."""

    mask: torch.Tensor  # bool, flat. full: [D, seq_len + D] of each request, end to end; else [B, D, D]. True: row attends to column
    positions: torch.Tensor  # [B * D] int64: seq_len + depth of the node
    retrieve_index: torch.Tensor  # [B, D] int64: the node's row in the flat batch, b * D + node
    retrieve_next_token: torch.Tensor  # [B, D] int64: the node's first child, -1 without one
    retrieve_next_sibling: torch.Tensor  # [B, D] int64: the next child of the same parent, -1 without one


class Accepted(NamedTuple):
    """What greedy verification takes over, as rows of the flat batch."""

    predicts: torch.Tensor  # [B * D] int32: at each accepted row the target's next token; 0 elsewhere
    accept_index: torch.Tensor  # [B, S] int32: the accepted rows from the root on, then -1
    accept_token_num: torch.Tensor  # [B] int32: accepted drafts, the root not counted


def tree_parents(parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int) -> torch.Tensor:
    """Parent node of each node [B, D] int64: -1 for the root, and -2 where the parent was not selected (a broken tree).

    parent_list [B, P]: candidate number of each expanded candidate, shifted by one (entry 0 is the root's); selected_index [B, D - 1]:
    candidate numbers of the drafted nodes. Candidate c was proposed by the expanded candidate number c // topk; 0 is the root.
    """
    batch, drafted = selected_index.shape
    block = selected_index // topk  # [B, D - 1]
    from_root = block == 0
    parents = torch.full((batch, drafted + 1), -1, dtype=torch.int64, device=selected_index.device)
    if parent_list.shape[1] == 0 or drafted == 0:
        parents[:, 1:] = torch.where(from_root, 0, -2)
        return parents
    candidate = parent_list.to(torch.int64).gather(1, block.to(torch.int64))  # [B, D - 1]
    match = candidate.unsqueeze(2) == selected_index.unsqueeze(1)  # [B, child, node]
    node = torch.where(match.any(2), match.to(torch.int8).argmax(2) + 1, -2)
    parents[:, 1:] = torch.where(from_root, 0, node)
    return parents


def build_tree(
    parent_list: torch.Tensor, selected_index: torch.Tensor, seq_lens: torch.Tensor, topk: int, depth: int, full_mask: bool = True
) -> Tree:
    """Attention mask, positions and child links of a batch of draft trees.

    parent_list [B, P] and selected_index [B, D - 1] as in tree_parents(); seq_lens [B]: tokens already in the cache; depth: draft steps, the
    longest path that is followed upwards. full_mask: columns for the prefix too (all True), else the D x D part alone.
    """
    batch, drafted = selected_index.shape
    nodes, device = drafted + 1, selected_index.device
    parents = tree_parents(parent_list, selected_index, topk)

    # The tree part of the mask: a node sees the root, itself, and its ancestors, `depth` of them at the most.
    seen = torch.zeros(batch, nodes, nodes, dtype=torch.bool, device=device)
    seen[:, :, 0] = True
    level = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
    at = torch.arange(nodes, device=device).expand(batch, nodes)
    for _ in range(depth):
        below_root = at > 0
        seen |= torch.nn.functional.one_hot(at.clamp(min=0), nodes).bool() & below_root.unsqueeze(2)
        level += below_root
        at = torch.where(below_root, parents.gather(1, at.clamp(min=0)), at)
    positions = (seq_lens.to(torch.int64).unsqueeze(1) + level).flatten()

    # First child: the smallest node with this parent. Next sibling: the smallest later node with the same parent.
    index = torch.arange(nodes, device=device)
    none = nodes
    child = parents.unsqueeze(1) == index.view(1, nodes, 1)  # [B, parent, node]
    first = torch.where(child, index, none).amin(2)
    sibling = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (index.view(1, 1, nodes) > index.view(1, nodes, 1)) & (parents >= 0).unsqueeze(2)
    following = torch.where(sibling, index, none).amin(2)

    if full_mask:
        parts = [torch.cat([seen.new_ones(nodes, length), seen[b]], dim=1).flatten() for b, length in enumerate(seq_lens.tolist())]
        mask = torch.cat(parts) if parts else seen.new_zeros(0)
    else:
        mask = seen.flatten()
    return Tree(
        mask,
        positions,
        torch.arange(batch * nodes, device=device).view(batch, nodes),
        torch.where(first == none, -1, first),
        torch.where(following == none, -1, following),
    )


def verify_tree_greedy(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    accept_width: int,
) -> Accepted:
    """Walk each tree from the root, at every node to the child that is the target's own next token, until there is none.

    candidates [B, D]: drafted tokens; retrieve_* [B, D] from build_tree(); target_predict [B, D]: the target's argmax at each node;
    accept_width S: columns of accept_index, the root and S - 1 accepted drafts at the most.
    """
    batch, nodes = candidates.shape
    tokens, index, children, siblings, target = (tensor.tolist() for tensor in (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict))
    predicts, accepted_rows, counts = [0] * (batch * nodes), [], []
    for b in range(batch):
        node, rows = 0, [index[b][0]]
        while True:
            predicts[rows[-1]] = target[b][node]
            child = children[b][node] if len(rows) < accept_width else -1
            while child != -1 and tokens[b][child] != target[b][node]:
                child = siblings[b][child]
            if child == -1:
                break
            node = child
            rows.append(index[b][node])
        counts.append(len(rows) - 1)
        accepted_rows.append(rows + [-1] * (accept_width - len(rows)))
    device = candidates.device
    return Accepted(
        torch.tensor(predicts, dtype=torch.int32, device=device),
        torch.tensor(accepted_rows, dtype=torch.int32, device=device).view(batch, accept_width),
        torch.tensor(counts, dtype=torch.int32, device=device),
    )
