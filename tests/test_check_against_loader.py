"""The check's list of tensors against SGLang's own loader: what the check calls missing is what the loader leaves unfilled, without a word."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import torch
from aerie.check import Check
from cpu_tools import free_port
from serve_folders import HIDDEN, MLA_TARGET, llama_drafter, mla_drafter, write_drafter, write_target

ROOT = Path(__file__).resolve().parents[1]
SHARED = "model.embed_tokens.weight"  # the target's own is put there afterwards

# What the check calls it -> what SGLang calls the parameter that stays unfilled
MISSING = {
    "lm_head.weight": "lm_head.weight", "fc.weight": "model.fc.weight", "norm.weight": "model.norm.weight",
    "midlayer.hidden_norm.weight": "model.layers.0.hidden_norm.weight", "midlayer.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight": "model.layers.0.post_attention_layernorm.weight", "midlayer.self_attn.k_proj.weight": "model.layers.0.self_attn.qkv_proj.weight",
    "midlayer.self_attn.o_proj.weight": "model.layers.0.self_attn.o_proj.weight", "midlayer.mlp.up_proj.weight": "model.layers.0.mlp.gate_up_proj.weight",
    "midlayer.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight",
}  # fmt: skip


def with_norms(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config |= {"fc_norm": True}
    config["eagle_config"] = config["eagle_config"] | {"norm_before_fc": True}
    tensors |= {f"fc_norm.{index}.weight": torch.ones(HIDDEN) for index in range(3)} | {"input_norm.weight": torch.ones(3 * HIDDEN)}


def test_the_loader_fills_what_the_check_asks_for(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    folders: dict[str, Path] = {}

    def make(name: str, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], Any] = lambda config, tensors: None, base: Callable = llama_drafter) -> None:
        config, tensors = base(torch.float32) if base is llama_drafter else base()
        change(config, tensors)
        folders[name] = write_drafter(tmp_path / name, config, {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()})

    make("good")
    make("norms", with_norms)
    make("layers.0", lambda config, tensors: [tensors.update({name.replace("midlayer", "layers.0"): tensors.pop(name)}) for name in list(tensors) if "midlayer" in name])
    for name in MISSING:
        make(f"no {name}", lambda config, tensors, name=name: tensors.pop(name))
    make("fc_norm without tensors", lambda config, tensors: config.update(fc_norm=True))
    make("no head_dim", lambda config, tensors: (config.pop("head_dim"), config.update(num_attention_heads=8, num_key_value_heads=4), tensors.update(
        {f"midlayer.self_attn.{part}_proj.weight": torch.ones(rows, 2 * HIDDEN) for part, rows in (("q", 128), ("k", 64), ("v", 64))},
    ), tensors.update({"midlayer.self_attn.o_proj.weight": torch.ones(HIDDEN, 128)})))  # fmt: skip

    environment = os.environ | {
        "AERIE_CPU_PLATFORM": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "patches" / "cpu_platform"), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "tests" / "serve_loader.py"), str(free_port()), str(target), *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout[-2000:] + done.stderr[-3000:]
    found = {name: [left for left in json.loads(lines[0][6:])[str(folder)] if left != SHARED] for name, folder in folders.items()}

    def failed(name: str) -> list[str]:
        check = Check(folders[name], target)
        check.run()
        return [line.key for line in check.failed]

    assert [found[name] for name in ("good", "norms", "layers.0")] == [[], [], []]
    for name, parameter in MISSING.items():
        assert found[f"no {name}"] == [parameter], name  # no error from SGLang
        assert failed(f"no {name}")[0] == name.replace("midlayer", "layers.0")
    assert found["fc_norm without tensors"] == [f"model.fc_norm.{index}.weight" for index in range(3)] and failed("fc_norm without tensors")[0] == "fc_norm.0.weight"
    assert failed("no head_dim")[0] == "head_dim"  # the loader takes another head size; on a CPU it even cuts the tensors to fit, and says nothing


def test_the_mla_class(tmp_path: Path) -> None:
    """kimi_k25_eagle3.py builds GPU-only parts in its constructor; its tensor names are compared with its source instead."""
    import sglang.srt.models

    source = (Path(sglang.srt.models.__path__[0]) / "kimi_k25_eagle3.py").read_text()
    deepseek = (Path(sglang.srt.models.__path__[0]) / "deepseek_v2.py").read_text()
    config, tensors = mla_drafter()
    check = Check(write_drafter(tmp_path / "mla", config, tensors), write_target(tmp_path / "target", MLA_TARGET))
    check.run()
    assert not check.failed
    for name in tensors:
        part = name.removeprefix("midlayer.").removeprefix("self_attn.").removeprefix("mlp.").removesuffix(".weight")
        assert part in source or part in deepseek, name
