"""Finds and loads build/libaerie_drafter.so with ctypes and declares its C interface (src/aerie_drafter.h)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

PATH = Path(__file__).resolve().parent / "build" / "libaerie_drafter.so"
ABI = 6  # AERIE_ABI of src/aerie_drafter.h

P, I, L, F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SIGNATURES: dict[str, list] = {
    # draft, draft stride, target, target stride, lse, top, weights, rows, N, M, Vd, renormalize, loss, match, accept, in_vocab, grad, grad stride
    "aerie_soft_target_ce": [P, L, P, L, P, P, P, P, L, L, L, I, P, P, P, P, P, L],
    "aerie_scale_rows": [P, L, L, L, P],  # grad, stride, N, V, scale
    "aerie_online_update": [P, L, L, L, L, P, P, P],  # chunk, stride, N, C, start, max, sum, argmax
    # ids, ids are 64 bit, table, stride, V, state, stride, embed weight, state weight, weights are float32, N, H, eps, out
    "aerie_drafter_input": [P, I, P, L, L, P, L, P, P, I, L, L, F, P],
    # grad, stride, ids, 64 bit, table, stride, V, state, stride, two weights, float32, N, H, eps, d rows or null, d state, two d weights, sums [blocks, 2, H], blocks
    "aerie_drafter_input_backward": [P, L, P, I, P, L, L, P, L, P, P, I, L, L, F, P, P, P, P, P, I],
    # logits, float32, stride, d2t, N, V, k, log-probabilities, ids, probabilities instead, positions or null, tokens or null, their stride
    "aerie_draft_topk": [P, I, L, P, L, L, I, P, P, I, P, P, L],
    # parent list, stride, columns, selected, stride, lengths, 64 bit, mask, cells, positions, index, next token, next sibling, N, topk, depth, nodes, full
    "aerie_build_tree": [P, L, L, P, L, P, I, P, L, P, P, P, P, L, I, I, I, I],
    # predicts, cells, accept index, accept count, candidates, index, next token, next sibling, target, N, nodes, width
    "aerie_verify_tree_greedy": [P, L, P, P, P, P, P, P, P, L, I, I],
    "aerie_quantize_rows_fp8": [P, L, L, L, P, P],  # x, stride, N, H, q, scale
    "aerie_dequantize_rows_fp8": [P, L, P, L, L, P],  # q, stride, scale, N, H, out
}

# Ops with several kernels, in the order of the header's numbers, and the kernels by number. The usual choice goes by size; for the others a number is 0.
VARIANTS: dict[str, list[str]] = {
    "soft_target": ["128 x 1", "128 x 2", "128 x 4", "128 x 8", "two passes"],  # threads x blocks a row
    "online": ["128 threads, 4 loads", "256 threads, 8 kept"],
    "drafter_input_backward": ["a side a block", "both sides"],
    "dequantize": ["128 threads a row", "256 threads"],
    "topk": ["pulled", "pushed"],  # k = 1
    "topk_ranked": ["ranked", "filtered"],  # k > 1
    "build_tree": ["32 warps", "4 warps, each by itself"],
}
PREFER = 100  # AERIE_PREFER


def status() -> str:
    """One line: loaded, or why the references run instead."""
    if os.environ.get("AERIE_DRAFTER_OPS") == "reference":
        return "AERIE_DRAFTER_OPS=reference: the references run"
    if not torch.cuda.is_available():
        return "no CUDA device: the references run"
    if not PATH.is_file():
        return f"{PATH} is missing (make cuda builds it): the references run"
    return "loaded" if load() is not None else f"{PATH} does not fit this source or this GPU: build it again with make cuda; the references run"


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None where there is none, no GPU, or it was built from another source or for other GPUs."""
    if os.environ.get("AERIE_DRAFTER_OPS") == "reference" or not torch.cuda.is_available() or not PATH.is_file():
        return None
    library = ctypes.CDLL(str(PATH))
    library.aerie_error.restype = ctypes.c_char_p
    library.aerie_error.argtypes = [I]
    library.aerie_backward_blocks.argtypes = [L, L]  # N, H
    if library.aerie_abi() != ABI or library.aerie_prepare() != 0:
        return None
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = [*arguments, P]  # the stream comes last
        function.restype = I
    library.aerie_choose.argtypes = [I, I]
    if wish := os.environ.get("AERIE_DRAFTER_VARIANT"):  # every op takes its kernel of this number where it has one that fits: for the tests
        for op, names in enumerate(VARIANTS.values()):
            library.aerie_choose(op, PREFER + int(wish) % len(names))
    return library


@contextlib.contextmanager
def chosen(op: str, number: int) -> Iterator[None]:
    """Inside, `op` (of VARIANTS) runs its kernel of that number; a size that it does not take is a RuntimeError. Raises ValueError for a number that is none."""
    library, which = load(), list(VARIANTS).index(op)
    if library.aerie_choose(which, number) != 0:
        raise ValueError(f"{op} has no kernel of number {number}; it has 0 to {len(VARIANTS[op]) - 1}")
    try:
        yield
    finally:
        library.aerie_choose(which, -1)


def has_kernel(x: Tensor, *dtypes: torch.dtype) -> bool:
    """Is there a kernel for this tensor: on a CUDA device, of one of these dtypes, with the library loaded? Else the reference runs."""
    return x.is_cuda and x.dtype in dtypes and load() is not None


def pointer(x: Tensor | None) -> int | None:
    """Address of the first element, null for None."""
    return None if x is None else x.data_ptr()


def call(name: str, device: torch.device, *arguments: object) -> None:
    """Launch on the device's current stream; a CUDA error becomes a RuntimeError that names the op."""
    library = load()
    stream = torch.cuda.current_stream(device).cuda_stream
    if device.index == torch.cuda.current_device():
        code = getattr(library, name)(*arguments, stream)
    else:
        with torch.cuda.device(device):
            code = getattr(library, name)(*arguments, stream)
    if code != 0:
        raise RuntimeError(f"{name} failed on {device}: {library.aerie_error(code).decode()} (CUDA error {code})")
