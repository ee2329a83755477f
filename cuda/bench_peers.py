"""What others do for the same answers: PyTorch, and liger-kernel and sgl_kernel where they can be imported. For bench.py."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor
from torch.nn import functional

Work = Callable[..., Any]


def soft_target(draft: Tensor, target: Tensor, lse: Tensor, top: Tensor) -> tuple[Tensor, ...]:
    """Op 1 in PyTorch, gradient included."""
    q = draft.float().softmax(-1)
    p = (target.float() - lse.unsqueeze(-1)).exp()
    loss = -(p * draft.float().log_softmax(-1)).sum(-1)
    return loss, draft.argmax(-1) == top, torch.minimum(p, q).sum(-1), (p.sum(-1, keepdim=True) * q - p).to(draft.dtype)


def drafter_input(token: Tensor, table: Tensor, state: Tensor, weight: Tensor) -> Tensor:
    """Op 2 in PyTorch."""
    norm, hidden = functional.rms_norm, (state.shape[1],)
    return torch.cat([norm(table[token], hidden, weight, 1e-5), norm(state, hidden, weight, 1e-5)], -1)


def drafter_input_backward(token: Tensor, table: Tensor, state: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Op 2 in PyTorch with its backward."""
    leaf, gain = state.detach().requires_grad_(), weight.detach().requires_grad_()
    drafter_input(token, table, leaf, gain).backward(grad)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Op 5 in PyTorch."""
    scale = x.float().abs().amax(-1, keepdim=True) / 448
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def liger(say: Callable[[str], None]) -> dict[str, Work]:
    """liger-kernel's functions that come nearest, forward with backward where the op has a gradient. Empty where it cannot be imported."""
    try:
        from liger_kernel.ops.kl_div import LigerKLDivLossFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except Exception as exc:  # absent, or made for another PyTorch: the other rows are still wanted
        say(f"liger-kernel is not measured: {type(exc).__name__}: {str(exc)[:100]}")
        return {}

    def kl(draft: Tensor, target: Tensor, lse: Tensor, top: Tensor) -> Tensor:
        leaf = draft.detach().requires_grad_()
        loss = LigerKLDivLossFunction.apply(leaf.float().log_softmax(-1), target.float() - lse.unsqueeze(-1), "sum", True)
        loss.backward()
        return leaf.grad

    def norms(token: Tensor, table: Tensor, state: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([LigerRMSNormFunction.apply(x, weight, 1e-5) for x in (table[token], state)], -1)

    return {"soft_target": kl, "drafter_input": norms}


def sgl(say: Callable[[str], None]) -> dict[str, Work]:
    """sgl_kernel's ops of the same names. Empty where it cannot be imported."""
    try:
        import sgl_kernel

        return {
            "quantize": sgl_kernel.sgl_per_token_quant_fp8, "build_tree": sgl_kernel.build_tree_kernel_efficient, "verify_tree": sgl_kernel.verify_tree_greedy,
        }  # fmt: skip
    except Exception as exc:  # absent, or made for another PyTorch
        say(f"sgl_kernel is not measured: {type(exc).__name__}: {str(exc)[:100]}")
        return {}
