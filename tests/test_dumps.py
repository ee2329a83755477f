"""Reading and checking one dump: each kind of damage is named with its place."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aerie.dumps import DTYPE_NAMES, DumpError, check_dump, first_bad_row, read_dump, read_error

RID = "aerie.t.0123456789abcdef.00000001.6"
IDENTITY = {"aux_layer_ids": [1, 2, 3], "capture_points": [2, 3, 4], "hidden_size": 16, "logits": {}}


def write(path, dtype=torch.float32, change=lambda tensors, metadata: None):
    torch.manual_seed(0)
    tensors = {"input_ids": torch.arange(6, dtype=torch.int32)}
    for name in ("aux_0", "aux_1", "aux_2", "final"):
        tensors[name] = torch.randn(6, 16).to(dtype)
        if dtype == torch.float8_e4m3fn:
            tensors[f"{name}_scale"] = torch.rand(6) + 0.5
    metadata = {
        "kind": "aerie-dump", "format": "1", "rid": RID, "aux_layer_ids": "[1, 2, 3]", "capture_points": "[2, 3, 4]", "normed": "true", "logits": "{}",
        "rows": "6", "dtype": DTYPE_NAMES[dtype],
    }  # fmt: skip
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.mark.parametrize("dtype, name", [(torch.float32, "float32"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16"), (torch.float8_e4m3fn, "fp8")])
def test_a_good_dump_passes(tmp_path, dtype, name):
    dump = read_dump(write(tmp_path / "d", dtype))
    check_dump(dump, RID, np.arange(6, dtype=np.int32))
    assert dump.identity() == {**IDENTITY, "dtype": name} and len(dump.aux) == 3 and len(dump.aux_scale) == (3 if name == "fp8" else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_not_finite_is_found_in_every_dtype(dtype):
    """Against torch.isfinite on float32, for the largest finite value and everything beyond it."""
    largest = torch.finfo(dtype).max
    states = torch.tensor([[0.0, 1.0], [-largest, largest], [1.0, -0.0]]).to(dtype)
    assert first_bad_row(states) is None
    for bad in (float("nan"), float("inf"), -float("inf")):
        for row in range(3):
            damaged = states.clone()
            damaged[row, 1] = bad  # e4m3 has no Inf: torch makes it NaN or the largest value
            expected = None if torch.isfinite(damaged.float()).all() else row
            assert first_bad_row(damaged) == expected


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda t, m: t["aux_2"][4].fill_(float("nan")), "aux_2 holds a value that is not finite in row 4"),
        (lambda t, m: t["final"][5, 3:4].fill_(float("inf")), "final holds a value that is not finite in row 5"),
        (lambda t, m: t["input_ids"][2:3].fill_(9), "row 2 is token 9, sent was 2"),
        (lambda t, m: t.update({name: part[:5].clone() for name, part in t.items()}), "5 rows for 6 tokens"),
        (lambda t, m: t.update(aux_1=t["aux_1"][:5].clone()), "aux_1"),
        (lambda t, m: m.update(rid=RID.replace("aerie.t", "aerie.other")), "aerie.other"),
        (lambda t, m: m.update(normed="false"), "normed"),
        (lambda t, m: m.update(kind="other"), "kind"),
        (lambda t, m: m.pop("aux_layer_ids"), "aux_layer_ids"),
        (lambda t, m: t.pop("final"), "holds"),
        (lambda t, m: t.update(final=t["final"].double()), "float64"),
    ],
)  # fmt: skip
def test_each_damage_is_named(tmp_path, change, words):
    path = write(tmp_path / "d", change=change)
    with pytest.raises(DumpError, match=words.replace("[", r"\[")):
        dump = read_dump(path)
        check_dump(dump, RID, np.arange(6, dtype=np.int32))
        dump.identity()
        raise AssertionError("the damage was not found")


def test_a_scale_that_is_not_finite_is_found(tmp_path):
    path = write(tmp_path / "d", torch.float8_e4m3fn, lambda t, m: t["aux_1_scale"][3:4].fill_(float("nan")))
    with pytest.raises(DumpError, match="aux_1 holds a value that is not finite in row 3"):
        check_dump(read_dump(path), RID, np.arange(6, dtype=np.int32))


def test_a_torn_file_is_refused(tmp_path):
    path = write(tmp_path / "d")
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(DumpError, match="whole"):
        read_dump(path)


def test_error_file(tmp_path):
    path = tmp_path / f"{RID}.error"
    assert read_error(tmp_path, RID) is None
    path.write_text(json.dumps({"rid": RID, "reason": "no room", "rows": 3}))
    assert read_error(tmp_path, RID) == "no room"
    path.write_text("{")
    assert "unreadable" in read_error(tmp_path, RID)
