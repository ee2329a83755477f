"""The drafter ops: checked inputs, CUDA kernels where the library is built, plain PyTorch (reference.py) everywhere else, with the same results and errors.

    soft_target_cross_entropy   loss, argmax match, acceptance mass and gradient of draft logits against the target's distribution, in one pass
    OnlineTarget                the target's log-sum-exp and argmax from chunks of the full vocabulary, without storing [N, V]
    drafter_input               [RMSNorm(embedding[ids]), RMSNorm(state)], side by side, with backward
    draft_topk                  top-k of the draft logits, log-probabilities and target ids
    build_tree, verify_tree_greedy   the speculative tree, as SGLang's ops of those names; *_into for buffers that are there
    quantize_rows_fp8, dequantize_rows_fp8   rows as e4m3 with one float32 scale each

Every op is registered with torch.library under aerie:: (fake kernels, autograd), so that torch.compile and CUDA graphs see it.
Kernels take bfloat16 (draft_topk float32 too); other dtypes run the reference, also on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import op_checks as checks
import reference
import reference_tree
import torch
from op_library import call, has_kernel, load, pointer, status
from torch import Tensor

__all__ = [
    "OnlineTarget", "SoftTarget", "build_tree", "build_tree_into", "dequantize_rows_fp8", "draft_ids", "draft_topk", "drafter_input", "quantize_rows_fp8",
    "soft_target_cross_entropy", "status", "verify_tree_greedy", "verify_tree_greedy_into",
]  # fmt: skip

LIB = torch.library.Library("aerie", "DEF")
OPS = torch.ops.aerie


def _define(schema: str, both, fake) -> None:
    """Define an op whose one implementation serves CPU and CUDA (it asks for a kernel itself), and its fake kernel."""
    name = schema.split("(")[0]
    LIB.define(schema)
    LIB.impl(name, both, "CPU")
    LIB.impl(name, both, "CUDA")
    torch.library.register_fake(f"aerie::{name}", fake, lib=LIB)


# --- 1. soft-target cross-entropy -------------------------------------------------------------------------------------------------------------------


class SoftTarget(NamedTuple):
    """What soft_target_cross_entropy answers, a value a row."""

    loss: Tensor  # [N] float32: weight * cross-entropy; differentiable
    match: Tensor  # [N] bool: the draft's argmax is the target's
    accept: Tensor  # [N] float32: sum of min(p, q), the chance that speculative sampling accepts a draft of this row
    in_vocab: Tensor  # [N] bool: the target's argmax is in the draft vocabulary


def _soft_target(draft: Tensor, target: Tensor, lse, top: Tensor, weights, rows, renormalize: bool, grad: Tensor | None):
    if not has_kernel(draft, torch.bfloat16):
        return reference.soft_target_ce(draft, target, lse, top, weights, rows, renormalize, grad)
    count, columns = draft.shape
    loss, accept = (torch.empty(count, dtype=torch.float32, device=draft.device) for _ in range(2))
    match, in_vocab = (torch.empty(count, dtype=torch.bool, device=draft.device) for _ in range(2))
    call(
        "aerie_soft_target_ce", draft.device, draft.data_ptr(), draft.stride(0), target.data_ptr(), target.stride(0), pointer(lse), top.data_ptr(),
        pointer(weights), pointer(rows), count, len(target), columns, renormalize, loss.data_ptr(), match.data_ptr(), accept.data_ptr(), in_vocab.data_ptr(),
        pointer(grad), 0 if grad is None else grad.stride(0),
    )  # fmt: skip
    return loss, match, accept, in_vocab


def _soft_target_new(draft, target, lse, top, weights, rows, renormalize, want_grad):
    grad = torch.empty(draft.shape if want_grad else (0, draft.shape[1]), dtype=draft.dtype, device=draft.device)
    return *_soft_target(draft, target, lse, top, weights, rows, renormalize, grad if want_grad else None), grad


def _soft_target_inplace(draft, target, lse, top, weights, rows, renormalize):
    return _soft_target(draft, target, lse, top, weights, rows, renormalize, draft)


def _soft_target_row_fakes(draft):
    wide = torch.float64 if draft.dtype == torch.float64 else torch.float32
    return tuple(draft.new_empty(draft.shape[0], dtype=dtype) for dtype in (wide, torch.bool, wide, torch.bool))


_ARGS = "Tensor target, Tensor? lse, Tensor top, Tensor? weights, Tensor? rows, bool renormalize"
_define(
    f"soft_target_ce(Tensor draft, {_ARGS}, bool want_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _soft_target_new,
    lambda draft, target, lse, top, weights, rows, renormalize, want_grad: (
        *_soft_target_row_fakes(draft),
        draft.new_empty(draft.shape if want_grad else (0, draft.shape[1])),
    ),
)
_define(
    f"soft_target_ce_(Tensor(a!) draft, {_ARGS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _soft_target_inplace,
    lambda draft, target, lse, top, weights, rows, renormalize: _soft_target_row_fakes(draft),
)


def _scale_rows(grad: Tensor, scale: Tensor) -> None:
    if not has_kernel(grad, torch.bfloat16):
        grad.mul_(scale.unsqueeze(-1).to(grad.dtype))
    else:
        call("aerie_scale_rows", grad.device, grad.data_ptr(), grad.stride(0), *grad.shape, scale.data_ptr())


_define("scale_rows_(Tensor(a!) grad, Tensor scale) -> ()", _scale_rows, lambda grad, scale: None)


class _SoftTargetInPlace(torch.autograd.Function):
    """Eager mode: the gradient replaces the draft logits in forward; backward scales its rows, which costs nothing where the scale is 1."""

    @staticmethod
    def forward(ctx, draft, target, lse, top, weights, rows, renormalize):
        loss, match, accept, in_vocab = OPS.soft_target_ce_(draft, target, lse, top, weights, rows, renormalize)
        ctx.mark_non_differentiable(match, accept, in_vocab)
        ctx.gradient = draft.detach()
        return loss, match, accept, in_vocab

    @staticmethod
    def backward(ctx, loss_grad, *_):
        if ctx.gradient is None:
            raise RuntimeError("soft_target_cross_entropy: backward ran a second time, but the gradient lives in the draft logits and is used up; run forward again, or use inplace=False")
        gradient, ctx.gradient = ctx.gradient, None
        OPS.scale_rows_(gradient, loss_grad.contiguous())
        return gradient, None, None, None, None, None, None


def _soft_target_setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[4])


def _soft_target_backward(ctx, loss_grad, *_):
    (gradient,) = ctx.saved_tensors
    if loss_grad is not None:
        gradient = (gradient * loss_grad.unsqueeze(-1)).to(gradient.dtype)
    return (gradient if loss_grad is not None else None), None, None, None, None, None, None, None


torch.library.register_autograd("aerie::soft_target_ce", _soft_target_backward, setup_context=_soft_target_setup, lib=LIB)


def soft_target_cross_entropy(
    draft_logits: Tensor,
    target_logits: Tensor,
    target_top: Tensor,
    target_lse: Tensor | None = None,
    weights: Tensor | None = None,
    target_rows: Tensor | None = None,
    renormalize: bool = False,
    inplace: bool = True,
    check_range: bool = True,
) -> SoftTarget:
    """Cross-entropy of the draft against the target's own distribution, with the metrics and the gradient, reading both logits once.

    draft_logits [N, Vd]. If it requires grad (and grad mode is on) its memory is OVERWRITTEN with d loss / d draft_logits: use it for nothing else
    afterwards (a linear layer's backward does not need it), and run backward once. With inplace=False, and under torch.compile, the gradient gets memory of its own.
    target_logits [M, Vd], same dtype: the columns of the target's logits that are in the draft vocabulary.
    target_top [M] int64: draft id of the target's argmax over its full vocabulary, -1 if it is outside (draft_ids() makes the map).
    target_lse [M] float32: log-sum-exp over the full vocabulary (OnlineTarget). None: over the slice, as if the target had no other token.
    weights [N] float32: factor of each row's loss and gradient, 1 / count for a mean; rows of weight 0 are not read. Put it here rather than behind the loss:
    `soft_target_cross_entropy(..., weights=w).loss.sum().backward()` needs no second pass over [N, Vd].
    target_rows [N] int64: row i is judged against target row target_rows[i]; None: row i.
    renormalize: divide p by its mass inside the draft vocabulary in loss and gradient (not in accept).

    With p = exp(target - lse), m = sum p, q = softmax(draft): loss = w * (m * lse(draft) - sum p * draft), gradient = w * (m * q - p).
    A target row of -inf has loss and gradient 0. Raises ValueError in one sentence.
    """
    checks.soft_target(draft_logits, target_logits, target_lse, target_top, weights, target_rows, check_range)
    arguments = (target_logits, target_lse, target_top, weights, target_rows, renormalize)
    if not (torch.is_grad_enabled() and draft_logits.requires_grad):
        return SoftTarget(*OPS.soft_target_ce(draft_logits, *arguments, False)[:4])
    if not inplace or torch.compiler.is_compiling():
        return SoftTarget(*OPS.soft_target_ce(draft_logits, *arguments, True)[:4])
    return SoftTarget(*_SoftTargetInPlace.apply(draft_logits, *arguments))


def draft_ids(d2t: Tensor, vocab_size: int) -> Tensor:
    """d2t [Vd] offsets (target id = draft id + d2t[draft id]) -> [vocab_size] int64: the draft id of each target id, -1 outside the draft vocabulary."""
    ids = torch.arange(len(d2t), device=d2t.device)
    inverse = torch.full((vocab_size,), -1, dtype=torch.int64, device=d2t.device)
    inverse[ids + d2t] = ids
    return inverse


def _online_update(chunk: Tensor, start: int, running_max: Tensor, running_sum: Tensor, argmax: Tensor) -> None:
    if not has_kernel(chunk, torch.bfloat16):
        reference.online_update(chunk, start, running_max, running_sum, argmax)
    else:
        call(
            "aerie_online_update", chunk.device, chunk.data_ptr(), chunk.stride(0), *chunk.shape, start, running_max.data_ptr(), running_sum.data_ptr(),
            argmax.data_ptr(),
        )  # fmt: skip


_define(
    "online_update_(Tensor chunk, int start, Tensor(a!) running_max, Tensor(b!) running_sum, Tensor(c!) argmax) -> ()",
    _online_update,
    lambda chunk, start, running_max, running_sum, argmax: None,
)


class OnlineTarget:
    """Log-sum-exp and argmax of the target's logits [N, V] from chunks of columns, so that [N, V] is never stored.

    Give the chunks in ascending order of ids: ties then go to the lowest id, as in torch.argmax.
    """

    def __init__(self, rows: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        self.maximum = torch.full((rows,), -torch.inf, dtype=dtype, device=device)
        self.total = torch.zeros(rows, dtype=dtype, device=device)  # sum of exp(logit - maximum)
        self.argmax = torch.full((rows,), -1, dtype=torch.int64, device=device)  # target ids

    def update(self, logits: Tensor, start: int) -> None:
        """Fold in logits [N, C] of the ids start .. start+C-1."""
        logits = logits.detach()
        checks.online(logits, start, self.maximum, self.total, self.argmax)
        OPS.online_update_(logits, start, self.maximum, self.total, self.argmax)

    @property
    def lse(self) -> Tensor:
        """[N]: log-sum-exp over everything seen so far."""
        return torch.where(torch.isfinite(self.maximum), self.maximum, 0.0) + self.total.log()


# --- 2. drafter input -------------------------------------------------------------------------------------------------------------------------------


def _drafter_input(ids, table, state, embed_weight, state_weight, eps):
    if not has_kernel(state, torch.bfloat16):
        return reference.drafter_input(ids, table, state, embed_weight, state_weight, eps)
    count, hidden = state.shape
    out = torch.empty(count, 2 * hidden, dtype=state.dtype, device=state.device)
    call(
        "aerie_drafter_input", state.device, ids.data_ptr(), ids.dtype == torch.int64, table.data_ptr(), table.stride(0), len(table), state.data_ptr(),
        state.stride(0), embed_weight.data_ptr(), state_weight.data_ptr(), embed_weight.dtype == torch.float32, count, hidden, eps, out.data_ptr(),
    )  # fmt: skip
    return out


def _drafter_input_backward(grad, ids, table, state, embed_weight, state_weight, eps, need_embed):
    if not has_kernel(state, torch.bfloat16):
        return reference.drafter_input_backward(grad, ids, table, state, embed_weight, state_weight, eps, need_embed)
    count, hidden = state.shape
    rows = torch.empty(count if need_embed else 0, hidden, dtype=table.dtype, device=state.device)
    state_grad = torch.empty(count, hidden, dtype=state.dtype, device=state.device)
    with torch.cuda.device(state.device):
        blocks = load().aerie_backward_blocks(count, hidden)
    sums = torch.empty(blocks, 2, hidden, dtype=torch.float32, device=state.device)  # each block's rows' weight gradients
    embed_weight_grad, state_weight_grad = torch.empty_like(embed_weight), torch.empty_like(state_weight)
    call(
        "aerie_drafter_input_backward", state.device, grad.data_ptr(), grad.stride(0), ids.data_ptr(), ids.dtype == torch.int64, table.data_ptr(),
        table.stride(0), len(table), state.data_ptr(), state.stride(0), embed_weight.data_ptr(), state_weight.data_ptr(), embed_weight.dtype == torch.float32,
        count, hidden, eps, rows.data_ptr() if need_embed else None, state_grad.data_ptr(), embed_weight_grad.data_ptr(),
        state_weight_grad.data_ptr(), sums.data_ptr(), blocks,
    )  # fmt: skip
    return rows, state_grad, embed_weight_grad, state_weight_grad


_define(
    "drafter_input(Tensor ids, Tensor table, Tensor state, Tensor embed_weight, Tensor state_weight, float eps) -> Tensor",
    _drafter_input,
    lambda ids, table, state, embed_weight, state_weight, eps: state.new_empty(state.shape[0], 2 * state.shape[1]),
)
_define(
    "drafter_input_backward(Tensor grad, Tensor ids, Tensor table, Tensor state, Tensor embed_weight, Tensor state_weight, float eps, bool need_embed)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _drafter_input_backward,
    lambda grad, ids, table, state, embed_weight, state_weight, eps, need_embed: (
        table.new_empty(state.shape[0] if need_embed else 0, state.shape[1]),
        torch.empty_like(state, memory_format=torch.contiguous_format),
        torch.empty_like(embed_weight),
        torch.empty_like(state_weight),
    ),
)


def _drafter_input_setup(ctx, inputs, output):
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _drafter_input_grad(ctx, grad):
    ids, table, state, embed_weight, state_weight = ctx.saved_tensors
    need = ctx.needs_input_grad
    rows, state_grad, embed_weight_grad, state_weight_grad = OPS.drafter_input_backward(
        grad.contiguous(), ids, table, state, embed_weight, state_weight, ctx.eps, need[1]
    )
    table_grad = torch.zeros_like(table).index_add_(0, ids, rows) if need[1] else None
    return None, table_grad, state_grad if need[2] else None, embed_weight_grad if need[3] else None, state_weight_grad if need[4] else None, None


torch.library.register_autograd("aerie::drafter_input", _drafter_input_grad, setup_context=_drafter_input_setup, lib=LIB)


def drafter_input(
    ids: Tensor, embedding: Tensor, state: Tensor, embed_weight: Tensor, state_weight: Tensor, eps: float = 1e-5, check_range: bool = True
) -> Tensor:
    """[N, 2H] in the state's dtype: RMSNorm(embedding[ids]) * embed_weight beside RMSNorm(state) * state_weight.

    ids [N] int64 or int32, embedding [V, H], state [N, H] of the same dtype, weights [H] in that dtype or float32. The norm is float32 and rounded once, after
    the weight, as in sglang/srt/layers/layernorm.py. Differentiable in embedding, state and both weights. Raises ValueError in one sentence.
    """
    checks.drafter_input(ids, embedding, state, embed_weight, state_weight, eps, check_range)
    return OPS.drafter_input(ids, embedding, state, embed_weight, state_weight, eps)


# --- 3. top-k of the draft logits -------------------------------------------------------------------------------------------------------------------


MAX_RANKED = 196608  # columns that the kernel for k > 1 takes


def _draft_topk(logits, d2t, k):
    if not has_kernel(logits, torch.bfloat16, torch.float32) or (k > 1 and logits.shape[1] > MAX_RANKED):
        return reference.draft_topk(logits, d2t, k)
    count, columns = logits.shape
    log_probs = torch.empty(count, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(count, k, dtype=torch.int64, device=logits.device)
    call(
        "aerie_draft_topk", logits.device, logits.data_ptr(), logits.dtype == torch.float32, logits.stride(0), pointer(d2t), count, columns, k,
        log_probs.data_ptr(), ids.data_ptr(), False, None, None, 0,
    )  # fmt: skip
    return log_probs, ids


_define(
    "draft_topk(Tensor logits, Tensor? d2t, int k) -> (Tensor, Tensor)",
    _draft_topk,
    lambda logits, d2t, k: (logits.new_empty(logits.shape[0], k, dtype=torch.float32), logits.new_empty(logits.shape[0], k, dtype=torch.int64)),
)


def draft_topk(logits: Tensor, k: int, d2t: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k best columns of logits [N, Vd], 1 <= k <= 32: log-probabilities [N, k] float32, descending, and ids [N, k] int64.

    d2t [Vd] int64 offsets: ids are the target's (draft id + d2t[draft id]); None: draft ids. Ties go to the lowest draft id. Raises ValueError in one sentence.
    """
    checks.draft_topk(logits, d2t, k)
    return OPS.draft_topk(logits.detach(), d2t, k)


# --- 4. the speculative tree ------------------------------------------------------------------------------------------------------------------------


def _build_tree(parent_list, selected_index, seq_lens, mask, positions, retrieve_index, next_token, next_sibling, topk, depth, full_mask):
    batch, nodes = retrieve_index.shape
    if has_kernel(selected_index, torch.int64):
        call(
            "aerie_build_tree", selected_index.device, parent_list.data_ptr(), parent_list.stride(0), parent_list.shape[1], selected_index.data_ptr(),
            selected_index.stride(0), seq_lens.data_ptr(), seq_lens.dtype == torch.int64, mask.data_ptr(), mask.numel(), positions.data_ptr(),
            retrieve_index.data_ptr(), next_token.data_ptr(), next_sibling.data_ptr(), batch, topk, depth, nodes, full_mask,
        )  # fmt: skip
        return
    built = reference_tree.build_tree(parent_list, selected_index, seq_lens, topk, depth, full_mask)
    outputs = (mask[: built.mask.numel()], positions, retrieve_index, next_token, next_sibling)
    for to, value in zip(outputs, built, strict=True):
        to.copy_(value)


def _verify_tree_greedy(predicts, accept_index, accept_token_num, candidates, retrieve_index, next_token, next_sibling, target_predict):
    batch, nodes = candidates.shape
    if has_kernel(candidates, torch.int64):
        call(
            "aerie_verify_tree_greedy", candidates.device, predicts.data_ptr(), predicts.numel(), accept_index.data_ptr(), accept_token_num.data_ptr(),
            candidates.data_ptr(), retrieve_index.data_ptr(), next_token.data_ptr(), next_sibling.data_ptr(), target_predict.data_ptr(), batch, nodes,
            accept_index.shape[1],
        )  # fmt: skip
        return
    taken = reference_tree.verify_tree_greedy(candidates, retrieve_index, next_token, next_sibling, target_predict, accept_index.shape[1])
    rows, width = taken.accept_index.long(), taken.accept_index >= 0
    predicts[rows[width]] = taken.predicts[rows[width]]
    accept_index.copy_(torch.where(width, taken.accept_index, accept_index))
    accept_token_num.copy_(taken.accept_token_num)


_define(
    "build_tree_(Tensor parent_list, Tensor selected_index, Tensor seq_lens, Tensor(a!) mask, Tensor(b!) positions, Tensor(c!) retrieve_index,"
    " Tensor(d!) next_token, Tensor(e!) next_sibling, int topk, int depth, bool full_mask) -> ()",
    _build_tree,
    lambda *_: None,
)
_define(
    "verify_tree_greedy_(Tensor(a!) predicts, Tensor(b!) accept_index, Tensor(c!) accept_token_num, Tensor candidates, Tensor retrieve_index,"
    " Tensor next_token, Tensor next_sibling, Tensor target_predict) -> ()",
    _verify_tree_greedy,
    lambda *_: None,
)


def build_tree_into(
    parent_list: Tensor, selected_index: Tensor, seq_lens: Tensor, mask: Tensor, positions: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor, topk: int, depth: int, full_mask: bool = True,
) -> None:  # fmt: skip
    """build_tree() into buffers that are there (a CUDA graph's), as SGLang's op does: the prefix part of a full mask is the caller's and stays as it is."""
    checks.build_tree(parent_list, selected_index, seq_lens, mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling, topk, depth)
    OPS.build_tree_(
        parent_list, selected_index, seq_lens, mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling, topk, depth, full_mask
    )


def build_tree(
    parent_list: Tensor, selected_index: Tensor, seq_lens: Tensor, topk: int, depth: int, full_mask: bool = True, seq_lens_sum: int | None = None
) -> reference_tree.Tree:
    """Attention mask, positions and child links of a batch of draft trees: reference_tree.build_tree(), which says the shapes.

    seq_lens_sum: sum of seq_lens, to save the device synchronisation that finds it. Raises ValueError in one sentence.
    """
    checks.matrix("selected_index", selected_index, (torch.int64,))
    batch, nodes, device = len(selected_index), selected_index.shape[1] + 1, selected_index.device
    if full_mask and seq_lens_sum is None:
        seq_lens_sum = int(seq_lens.sum())
    cells = nodes * nodes * batch + (seq_lens_sum * nodes if full_mask else 0)
    mask = torch.ones(cells, dtype=torch.bool, device=device)
    positions = torch.empty(batch * nodes, dtype=torch.int64, device=device)
    links = torch.empty(3, batch, nodes, dtype=torch.int64, device=device)
    build_tree_into(parent_list, selected_index, seq_lens, mask, positions, *links, topk, depth, full_mask)
    return reference_tree.Tree(mask, positions, *links)


def verify_tree_greedy_into(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor, target_predict: Tensor,
) -> None:  # fmt: skip
    """verify_tree_greedy() into buffers that are there; what is not accepted stays as it is, as in SGLang's op."""
    checks.verify_tree(predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict)
    OPS.verify_tree_greedy_(
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict
    )


def verify_tree_greedy(
    candidates: Tensor, retrieve_index: Tensor, retrieve_next_token: Tensor, retrieve_next_sibling: Tensor, target_predict: Tensor, accept_width: int
) -> reference_tree.Accepted:
    """The longest path that is the target's own greedy text: reference_tree.verify_tree_greedy(), which says the shapes. Raises ValueError in one sentence."""
    checks.matrix("candidates", candidates, (torch.int64,))
    if accept_width < 1:
        raise ValueError(f"accept_width = {accept_width} must be 1 or more: the root is always accepted")
    batch, device = len(candidates), candidates.device
    predicts = torch.zeros(candidates.numel(), dtype=torch.int32, device=device)
    accept_index = torch.full((batch, accept_width), -1, dtype=torch.int32, device=device)
    accept_token_num = torch.empty(batch, dtype=torch.int32, device=device)
    verify_tree_greedy_into(predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict)
    return reference_tree.Accepted(predicts, accept_index, accept_token_num)


# --- 5. rows in fp8 ---------------------------------------------------------------------------------------------------------------------------------


def _quantize_rows_fp8(x):
    if not has_kernel(x, torch.bfloat16):
        return reference.quantize_rows_fp8(x)
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(len(x), dtype=torch.float32, device=x.device)
    call("aerie_quantize_rows_fp8", x.device, x.data_ptr(), x.stride(0), *x.shape, q.data_ptr(), scale.data_ptr())
    return q, scale


def _dequantize_rows_fp8(q, scale, dtype):
    if not has_kernel(q, torch.float8_e4m3fn) or dtype != torch.bfloat16:
        return reference.dequantize_rows_fp8(q, scale, dtype)
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    call("aerie_dequantize_rows_fp8", q.device, q.data_ptr(), q.stride(0), scale.data_ptr(), *q.shape, out.data_ptr())
    return out


_define(
    "quantize_rows_fp8(Tensor x) -> (Tensor, Tensor)",
    _quantize_rows_fp8,
    lambda x: (x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[0], dtype=torch.float32)),
)
_define(
    "dequantize_rows_fp8(Tensor q, Tensor scale, ScalarType dtype) -> Tensor",
    _dequantize_rows_fp8,
    lambda q, scale, dtype: q.new_empty(q.shape, dtype=dtype),
)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[N, H] float -> e4m3 [N, H] and scale [N] float32 with x ~ e4m3 * scale; a row with a NaN or an infinity gets scale NaN. Raises ValueError."""
    checks.quantize(x)
    return OPS.quantize_rows_fp8(x.detach())


def dequantize_rows_fp8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """e4m3 [N, H] * scale [N] -> [N, H] in bfloat16, float16 or float32. Raises ValueError in one sentence."""
    checks.dequantize(q, scale, dtype)
    return OPS.dequantize_rows_fp8(q, scale, dtype)
