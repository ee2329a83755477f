"""Synthetic sizes for the trainer's benchmarks: random targets, drafters and documents, no store and no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .batches import Batch, build_batch
from .drafter import Drafter, DrafterShape
from .ttt_loss import TargetHead
from .unroll import Fixed


@dataclass(frozen=True)
class Size:
    """One benchmark: the drafter, the documents of a step."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft: int
    documents: int
    tokens: int  # of each document
    latent: tuple[int, ...] = ()  # MLA: q_lora_rank, kv_lora_rank, nope, rope and value dimensions of a head


SIZES = {
    "S": Size(4096, 14336, 32, 8, 128, 128_256, 32_000, 4, 2048),
    "K": Size(7168, 12288, 64, 64, 128, 163_840, 32_000, 1, 4096),
    "K8": Size(7168, 12288, 64, 64, 128, 163_840, 32_000, 2, 4096),
    "S16": Size(4096, 14336, 32, 8, 128, 128_256, 32_000, 1, 16_384),
    "K16": Size(7168, 12288, 64, 64, 128, 163_840, 32_000, 1, 16_384),
    "M": Size(7168, 12288, 64, 64, 192, 163_840, 32_000, 1, 4096, (1536, 512, 128, 64, 128)),  # K with the latent attention of Kimi and DeepSeek
    "E": Size(4096, 14336, 32, 8, 128, 128_256, 32_000, 1, 2048),  # as much of S as the plain version fits on one GPU
    "demo": Size(576, 1536, 9, 3, 64, 49_152, 8192, 8, 128),
    "tiny": Size(64, 128, 4, 2, 16, 512, 256, 2, 96),
    "tinyM": Size(64, 128, 4, 4, 24, 512, 256, 2, 96, (48, 32, 16, 8, 16)),
}


def weight_bytes(size: Size) -> int:
    """Bytes of a size's float32 weights with gradients and two moments, and of the target's embedding and head; latent attention as if it were not."""
    attention = size.hidden * size.head_dim * (3 * size.heads + 4 * size.kv_heads)  # queries and states of twice the width, one output
    drafter = 3 * size.hidden**2 + attention + 3 * size.hidden * size.inner + size.draft * size.hidden
    return 16 * drafter + 8 * size.vocab * size.hidden


@dataclass
class Synthetic:
    """Quacks like store.StoredSample."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor
    final_rows: torch.Tensor

    def aux_float(self, dtype: torch.dtype) -> torch.Tensor:
        return self.aux.to(dtype)

    def final_float(self, dtype: torch.dtype) -> torch.Tensor:
        return self.final.to(dtype)


def answer_mask(length: int, share: float, generator: np.random.Generator) -> np.ndarray:
    """A mask of chat turns, prompt and answer in turn: exactly `share` of the tokens are answers, in runs of 64 to 512 tokens (the last one shorter)."""
    answers: list[int] = []
    left = round(share * length)
    while left > 0:
        answers.append(min(int(generator.integers(64, 513)), left))
        left -= answers[-1]
    cuts = np.sort(generator.integers(0, length - sum(answers) + 1, len(answers) - 1))
    prompts = np.diff(np.concatenate([[0], cuts, [length - sum(answers)]]))
    return np.concatenate([np.concatenate([np.zeros(prompt, np.uint8), np.ones(answer, np.uint8)]) for prompt, answer in zip(prompts, answers)])


def make_samples(size: Size, share: float, dtype: torch.dtype, seed: int, device: torch.device | str = "cpu") -> list[Synthetic]:
    """Documents of random ids and states; the states are drawn, and stay, on the device."""
    generator = np.random.Generator(np.random.PCG64(seed))
    torch.manual_seed(seed)
    samples = []
    for number in range(size.documents):
        mask = answer_mask(size.tokens, share, generator)
        rows = np.flatnonzero(mask[1:-1] & mask[2:]) + 1
        samples.append(Synthetic(
            f"{number:016x}", torch.from_numpy(generator.integers(0, size.vocab, size.tokens, dtype=np.int32)), torch.from_numpy(mask),
            torch.randn(size.tokens, 3 * size.hidden, device=device).to(dtype), torch.randn(len(rows), size.hidden, device=device).to(dtype), torch.from_numpy(rows),
        ))  # fmt: skip
    return samples


def make_batch(size: Size, share: float, steps: int, dtype: torch.dtype, seed: int, device: torch.device | str = "cpu") -> Batch:
    """All documents of make_samples() in one batch."""
    batch = build_batch(make_samples(size, share, dtype, seed, device), steps, dtype)
    assert batch is not None
    return batch


def make_fixed(size: Size, steps: int, dtype: torch.dtype, device: torch.device) -> Fixed:
    """A random target: embedding, head, and the draft vocabulary spread over its ids."""
    generator = torch.Generator(device=device).manual_seed(1)
    head = torch.empty(size.vocab, size.hidden, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
    embedding = torch.empty(size.vocab, size.hidden, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)
    ids = torch.linspace(0, size.vocab - 1, size.draft, device=device).long()
    to_draft = torch.full((size.vocab,), -1, device=device)
    to_draft[ids] = torch.arange(size.draft, device=device)
    return Fixed(embedding, TargetHead(head, head[ids].contiguous(), ids, to_draft), steps, 0.8)


def make_drafter(size: Size, dtype: torch.dtype, device: torch.device, fast: bool) -> Drafter:
    """Float32 masters, compute in `dtype`."""
    q_rank, kv_rank, nope, rope, value = size.latent or (0,) * 5
    shape = DrafterShape(
        size.hidden, size.hidden, size.inner, size.heads, size.kv_heads, size.head_dim, size.vocab, size.draft, 3, 1e-5, size.tokens + 64,
        {"rope_type": "default", "rope_theta": 500000.0}, arch="mla" if size.latent else "llama", q_lora_rank=q_rank, kv_lora_rank=kv_rank, qk_nope_head_dim=nope,
        qk_rope_head_dim=rope, v_head_dim=value,
    )  # fmt: skip
    drafter = Drafter(shape, device=device)
    with torch.no_grad():
        generator = torch.Generator(device=device).manual_seed(0)
        for name, parameter in drafter.named_parameters():
            if name in Drafter.MATRICES:
                parameter.normal_(0, 0.02, generator=generator)
    drafter.set_compute(dtype)
    drafter.fast = fast
    return drafter
