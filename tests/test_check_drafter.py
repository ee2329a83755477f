"""check_drafter: a good folder passes, each bad one of issue 'Serving' is refused with the key's name and exit code 1 (2 for what is no drafter's folder)."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from aerie.check import Check, Serving
from aerie.identity import model_hash, tokenizer_hash
from serve_folders import DRAFT_VOCAB, HIDDEN, LLAMA_TARGET, MLA_TARGET, VOCAB, llama_drafter, mla_drafter, write_drafter, write_target

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target")


def run_script(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """check_drafter.py in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["check_drafter.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / "check_drafter.py"), run_name="__main__")
    return int(ended.value.code or 0)


def drop(*names: str) -> Edit:
    return lambda config, tensors: [(tensors if name in tensors else config).pop(name) for name in names]


def put(**values: Any) -> Edit:
    return lambda config, tensors: config.update(values)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda config, tensors: tensors.update({name: change(tensors[name])})


def other_vocabulary(t2d: torch.Tensor) -> torch.Tensor:
    return torch.roll(t2d, 17)


def with_nan(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[5] = float("nan")
    return value


def absolute(d2t: torch.Tensor) -> torch.Tensor:
    return d2t + torch.arange(len(d2t))


def float16(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["torch_dtype"] = "float16"
    tensors.update({name: value.half() for name, value in tensors.items() if value.is_floating_point()})


BAD: dict[str, tuple[Edit, str, str]] = {  # what is done to a good folder, the key named, a word of the reason
    "no lm_head": (drop("lm_head.weight"), "lm_head.weight", "random"),
    "no fc": (drop("fc.weight"), "fc.weight", "random"),
    "no norm": (drop("norm.weight"), "norm.weight", "random"),
    "no d2t": (drop("d2t"), "d2t", "target ids"),
    "a torn layer": (drop("midlayer.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight", "random"),
    "two aux states in fc": (tensor("fc.weight", lambda value: value[:, : 2 * HIDDEN]), "fc.weight", "2 auxiliary states"),
    "another hidden size": (put(hidden_size=HIDDEN // 2, target_hidden_size=HIDDEN), "hidden_size", f"made for {HIDDEN}"),
    "fewer key heads": (put(num_key_value_heads=1), "num_key_value_heads", "made for"),
    "more heads than key heads divide": (put(num_attention_heads=7), "num_attention_heads", "made for"),
    "another inner size": (put(intermediate_size=40), "intermediate_size", "made for"),
    "another draft vocabulary": (put(draft_vocab_size=DRAFT_VOCAB - 1), "draft_vocab_size", f"made for {DRAFT_VOCAB}"),
    "two dtypes": (put(dtype="float32", torch_dtype="bfloat16"), "dtype", "torch_dtype is bfloat16"),
    "two aux ids": (put(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 4]}), "fc.weight", "3 auxiliary states"),
    "aux count against ids": (put(num_aux_hidden_states=2), "num_aux_hidden_states", "3 layers"),
    "aux id too deep": (put(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}), "eagle_aux_hidden_state_layer_ids", "the target has 6"),
    "aux ids twice": (put(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}), "eagle_aux_hidden_state_layer_ids", "repeats"),
    "aux off": (put(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": False}), "use_aux_hidden_state", "true"),
    "absolute d2t": (tensor("d2t", absolute), "d2t", "offsets"),
    "d2t twice": (tensor("d2t", lambda value: value - torch.arange(len(value)) // 2), "d2t", "distinct"),
    "d2t too long": (tensor("d2t", lambda value: torch.cat([value, value[-1:]])), "d2t", f"[{DRAFT_VOCAB}]"),
    "t2d of another vocabulary": (tensor("t2d", other_vocabulary), "t2d", "another vocabulary"),
    "t2d of another size": (tensor("t2d", lambda value: value[:-8]), "t2d", f"[{VOCAB}]"),
    "no head_dim": (drop("head_dim"), "head_dim", "missing"),
    "no rope_theta": (drop("rope_theta"), "rope_theta", "missing"),
    "no eagle_config": (drop("eagle_config"), "eagle_config", "guesses"),
    "no draft_vocab_size": (drop("draft_vocab_size"), "draft_vocab_size", "missing"),
    "empty eagle_config": (put(eagle_config={}), "eagle_aux_hidden_state_layer_ids", "missing"),
    "head_dim of another": (put(head_dim=32), "head_dim", "made for"),
    "2048 under 8k": (put(max_position_embeddings=2048), "max_position_embeddings", "8192"),
    "layers copied from the target": (put(num_hidden_layers=6), "num_hidden_layers", "copied"),
    "48 layers": (put(num_hidden_layers=48), "num_hidden_layers", "1 decoder layer;"),
    "float16": (float16, "dtype", "float16 weights under a target served in bfloat16"),
    "float32 under auto": (put(torch_dtype="float32"), "dtype", "in float16"),
    "no dtype": (drop("torch_dtype"), "dtype", "missing"),
    "tied": (put(tie_word_embeddings=True), "tie_word_embeddings", "draft vocabulary"),
    "other vocabulary size": (put(vocab_size=640), "vocab_size", "another target"),
    "rope spellings differ": (put(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "rope_parameters", "rope_theta"),
    "a NaN": (tensor("midlayer.self_attn.o_proj.weight", with_nan), "midlayer.self_attn.o_proj.weight", "1 of"),
    "norm flag left out": (lambda config, tensors: tensors.update({f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)}), "fc_norm.0.weight", "left out"),
    "norm flag without tensors": (put(fc_norm=True), "fc_norm.0.weight", "not in the file"),
    "norm flags differ": (put(norm_before_fc=True, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_fc": False}), "norm_before_fc", "top level"),
    "quantisation copied": (put(quantization_config={"quant_method": "fp8"}), "quantization_config", "not quantised"),
    "speculators format": (put(speculators_model_type="eagle3"), "speculators_config", "speculators format"),
    "another class": (put(architectures=["LlamaForCausalLM"]), "architectures", "LlamaForCausalLMEagle3"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refuses(name: str, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    edit, key, word = BAD[name]
    config, tensors = llama_drafter()
    edit(config, tensors)
    assert run_script(monkeypatch, write_drafter(tmp_path / "drafter", config, tensors), "--target", target) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"error: {tmp_path / 'drafter'}: {key}: ") and word in err and "Traceback" not in err
    assert f"✗ {key}" in out


def test_a_good_folder_passes(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    training = {"model_hash": model_hash(target), "tokenizer_hash": tokenizer_hash(target), "aux_layer_ids": [1, 2, 4], "capture_points": [2, 3, 5], "predicted_accept_length": 1.9}
    folder = write_drafter(tmp_path / "drafter", *llama_drafter(), training)
    assert run_script(monkeypatch, folder, "--target", target, "--server-version", "0.5.23") == 0
    out = capsys.readouterr().out
    assert "✗" not in out and "states after 2, 3, 5 of 6" in out and "1.900" in out


def test_an_mla_drafter_passes_and_a_plain_one_needs_its_own_backend(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", MLA_TARGET)
    mla = Check(write_drafter(tmp_path / "mla", *mla_drafter()), target, Serving(gpu=True))
    mla.run()
    assert not mla.failed and any("[1, 2, 4]: the states after 2, 3, 5" in line.text for line in mla.lines)  # the first id is 1: DeepSeek shifts too
    config, tensors = mla_drafter()
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 3, 5]
    assert any("the states after 2, 3, 5" in line.text for line in Check(write_drafter(tmp_path / "mla2", config, tensors), target).run())
    del tensors["midlayer.self_attn.kv_b_proj.weight"]
    torn = Check(write_drafter(tmp_path / "torn", config, tensors), target)
    torn.run()
    assert [line.key for line in torn.failed] == ["layers.0.self_attn.kv_b_proj.weight"]
    plain = write_drafter(tmp_path / "plain", *llama_drafter())
    for serving, refused in ((Serving(gpu=True), True), (Serving(attention_backend="trtllm_mla"), True), (Serving(gpu=True, draft_attention_backend="fa3"), False), (Serving(), False)):
        check = Check(plain, target, serving)
        check.run()
        assert [line.key for line in check.failed] == (["speculative-draft-attention-backend"] if refused else []), serving


def test_what_the_server_is_started_with_counts(tmp_path: Path, target: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", *llama_drafter())

    def failed(**serving: Any) -> list[str]:
        check = Check(folder, target, Serving(**serving))
        check.run()
        return [line.key for line in check.failed]

    assert failed() == failed(dtype="float32") == failed(context_length=8192) == failed(quantization="fp8", draft_quantization="unquant") == []
    assert failed(context_length=16384) == ["max_position_embeddings"]
    assert failed(quantization="fp8") == ["speculative-draft-model-quantization"]
    assert failed(store={"aux_layer_ids": [1, 2, 3]}) == ["eagle_aux_hidden_state_layer_ids"]
    assert failed(store={"aux_layer_ids": [1, 2, 4], "capture_points": [1, 2, 4]}) == ["capture_points"]


def test_the_dtype_that_a_folder_is_served_in(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A float32 drafter under a bfloat16 target, both served in float32, as the demo's: by training.json, by --config, by --dtype; without any of them it is refused."""
    from cpu_tools import write_config

    folder = write_drafter(tmp_path / "unsaid", *llama_drafter(torch.float32))
    assert run_script(monkeypatch, folder, "--target", target) == 1 and "--dtype" in capsys.readouterr().err
    assert run_script(monkeypatch, folder, "--target", target, "--dtype", "float32") == 0
    config = write_config(tmp_path / "float32.toml", target, [1, 2, 4], target={"dtype": "float32"})
    assert run_script(monkeypatch, folder, "--target", target, "--config", config) == 0
    said = write_drafter(tmp_path / "said", *llama_drafter(torch.float32), {"served_dtype": "float32"})
    assert run_script(monkeypatch, said, "--target", target, "--server-version", "0.5.17") == 0
    assert run_script(monkeypatch, said, "--target", target, "--dtype", "auto") == 1
    odd = write_drafter(tmp_path / "odd", *llama_drafter(torch.float32), {"served_dtype": ["fp8"]})
    assert run_script(monkeypatch, odd, "--target", target) == 1


def test_another_target_of_the_same_shape(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    training = {"model_hash": model_hash(target), "tokenizer_hash": tokenizer_hash(target)}
    folder = write_drafter(tmp_path / "drafter", *llama_drafter(), training)
    other = write_target(tmp_path / "other", LLAMA_TARGET | {"rms_norm_eps": 1e-6})
    assert run_script(monkeypatch, folder, "--target", other) == 1 and ": model_hash: " in capsys.readouterr().err
    (target / "tokenizer.json").write_text("{}")
    assert run_script(monkeypatch, folder, "--target", target) == 1 and ": tokenizer_hash: " in capsys.readouterr().err
    wide = write_target(tmp_path / "wide", LLAMA_TARGET | {"hidden_size": 128})
    assert run_script(monkeypatch, folder, "--target", wide) == 1 and ": hidden_size: " in capsys.readouterr().err


def test_what_is_no_drafters_folder(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    good = write_drafter(tmp_path / "good", *llama_drafter())
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    no_config = write_drafter(tmp_path / "no-config", *llama_drafter())
    (no_config / "config.json").unlink()
    bad_json = write_drafter(tmp_path / "bad-json", *llama_drafter())
    (bad_json / "config.json").write_text('{"hidden_size": ')
    no_weights = write_drafter(tmp_path / "no-weights", *llama_drafter())
    (no_weights / "model.safetensors").unlink()
    torn = write_drafter(tmp_path / "torn", *llama_drafter())
    data = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) * 6 // 10])
    for folder in (tmp_path / "missing", tmp_path / "empty", tmp_path / "file", no_config, bad_json, no_weights, torn):
        assert run_script(monkeypatch, folder, "--target", target) == 2, folder
        err = capsys.readouterr().err
        assert err.startswith("error: ") and str(folder) in err and err.count("\n") == 1
    assert run_script(monkeypatch, good, "--target", tmp_path / "missing") == 2
    assert run_script(monkeypatch, good, "--target", target, "--server-version", "0.4.1") == 2
    assert "0.5.23" in capsys.readouterr().err


def test_public_layouts(tmp_path: Path, target: Path) -> None:
    """layers.0 and model. prefixes, a .bin file, an index with shards, null draft vocabulary: what others publish."""
    config, tensors = llama_drafter()
    renamed = {name.replace("midlayer", "model.layers.0") if "midlayer" in name else name: value for name, value in tensors.items()}
    folders = [write_drafter(tmp_path / "renamed", config, renamed)]
    binary = tmp_path / "binary"
    binary.mkdir()
    (binary / "config.json").write_text(json.dumps(config))
    torch.save(tensors, binary / "pytorch_model.bin")
    sharded = write_drafter(tmp_path / "sharded", config, {name: value for name, value in tensors.items() if name != "fc.weight"})
    from safetensors.torch import save_file

    save_file({"fc.weight": tensors["fc.weight"]}, sharded / "more.safetensors")
    weight_map = {name: "more.safetensors" if name == "fc.weight" else "model.safetensors" for name in tensors}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shared = {name: value for name, value in tensors.items() if name not in ("lm_head.weight", "d2t", "t2d")}
    folders += [binary, sharded, write_drafter(tmp_path / "shared", config | {"draft_vocab_size": None}, shared)]
    for folder in folders:
        check = Check(folder, target)
        check.run()
        assert not check.failed, (folder, check.failed)
        assert any(line.ok is None and line.key == "training.json" for line in check.lines)


def test_from_another_folder_with_help(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPTS / "check_drafter.py"), "--help"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--target" in done.stdout


def test_for_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The ids of an exported folder are the capture points, at the top level; each engine's check refuses the other's folder."""
    from cpu_tools import write_config

    for name, target_config, ids, points in (("llama", LLAMA_TARGET, [1, 2, 4], [2, 3, 5]), ("mla", MLA_TARGET, [2, 3, 5], [2, 3, 5])):
        target = write_target(tmp_path / f"target-{name}", target_config)
        config, tensors = llama_drafter()
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        training = {"aux_layer_ids": ids, "capture_points": points}
        folder = write_drafter(tmp_path / f"drafter-{name}", config, tensors, training)
        path = write_config(tmp_path / f"{name}.toml", target, ids, target={"dtype": "bfloat16"})
        output = tmp_path / f"vllm-{name}"
        monkeypatch.setattr(sys, "argv", ["export_drafter.py", str(output), "--for", "vllm", "--drafter", str(folder), "--config", str(path)])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / "export_drafter.py"), run_name="__main__")
        assert not ended.value.code, capsys.readouterr().err
        written = json.loads((output / "config.json").read_text())
        assert written["eagle_aux_hidden_state_layer_ids"] == points and "eagle_aux_hidden_state_layer_ids" not in written["eagle_config"]
        assert run_script(monkeypatch, output, "--target", target, "--for", "vllm") == 0
        assert run_script(monkeypatch, output, "--target", target) == 1 and ": eagle_aux_hidden_state_layer_ids: " in capsys.readouterr().err
        assert run_script(monkeypatch, folder, "--target", target, "--for", "vllm") == 1
    config["fc_norm"] = True
    normed = tensors | {f"fc_norm.{index}.weight": torch.ones(HIDDEN) for index in range(3)}
    config["eagle_aux_hidden_state_layer_ids"] = points
    assert run_script(monkeypatch, write_drafter(tmp_path / "normed", config, normed), "--target", target, "--for", "vllm") == 1
    assert ": fc_norm: " in capsys.readouterr().err


def test_a_version_that_nobody_read(tmp_path: Path, target: Path) -> None:
    check = Check(write_drafter(tmp_path / "drafter", *llama_drafter()), target, Serving(server_version="0.9.0"))
    assert [line.key for line in check.run() if line.ok is None] == ["SGLang", "training.json"] and not check.failed
