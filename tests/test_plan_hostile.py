"""plan_run.py with numbers that are none, files that are not there, and configs of models that leave something out: a sentence each, never a traceback, never a plan that looks sound."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from aerie import plan as planning
from aerie import servers
from aerie.config import load_config
from aerie.errors import UserError
from aerie.paths import ROOT
from aerie.shapes import shape_from

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 320, "max_position_embeddings": 2048}


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path):
    """plan(words) -> (exit code, stdout, stderr) of plan_run.py, in this process."""
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path))

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plan_run.py", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / "plan_run.py"), run_name="__main__")
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return run


@pytest.mark.parametrize(("words", "named"), [
    (["--gpus", "0"], "--gpus"), (["--gpus", "-1"], "--gpus"), (["--gpu-gib", "nan"], "--gpu-gib"), (["--gpu-gib", "inf"], "--gpu-gib"), (["--gpu-gib", "0"], "--gpu-gib"),
    (["--gpu-gib", "-5"], "--gpu-gib"), (["--gpu-gib", "1e300"], "--gpu-gib"),
])  # fmt: skip
def test_a_machine_that_cannot_be(plan, words, named):
    code, _, err = plan("--config", "kimi-k2.5", *words)
    assert code == 2 and named in err


@pytest.mark.parametrize("option", [
    "tp-size=0", "tp-size=abc", "tp-size=[1]", "tp-size=true", "tp-size=1.5", "mem-fraction-static=abc", "mem-fraction-static=nan", "mem-fraction-static=7", "mem-fraction-static=-1",
    "chunked-prefill-size=abc", "max-running-requests=-3", "context-length=8k", "context-length=0", "max-total-tokens=x",
])  # fmt: skip
def test_options_that_are_no_numbers(plan, option):
    code, out, err = plan("--config", "kimi-k2.5", "--paper", "--set", f"server.args.{option}")
    assert code == 2 and option.split("=")[0] in err and "must be" in err and not out, err


@pytest.mark.parametrize("value", ["plan.supervised=5", "plan.gpu_gib=1e300", "plan.tokens_per_sample=1e300"])
def test_amounts_that_cannot_be(plan, value):
    code, _, err = plan("--config", "kimi-k2.5", "--paper", "--set", value)
    assert code == 2 and value.split("=")[0] in err and "at most" in err


def test_an_option_may_be_text_that_is_a_number():
    assert servers.option_number({"context-length": "4096"}, "context-length", default=1) == 4096 and servers.option_number({}, "tp-size", "tp", default=3) == 3
    with pytest.raises(UserError, match="tp = 'x' must be a whole number, 1 or more"):
        servers.option_number({"tp": "x"}, "tp-size", "tp", default=1)


def test_without_chunks_a_whole_prompt_is_prefilled_at_once(plan):
    """SGLang's chunked-prefill-size = -1: the memory is that of the longest prefill, not less than nothing."""
    config = load_config("kimi-k2.5")
    shape = planning.shape_of(config)

    def beside(chunk: int) -> float:
        found = planning.Plan(8, 95.0 * planning.GIB)
        planning.plan_server(found, config, shape, "extraction", {**config.server.args, "chunked-prefill-size": chunk})
        return sum(part.bytes for part in found.phases["extraction"] if part.name in ("activations of a chunk", "capture: auxiliary states"))

    assert beside(-1) == beside(0) == beside(16384) > beside(8192)
    assert plan("--config", "kimi-k2.5", "--paper", "--set", "server.args.chunked-prefill-size=-1")[0] in (0, 2)


@pytest.mark.parametrize("flag", ["--server-log", "--train-report", "--bench-train"])
def test_a_named_file_that_is_not_there(plan, flag):
    code, _, err = plan("--config", "kimi-k2.5", "--paper", "--compare", flag, "/nowhere/x")
    assert code == 2 and "/nowhere/x" in err and flag in err


@pytest.mark.parametrize("content", ['{"results": 3}', '{"results": [3]}', '{"results": [{"peak_gb": 1}]}'])
def test_a_report_of_another_kind(plan, tmp_path, content):
    (tmp_path / "bench.json").write_text(content)
    code, _, err = plan("--config", "kimi-k2.5", "--paper", "--compare", "--bench-train", str(tmp_path / "bench.json"))
    assert code == 2 and "bench.json" in err


def test_compare_while_the_store_holds_no_shard(plan, tmp_path):
    """As after streaming: every shard was deleted once it was trained on."""
    store = tmp_path / "compare" / "store"
    store.mkdir(parents=True)
    (store / "manifest.json").write_text("{}")
    words = ("--config", "kimi-k2.5", "--run", "compare", "--paper", "--compare")
    code, _, err = plan(*words)
    assert code == 2 and "nothing measured yet" in err
    (store / "shard-00000.safetensors").write_bytes(b"x" * 1000)
    assert plan(*words, "--set", "extract.keep_gb=100")[0] == 2  # what is left of a store that passes through says nothing of its size


@pytest.mark.parametrize("change", [
    {"num_attention_heads": 0}, {"hidden_size": 0}, {"intermediate_size": None}, {"quantization_config": {"quant_method": "compressed-tensors"}},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}},
    {"quantization_config": {"quant_method": "awq"}}, {"quantization_config": [1]}, {"num_hidden_layers": -1},
])  # fmt: skip
def test_a_model_whose_config_leaves_something_out(change):
    config = load_config("llama-3.1-8b", overrides=("target.aux_layer_ids=[1]",))
    with pytest.raises(UserError) as refused:
        shape = shape_from({**SHAPE, **change}, "odd")
        planning.make_plan(config, shape, planning.Amounts(10, 1000, 500, 100, "test"), gpus=1, gpu_bytes=1e11, extraction_args={}, serving_args={}, disk_free=1e12, dumps_free=None)
    assert "--weights-gib" not in str(refused.value)


def test_the_unchanged_shape_is_one():
    json.dumps(shape_from(SHAPE, "even").weight_bytes(1, "bfloat16"))
