"""SGLang plugin: the served EAGLE-3 drafter calls Aerie's draft_topk, build_tree and verify_tree_greedy in place of SGLang's own. GPU only.

Off unless AERIE_SERVE_DRAFTER_OPS=1 (`serve.drafter_ops = true`). SGLang loads it through the entry-point group `sglang.srt.plugins` in its scheduler process,
before the worker of the drafter is made; no line of SGLang is changed. AERIE_ROOT is the checkout whose cuda/ holds the library. For SGLang 0.5.17 and 0.5.23.

    replaced in                     what                                                     by
    eagle_worker_v2                 draft_topk1_postprocess (chain: argmax, position + 1)    draft_topk, k = 1, the rest in the same launch
    eagle_worker_v2                 renorm_draft_probs + fast_topk (tree)                    draft_topk of the logits, no softmax over the vocabulary
    eagle_utils                     the tree build, verify_tree_greedy_func                  build_tree, verify_tree_greedy

What the kernels do not take (other dtypes, bit-packed masks, rejection sampling) goes to SGLang's own function, as before. The log says once for each kernel
that it is in use, and once for each that it was handed something it does not take.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, NamedTuple

import torch

logger = logging.getLogger(__name__)

SWITCH = "AERIE_SERVE_DRAFTER_OPS"
MAX_TOPK, MAX_NODES, MAX_RANKED = 32, 2048, 196608  # as in cuda/op_checks.py and cuda/drafter_ops.py
_said: set[str] = set()  # kernels that were called
_handed_over: set[str] = set()  # kernels that could not take what they got


class Logits(NamedTuple):
    """What stands in for the probabilities between renorm_draft_probs and fast_topk."""

    values: torch.Tensor  # [N, V]


def _library() -> ModuleType:
    """cuda/op_library.py of the checkout. SystemExit where it cannot run: a switch that is on must not be off in silence."""
    folder = str(Path(os.environ.get("AERIE_ROOT") or Path(__file__).resolve().parents[2]) / "cuda")
    if folder not in sys.path:
        sys.path.append(folder)
    import op_library

    if not op_library.PATH.is_file():
        raise SystemExit(f"{SWITCH}=1 but {op_library.PATH} is missing; build it with make cuda, or set serve.drafter_ops = false")
    try:
        abi = ctypes.CDLL(str(op_library.PATH)).aerie_abi()  # touches no GPU
    except (OSError, AttributeError) as exc:
        raise SystemExit(f"{SWITCH}=1 but {op_library.PATH} is no library of the drafter ops ({exc}); build it again with make cuda") from None
    if abi != op_library.ABI:
        raise SystemExit(f"{SWITCH}=1 but {op_library.PATH} was built from another version of cuda/ (its interface is {abi}, not {op_library.ABI}); build it again with make cuda")
    return op_library


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def _hand_over(kernel: str, *tensors: torch.Tensor) -> None:
    """Say once that SGLang's own function runs in place of `kernel`, and what it got."""
    if kernel not in _handed_over:
        _handed_over.add(kernel)
        got = ", ".join(f"{x.dtype} {list(x.shape)} on {x.device.type}".removeprefix("torch.") for x in tensors)
        logger.warning("Aerie: %s does not take this, SGLang's own function runs: %s", kernel, got)


def _call(name: str, device: torch.device, *arguments: object) -> None:
    import op_library  # the folder is on the path since install()

    if name not in _said:
        _said.add(name)
        if op_library.load() is None:
            raise RuntimeError(f"{SWITCH}=1 but the drafter ops do not load: {op_library.status()}")
        logger.info("Aerie: the drafter uses %s", name)
    op_library.call(name, device, *arguments)


def _topk(logits: torch.Tensor, k: int, positions: torch.Tensor | None, tokens: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [N, k] float32 and draft ids [N, k]; positions [N] += 1, tokens [N] (a column) = best id."""
    probabilities = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(logits.shape[0], k, dtype=torch.int64, device=logits.device)
    _call(
        "aerie_draft_topk", logits.device, logits.data_ptr(), logits.dtype == torch.float32, logits.stride(0), None, *logits.shape, k, probabilities.data_ptr(),
        ids.data_ptr(), True, None if positions is None else positions.data_ptr(), None if tokens is None else tokens.data_ptr(),
        0 if tokens is None else tokens.stride(0),
    )  # fmt: skip
    return probabilities, ids


def _takes_logits(logits: torch.Tensor, k: int) -> bool:
    fits = _on_gpu(logits) and logits.dtype in (torch.float32, torch.bfloat16) and logits.dim() == 2 and logits.stride(1) == 1
    return fits and 1 <= k <= min(MAX_TOPK, logits.shape[1]) and (k == 1 or logits.shape[1] <= MAX_RANKED)


def make_topk1(original: Callable) -> Callable:
    """For draft_topk1_postprocess."""

    def draft_topk1_postprocess(next_token_logits, positions, draft_tokens=None, draft_token_column=0):
        fits = positions.dtype == torch.int64 and positions.is_contiguous() and (draft_tokens is None or draft_tokens.dtype == torch.int64)
        if not (fits and _takes_logits(next_token_logits, 1)):
            _hand_over("aerie_draft_topk", next_token_logits, positions)
            return original(next_token_logits, positions, draft_tokens, draft_token_column)
        tokens = None if draft_tokens is None else draft_tokens[:, draft_token_column]
        return _topk(next_token_logits, 1, positions, tokens)

    return draft_topk1_postprocess


def make_renorm(original: Callable) -> Callable:
    """For renorm_draft_probs: without rejection sampling nobody but fast_topk reads the probabilities."""

    def renorm_draft_probs(next_token_logits, sampling_info, use_rejection_sampling):
        if use_rejection_sampling or not _takes_logits(next_token_logits, 1):
            _hand_over("aerie_draft_topk", next_token_logits)
            return original(next_token_logits, sampling_info, use_rejection_sampling)
        return Logits(next_token_logits)

    return renorm_draft_probs


def make_fast_topk(original: Callable) -> Callable:
    """For fast_topk."""

    def fast_topk(values, topk, dim):
        if not isinstance(values, Logits):
            return original(values, topk, dim)
        if not _takes_logits(values.values, topk):
            _hand_over("aerie_draft_topk", values.values)
            return original(torch.softmax(values.values, dim=-1), topk, dim)
        return _topk(values.values, topk, None, None)

    return fast_topk


def make_build_tree(original: Callable) -> Callable:
    """For build_tree_kernel_efficient_func (0.5.23) and sgl_build_tree_kernel_efficient (0.5.17): the same arguments in the same order."""

    def build_tree(
        parent_list, selected, seq_lens, mask, positions, retrieve_index, next_token, next_sibling, topk, depth, nodes, mask_mode
    ):  # fmt: skip
        int64 = all(x.dtype == torch.int64 for x in (parent_list, selected, positions, retrieve_index, next_token, next_sibling))
        # SGLang's own mask is bool, the buffer of its Triton attention backend uint8: a byte a cell, 0 or 1, either way. Bits (mask mode 2) are not taken.
        cells = mask.dtype in (torch.bool, torch.uint8)
        fits = int64 and cells and seq_lens.dtype in (torch.int64, torch.int32) and seq_lens.is_contiguous() and parent_list.dim() == 2
        rows = all(x.shape[1] < 2 or x.stride(1) == 1 for x in (parent_list, selected)) if fits else False
        if not (rows and _on_gpu(selected) and int(mask_mode) in (0, 1) and nodes <= MAX_NODES):
            _hand_over("aerie_build_tree", parent_list, selected, seq_lens, mask)
            return original(parent_list, selected, seq_lens, mask, positions, retrieve_index, next_token, next_sibling, topk, depth, nodes, mask_mode)
        _call(
            "aerie_build_tree", selected.device, parent_list.data_ptr(), parent_list.stride(0), parent_list.shape[1], selected.data_ptr(), selected.stride(0),
            seq_lens.data_ptr(), seq_lens.dtype == torch.int64, mask.data_ptr(), mask.numel(), positions.data_ptr(), retrieve_index.data_ptr(),
            next_token.data_ptr(), next_sibling.data_ptr(), seq_lens.numel(), topk, depth, nodes, int(mask_mode) == 0,
        )  # fmt: skip
        return None

    return build_tree


def make_verify(original: Callable) -> Callable:
    """For verify_tree_greedy_func."""

    def verify_tree_greedy_func(
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict, topk=-1
    ):  # fmt: skip
        inputs = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict)
        outputs = (predicts, accept_index, accept_token_num)
        fits = all(x.dtype == torch.int64 and x.is_contiguous() for x in inputs) and all(x.dtype == torch.int32 and x.is_contiguous() for x in outputs)
        if not (fits and _on_gpu(candidates) and candidates.shape[1] <= MAX_NODES):
            _hand_over("aerie_verify_tree_greedy", *outputs, *inputs)
            return original(*outputs, *inputs, topk)
        _call(
            "aerie_verify_tree_greedy", candidates.device, predicts.data_ptr(), predicts.numel(), accept_index.data_ptr(), accept_token_num.data_ptr(),
            *(x.data_ptr() for x in inputs), *candidates.shape, accept_index.shape[1],
        )  # fmt: skip
        return outputs

    return verify_tree_greedy_func


# module -> attribute -> maker. Of the tree build's two names each version has one.
TARGETS: dict[str, dict[str, Callable[[Callable], Callable]]] = {
    "eagle_worker_v2": {"draft_topk1_postprocess": make_topk1, "renorm_draft_probs": make_renorm, "fast_topk": make_fast_topk},
    "eagle_utils": {
        "build_tree_kernel_efficient_func": make_build_tree, "sgl_build_tree_kernel_efficient": make_build_tree, "verify_tree_greedy_func": make_verify,
    },
}  # fmt: skip
ONE_OF = {"build_tree_kernel_efficient_func", "sgl_build_tree_kernel_efficient"}


def patch(modules: dict[str, Any]) -> list[str]:
    """Replace the functions in these modules; SystemExit when one is not there (another SGLang). Returns what was replaced."""
    replaced = []
    for name, makers in TARGETS.items():
        for attribute, make in makers.items():
            original = getattr(modules[name], attribute, None)
            if original is not None:
                setattr(modules[name], attribute, make(original))
                replaced.append(attribute)
            elif attribute not in ONE_OF:
                raise SystemExit(f"{SWITCH}=1 but this SGLang has no {name}.{attribute}: serve.drafter_ops is for 0.5.17 and 0.5.23")
    if len(ONE_OF & set(replaced)) != 1:
        raise SystemExit(f"{SWITCH}=1 but this SGLang builds its trees elsewhere: serve.drafter_ops is for 0.5.17 and 0.5.23")
    return replaced


def install() -> None:
    """SGLang's plugin entry: nothing unless switched on, and only where the drafter runs."""
    if os.environ.get(SWITCH) != "1" or multiprocessing.parent_process() is None:
        return
    if not torch.version.cuda:
        raise SystemExit(f"{SWITCH}=1 needs a GPU: set serve.drafter_ops = false")
    _library()
    try:  # SGLang goes on without a plugin that raises an Exception, and says so in its log alone
        from sglang.srt.speculative import eagle_utils, eagle_worker_v2
    except Exception as exc:
        raise SystemExit(f"{SWITCH}=1 but the worker of this SGLang's drafter cannot be imported ({exc!r}): serve.drafter_ops is for 0.5.17 and 0.5.23") from exc

    replaced = patch({"eagle_worker_v2": eagle_worker_v2, "eagle_utils": eagle_utils})
    logger.info("Aerie: drafter ops replace %s", ", ".join(replaced))
