"""04_serve.sh and 05_benchmark.py with real servers on a tiny target and a random drafter: restart, a kill in mid-benchmark, chain and tree, no memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import pytest
import torch
from aerie.config import Config, make_words
from aerie.drafter import Drafter
from aerie.drafter_init import init_from_target, make_shape
from aerie.errors import UserError
from aerie.export import export_drafter
from aerie.identity import model_hash, tokenizer_hash
from aerie.rid import sample_id
from aerie.samples import Sample, write_samples
from aerie.ports import port_is_free
from aerie.servers import Server, advice, stop_mode, watcher_record
from aerie.serving import launch
from aerie.target_weights import TargetWeights

pytestmark = [pytest.mark.server, pytest.mark.slow]

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture(scope="module")
def config(make_config: Callable[..., Config]) -> Iterator[Config]:
    """A run with a drafter that starts as the target's last layer (it drafts a little), and held-out prompts of random tokens."""
    config = make_config("llama", "serving-real", draft={"vocab_size": 512}, bench={"concurrency": [4], "max_new_tokens": 32, "samples": 16, "side_by_side": True, "rounds": 1, "latency": False})
    target = TargetWeights(config.model_path)
    drafter = Drafter(make_shape(config, target))
    generator = torch.Generator().manual_seed(0)
    drafter.reset(generator)
    init_from_target(drafter, target, target.lm_head().float(), generator)
    training = {"model_hash": model_hash(config.model_path), "tokenizer_hash": tokenizer_hash(config.model_path), "aux_layer_ids": config.target.aux_layer_ids, "num_steps": 3}
    export_drafter(config.run.drafter, drafter, torch.arange(512), config.target.aux_layer_ids, target.config, torch.float32, training)
    random = np.random.default_rng(1)
    samples = []
    for index in range(16):
        ids, mask = random.integers(6, 500, 44 + index).astype(np.int32), np.zeros(44 + index, np.uint8)
        mask[12:] = 1
        samples.append(Sample(sample_id(ids, mask), ids, mask))
    write_samples(config.run.data / "heldout.safetensors", samples, {})
    yield config
    for mode in ("serving", "baseline"):
        stop_mode(config, mode)


def command(config: Config, script: str, *words: str) -> list[str]:
    first = [str(SCRIPTS / script), str(config.path)] if script.endswith(".sh") else [sys.executable, str(SCRIPTS / script), "--config", str(config.path)]
    return [*first, "--run", config.run.name, *words]


def run(config: Config, script: str, *words: str, code: int = 0) -> str:
    done = subprocess.run(command(config, script, *words), capture_output=True, text=True, check=False, timeout=500, env=os.environ | {"PY": sys.executable})
    assert done.returncode == code and "Traceback" not in done.stderr, f"{script}: {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def wait_for(what: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


def test_a_killed_server_comes_back_and_stop_ends_all(config: Config) -> None:
    said = run(config, "04_serve.sh", "--background")
    assert f"end it with `make stop{make_words(config)}`" in said and "Ctrl-C" not in said
    assert "checks passed" in said and "warm-up: accept length" in said and "training predicted none" in said
    assert "already runs" in run(config, "04_serve.sh", "--background")
    first = Server.find(config, "serving")
    os.killpg(first.record["pid"], signal.SIGKILL)
    wait_for(lambda: (server := Server.find(config, "serving")) is not None and server.record["pid"] != first.record["pid"] and server.healthy())
    log = (config.run.logs / "serving-watcher.log").read_text()
    assert "restart 1 of 3" in log and "killed by signal 9" in log
    watcher = watcher_record(config, "serving")
    assert "ended: serving" in run(config, "04_serve.sh", "--stop")
    assert Server.find(config, "serving") is None and watcher_record(config, "serving") is None and port_is_free("127.0.0.1", config.serve.port)
    assert not Path(f"/proc/{watcher['pid']}").exists()


def test_benchmark_chain_and_tree(config: Config) -> None:
    """Texts equal, and a tree accepts at least as much as the chain of the same depth."""
    said = run(config, "05_benchmark.py", "--sweep", "3,1,4", "3,4,16")
    report = json.loads((config.run.bench / "report.json").read_text())
    assert report["lossless"]["equal"] == report["lossless"]["compared"] == 16, said
    chain, tree = report["sweep"]
    assert chain["accept_length"] == pytest.approx(report["accept_length"]) and 1.0 < chain["accept_length"] <= tree["accept_length"] <= 4.0
    assert Server.find(config, "serving") is None and Server.find(config, "baseline") is None  # they were its own


def test_a_server_killed_in_mid_benchmark(config: Config) -> None:
    (config.run.bench / "report.json").unlink(missing_ok=True)
    words = ("--set", "bench.requests_per_slot=1", "--set", "bench.max_new_tokens=500")  # long answers: the second pass is under way when the first one's are logged
    bench = subprocess.Popen(command(config, "05_benchmark.py", *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        log = config.run.logs / "serving.log"
        started = time.time()
        wait_for(lambda: log.exists() and log.stat().st_mtime > started and log.read_text().count("POST /generate") > 4 and Server.find(config, "serving") is not None)
        time.sleep(0.5)  # not between two passes, where the next one would find no server
        os.killpg(Server.find(config, "serving").record["pid"], signal.SIGKILL)
        said, _ = bench.communicate(timeout=120)
    finally:
        bench.kill()
    assert bench.returncode == 2 and "the serving server stopped answering after" in said and "Traceback" not in said
    assert not (config.run.bench / "report.json").exists() and Server.find(config, "baseline") is None


def test_no_memory_for_the_cache(config: Config) -> None:
    """SGLang's own refusal, made into one sentence with what to do."""
    args = {"max-total-tokens": False, "mem-fraction-static": 0.0001}
    config.server.cpu_args.update(args)
    try:
        with pytest.raises(UserError, match="the baseline server ended while starting: .*memory.*mem-fraction-static"):
            launch(config, "baseline")
    finally:
        for name in args:
            del config.server.cpu_args[name]
    assert "nvidia-smi" in advice("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.") and not advice("KeyError: 'x'")
