"""Input checks of the drafter ops: each failure is one sentence that names the argument, its value and what it must be.

Shapes, dtypes, devices and layout cost nothing and are always checked. Values (ids in range) cost a device synchronisation: check_range=False leaves
them out; the ops then answer an id out of range with NaN, never with an illegal access.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
MAX_TOPK = 32
MAX_NODES = 2048  # of a draft tree


def matrix(name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """A 2-D tensor of one of the dtypes whose rows are contiguous (any row stride that does not make rows overlap)."""
    if x.dim() != 2:
        raise ValueError(f"{name} must have 2 dimensions, not the shape {list(x.shape)}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}; it must be one of {', '.join(map(str, dtypes))}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name} has strides {list(x.stride())}: its rows must be contiguous (last stride 1); call .contiguous() first")
    if x.shape[0] > 1 and x.stride(0) < x.shape[1]:
        raise ValueError(f"{name} has row stride {x.stride(0)} below its {x.shape[1]} columns: its rows overlap; call .contiguous() first")


def vector(name: str, x: Tensor, length: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """A contiguous 1-D tensor of the given length and one of the dtypes."""
    if x.dim() != 1 or x.shape[0] != length:
        raise ValueError(f"{name} has the shape {list(x.shape)}; it must be [{length}]")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {x.dtype}; it must be one of {', '.join(map(str, dtypes))}")
    if not x.is_contiguous():
        raise ValueError(f"{name} has stride {x.stride(0)}: it must be contiguous; call .contiguous() first")


def same_device(first: str, x: Tensor, **others: Tensor | None) -> None:
    """All on one device."""
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(f"{name} is on {other.device}, {first} on {x.device}: move them to one device")


def in_range(name: str, ids: Tensor, low: int, high: int) -> None:
    """Every id in low .. high-1. Synchronises with the device; left out while a CUDA graph is being captured or torch.compile traces."""
    if ids.numel() == 0 or torch.compiler.is_compiling():
        return
    if ids.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    smallest, largest = (int(value) for value in torch.aminmax(ids))
    if smallest < low or largest >= high:
        raise ValueError(f"{name} holds ids from {smallest} to {largest}; they must be in {low} .. {high - 1}")


def soft_target(draft: Tensor, target: Tensor, lse: Tensor | None, top: Tensor, weights: Tensor | None, rows: Tensor | None, check_range: bool) -> None:
    """Inputs of soft_target_cross_entropy."""
    matrix("draft_logits", draft)
    matrix("target_logits", target)
    if target.dtype != draft.dtype or target.shape[1] != draft.shape[1]:
        raise ValueError(f"target_logits {list(target.shape)} {target.dtype} does not fit draft_logits {list(draft.shape)} {draft.dtype}: same columns, same dtype")
    if draft.shape[1] == 0:
        raise ValueError("draft_logits has no columns: the draft vocabulary is empty")
    if rows is None and len(target) != len(draft):
        raise ValueError(f"target_logits has {len(target)} rows, draft_logits {len(draft)}: pass target_rows, or as many of one as of the other")
    floats = (torch.float32, torch.float64) if draft.dtype == torch.float64 else (torch.float32,)
    vector("target_top", top, len(target), (torch.int64,))
    if lse is not None:
        vector("target_lse", lse, len(target), floats)
    if weights is not None:
        vector("weights", weights, len(draft), floats)
    if rows is not None:
        vector("target_rows", rows, len(draft), (torch.int64,))
    same_device("draft_logits", draft, target_logits=target, target_lse=lse, target_top=top, weights=weights, target_rows=rows)
    if check_range:
        in_range("target_top", top, -1, draft.shape[1])
        if rows is not None:
            in_range("target_rows", rows, 0, len(target))


def online(chunk: Tensor, start: int, running_max: Tensor, running_sum: Tensor, argmax: Tensor) -> None:
    """Inputs of OnlineTarget.update."""
    matrix("logits", chunk)
    if start < 0:
        raise ValueError(f"start = {start} must be the id of the chunk's first column, 0 or more")
    wide = (torch.float64,) if chunk.dtype == torch.float64 else (torch.float32,)
    vector("running_max", running_max, len(chunk), wide)
    vector("running_sum", running_sum, len(chunk), wide)
    vector("argmax", argmax, len(chunk), (torch.int64,))
    same_device("logits", chunk, running_max=running_max, running_sum=running_sum, argmax=argmax)


def drafter_input(ids: Tensor, table: Tensor, state: Tensor, embed_weight: Tensor, state_weight: Tensor, eps: float, check_range: bool) -> None:
    """Inputs of drafter_input."""
    matrix("state", state)
    matrix("embedding", table)
    hidden = state.shape[1]
    if hidden == 0 or table.shape[1] != hidden:
        raise ValueError(f"embedding {list(table.shape)} does not fit state {list(state.shape)}: both must have the same hidden size, above 0")
    if table.dtype != state.dtype:
        raise ValueError(f"embedding has dtype {table.dtype}, state {state.dtype}: they must be the same")
    vector("ids", ids, len(state), (torch.int64, torch.int32))
    vector("embed_weight", embed_weight, hidden, (state.dtype, torch.float32))
    vector("state_weight", state_weight, hidden, (embed_weight.dtype,))
    if not eps > 0:
        raise ValueError(f"eps = {eps} must be above 0")
    same_device("state", state, ids=ids, embedding=table, embed_weight=embed_weight, state_weight=state_weight)
    if len(ids) and not len(table):
        raise ValueError("embedding has no rows")
    if check_range:
        in_range("ids", ids, 0, len(table))


def draft_topk(logits: Tensor, d2t: Tensor | None, k: int) -> None:
    """Inputs of draft_topk."""
    matrix("logits", logits)
    if not isinstance(k, int):
        raise ValueError(f"k is a {type(k).__name__}; it must be an int, as in draft_topk(logits, k, d2t)")
    if not 1 <= k <= min(MAX_TOPK, logits.shape[1]):
        raise ValueError(f"k = {k} must be 1 to {min(MAX_TOPK, logits.shape[1])} (at most {MAX_TOPK}, at most the {logits.shape[1]} columns of logits)")
    if d2t is not None:
        vector("d2t", d2t, logits.shape[1], (torch.int64,))
    same_device("logits", logits, d2t=d2t)


def quantize(x: Tensor) -> None:
    """Input of quantize_rows_fp8."""
    matrix("x", x, FLOATS[:3])


def dequantize(q: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    """Inputs of dequantize_rows_fp8."""
    matrix("q", q, (torch.float8_e4m3fn,))
    vector("scale", scale, len(q), (torch.float32,))
    if dtype not in FLOATS[:3]:
        raise ValueError(f"dtype {dtype} must be one of {', '.join(map(str, FLOATS[:3]))}")
    same_device("q", q, scale=scale)


def _shape(name: str, x: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if tuple(x.shape) != shape or x.dtype not in dtypes or not x.is_contiguous():
        raise ValueError(f"{name} is {list(x.shape)} {x.dtype} with strides {list(x.stride())}; it must be {list(shape)} {dtypes[0]}, contiguous")


def build_tree(
    parent_list: Tensor, selected: Tensor, seq_lens: Tensor, mask: Tensor, positions: Tensor, index: Tensor, next_token: Tensor, next_sibling: Tensor,
    topk: int, depth: int,
) -> None:  # fmt: skip
    """Inputs and outputs of build_tree."""
    matrix("selected_index", selected, (torch.int64,))
    matrix("parent_list", parent_list, (torch.int64,))
    batch, nodes = len(selected), selected.shape[1] + 1
    if nodes > MAX_NODES:
        raise ValueError(f"selected_index has {nodes - 1} columns; a tree has at most {MAX_NODES - 1} drafted tokens")
    if topk < 1 or depth < 0:
        raise ValueError(f"topk = {topk} must be 1 or more and depth = {depth} 0 or more")
    if len(parent_list) != batch:
        raise ValueError(f"parent_list has {len(parent_list)} rows, selected_index {batch}")
    vector("seq_lens", seq_lens, batch, (torch.int64, torch.int32))
    if mask.dtype != torch.bool or mask.dim() != 1 or not mask.is_contiguous() or mask.numel() < batch * nodes * nodes:
        raise ValueError(f"mask is {list(mask.shape)} {mask.dtype}; it must be flat bool with room for {batch} trees of {nodes} x {nodes} cells")
    vector("positions", positions, batch * nodes, (torch.int64,))
    for name, x in (("retrieve_index", index), ("retrieve_next_token", next_token), ("retrieve_next_sibling", next_sibling)):
        _shape(name, x, (batch, nodes), (torch.int64,))
    same_device(
        "selected_index", selected, parent_list=parent_list, seq_lens=seq_lens, mask=mask, positions=positions, retrieve_index=index,
        retrieve_next_token=next_token, retrieve_next_sibling=next_sibling,
    )  # fmt: skip


def verify_tree(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, index: Tensor, next_token: Tensor, next_sibling: Tensor, target: Tensor
) -> None:
    """Inputs and outputs of verify_tree_greedy."""
    matrix("candidates", candidates, (torch.int64,))
    batch, nodes = candidates.shape
    if not 1 <= nodes <= MAX_NODES:
        raise ValueError(f"candidates has {nodes} columns; a tree has 1 to {MAX_NODES} nodes")
    for name, x in (
        ("candidates", candidates), ("retrieve_index", index), ("retrieve_next_token", next_token), ("retrieve_next_sibling", next_sibling),
        ("target_predict", target),
    ):  # fmt: skip
        _shape(name, x, (batch, nodes), (torch.int64,))
    matrix("accept_index", accept_index, (torch.int32,))
    if accept_index.shape[1] < 1:
        raise ValueError("accept_index has no columns: the root is always accepted")
    _shape("accept_index", accept_index, (batch, accept_index.shape[1]), (torch.int32,))
    vector("accept_token_num", accept_token_num, batch, (torch.int32,))
    if predicts.dim() != 1 or predicts.numel() < batch * nodes or predicts.dtype != torch.int32 or not predicts.is_contiguous():
        raise ValueError(f"predicts is {list(predicts.shape)} {predicts.dtype}; it must be flat int32 with room for {batch * nodes} rows")
    same_device(
        "candidates", candidates, predicts=predicts, accept_index=accept_index, accept_token_num=accept_token_num, retrieve_index=index,
        retrieve_next_token=next_token, retrieve_next_sibling=next_sibling, target_predict=target,
    )  # fmt: skip
