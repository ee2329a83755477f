"""The user's way on a tiny random DeepSeek-V3 (MLA, MoE, yarn): make data extract train serve bench, and single scripts by hand from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from aerie.config import load_config
from aerie.paths import ROOT
from aerie.servers import Server
from cpu_tools import AUX_LAYER_IDS, write_config

pytestmark = pytest.mark.server

WORDS = ["river", "stone", "lamp", "garden", "copper", "winter", "bridge", "paper", "engine", "cloud", "table", "forest"]


@pytest.fixture(scope="module")
def way(tiny_model, tmp_path_factory):
    """(config, environment, another folder) of a run that nobody has started."""
    folder = tmp_path_factory.mktemp("way")
    chats = [{"messages": [{"role": "user", "content": f"Tell me about a {first} and a {second}."}]} for first in WORDS for second in WORDS if first < second]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats[:24]))
    path = write_config(
        folder / "way.toml", tiny_model("deepseek_v3"), AUX_LAYER_IDS["deepseek_v3"],
        data={"inputs": [str(folder / "chats.jsonl")], "max_new_tokens": 24, "heldout": 6, "max_tokens": 512},
        extract={"proof_samples": 4},
        draft={"vocab_size": 256},
        train={"ttt_steps": 3, "epochs": 2, "batch_tokens": 512, "eval_samples": 6, "lr": 1e-3, "checkpoint_every": 1},
        bench={"concurrency": [4], "max_new_tokens": 24, "samples": 6, "side_by_side": True, "rounds": 1},
    )  # fmt: skip
    config = load_config(str(path))
    yield config, os.environ | {"PY": sys.executable}, folder
    for mode in ("extraction", "serving", "baseline"):
        if server := Server.find(config, mode):
            server.stop()


def call(command, env, cwd, code=0):
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def make(way, *words, code=0):
    config, env, _ = way
    return call(["make", "-C", str(ROOT), *words, f"CONFIG={config.path}", f"PY={sys.executable}"], env, "/", code)


def by_hand(way, script, *flags, code=0):
    config, env, folder = way
    return call([sys.executable, str(ROOT / "scripts" / script), "--config", str(config.path), *flags], env, folder, code)


def report(way, part):
    return json.loads((way[0].run.root / part / "report.json").read_text())


def test_data_and_extract(way):
    config, _, _ = way
    make(way, "data")
    samples = report(way, "data")
    by_hand(way, "02b_extract_hidden_states_sglang.py", "--limit", "5")  # half-finished, from another folder
    assert json.loads((config.run.store / "manifest.json").read_text())["samples"] == 5
    make(way, "extract")
    done = report(way, "store")
    assert done["accounting"] == "done 24 + failed 0 + skipped 0 = 24 samples"
    assert samples["splits"]["heldout"]["rows"] == 6 and samples["splits"]["train"]["rows"] == 18


def test_train(way):
    config, env, folder = way
    command = [sys.executable, str(ROOT / "scripts" / "03_train.py"), "--config", str(config.path)]
    first = subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # from another folder
    deadline = time.monotonic() + 180
    while not any(config.run.checkpoints.glob("*")) and first.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()  # in the middle, after its first checkpoint
    first.wait()
    assert any(config.run.checkpoints.glob("*"))
    by_hand(way, "03_train.py")
    assert Server.find(config, "extraction") is None  # the trainer ended it: it held the memory
    assert report(way, "store")["accounting"] in make(way, "extract")  # nothing left to ask for
    assert "all_final_rows" in make(way, "extract", "SET=extract.all_final_rows=true", code=2)  # another store
    assert Server.find(config, "extraction") is None  # none was started for either
    make(way, "train")
    done = report(way, "drafter")
    assert done["predicted_accept_length"] >= 1.0 and done["train_tok_s"] > 0
    make(way, "check")


def test_serve_and_bench(way):
    config, _, _ = way
    assert " for these (" in make(way, "serve")
    make(way, "bench")
    done = report(way, "bench")
    assert done["same_prompts"]["prompts"] == 6 and done["same_prompts"]["served"] == done["accept_length"]
    assert done["lossless"]["equal"] == done["lossless"]["compared"] == 6
    assert 1.0 <= done["accept_length"] <= config.serve.num_steps + 1
    for key in ("predicted_accept_length", "baseline_tok_s", "speculative_tok_s", "samples", "tokens", "extract_tok_s", "train_tok_s"):
        assert done[key] > 0, key
    make(way, "stop")
    assert Server.find(config, "serving") is None and Server.find(config, "baseline") is None
