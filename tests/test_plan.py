"""The memory model against what can be measured here (files, tensors, an owner's public log), and every refusal with its number."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from aerie import dumps
from aerie import plan as planning
from aerie.batches import build_batch
from aerie.config import load_config
from aerie.drafter_shapes import LLAMA, expected_tensors
from aerie.errors import UserError
from aerie.paths import ROOT
from aerie.rid import new_rid, sample_id
from aerie.samples import Sample, write_samples
from aerie.shapes import load_shape, shape_from
from aerie.store import StoreWriter
from aerie.unroll import Rope, unroll
from capture_fakes import Rig
from cpu_tools import write_config
from safetensors import safe_open
from train_helpers import make_drafter, make_fixed, make_sample, make_shape

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

from kimi_shape import WIDE  # noqa: E402

GIB = 1 << 30
SCRIPT = ROOT / "scripts" / "plan_run.py"


def near(found: float, wanted: float, share: float = 0.1) -> bool:
    return abs(found / wanted - 1) <= share


def tensor_bytes(folder: Path) -> int:
    """Bytes of all tensors in a folder's safetensors, added up from the tensors themselves."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            total += sum(file.get_tensor(name).nbytes for name in file.keys())
    return total


# --- the target ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_weights_of_real_folders(tiny_model, family):
    """From the shapes alone, against the tensors on disk."""
    folder = tiny_model(family)
    shape = shape_from(json.loads((folder / "config.json").read_text()), family)
    parts = shape.part_bytes(1, 4)
    if shape.is_mla:  # the absorbed copies exist only once loaded
        c = shape.config
        parts["attention"] -= shape.layers * c["kv_lora_rank"] * shape.heads * (c["qk_nope_head_dim"] + c["v_head_dim"]) * 4
    assert near(sum(parts.values()), tensor_bytes(folder), 0.03)


def test_weights_of_smollm2(smollm2):
    computed = shape_from(json.loads((smollm2 / "config.json").read_text()), "smollm2")
    assert near(sum(computed.weight_bytes(1, "bfloat16").values()), tensor_bytes(smollm2), 0.01)
    assert near(sum(load_shape(str(smollm2)).weight_bytes(1, "float32").values()), 2 * tensor_bytes(smollm2), 0.01)


def test_public_numbers():
    """Kimi-K2.5 on eight RTX PRO 6000, an owner's SGLang log of 2026-01-29: 72.33 GB (GiB) of weights a GPU, 4,578 tokens in 0.30 GB. DeepSeek-V3: 671 B parameters."""
    kimi = load_shape("/nowhere", "kimi-k2.5")
    assert near(sum(kimi.weight_bytes(8, "bfloat16").values()) / GIB, 72.33, 0.02)
    assert near(4578 * kimi.kv_bytes(8, "bfloat16") / GIB, 0.30, 0.02)
    assert near(sum(count for _, count in load_shape("/nowhere", "deepseek-v3").parameters().values()), 671e9, 0.005)
    assert near(sum(count for _, count in load_shape("/nowhere", "kimi-k2-instruct").parameters().values()), 1026e9, 0.005)
    assert near(sum(count for _, count in load_shape("/nowhere", "llama-3.1-8b").parameters().values()), 8.03e9, 0.005)
    assert near(sum(count for _, count in load_shape("/nowhere", "qwen3-8b").parameters().values()), 8.19e9, 0.005)


def test_a_folder_decides_over_the_shape_file(tmp_path):
    raw = json.loads((ROOT / "configs/shapes/llama-3.1-8b.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 10**9}, "weight_map": {}}))
    shape = load_shape(str(tmp_path), "llama-3.1-8b")
    assert shape.layers == 2 and near(sum(shape.weight_bytes(1, "bfloat16").values()), 1e9, 1e-6)
    assert near(sum(shape.weight_bytes(2, "float32").values()), 1e9, 1e-6)  # half of each tensor, twice as wide


def test_tensor_parallel_splits_what_sglang_splits():
    kimi = load_shape("/nowhere", "kimi-k2.5")
    one, eight = kimi.weight_bytes(1, "bfloat16"), kimi.weight_bytes(8, "bfloat16")
    assert near(one["experts"] / 8, eight["experts"], 1e-9) and one["router"] == eight["router"] and one["vision"] == eight["vision"]
    assert eight["attention"] > one["attention"] / 8
    assert kimi.kv_bytes(1, "bfloat16") == kimi.kv_bytes(8, "bfloat16") == 61 * 576 * 2
    llama = load_shape("/nowhere", "llama-3.1-8b")
    assert llama.kv_bytes(1, "bfloat16") == 32 * 2 * 8 * 128 * 2 and llama.kv_bytes(16, "bfloat16") == 32 * 2 * 1 * 128 * 2


# --- dumps, store, drafter ---------------------------------------------------------------------------------------------------------------------


def supervised_naive(mask: np.ndarray) -> int:
    return sum(1 for row in range(1, len(mask)) if row + 1 < len(mask) and mask[row] and mask[row + 1])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
def test_store_bytes_are_those_on_disk(tmp_path, dtype):
    rng = np.random.default_rng(0)
    hidden, total, finals = 256, 0, 0
    writer = StoreWriter(tmp_path, {"hidden_size": hidden, "dtype": dtype, "aux_layer_ids": [1, 2, 3]})
    for tokens in (300, 700, 2000, 1200):
        ids, mask = rng.integers(0, 99, tokens, dtype=np.int32), (np.arange(tokens) > tokens // 3).astype(np.uint8)
        states = torch.randn(4, tokens, hidden).to(torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype))
        scales = {"aux_scale": np.ones((tokens, 3)), "final_scale": np.ones(tokens)} if dtype == "fp8" else {}
        writer.add(sample_id(ids, mask), ids, mask, list(states[:3]), states[3], **scales)
        total, finals = total + tokens, finals + supervised_naive(mask)
    writer.close()
    shape = load_shape("/nowhere", "llama-3.1-8b")
    shape.config["hidden_size"] = hidden
    aux, final = planning.row_bytes(shape, 3, "float32" if dtype == "float32" else "bfloat16", "fp8" if dtype == "fp8" else "model")
    assert near(total * aux + finals * (final + 8), sum(path.stat().st_size for path in tmp_path.glob("shard-*.safetensors")), 0.02)


def test_dump_bytes_are_those_of_a_real_dump(tmp_path):
    """The server-side writer on a fake text model."""
    rig = Rig(tmp_path / "dumps")
    rid, ids = str(new_rid("t", "0123456789abcdef", 300)), list(range(300))
    rig.run((rid, ids, 0))
    path = dumps.wait_dump(rig.folder, rid, 10)
    hidden = dumps.read_dump(path).final.shape[1]
    shape = load_shape("/nowhere", "llama-3.1-8b")
    shape.config["hidden_size"] = hidden
    assert near(planning.dump_bytes(shape, 3, "float32", 300), path.stat().st_size)
    rig.close()


def test_amounts_come_from_the_data_once_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path))
    config = load_config("qwen3-8b")
    assert planning.read_amounts(config).source == "[plan]" and planning.read_amounts(config).samples == 20000
    rng = np.random.default_rng(1)
    samples = []
    for tokens in (3, 1, 40, 2, 17):
        ids, mask = rng.integers(0, 9, tokens, dtype=np.int32), rng.integers(0, 2, tokens, dtype=np.uint8)
        samples.append(Sample(sample_id(ids, mask), ids, mask))
    write_samples(config.run.data / "train.safetensors", samples[:3], {})
    write_samples(config.run.data / "heldout.safetensors", samples[3:], {})
    amounts = planning.read_amounts(config)
    assert (amounts.samples, amounts.tokens, amounts.longest) == (5, 63, 40)
    assert amounts.final_rows == sum(supervised_naive(sample.loss_mask) for sample in samples)


def test_samples_before_there_is_data(tmp_path, monkeypatch):
    """From data.limit + data.heldout, no more than the chats there are; else the chats; the source is said; nothing known: an error that says it for make too."""
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path))
    demo = planning.read_amounts(load_config("smollm2-135m"))
    assert (demo.samples, demo.tokens) == (280, 280 * 115) and "data.limit 240 + data.heldout 40" in demo.source
    assert planning.read_amounts(load_config("smollm2-gpu")).samples == 10000 + 128

    lines, array, missing = tmp_path / "a.jsonl", tmp_path / "b.json", tmp_path / "none.jsonl"
    lines.write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n')
    array.write_text(json.dumps([{"prompt": str(number)} for number in range(5)], indent=1))

    def amounts(*files: Path, limit: int = 0) -> planning.Amounts:
        inputs = json.dumps([str(path) for path in files])
        return planning.read_amounts(load_config("smollm2-135m", overrides=[f"data.inputs={inputs}", f"data.limit={limit}", "data.heldout=1", "plan.tokens_per_sample=5000"]))

    found = amounts(lines, array)
    assert (found.samples, found.tokens) == (7, 7 * 1024) and "the chats in the files of data.inputs" in found.source and "data.max_tokens" in found.source
    assert amounts(lines, array, limit=100).samples == 7 and amounts(lines, array, limit=3).samples == 4
    assert amounts(lines, missing).samples == 2 and "1 readable ones of the 2 files" in amounts(lines, missing).source
    assert amounts(missing, limit=3).samples == 4
    for nothing in ((), (missing, tmp_path)):
        with pytest.raises(UserError, match=r"--set plan.samples=10000 \(make: SET='plan.samples=10000'\)"):
            amounts(*nothing)


@pytest.mark.parametrize("arch", ["llama", "mla"])
def test_drafter_parameters(arch):
    config = load_config("kimi-k2.5", overrides=[f"draft.arch={arch}"])
    count = sum(planning.drafter_parameters(config, load_shape("/nowhere", "kimi-k2.5")).values())
    hidden, inner, vocab, heads = 7168, 12288, 32000, 64
    attention = 2 * hidden * 3 * heads * 128 + heads * 128 * hidden
    if arch == "mla":
        attention = 2 * hidden * (1536 + 576) + 1536 * heads * 192 + 512 * heads * 256 + heads * 128 * hidden
    assert near(count, 3 * hidden * hidden + attention + 3 * hidden * inner + vocab * hidden, 0.001)


def test_trainers_weights_and_optimizer_are_those_of_torch():
    """Masters, gradients and AdamW's moments, measured as tensors of a real model after a real step."""
    config = load_config("qwen3-8b", overrides=["draft.hidden_size=128", "draft.intermediate_size=256", "draft.vocab_size=512", "draft.num_attention_heads=4",
                                                "draft.num_key_value_heads=2", "draft.head_dim=32"])  # fmt: skip
    shape = load_shape("/nowhere", "qwen3-8b")
    shape.config.update(hidden_size=128, vocab_size=1024)
    tensors = expected_tensors(planning.drafter_config(config, shape), LLAMA, 3, 128)
    weights = [torch.nn.Parameter(torch.randn(size)) for size in tensors.values()]
    optimizer = torch.optim.AdamW(weights)
    sum(weight.sum() for weight in weights).backward()
    optimizer.step()
    moments = sum(state.nbytes for entry in optimizer.state.values() for name, state in entry.items() if name != "step")
    parts = {part.name: part.bytes for part in planning.training_parts(config, shape, 64, 0.5)}
    assert near(parts["masters"], sum(weight.nbytes for weight in weights), 0.001)
    assert near(parts["gradients"], sum(weight.grad.nbytes for weight in weights), 0.001)
    assert near(parts["AdamW moments"], moments, 0.001)


# --- what does not fit --------------------------------------------------------------------------------------------------------------------------


def refusals(name: str, overrides=(), gpus=None, gpu_gib=None, disk=1e15, dumps=1e12) -> list[str]:
    config = load_config(name, overrides=list(overrides))
    shape = load_shape("/nowhere", config.plan.shape)
    args = config.server.args
    plan = planning.make_plan(
        config, shape, planning.read_amounts(config), gpus=gpus or config.plan.gpus, gpu_bytes=(gpu_gib or config.plan.gpu_gib) * GIB,
        extraction_args=args, serving_args=args | config.serve.args, disk_free=disk, dumps_free=dumps,
    )  # fmt: skip
    return plan.refusals


@pytest.mark.parametrize("name", ["kimi-k2.5", "kimi-k2-instruct", "deepseek-v3", "qwen3-8b", "llama-3.1-8b"])
def test_every_config_fits_the_machine_it_was_written_for(name):
    assert refusals(name) == []


@pytest.mark.parametrize("name", ["kimi-k2.5", "kimi-k2-instruct", "deepseek-v3", "qwen3-8b", "llama-3.1-8b"])
def test_what_a_config_says_to_expect_is_what_the_plan_says(name):
    """The comment that a config begins with: weights and training in GiB, disk in TB, the SGLang versions, and what is not measured."""
    config = load_config(name)
    comment = config.path.read_text().split("[target]")[0]
    shape, amounts = load_shape("/nowhere", config.plan.shape), planning.read_amounts(config)

    def said(what: str, unit: str) -> float:
        return float(re.search(rf"# +{what} .*?([\d.]+) {unit}", comment)[1])

    assert near(said("weights", "GiB"), sum(shape.weight_bytes(config.server.args.get("tp-size", 1), "bfloat16").values()) / GIB, 0.03)
    assert near(said("training", "GiB"), sum(part.bytes for part in planning.training_parts(config, shape, config.train.batch_tokens, config.plan.supervised)) / GIB, 0.05)
    aux, final = planning.row_bytes(shape, 3, "bfloat16")
    assert near(said("disk", "TB"), amounts.tokens * (aux + final) / 1e12, 0.05)
    assert "0.5.23" in comment and "0.5.17" in comment and "easured by us" in comment and "hours" in comment


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("kimi-k2.5", {"gpus": 4}, ["tp-size = 8", "4 are there"]),
        ("kimi-k2.5", {"overrides": ["server.args.tp-size=4"], "gpus": 4}, ["extraction", "leave no KV", "86.6 GiB"]),
        ("kimi-k2-instruct", {"gpu_gib": 94.15}, ["weights of 121", "leave no KV"]),
        ("kimi-k2.5", {"overrides": ["server.args.mem-fraction-static=0.98"]}, ["mem-fraction-static = 0.980", "lower it to 0.9"]),
        ("kimi-k2.5", {"overrides": ["server.args.chunked-prefill-size=32768"]}, ["chunked-prefill-size = 32768", "beside weights and KV"]),
        ("kimi-k2.5", {"overrides": ["data.max_tokens=32768"]}, ["data.max_tokens = 32768", "context-length = 32768"]),
        ("kimi-k2.5", {"overrides": ["server.args.mem-fraction-static=0.77"]}, ["does not hold one sample of 8,193"]),
        ("kimi-k2.5", {"overrides": ["train.batch_tokens=262144"]}, ["training", "train.batch_tokens = 262144"]),
        ("qwen3-8b", {"overrides": ["train.stop_server=false", "server.args.mem-fraction-static=0.9"]}, ["train.stop_server"]),
        ("kimi-k2.5", {"disk": 2e12}, ["disk", "4,428 GB", "2,000 GB", "fp8"]),
        ("kimi-k2.5", {"disk": 2e12, "gpus": 9}, ["disk", "keep_gb, on a GPU of its own"]),
        ("kimi-k2.5", {"dumps": 0.5e9}, ["dump folder", "0.94 GB", "0.50 GB"]),
    ],
)
def test_refusals_name_the_number(name, change, words):
    found = refusals(name, **change)
    assert found
    for word in words:
        assert word in "; ".join(found)


def test_a_short_disk_is_told_only_what_helps_there():
    fp8 = "; ".join(refusals("kimi-k2.5", ['extract.dtype="fp8"'], disk=1e12))
    assert "AERIE_RUNS_DIR" in fp8 and "extract.dtype" not in fp8 and "make stream" not in fp8  # the target fills all eight
    kept = "; ".join(refusals("kimi-k2.5", ["extract.keep_gb=500", 'extract.dtype="fp8"'], disk=1e11, gpus=9))
    assert "lower extract.keep_gb = 500" in kept and "make stream" not in kept and "extract.dtype" not in kept


@pytest.mark.parametrize(
    ("overrides", "done"),
    [([], "training, one GPU"), (["train.gpus=[0,1]"], "training, DDP over 2 GPUs"), (["train.gpus=[0,1,2,3]", 'train.parallel="fsdp"'], "training, FSDP over 4 GPUs")],
)
def test_the_plan_says_which_training_the_config_does(overrides, done):
    config = load_config("kimi-k2.5", overrides=overrides)
    plan = planning.Plan(8, 94 * GIB)
    planning.plan_training(plan, config, load_shape("/nowhere", config.plan.shape), 0.5, False)
    assert plan.training == done and len(plan.phases) == 2 and [name for name, note in plan.notes.items() if "what the config does" in note] == [done]
    other = next(name for name in plan.phases if name != done)
    assert " if " in other and (plan.total(done) < plan.total(other)) == ("FSDP" in done)


def test_streaming_and_fp8_need_less_disk():
    assert refusals("kimi-k2.5", ["extract.keep_gb=500"], disk=1e12, gpus=9) == []
    assert "give it a GPU of its own" in "; ".join(refusals("kimi-k2.5", ["extract.keep_gb=500"], disk=1e12))
    assert refusals("llama-3.1-8b", ["extract.keep_gb=50", "server.args.mem-fraction-static=0.5"], disk=1e11) == []
    assert refusals("kimi-k2.5", ['extract.dtype="fp8"'], disk=2.3e12) == []


def test_hours_take_what_the_run_has_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path))
    config = load_config("kimi-k2.5")
    amounts = planning.Amounts(1000, 3.6e6, 1.8e6, 8192, "test")
    plan = planning.Plan(8, 1.0)
    planning.plan_hours(plan, config, amounts)
    assert near(plan.hours["extraction"], 3.6e6 / 2600 / 3600, 1e-9) and near(plan.hours["answers"], 1.8e6 / 985 / 3600, 1e-9)
    config.run.store.mkdir(parents=True)
    (config.run.store / "report.json").write_text(json.dumps({"extract_tok_s": 5000.0}))
    planning.plan_hours(plan, config, amounts)
    assert near(plan.hours["extraction"], 0.2, 1e-9) and "measured in this run" in plan.notes["hours of extraction"]


# --- the script ----------------------------------------------------------------------------------------------------------------------------------


def script(*words: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False, cwd=cwd)


def test_script_says_what_fits_and_exits_2_where_it_does_not(tmp_path):
    done = script("--config", "kimi-k2.5", "--paper", "--report", str(tmp_path / "plan.json"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 GPUs" in done.stdout and "hours" in done.stdout
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["refusals"] == [] and near(sum(value for name, value in report["phases"]["extraction"].items() if name.startswith("weights")) / GIB, 72.33, 0.02)
    done = script("--config", "kimi-k2.5", "--paper", "--gpus", "4", "--gpu-gib", "94")
    assert done.returncode == 2 and "tp-size = 8" in done.stderr and "Traceback" not in done.stderr


def test_script_before_the_target_is_made_names_make_target(tmp_path, monkeypatch):
    """Also for a copy of the demo's config, as docs/adding.md says it."""
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path))
    mine = tmp_path / "mine.toml"
    mine.write_text((ROOT / "configs/smollm2-135m.toml").read_text())
    for words, advice in (((), "`make target`"), (("--config", "smollm2-gpu"), "`make target CONFIG=smollm2-gpu`"), (("--config", str(mine)), f"`make target CONFIG={mine}`")):
        done = script(*words)
        assert done.returncode == 2 and advice in done.stderr and "Traceback" not in done.stderr, done.stderr
    done = script("--config", str(mine), "--set", "target.from_package=")
    assert done.returncode == 2 and "download the model" in done.stderr


def test_script_plans_the_demo(tmp_path, monkeypatch, smollm2):
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path))
    done = script("--set", f"target.model_path={smollm2}")
    assert done.returncode == 0, done.stderr
    assert "280 samples" in done.stdout and "data.limit 240 + data.heldout 40" in done.stdout and "no GPU was asked" not in done.stdout


LOG = """[2026-01-29 01:14:35 TP7] Load weight end. elapsed=79.04 s, type=KimiK25ForConditionalGeneration, dtype=torch.bfloat16, avail mem=21.82 GB, mem usage=72.33 GB.
[2026-01-29 01:14:53 TP7] KV Cache is allocated. #tokens: {tokens}, KV size: {size:.2f} GB
"""


@pytest.mark.parametrize(("tokens", "code"), [(224360, 0), (150000, 1)])
def test_compare_reads_a_servers_log(tmp_path, tokens, code):
    (tmp_path / "server.log").write_text(LOG.format(tokens=tokens, size=tokens * 70272 / GIB))
    done = script("--config", "kimi-k2.5", "--run", "compare_test", "--paper", "--compare", "--server-log", str(tmp_path / "server.log"))
    assert done.returncode == code, done.stdout + done.stderr
    assert "extraction: KV tokens" in done.stdout and ("over 10% off" in done.stdout) == bool(code)


# What two servers said on an H200 (SGLang 0.5.17, 2026-11-30): a DeepSeek-V3 of Kimi's widths with 8 layers and 32 experts, and a Llama of SmolLM2's shape.
H200_LOG = """[2026-11-30 00:43:14] Load weight begin. avail mem=111.23 GB
[2026-11-30 00:43:23] Load weight end. elapsed=9.01 s, type=DeepseekV3ForCausalLM, avail mem=88.55 GB, mem usage=22.68 GB.
[2026-11-30 00:43:27] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 65536, KV size: 0.56 GB
""", """[2026-11-30 00:50:14] Load weight begin. avail mem=138.16 GB
[2026-11-30 00:50:15] Load weight end. elapsed=0.75 s, type=LlamaForCausalLM, avail mem=137.89 GB, mem usage=0.27 GB.
[2026-11-30 00:50:16] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 400000, K size: 4.29 GB, V size: 4.29 GB
"""  # fmt: skip


@pytest.mark.parametrize("which", [0, 1])
def test_servers_on_an_h200(tmp_path, smollm2, which):
    model, tokens = (WIDE, 65536) if which == 0 else (json.loads((Path(smollm2) / "config.json").read_text()), 400000)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model | {"dtype": "bfloat16"}))
    (tmp_path / "server.log").write_text(H200_LOG[which])
    server = {"args": {"mem-fraction-static": 0.6, "max-total-tokens": tokens, "context-length": 4096, "disable-cuda-graph": True}}
    config = write_config(tmp_path / "c.toml", tmp_path / "model", [2, 4, 6], target={"dtype": "bfloat16"}, server=server)
    words = ("--gpus", "1", "--gpu-gib", "139", "--paper", "--compare", "--set", "plan.samples=208", "--server-log", str(tmp_path / "server.log"))
    done = script("--config", str(config), "--run", "h200_test", *words)
    assert done.returncode == 0 and done.stdout.count("extraction: ") == 3, done.stdout + done.stderr


# --- the trainer, measured on the CPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "answer", "steps"), [(300, 700, 7), (700, 300, 7), (200, 800, 3)])
def test_what_a_training_step_keeps_for_backward(prompt, answer, steps):
    """Every tensor that autograd holds after a real forward of the trainer, counted by storage, with the batch itself: against the plan's parts."""
    hidden, heads, kv_heads, dim, inner, draft = 128, 4, 2, 32, 384, 256
    shape = make_shape(hidden_size=hidden, target_hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim,
                       vocab_size=512, draft_vocab_size=draft)  # fmt: skip
    drafter, fixed = make_drafter(shape), make_fixed(shape, steps)
    batch = build_batch([make_sample("a", [0] * prompt + [1] * answer, shape, 3)], steps)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*drafter.parameters(), fixed.embedding, fixed.head.head, fixed.head.draft_head)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in vars(batch).values() if isinstance(t, torch.Tensor)}
    held = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)  # so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, *_ = unroll(drafter, batch, fixed, Rope(drafter, torch.device("cpu"), torch.float32), 1.0)
    config = load_config("qwen3-8b", overrides=[f"draft.intermediate_size={inner}", f"draft.vocab_size={draft}", f"draft.num_attention_heads={heads}", f"train.ttt_steps={steps}",
                                                f"draft.num_key_value_heads={kv_heads}", f"draft.head_dim={dim}"])  # fmt: skip
    target = load_shape("/nowhere", "qwen3-8b")
    target.config.update(hidden_size=hidden, vocab_size=512)
    rows = len(batch.positions)
    parts = planning.training_parts(config, target, rows, len(batch.rows) / rows, compute=4)
    predicted = sum(part.bytes for part in parts if part.name.startswith(("activations", "batch", "teacher")))
    assert near(predicted, sum(storages.values())), predicted / sum(storages.values())
    assert loss.requires_grad


# Peaks of bench_train.py on one H200 (torch 2.11.0, bf16, the fused path), 2026-11-30, one of 2,048 rows 2026-11-29: config with the same drafter, rows of a step, supervised rows, GiB.
H200 = [
    ("kimi-k2.5", 4096, 2855, 28.337), ("kimi-k2.5", 4096, 1225, 26.057), ("kimi-k2.5", 8192, 5710, 33.977), ("kimi-k2.5", 16384, 11428, 45.356),
    ("llama-3.1-8b", 8192, 5710, 16.658), ("llama-3.1-8b", 8192, 2446, 13.396), ("llama-3.1-8b", 16384, 11428, 23.724), ("llama-3.1-8b", 2048, 1410, 11.232),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "labels", "peak"), H200)
def test_training_peaks_of_an_h200(name, rows, labels, peak):
    config = load_config(name)
    parts = planning.training_parts(config, load_shape("/nowhere", config.plan.shape), rows, labels / rows, loss_kernel=True)
    assert near(sum(part.bytes for part in parts) / GIB, peak), sum(part.bytes for part in parts) / GIB / peak


def test_the_peak_of_a_small_training_run_on_an_h200():
    """03_train.py on smollm2-gpu's 10,000 chats, 2026-11-30: 1,999,500,288 bytes (batches of 8,192 rows at most, 81% supervised on the mean): what is small elsewhere weighs here."""
    config, shape = load_config("smollm2-gpu"), load_shape("/nowhere", "llama-3.1-8b")
    shape.config.update(hidden_size=576, vocab_size=49152, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536)
    parts = planning.training_parts(config, shape, 8192, 9526105 / 11690095, loss_kernel=True)
    assert near(sum(part.bytes for part in parts), 1_999_500_288), sum(part.bytes for part in parts) / 1_999_500_288


def test_the_plan_of_smollm2_gpu_is_what_was_measured():
    """10,128 chats, 2.37 M tokens, a store of 10.4 GB, 119 s of answers, 60 s of training."""
    config = load_config("smollm2-gpu", "smollm2-gpu-planned")
    shape, amounts = load_shape("/nowhere", "llama-3.1-8b"), planning.read_amounts(config)
    shape.config.update(hidden_size=576, vocab_size=49152, num_attention_heads=9, num_key_value_heads=3, head_dim=64, intermediate_size=1536)
    plan = planning.make_plan(config, shape, amounts, gpus=0, gpu_bytes=0, extraction_args={}, serving_args={}, disk_free=1e12, dumps_free=None)
    assert amounts.samples == 10_128 and near(amounts.tokens, 2.37e6, 0.01) and near(next(part.bytes for part in plan.disk if part.name == "store"), 10.4e9, 0.02)
    assert near(plan.hours["answers"], 119 / 3600, 0.2) and near(plan.hours["training"], 60 / 3600, 0.05)


def test_the_peak_of_a_training_run_at_kimi_s_widths_on_an_h200():
    """tests/gpu/kimi_shape.py, 2026-11-30: 27,551,019,520 bytes, the vocabulary of the target 49,152."""
    config, shape = load_config("kimi-k2.5"), load_shape("/nowhere", "kimi-k2.5")
    shape.config.update(vocab_size=49152)
    parts = planning.training_parts(config, shape, 4096, 0.8, loss_kernel=True)
    assert near(sum(part.bytes for part in parts), 27_551_019_520), sum(part.bytes for part in parts) / 27_551_019_520
