"""Hugging Face transformers as the reference for captured states, and requests to a capture server."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import requests
import torch
from aerie import dumps
from aerie.rid import new_rid, sample_id
from aerie.servers import Server, dump_dir
from safetensors.torch import load_file, save_file

# float32 rounding through six layers: two implementations add in another order
RTOL = 2e-4


def text_folder(folder: Path) -> Path:
    """A folder that transformers can load: the model itself, or the text model inside a kimi_k25 checkpoint, written beside it."""
    config = json.loads((folder / "config.json").read_text())
    if "text_config" not in config:
        return folder
    plain = folder.with_name(folder.name + "-text")
    if not plain.is_dir():
        plain.mkdir()
        weights = {name.removeprefix("language_model."): value for name, value in load_file(folder / "model.safetensors").items() if name.startswith("language_model.")}
        save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
        (plain / "config.json").write_text(json.dumps(config["text_config"]))
    return plain


def reference_states(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[torch.Tensor]]:
    """For each prompt: the state before layer 0, after 1, 2, ... layers, and as the last entry after the final norm; each [T, H] float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(text_folder(folder), dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for ids in prompts:
            output = model.model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
            found.append([state[0] for state in output.hidden_states])
            assert torch.equal(found[-1][-1], output.last_hidden_state[0])
    return found


def lm_head(folder: Path) -> torch.Tensor:
    """[V, H] float32, from the checkpoint."""
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in ("lm_head.weight", "language_model.lm_head.weight") if name in weights)
    return weights[name].float()


def random_prompt(tokens: int, seed: int, vocab: int = 320) -> list[int]:
    """Ids 8 to vocab, as random as numpy's generator for this seed."""
    return np.random.default_rng(seed).integers(8, vocab, tokens).tolist()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The worst row's: norm of the difference over norm of the reference."""
    return float(((found.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)).max())


class Client:
    """Asks one capture server by name."""

    def __init__(self, server: Server, run: str = "test"):
        self.server, self.run = server, run
        self.folder = dump_dir(server.config)

    def rid(self, ids: Sequence[int], run: str = "") -> str:
        """A fresh name for these ids."""
        return str(new_rid(run or self.run, sample_id(np.array(ids), np.zeros(len(ids), np.uint8)), len(ids)))

    def post(self, rid: str | None, ids: Sequence[int], max_new_tokens: int = 1, temperature: float = 0.0, **more: Any) -> requests.Response:
        """One /generate call."""
        body = {"input_ids": list(ids), "sampling_params": {"temperature": temperature, "max_new_tokens": max_new_tokens, "ignore_eos": True}, **more}
        if rid is not None:
            body["rid"] = rid
        return requests.post(f"{self.server.url}/generate", json=body, timeout=180)

    def dump(self, rid: str, ids: Sequence[int]) -> dumps.Dump:
        """The checked dump of a request that was sent; it is taken into memory and deleted."""
        dump = dumps.read_dump(dumps.wait_dump(self.folder, rid, 60))
        dumps.check_dump(dump, rid, ids)
        dump = dump._replace(input_ids=dump.input_ids.clone(), aux=[state.clone() for state in dump.aux], final=dump.final.clone())
        dumps.remove_dump(self.folder, rid)
        return dump

    def capture(self, ids: Sequence[int], **more: Any) -> dumps.Dump:
        """Send, wait, check, take."""
        rid = self.rid(ids)
        answer = self.post(rid, ids, **more)
        assert answer.status_code == 200, answer.text[:300]
        return self.dump(rid, ids)

    def capture_together(self, prompts: Sequence[Sequence[int]], **more: Any) -> list[dumps.Dump]:
        """All at the same time, one thread each."""
        found: list[dumps.Dump | Exception] = [RuntimeError("not run")] * len(prompts)
        start = threading.Barrier(len(prompts))

        def one(index: int) -> None:
            try:
                start.wait(60)
                found[index] = self.capture(prompts[index], **more)
            except Exception as exc:
                found[index] = exc

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for each in found:
            if isinstance(each, Exception):
                raise each
        return found


def assert_same_states(found: dumps.Dump, wanted: dumps.Dump, rtol: float = RTOL) -> None:
    """The same prompt captured in another company."""
    assert torch.equal(found.input_ids, wanted.input_ids)
    for mine, theirs in zip([*found.aux, found.final], [*wanted.aux, wanted.final], strict=True):
        assert relative_error(mine, theirs) < rtol


def assert_reference(found: dumps.Dump, states: list[torch.Tensor], points: Sequence[int], rtol: float = RTOL) -> None:
    """Each auxiliary state is transformers' state after that many layers and no other; `final` is the one after the final norm."""
    for point, state in zip(points, found.aux, strict=True):
        errors = [relative_error(state, other) for other in states[:-1]]
        assert errors[point] < rtol, (point, errors)
        assert min(error for index, error in enumerate(errors) if index != point) > 100 * rtol
    assert relative_error(found.final, states[-1]) < rtol
