"""The store: any sizes come back as they went in, from any number of threads, and any crash point leaves a store that resumes to the same content."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from aerie.errors import UserError
from aerie.rid import sample_id
from aerie.shard_writer import ShardWriter
from aerie.shards import BadShard, Shard
from aerie.store import Store, StoreWriter, StreamingStore, read_done, supervised_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RELAXED = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def fields(hidden: int = 8, dtype: str = "float32", **more) -> dict:
    return {"hidden_size": hidden, "dtype": dtype, "aux_layer_ids": [1, 2, 3], "capture_points": [2, 3, 4], "model_hash": "m", **more}


def make_sample(seed: int, tokens: int, hidden: int = 8, dtype: str = "float32") -> dict:
    rng = np.random.default_rng([seed, tokens])
    ids = rng.integers(0, 1000, tokens, dtype=np.int32)
    mask = rng.integers(0, 2, tokens, dtype=np.uint8)
    states = torch.from_numpy(rng.standard_normal((4, tokens, hidden), dtype=np.float32))
    sample = {"id": sample_id(ids, mask), "input_ids": ids, "loss_mask": mask, "heldout": bool(seed % 3 == 0)}
    if dtype == "fp8":
        scale = states.abs().amax(-1) / 448
        scale[scale == 0] = 1
        states = (states / scale[..., None]).to(torch.float8_e4m3fn)
        sample |= {"aux_scale": scale[:3].T.numpy(), "final_scale": scale[3].numpy()}
    else:
        states = states.to(DTYPES[dtype])
    return sample | {"aux": list(states[:3]), "final": states[3]}


def assert_equal(got, sample: dict, all_rows: bool = False) -> None:
    assert (got.id, got.heldout) == (sample["id"], sample["heldout"])
    assert np.array_equal(got.input_ids.numpy(), sample["input_ids"]) and np.array_equal(got.loss_mask.numpy(), sample["loss_mask"])
    wanted = torch.cat([plane.view(torch.uint8) for plane in sample["aux"]], 1)
    assert torch.equal(got.aux.contiguous().view(torch.uint8).reshape(wanted.shape), wanted)
    mask = sample["loss_mask"]
    rows = range(len(mask)) if all_rows else [r for r in range(1, len(mask) - 1) if mask[r] and mask[r + 1]]
    assert got.final_rows.tolist() == list(rows)
    assert torch.equal(got.final.contiguous().view(torch.uint8), sample["final"][list(rows)].view(torch.uint8))
    if "aux_scale" in sample:
        assert np.array_equal(got.aux_scale.numpy(), sample["aux_scale"])
        naive = torch.stack([plane.float() * torch.from_numpy(sample["aux_scale"][:, n : n + 1]) for n, plane in enumerate(sample["aux"])], 1)
        assert torch.equal(got.aux_float(), naive.reshape(len(mask), -1))
        assert torch.equal(got.final_float(), sample["final"][list(rows)].float() * torch.from_numpy(sample["final_scale"])[list(rows), None])


def test_supervised_rows_by_hand():
    #                             0  1  2  3  4  5  6  7
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1], np.uint8)
    # predictions at t need mask[t+1] and mask[t+2] and read final[t+1]: t = 1, 2, 5
    assert supervised_rows(mask).tolist() == [2, 3, 6]
    assert supervised_rows(np.ones(4, np.uint8)).tolist() == [1, 2]  # row 0 predicts nobody's label
    assert [supervised_rows(np.ones(n, np.uint8)).tolist() for n in range(3)] == [[], [], []]


@RELAXED
@given(
    lengths=st.lists(st.integers(1, 40), max_size=12), hidden=st.sampled_from([1, 3, 8, 64]), dtype=st.sampled_from(["float32", "bfloat16", "float16", "fp8"]),
    shard_bytes=st.sampled_from([1, 1000, 20_000, 1 << 30]), threads=st.integers(1, 4), all_rows=st.booleans(),
)  # fmt: skip
def test_round_trip(tmp_path_factory, lengths, hidden, dtype, shard_bytes, threads, all_rows):
    path = tmp_path_factory.mktemp("store")
    samples = {s["id"]: s for s in (make_sample(n, tokens, hidden, dtype) for n, tokens in enumerate(lengths))}
    work = list(samples.values())
    with StoreWriter(path, fields(hidden, dtype, all_final_rows=all_rows), shard_bytes) as writer:
        pool = [threading.Thread(target=lambda part=work[n::threads]: [writer.add(**sample) for sample in part]) for n in range(threads)]
        for thread in pool:
            thread.start()
        for thread in pool:
            thread.join()
    store = Store.open(path)
    assert sorted(store.ids) == sorted(samples) and store.verify() == []
    for index in range(len(store)):
        got = store.get(index)
        assert_equal(got, samples[got.id], all_rows)
        assert store.lengths[index] == len(got.input_ids) and store.final_counts[index] == len(got.final_rows) and store.heldout[index] == got.heldout
        store.check(index)
    assert store.manifest["samples"] == len(samples) and store.manifest["rows"] == sum(len(s["input_ids"]) for s in work) and store.manifest["complete"]
    assert store.manifest["bytes"] == sum(file.stat().st_size for file in path.glob("shard-*")) and set(read_done(path)) == set(samples)


def test_shards_are_plain_safetensors(tmp_path):
    sample = make_sample(1, 30, 16, "bfloat16")
    with StoreWriter(tmp_path, fields(16, "bfloat16")) as writer:
        writer.add(**sample)
    with safe_open(tmp_path / "shard-000000.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("aux"), torch.cat(sample["aux"], 1))
        assert torch.equal(file.get_tensor("final"), sample["final"][file.get_tensor("final_rows")])
        assert file.get_tensor("offsets").tolist() == [0, 30] and file.metadata()["ids"] == sample["id"]


class Crash(Exception):
    pass


CALLS = ("pwrite", "fsync", "rename", "replace", "ftruncate", "open", "unlink")


@RELAXED
@given(seed=st.integers(0, 10_000), crash_at=st.integers(0, 60), shard_bytes=st.sampled_from([500, 3000, 100_000]))
def test_any_crash_point_resumes_to_the_same_content(tmp_path_factory, seed, crash_at, shard_bytes):
    """The process 'dies' at its crash_at-th system call that changes the disk, nothing of it runs afterwards; a new writer goes on."""
    path = tmp_path_factory.mktemp("store")
    samples = [make_sample(n, 1 + (seed * 7 + n * 5) % 23) for n in range(8)]
    count = 0
    originals = {name: getattr(os, name) for name in CALLS}

    def counted(name):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count > crash_at:
                raise Crash
            return originals[name](*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(name))
    writer = None
    try:
        writer = StoreWriter(path, fields(), shard_bytes)
        for sample in samples:
            writer.add(**sample)
        writer.close()
    except Crash:
        pass
    finally:
        for name, function in originals.items():
            setattr(os, name, function)
    if writer is not None:
        writer._lock_file.close()  # what the end of a process does
    with StoreWriter(path, fields(), shard_bytes) as again:
        todo = [sample for sample in samples if sample["id"] not in again.done]
        for sample in todo:
            assert again.add(**sample)
    store = Store.open(path)
    assert sorted(store.ids) == sorted(sample["id"] for sample in samples) and store.verify() == []
    by_id = {sample["id"]: sample for sample in samples}
    for index in range(len(store)):
        assert_equal(store.get(index), by_id[store.ids[index]])
    assert not list(path.glob(".*tmp")) and set(read_done(path)) == set(by_id)


@RELAXED
@given(seed=st.integers(0, 10_000), files=st.integers(1, 4))
def test_power_loss_truncates_the_newest_files(tmp_path_factory, seed, files):
    path = tmp_path_factory.mktemp("store")
    rng = random.Random(seed)
    samples = [make_sample(seed + n, 1 + rng.randrange(30)) for n in range(9)]
    with StoreWriter(path, fields(), 3000) as writer:
        for sample in samples[:7]:
            writer.add(**sample)
    newest = [path / "manifest.json", path / "done.log", *sorted(path.glob("shard-*"))[-2:]]
    for file in rng.sample(newest, min(files, len(newest))):
        os.truncate(file, rng.randrange(file.stat().st_size + 1))
    with StoreWriter(path, fields(), 3000) as again:
        for sample in samples:
            again.add(**sample)
    store = Store.open(path)
    assert sorted(store.ids) == sorted(sample["id"] for sample in samples) and store.verify() == []


def test_flipped_byte_is_found_and_repaired(tmp_path):
    samples = [make_sample(n, 20) for n in range(4)]
    with StoreWriter(tmp_path, fields(), 2500) as writer:
        for sample in samples:
            writer.add(**sample)
    last = sorted(tmp_path.glob("shard-*"))[-1]
    shard = Shard(last)
    for name, entry in shard.entries.items():
        original = last.read_bytes()
        damaged = bytearray(original)
        damaged[shard.header_bytes + entry["data_offsets"][0]] ^= 0x10
        last.write_bytes(bytes(damaged))
        with pytest.raises(BadShard):
            Shard(last).verify()
        last.write_bytes(original)
    damaged[shard.header_bytes + 5] ^= 1
    last.write_bytes(bytes(damaged))
    (problem,) = Store.open(tmp_path).verify() if not _torn(last) else [(last, "")]
    assert problem[0] == last
    with StoreWriter(tmp_path, fields(), 2500) as again:
        assert [name for name, _ in again.removed] == [last.name]
        for sample in samples:
            again.add(**sample)
    assert len(Store.open(tmp_path)) == 4 and Store.open(tmp_path).verify() == []


def _torn(path: Path) -> bool:
    try:
        Shard(path)
    except BadShard:
        return True
    return False


OTHERS = [("model_hash", "other"), ("aux_layer_ids", [1, 2, 4]), ("capture_points", [1, 2, 3]), ("dtype", "bfloat16"), ("data_hash", "d2")]


@pytest.mark.parametrize("key, value", OTHERS)
def test_states_of_another_kind_are_refused(tmp_path, key, value):
    with StoreWriter(tmp_path, fields(data_hash="d1")) as writer:
        writer.add(**make_sample(1, 5))
    with pytest.raises(UserError, match=key):
        StoreWriter(tmp_path, fields(data_hash="d1") | {key: value})
    StoreWriter(tmp_path, fields(data_hash="d1")).close()  # the refused one left no lock


def test_one_writer_at_a_time(tmp_path):
    with StoreWriter(tmp_path, fields()):
        with pytest.raises(UserError, match="another extraction"):
            StoreWriter(tmp_path, fields())


def test_same_sample_is_stored_once(tmp_path):
    with StoreWriter(tmp_path, fields()) as writer:
        assert [writer.add(**make_sample(1, 5)), writer.add(**make_sample(1, 5))] == [True, False]
    assert len(Store.open(tmp_path)) == 1


def test_missing_and_damaged_store_say_what_to_do(tmp_path):
    with pytest.raises(UserError, match="make extract"):
        Store.open(tmp_path / "none")
    with StoreWriter(tmp_path, fields()) as writer:
        writer.add(**make_sample(1, 5))
    os.truncate(tmp_path / "shard-000000.safetensors", 5000)
    with pytest.raises(UserError, match="shard-000000"):
        Store.open(tmp_path)


def test_streaming_reads_each_shard_once_and_deletes_what_is_consumed(tmp_path):
    samples = [make_sample(3 * n + 1, 20) for n in range(6)]
    with StoreWriter(tmp_path, fields(), 2500) as writer:
        for sample in samples:
            writer.add(**sample)
        stream = StreamingStore(tmp_path)
        reader = stream.shards(poll_s=0.01)
        first = next(reader)
        kept = first.get(0)
        stream.consume(first.shards[0].path.name)
        assert writer.delete_consumed() > 0 and not first.shards[0].path.exists()
        assert torch.isfinite(kept.aux).all()  # the map outlives the file
    seen = first.ids + [sample for part in reader for sample in part.ids]
    assert sorted(seen) == sorted(sample["id"] for sample in samples)
    with StoreWriter(tmp_path, fields(), 2500) as again:
        assert len(again.done) == 6 and again.manifest["samples"] == 6 - len(first)
    assert [sample for part in StreamingStore(tmp_path).shards() for sample in part.ids] == [s for s in seen if s not in first.ids]


def test_ten_million_rows_open_by_their_headers_alone(tmp_path):
    """Sparse shards of 2.5 million rows each: the reader must not touch rows (a read of 10 million of them would need 480 GB)."""
    spec_fields = fields(4096, "float32")
    writer = StoreWriter(tmp_path, spec_fields)
    for number in range(4):
        metadata = {"kind": "aerie-shard", "manifest": json.dumps(writer.manifest)}
        shard = ShardWriter(tmp_path / f"shard-{number:06d}.safetensors", writer.spec, 1 << 60, metadata, [])
        for place in range(1000):
            shard.count(f"{number * 1000 + place:016x}", 2500, 0)
            shard.samples.append({
                "heldout": False, "input_ids": np.zeros(2500, np.int32), "loss_mask": np.zeros(2500, np.uint8), "final_rows": np.zeros(0, np.int64),
                "aux_sum": 0, "final_sum": 0, "aux_scale": None, "final_scale": None,
            })  # fmt: skip
        shard.finish()
    writer.abandon()
    tracked = Store.open(tmp_path)
    assert int(tracked.lengths.sum()) == 10_000_000 and len(tracked) == 4000
    assert tracked.get(2500).aux.shape == (2500, 3 * 4096)
