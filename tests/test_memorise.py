"""A drafter that is made to memorise 16 chats is served and accepts nearly everything on them: catches any slip from capture to serving."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest
from aerie.config import Config
from aerie.generate import accept_length, generate_all, prompts_of
from aerie.samples import SampleFile
from aerie.servers import Server, stop_mode
from aerie.tiny import make_tiny
from cpu_tools import tiny_config
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.server

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
THINGS = "bread river lamp garden copper winter bridge paper engine cloud table forest violin harbour ladder candle mirror saddle".split()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """A run on a tiny random Llama that is sure of its words: a random head's choices hang on differences too small to be learned in a minute, so it is made ten times larger."""
    folder = tmp_path_factory.mktemp("memorise")
    target = make_tiny("llama", folder / "target")
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] *= 10
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    chats = [{"messages": [{"role": "user", "content": f"what is the answer about {thing}?"}]} for thing in THINGS]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    config = tiny_config(
        folder, target, "llama", "memorise",
        data={"inputs": [str(folder / "chats.jsonl")], "max_new_tokens": 40, "heldout": 2, "max_tokens": 512}, draft={"vocab_size": 512}, serve={"num_steps": 3},
        train={"ttt_steps": 4, "step_decay": 1.0, "epochs": 400, "batch_tokens": 2048, "lr": 4e-3, "min_lr_ratio": 0.02, "eval_every": 1000000},
    )  # fmt: skip
    yield config
    for mode in ("extraction", "serving"):
        stop_mode(config, mode)


def run(config: Config, script: str, *words: str) -> str:
    command = [str(SCRIPTS / script), str(config.path)] if script.endswith(".sh") else [sys.executable, str(SCRIPTS / script), "--config", str(config.path)]
    env = os.environ | {"PY": sys.executable}
    done = subprocess.run([*command, "--run", config.run.name, *words], capture_output=True, text=True, check=False, timeout=500, env=env)
    assert done.returncode == 0 and "Traceback" not in done.stderr, f"{script}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def test_a_memorising_drafter_is_accepted(config: Config) -> None:
    run(config, "01_launch_server.sh", "--background")
    run(config, "02a_prepare_data.py")
    run(config, "02b_extract_hidden_states_sglang.py")
    run(config, "01_launch_server.sh", "--stop")
    run(config, "03_train.py")
    run(config, "check_drafter.py")
    said = run(config, "04_serve.sh", "--background")
    assert "warm-up: accept length" in said and "ready on" in said
    server = Server.find(config, "serving")
    samples = SampleFile(config.run.data / "train.safetensors")
    prompts = [prompt for sample in samples for prompt in prompts_of(sample, 40)]
    assert len(prompts) == 16
    answers, _ = generate_all(server.url, prompts, 4)
    for sample, answer in zip(samples, answers):  # the target's own text, unchanged by the drafter
        assert answer.output_ids == sample.input_ids[sample.loss_mask.astype(bool)].tolist()
    fewest = sum(-(-answer.drafted_tokens // (config.serve.num_steps + 1)) for answer in answers)  # every draft token accepted
    needed = sum(answer.verifications for answer in answers)
    assert fewest <= needed <= 1.1 * fewest, f"{needed} verifications, {fewest} would do; accept length {accept_length(answers):.3f}"
    assert "ended: serving" in run(config, "04_serve.sh", "--stop") and Server.find(config, "serving") is None
