"""Reading and checking one dump: each kind of damage is named with its place."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest
import torch
from safetensors.torch import save
from hypothesis import given, settings
from hypothesis import strategies as st

from aerie.dump_file import Look, open_dump, rows_sum
from aerie.dumps import DTYPE_NAMES, DumpError, check_dump, first_bad_row, read_dump, read_error
from capture_fakes import load_hook

RID = "aerie.t.0123456789abcdef.00000001.6"
IDENTITY = {"aux_layer_ids": [1, 2, 3], "capture_points": [2, 3, 4], "hidden_size": 16, "logits": {}}


def naive_sum(tensor: torch.Tensor, first: int = 0) -> int:
    """The checksum by its definition, with Python's own numbers."""
    total = 0
    for place, row in enumerate(tensor):
        data = bytes(row.reshape(-1).view(torch.uint8).tolist())
        size = 4 if len(data) % 4 == 0 else 2 if len(data) % 2 == 0 else 1
        words = sum(int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size))
        total += (2 * (first + place) + 1) * (words % 2**32)
    return total % 2**64


def write(path, dtype=torch.float32, change=lambda tensors, metadata: None):
    """A dump, changed before its checksums are made: what a server would write that went wrong itself."""
    torch.manual_seed(0)
    tensors = {"input_ids": torch.arange(6, dtype=torch.int32)}
    for name in ("aux_0", "aux_1", "aux_2", "final"):
        tensors[name] = torch.randn(6, 16).to(dtype)
        if dtype == torch.float8_e4m3fn:
            tensors[f"{name}_scale"] = torch.rand(6) + 0.5
    metadata = {
        "kind": "aerie-dump", "format": "2", "rid": RID, "aux_layer_ids": "[1, 2, 3]", "capture_points": "[2, 3, 4]", "normed": "true", "logits": "{}",
        "rows": "6", "dtype": DTYPE_NAMES[dtype],
    }  # fmt: skip
    change(tensors, metadata)
    value = " ".join(f"{name}:{naive_sum(tensor):016x}" for name, tensor in tensors.items())
    plain = save(tensors, metadata | {"checksums": value + " header:00000000"})
    length = int.from_bytes(plain[:8], "little")
    bare = plain[8 : 8 + length].replace((value + " header:00000000").encode(), b"")
    path.write_bytes(plain.replace(b"header:00000000", f"header:{zlib.crc32(bare):08x}".encode(), 1))
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_every_flipped_byte_is_found(tmp_path, dtype):
    """Each byte of the file, wherever it lies: header, its length, metadata, padding, ids, states, scales. One bit, the sign of a byte, all bits."""
    path, other = write(tmp_path / "d", dtype), tmp_path / "flipped"
    data, ids = path.read_bytes(), np.arange(6, dtype=np.int32)
    for place in range(len(data)):
        mask = (0x01, 0x80, 0xFF, 0x20)[place % 4]
        other.write_bytes(data[:place] + bytes([data[place] ^ mask]) + data[place + 1 :])
        with pytest.raises(DumpError):
            check_dump(read_dump(other), RID, ids)
            raise AssertionError(f"byte {place} of {len(data)} changed unseen")
    other.write_bytes(data)
    check_dump(read_dump(other), RID, ids)


def test_a_flipped_byte_is_named_by_its_tensor(tmp_path):
    path = write(tmp_path / "d", torch.bfloat16)
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for name in ("input_ids", "aux_0", "aux_2", "final"):
        place = 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][1] - 2  # low byte of the last value: it stays finite
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DumpError, match=f"{name} is not as the server wrote it"):
            check_dump(read_dump(path), RID, np.arange(6, dtype=np.int32))


def test_rows_in_each_others_place_and_swapped_tensors_are_found(tmp_path):
    path = write(tmp_path / "d")
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    places = {name: [start + at for at in item["data_offsets"]] for name, item in json.loads(data[8:start]).items() if name != "__metadata__"}
    (a, a_end), (b, b_end) = places["aux_0"], places["aux_1"]
    swapped = bytearray(data)
    swapped[a:a_end], swapped[b:b_end] = data[b:b_end], data[a:a_end]
    rows = bytearray(data)
    rows[a : a + 64], rows[a + 64 : a + 128] = data[a + 64 : a + 128], data[a : a + 64]
    for damaged in (swapped, rows):
        path.write_bytes(damaged)
        with pytest.raises(DumpError, match="aux_0 is not as the server wrote it"):
            check_dump(read_dump(path), RID, np.arange(6, dtype=np.int32))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 40), st.integers(0, 70), st.sampled_from(list(DTYPE_NAMES)), st.integers(0, 2**22), st.randoms(use_true_random=False))
def test_the_checksum_is_that_of_the_server_and_of_its_definition(rows, width, dtype, first, random):
    """Both twins against Python's own numbers, whole and in pieces of any size and order; width 0: one value a row."""
    data = torch.tensor([random.randrange(256) for _ in range(rows * max(width, 1) * dtype.itemsize)], dtype=torch.uint8)
    tensor = data.view(dtype).view(rows, width) if width else data.view(dtype)
    wanted = naive_sum(tensor, first)
    assert rows_sum(data.view(rows, -1).numpy(), first) == wanted
    cut = random.randrange(rows + 1)
    hook, sums = load_hook(), np.zeros(rows, np.uint32)
    hook.add_words(hook.row_words(data.view(rows, -1).numpy()), sums)
    assert (hook.rows_sum(sums[cut:], first + cut) + hook.rows_sum(sums[:cut], first)) % 2**64 == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_blocks_are_summed_and_looked_at_in_any_order(tmp_path, dtype):
    """Planes side by side with zeros behind, as the store's writer shows them, in uneven blocks: the verdict is that of the whole file; one bad value in each is named."""
    for bad in (None, ("aux_1", 4), ("final", 0), ("aux_0", 5)):
        path = write(tmp_path / "d", dtype, lambda t, m, bad=bad: bad and t[bad[0]][bad[1], 3:4].fill_(float("nan")))
        dump = open_dump(path)
        look = Look(dump)
        for first, last in ((3, 6), (0, 1), (1, 3)):
            block = [dump.rows[name][first:last] for name in ("aux_0", "aux_1", "aux_2")]
            look(["aux_0", "aux_1", "aux_2"], first, np.concatenate([*block, np.zeros((last - first, 8), np.uint8)], 1))
            look(["final"], first, dump.rows["final"][first:last])
        if bad is None:
            look.verdict()
        else:
            with pytest.raises(DumpError, match=f"{bad[0]} holds a value that is not finite in row {bad[1]}"):
                look.verdict()


def test_an_older_format_says_what_to_do(tmp_path):
    path = write(tmp_path / "d", change=lambda tensors, metadata: metadata.update(format="1"))
    with pytest.raises(DumpError, match="of format '1', this code reads 2: .* run scripts/00_apply_patch.sh and start the server again"):
        read_dump(path)


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
