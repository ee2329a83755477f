"""Write a store's samples as the per-sample files that other EAGLE-3 trainers read.

specforge: rows_<a>-<b>/data_<i>.ckpt, torch.save of a dict: input_ids [T] int64, loss_mask [T] int64, hidden_state [1, T, H], aux_hidden_state [1, T, 3H]
(scripts/prepare_hidden_states.py and OfflineEagle3Dataset there). speculators: hs_<i>.safetensors: token_ids [T] int64, hidden_states [T, 4, H], `final` last.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Callable

import torch
from safetensors.torch import save_file

from .errors import UserError
from .samples import settle
from .store import Store, StoredSample

FORMATS = ("specforge", "speculators")
GROUP = 2000  # files a folder


def whole_final(sample: StoredSample, dtype: torch.dtype) -> torch.Tensor:
    """[T, H]: `final` in its rows, zeros where the store keeps none."""
    full = torch.zeros(len(sample.input_ids), sample.final.shape[1], dtype=dtype)
    full[sample.final_rows] = sample.final_float(dtype)
    return full


def supervised(sample: StoredSample) -> torch.Tensor:
    """[T] int64: 1 at t where token[t+1] and token[t+2] are the assistant's, the predictions that serving asks for; each of them has its final[t+1]."""
    mask = sample.loss_mask.bool()
    result = torch.zeros(len(mask), dtype=torch.int64)
    result[:-2] = (mask[1:-1] & mask[2:]).to(torch.int64)
    return result


def write_specforge(sample: StoredSample, number: int, out: Path, dtype: torch.dtype) -> Path:
    """One `.ckpt`. Its trainer reads loss_mask[t] as 'the prediction made at t, with final[t+1] as its label, counts'."""
    start = number // GROUP * GROUP
    path = out / f"rows_{start}-{start + GROUP}" / f"data_{number}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "input_ids": sample.input_ids.to(torch.int64), "loss_mask": supervised(sample),
        "hidden_state": whole_final(sample, dtype).unsqueeze(0), "aux_hidden_state": sample.aux_float(dtype).clone().unsqueeze(0),
    }  # fmt: skip
    temporary = path.with_suffix(".tmp")
    torch.save(content, temporary)
    os.replace(temporary, path)
    return path


def write_speculators(sample: StoredSample, number: int, out: Path, dtype: torch.dtype) -> Path:
    """One `hs_<i>.safetensors`: the auxiliary layers in rising order, then the state after the final norm."""
    path = out / f"hs_{number}.safetensors"
    rows = len(sample.input_ids)
    aux = sample.aux_float(dtype).view(rows, -1, sample.final.shape[1])
    states = torch.cat([aux, whole_final(sample, dtype).unsqueeze(1)], 1)
    temporary = path.with_suffix(".tmp")
    save_file({"token_ids": sample.input_ids.to(torch.int64), "hidden_states": states}, temporary)
    settle(temporary)
    os.replace(temporary, path)
    return path


def export(store: Store, kind: str, out: Path, heldout: bool = False, progress: Callable[[int], None] = lambda count: None) -> int:
    """Write all training samples (or the held-out ones) in the store's order; returns how many. Raises UserError when the store lacks what the format needs."""
    if kind == "speculators" and not store.manifest.get("all_final_rows"):
        raise UserError(
            f"the store in {store.path} keeps `final` only where it is supervised, and speculators' files carry no mask; extract with "
            "extract.all_final_rows = true into another run"
        )
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; name a new folder")
    stored = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.bfloat16}[store.manifest["dtype"]]
    write = {"specforge": write_specforge, "speculators": write_speculators}[kind]
    out.mkdir(parents=True, exist_ok=True)
    number = 0
    for index in range(len(store)):
        if bool(store.heldout[index]) == heldout:
            write(store.get(index), number, out, stored)
            number += 1
            progress(number)
    return number
