"""Helpers of the tests that serve: configs in a temporary folder, free ports, one /generate call."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import requests
from aerie.config import Config, load_config

# Ids whose capture points are 2, 3 and 5 of the six layers. deepseek_v2 captures at the id (unless the first is 1), llama and qwen at id + 1.
AUX_LAYER_IDS = {"llama": [1, 2, 4], "qwen3": [1, 2, 4], "qwen3_moe": [1, 2, 4], "deepseek_v3": [2, 3, 5], "kimi_k25": [2, 3, 5]}
CAPTURE_POINTS = [2, 3, 5]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{key}" = {_toml(item)}' for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def write_config(path: Path, model: Path | str, aux_layer_ids: list[int], **sections: dict[str, Any]) -> Path:
    """A config file for `model` with free ports, float32 and small servers; `sections` (target=..., server=...) add to it or override it."""
    base: dict[str, dict[str, Any]] = {
        "target": {"model_path": str(model), "aux_layer_ids": aux_layer_ids, "dtype": "float32"},
        "server": {"port": free_port(), "ready_timeout_s": 240.0, "args": {"context-length": 2048}},
        "serve": {"port": free_port()},
        "bench": {"baseline_port": free_port()},
    }
    for name, table in sections.items():
        merged = base.setdefault(name, {})
        for key, value in table.items():
            merged[key] = merged[key] | value if isinstance(value, dict) and isinstance(merged.get(key), dict) else value
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items()) for name, table in base.items()))
    return path


def tiny_config(folder: Path, model: Path, family: str, run: str, **sections: dict[str, Any]) -> Config:
    """The loaded config of a tiny model, in folder/<run>.toml."""
    return load_config(str(write_config(folder / f"{run}.toml", model, AUX_LAYER_IDS[family], **sections)), run)


def generate(url: str, input_ids: list[int] | list[list[int]], max_new_tokens: int = 16, rid: str | None = None, timeout: float = 180.0, **fields: Any) -> Any:
    """One greedy /generate call that never ends early; `fields` go into the request (return_logprob=True, ...)."""
    body = {"input_ids": input_ids, "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}, **fields}
    if rid is not None:
        body["rid"] = rid
    answer = requests.post(f"{url}/generate", json=body, timeout=timeout)
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text[:500]}"
    return answer.json()
