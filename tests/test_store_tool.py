"""store_tool.py: verify finds each kind of damage, info says what a store is, export writes what the other trainers read."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
import torch
from aerie.errors import run_main
from aerie.rid import sample_id
from aerie.store import Store, StoreWriter
from aerie.store_check import check_head
from aerie.target_weights import TargetWeights
from extract_tools import ROOT, fake_run  # noqa: F401  (a fixture)
from fake_dump_server import known_states
from safetensors.torch import load_file


def tool(capsys, *words: str) -> tuple[int, str, str]:
    spec = importlib.util.spec_from_file_location("store_tool", ROOT / "scripts" / "store_tool.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["store_tool.py", *words])
        with pytest.raises(SystemExit) as ended:
            run_main(module.main)
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_verify_and_info_of_an_extracted_run(fake_run, capsys):
    run = fake_run()
    run.start_server()
    assert run.extract_here()[0] == 0
    capsys.readouterr()
    code, out, err = tool(capsys, "verify", str(run.store_path), "--url", f"http://127.0.0.1:{run.port}")
    assert code == 0 and "28 samples" in out and "0 problems" in out and "(100.00%)" in out, out + err
    code, out, err = tool(capsys, "info", str(run.store_path))
    assert code == 0 and "state after [2, 3, 5] decoder layers" in out and "4 held out" in out and "not complete" not in out, out + err

    shard = max(run.store_path.glob("shard-*"), key=lambda path: path.stat().st_size)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100_000] + bytes([whole[-100_000] ^ 1]) + whole[-99_999:])
    code, out, err = tool(capsys, "verify", str(run.store_path), "--proof", "0")
    assert code == 1 and f"BAD: {shard.name}" in out
    shard.write_bytes(whole)
    shard.unlink()
    code, out, err = tool(capsys, "verify", str(run.store_path), "--proof", "0")
    assert code == 1 and "in no shard" in out
    code, out, err = tool(capsys, "verify", "no-such-run")
    assert code == 2 and "make extract" in err


@pytest.mark.parametrize(("dtype", "near"), [("bfloat16", True), ("float32", False)])
def test_near_ties_with_the_server_are_counted_as_in_extraction(fake_run, dtype, near):
    run = fake_run(samples=8, heldout=0)
    run.start_server("--dtype", dtype)
    assert run.extract_here()[0] == 0
    store, head = Store.open(run.store_path), TargetWeights(run.model).lm_head()
    right = check_head(store, head, 8, f"http://127.0.0.1:{run.port}").server
    assert right.samples == 8 and right.equal == right.compared > 8 and right.near_ties == 0
    longer = torch.cat([head, head * 1.001])  # each row once more and a little longer: wherever the best logit is above 0 our choice is the longer one
    other = check_head(store, longer, 8, f"http://127.0.0.1:{run.port}").server
    assert other.compared == right.compared and other.equal < other.compared
    assert other.near_ties == (other.compared - other.equal if near else 0) and other.refuted(1) is not near


def make_store(path, all_rows: bool, dtype: str = "bfloat16", nan: bool = False):
    fields = {"hidden_size": 8, "dtype": dtype, "aux_layer_ids": [1, 2, 3], "capture_points": [2, 3, 4], "all_final_rows": all_rows, "model_hash": "m"}
    made = []
    with StoreWriter(path, fields, 1000) as writer:
        for number in range(5):
            ids = np.arange(6 + number, dtype=np.int32) + 10 * number
            mask = (np.arange(len(ids)) >= 3).astype(np.uint8)
            states = [torch.from_numpy(known_states(ids, layer, 8)).to(torch.bfloat16) for layer in range(4)]
            if nan and number == 3:
                states[1][2, 2] = float("nan")
            writer.add(sample_id(ids, mask), ids, mask, states[:3], states[3], heldout=number == 4)
            made.append((ids, mask, states))
    return made


def test_verify_finds_values_that_are_not_finite(tmp_path, capsys):
    make_store(tmp_path / "s", False, nan=True)
    code, out, err = tool(capsys, "verify", str(tmp_path / "s"), "--proof", "0")
    assert code == 1 and "aux holds a value that is not finite in row 2" in out


def test_export_for_specforge(tmp_path, capsys):
    made = make_store(tmp_path / "s", False)
    code, out, err = tool(capsys, "export", "--format", "specforge", str(tmp_path / "s"), str(tmp_path / "out"))
    assert code == 0 and "4 samples" in out, err
    store = Store.open(tmp_path / "s")
    order = [index for index in range(len(store)) if not store.heldout[index]]
    files = sorted((tmp_path / "out").rglob("*.ckpt"))
    assert [str(file.relative_to(tmp_path / "out")) for file in files] == [f"rows_0-2000/data_{n}.ckpt" for n in range(4)]
    for number, index in enumerate(order):
        data = torch.load(files[number], weights_only=True)
        ids, mask, states = next(item for item in made if sample_id(item[0], item[1]) == store.ids[index])
        tokens = len(ids)
        assert set(data) == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}
        assert data["input_ids"].tolist() == ids.tolist() and data["input_ids"].dtype == data["loss_mask"].dtype == torch.int64
        # prompt rows 0..2, answer from 3: predictions at t with token t+1 and t+2 in the answer are t = 2 .. T-3
        assert data["loss_mask"].tolist() == [int(2 <= t <= tokens - 3) for t in range(tokens)]
        assert data["aux_hidden_state"].shape == (1, tokens, 24) and data["hidden_state"].shape == (1, tokens, 8)
        assert data["aux_hidden_state"].dtype == data["hidden_state"].dtype == torch.bfloat16
        assert torch.equal(data["aux_hidden_state"][0], torch.cat(states[:3], 1))
        for t in range(2, tokens - 2):  # the label of each supervised prediction
            assert torch.equal(data["hidden_state"][0, t + 1], states[3][t + 1])
    code, out, err = tool(capsys, "export", "--format", "specforge", str(tmp_path / "s"), str(tmp_path / "out"))
    assert code == 2 and "not empty" in err


def test_export_for_speculators(tmp_path, capsys):
    make_store(tmp_path / "part", False)
    code, out, err = tool(capsys, "export", "--format", "speculators", str(tmp_path / "part"), str(tmp_path / "out"))
    assert code == 2 and "extract.all_final_rows" in err and not (tmp_path / "out").exists()
    made = make_store(tmp_path / "s", True)
    code, out, err = tool(capsys, "export", "--format", "speculators", "--heldout", str(tmp_path / "s"), str(tmp_path / "out"))
    assert code == 0 and "1 samples" in out, err
    data = load_file(tmp_path / "out" / "hs_0.safetensors")
    ids, _, states = made[4]
    assert set(data) == {"token_ids", "hidden_states"} and data["token_ids"].tolist() == ids.tolist() and data["token_ids"].dtype == torch.int64
    assert data["hidden_states"].shape == (10, 4, 8) and data["hidden_states"].dtype == torch.bfloat16
    assert torch.equal(data["hidden_states"], torch.stack(states, 1))
