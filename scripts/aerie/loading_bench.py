"""What reading the store costs the trainer once it runs: the same steps with batches from disk (page cache warm) and with batches that are on the device."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .batches import Batch, Mover, Reader
from .config import Train
from .optimizer import Optimizer
from .ops import drafter_ops
from .store import Store, StoreWriter
from .train_bench import SIZES, Size, make_drafter, make_fixed, make_samples
from .unroll import Rope, unroll

SETS = 6  # different batches; each is read again in every round


def write_store(folder: Path, size: Size, share: float, dtype: torch.dtype, fp8: bool, device: torch.device) -> Store:
    """SETS batches' documents in a store, each document a sample."""
    identity = {"hidden_size": size.hidden, "dtype": "fp8" if fp8 else str(dtype)[6:], "aux_layer_ids": [1, 2, 3]}
    writer = StoreWriter(folder, identity)
    for seed in range(SETS):
        for number, sample in enumerate(make_samples(size, share, dtype, seed, device)):
            aux, final = sample.aux, sample.final.new_zeros(size.tokens, size.hidden)
            final[sample.final_rows.to(device)] = sample.final
            scales: tuple[Any, Any] = (None, None)
            if fp8:
                aux, aux_scale = drafter_ops.quantize_rows_fp8(aux.view(3 * size.tokens, size.hidden))
                final, final_scale = drafter_ops.quantize_rows_fp8(final)
                aux, scales = aux.view(size.tokens, -1), (aux_scale.view(size.tokens, 3).cpu(), final_scale.cpu())
            writer.add(f"{seed:08x}{number:08x}", sample.input_ids, sample.loss_mask, aux, final, aux_scale=scales[0], final_scale=scales[1])
    writer.close()
    return Store.open(folder)


def measure_loading(name: str, share: float, steps: int, device: torch.device, dtype: torch.dtype, fast: bool, stored: str, rounds: int, scratch: str | None) -> dict[str, Any]:
    """Milliseconds of a step from disk and resident, over `rounds` rounds of SETS steps after one that does not count, and what loading adds to a step."""
    size, cuda = SIZES[name], device.type == "cuda"
    drafter, fixed = make_drafter(size, dtype, device, fast), make_fixed(size, steps, dtype, device)
    optimizer, rope = Optimizer(drafter, Train(lr=1e-5)), Rope(drafter, device, dtype)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        unroll(drafter, batch, fixed, rope, float(batch.counts[0]))[0].backward()
        optimizer.step(1e-5)

    def timed(batches: Any, move: Any = lambda batch: batch) -> float:
        """Seconds of a step, the first SETS left out: a run waits for its first batch once, not once in 18 steps."""
        before = None
        started = 0.0
        for count, batch in enumerate(batches, 1):
            step(move(batch))
            if cuda:  # as the trainer: the host is a step ahead
                if before is not None:
                    before.synchronize()
                before = torch.cuda.Event()
                before.record()
            if count == SETS:
                if cuda:
                    torch.cuda.synchronize()
                started = time.perf_counter()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / (count - SETS)

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        store = write_store(Path(folder) / "store", size, share, dtype, stored == "fp8", device)
        plan = [[size.documents * place + number for number in range(size.documents)] for place in range(SETS)]
        reader = Reader(store, steps, 0, dtype, pin=cuda)
        resident = [batch.to(device, dtype) for batch in reader.read(plan)]
        there = timed(resident * (rounds + 1))
        read = timed(reader.read(plan * (rounds + 1)), Mover(device, dtype))
        started = time.perf_counter()
        alone = sum(1 for _ in reader.read(plan * rounds)) / (time.perf_counter() - started)  # nobody trains beside it
    return {
        "size": name, "stored": stored, "step_ms": 1e3 * read, "resident_ms": 1e3 * there, "share": read / there - 1, "batches_s_alone": alone, "bytes": store.bytes // SETS,
    }  # fmt: skip
