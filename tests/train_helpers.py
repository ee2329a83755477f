"""Random drafters, targets and samples for the tests of training."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from aerie.drafter import Drafter, DrafterShape  # noqa: E402
from aerie.ttt_loss import TargetHead  # noqa: E402
from aerie.unroll import Fixed  # noqa: E402
from train_reference import Numbers  # noqa: E402

HIDDEN, VOCAB, DRAFT = 32, 97, 40


@dataclass
class FakeSample:
    """Quacks like store.StoredSample; final_all is what the target would have for every row."""

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    final_all: torch.Tensor
    heldout: bool = False
    aux_scale = final_scale = None  # not fp8

    @property
    def final_rows(self) -> torch.Tensor:
        mask = self.loss_mask.numpy().astype(bool)
        return torch.tensor([r for r in range(1, len(mask) - 1) if mask[r] and mask[r + 1]], dtype=torch.int64)

    @property
    def final(self) -> torch.Tensor:
        return self.final_all[self.final_rows]

    def aux_float(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.aux.to(dtype)

    def final_float(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.final.to(dtype)


class FakeStore:
    """A list of samples with the store's interface."""

    def __init__(self, samples: list[FakeSample]):
        self.samples = samples
        self.ids = [sample.id for sample in samples]
        self.lengths = np.array([len(sample.input_ids) for sample in samples])
        self.heldout = np.array([sample.heldout for sample in samples])

    def __len__(self) -> int:
        return len(self.samples)

    def get(self, index: int) -> FakeSample:
        return self.samples[index]


MLA = {"arch": "mla", "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 12, "num_key_value_heads": 4}

YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
}  # fmt: skip


def make_shape(**changes) -> DrafterShape:
    """A tiny drafter's shape with grouped queries."""
    values = dict(
        hidden_size=HIDDEN, target_hidden_size=HIDDEN, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=VOCAB,
        draft_vocab_size=DRAFT, num_aux=3, rms_norm_eps=1e-5, max_position_embeddings=4096, rope={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return DrafterShape(**{**values, **changes})


def numbers_of(shape: DrafterShape) -> Numbers:
    latent = (shape.q_lora_rank, shape.kv_lora_rank, shape.qk_nope_head_dim, shape.qk_rope_head_dim, shape.v_head_dim) if shape.arch == "mla" else None
    options = {name for name in ("fc_norm", "norm_before_fc", "norm_output") if getattr(shape, name)}
    return Numbers(shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim, shape.rms_norm_eps, shape.rope["rope_theta"], shape.num_aux, options, latent, shape.rope if shape.rope["rope_type"] == "yarn" else None)


def make_drafter(shape: DrafterShape, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 0.3) -> Drafter:
    drafter = Drafter(shape, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    drafter.reset(generator, std)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name not in Drafter.MATRICES:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    drafter.set_compute(dtype)
    return drafter


def make_fixed(shape: DrafterShape, steps: int, decay: float = 0.8, seed: int = 1, dtype: torch.dtype = torch.float32) -> Fixed:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator).to(dtype)
    head = (0.3 * torch.randn(shape.vocab_size, shape.target_hidden_size, generator=generator)).to(dtype)
    ids = torch.sort(torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size]).values
    to_draft = torch.full((shape.vocab_size,), -1)
    to_draft[ids] = torch.arange(len(ids))
    return Fixed(embedding, TargetHead(head, head[ids], ids, to_draft), steps, decay)


def make_sample(name: str, mask: list[int], shape: DrafterShape, seed: int, dtype: torch.dtype = torch.float32) -> FakeSample:
    """Random ids and states under the given mask."""
    generator = torch.Generator().manual_seed(seed)
    length = len(mask)
    return FakeSample(
        name, torch.randint(0, shape.vocab_size, (length,), generator=generator, dtype=torch.int32), torch.tensor(mask, dtype=torch.uint8),
        torch.randn(length, shape.num_aux * shape.target_hidden_size, generator=generator).to(dtype),
        torch.randn(length, shape.target_hidden_size, generator=generator).to(dtype),
    )  # fmt: skip
