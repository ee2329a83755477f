"""A run with a synthetic store on a tiny target, for tests that call scripts/03_train.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
from aerie.config import Config
from aerie.identity import model_hash, tokenizer_hash
from aerie.ports import free_port
from aerie.rid import sample_id
from aerie.store import StoreWriter
from aerie.target_weights import TargetWeights
from aerie.vocab import write_vocab_map

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "03_train.py"


def torchrun(processes: int, words: Sequence[str]) -> list[str]:
    """The command of a torchrun of one's own: a Python script (`words`: it and its arguments) in so many processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-port", str(free_port()), "--", *words]


def write_run(config: Config, samples: int = 24, heldout: int = 6, length: int = 24, seed: int = 0, learnable: bool = True, bad: int = 0, draft_vocab: int = 128) -> None:
    """Random states; with `learnable` the text repeats a few tokens and the final states point at the next one, so that a drafter can learn it."""
    target = TargetWeights(config.model_path)
    hidden, vocab, layers = target.config["hidden_size"], target.config["vocab_size"], len(config.target.aux_layer_ids)
    head = target.lm_head().float()
    identity = {
        "model_path": config.model_path, "model_hash": model_hash(config.model_path), "tokenizer_hash": tokenizer_hash(config.model_path),
        "aux_layer_ids": config.target.aux_layer_ids, "capture_points": [i + 1 for i in config.target.aux_layer_ids], "hidden_size": hidden,
        "dtype": "float32", "logits": {},
    }  # fmt: skip
    generator = np.random.Generator(np.random.PCG64(seed))
    cycle = generator.permutation(draft_vocab)[:16] if learnable else None
    writer = StoreWriter(config.run.store, identity, shard_bytes=1 << 20)
    for number in range(samples + heldout):
        count = length + number % 7
        if learnable:
            ids = cycle[(np.arange(count) + generator.integers(16)) % 16].astype(np.int32)
        else:
            ids = generator.integers(0, vocab, count, dtype=np.int32)
        mask = np.zeros(count, np.uint8)
        mask[6 : count - (number % 3)] = 1
        ids[0] = number % vocab  # no two samples are the same
        ids[1] = number // vocab
        aux = torch.from_numpy(generator.standard_normal((count, layers * hidden), dtype=np.float32))
        final = torch.from_numpy(generator.standard_normal((count, hidden), dtype=np.float32)) * 0.1
        final[:-1] += 8 * torch.nn.functional.normalize(head[torch.from_numpy(ids[1:].astype(np.int64))], dim=-1) * hidden**0.5 / 8
        if number < bad:
            aux[8, 3] = float("nan")
        writer.add(sample_id(ids, mask), ids, mask, aux, final, heldout=number >= samples)
    writer.close()
    write_vocab_map(
        config.run.data / "vocab_map.safetensors", np.arange(draft_vocab), vocab,
        {"tokenizer_hash": identity["tokenizer_hash"], "data_hash": "0", "coverage": "{}"},
    )  # fmt: skip


def train(config: Config, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run scripts/03_train.py on this config to its end."""
    command = [sys.executable, str(SCRIPT), "--config", str(config.path), "--run", config.run.name, *words]
    return subprocess.run(command, cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"} | (env or {}), capture_output=True, text=True, timeout=300, check=False)
