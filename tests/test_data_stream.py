"""A hundred thousand short chats: memory stays flat, a killed run goes on, the rate is in the report."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aerie.paths import ROOT
from data_tools import make_fast
from test_answers import write_config

pytestmark = pytest.mark.slow
WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not what all were we when".split()
CHATS = 100_000
MIB = 1 << 20


def write_chats(path: Path, count: int) -> None:
    rng = random.Random(1)
    with open(path, "w") as file:
        for i in range(count):
            question, answer = " ".join(rng.choices(WORDS, k=12)), " ".join(rng.choices(WORDS, k=rng.randrange(5, 40)))
            print(json.dumps({"messages": [{"role": "user", "content": f"{question} {i}?"}, {"role": "assistant", "content": answer}]}), file=file)


def test_a_hundred_thousand_chats(tmp_path: Path) -> None:
    model = make_fast(tmp_path / "chatml", "chatml")
    chats = tmp_path / "many.jsonl"
    data = {"heldout": 200, "regenerate": False, "inputs": [str(chats)]}
    command = lambda run: [sys.executable, str(ROOT / "scripts/02a_prepare_data.py"), "--config", str(write_config(tmp_path, model, [], **data)), "--run", run]  # noqa: E731
    folder = lambda run: Path(os.environ["AERIE_RUNS_DIR"]) / run / "data"  # noqa: E731

    def report(run: str) -> dict:
        done = subprocess.run(command(run), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads((folder(run) / "report.json").read_text())

    write_chats(chats, CHATS // 10)
    small = report("stream-small")
    write_chats(chats, CHATS)
    large = report("stream-large")
    assert large["counts"]["chats"] == CHATS and sum(counts["rows"] for counts in large["splits"].values()) == CHATS
    grown = large["peak_memory_bytes"] - small["peak_memory_bytes"]
    print(f"\n{CHATS:,} chats: {large['rendered_chats_s']:,.0f} chats/s, {large['seconds']['all']:.0f} s; peak memory {large['peak_memory_bytes'] / MIB:.0f} MiB, {grown / MIB:+.0f} MiB on a tenth")
    size = sum(counts["tokens"] for counts in large["splits"].values()) * 5
    assert grown < 64 * MIB, f"ten times the chats ({size / MIB:.0f} MiB of rows) cost {grown / MIB:.0f} MiB more memory"

    state = folder("stream-killed") / ".rows.json"
    run = subprocess.Popen(command("stream-killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not state.exists() and run.poll() is None:
        time.sleep(0.05)
    time.sleep(1.0)  # rows past the checkpoint
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    done = json.loads(state.read_text())["chats"]
    again = report("stream-killed")
    assert again["data_hash"] == large["data_hash"] and again["coverage"] == large["coverage"] and again["counts"] == large["counts"]
    assert 0 < done < CHATS
    for name in ("train.safetensors", "heldout.safetensors"):
        assert (folder("stream-killed") / name).read_bytes() == (folder("stream-large") / name).read_bytes()
