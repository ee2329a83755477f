"""Helpers of the extraction tests: a run folder with data, the fake server as a process of its own, 02b as a user starts it, a look at what came out."""

from __future__ import annotations

import contextlib
import importlib.util
import io
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
import requests
from aerie.config import Config, load_config
from aerie.errors import run_main
from aerie.identity import tokenizer_hash
from aerie.rid import sample_id
from aerie.samples import Sample, write_samples
from aerie.store import Store, supervised_rows
from cpu_tools import free_port, write_config
from fake_dump_server import known_states

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "02b_extract_hidden_states_sglang.py"


def make_samples(count: int, seed: int = 0, longest: int = 60, shortest: int = 8, vocab: int = 500) -> list[Sample]:
    """Samples of a prompt and an answer each, all different."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        tokens = int(rng.integers(shortest, longest + 1))
        ids = rng.integers(0, vocab, tokens, dtype=np.int32)
        mask = (np.arange(tokens) >= int(rng.integers(1, tokens - 3))).astype(np.uint8)
        samples.append(Sample(sample_id(ids, mask), ids, mask))
    return samples


def children_named(parent: int, name: str) -> list[int]:
    """Process ids of the children of `parent` whose command holds `name`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and name in (status.parent / "cmdline").read_text():
                found.append(int(status.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class RunOf:
    """02b on one run."""

    def __init__(self, config: Config):
        self.config_path, self.name, self.runs = config.path, config.run.name, config.run.root.parent

    def command(self, *options: str) -> list[str]:
        return [sys.executable, str(SCRIPT), "--config", str(self.config_path), "--run", self.name, *options]

    def extract_here(self, *options: str) -> tuple[int, str, str]:
        """02b's main() in this process (a new one takes seconds to import torch): exit code, stdout, stderr."""
        spec = importlib.util.spec_from_file_location("script_02b", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            patch.setenv("AERIE_RUNS_DIR", str(self.runs))
            patch.setattr(sys, "argv", self.command(*options)[1:])
            with pytest.raises(SystemExit) as ended:
                run_main(module.main)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return ended.value.code, out.getvalue(), err.getvalue()

    def extract_in_a_process(self) -> tuple[int, str, str]:
        """The same in a process of its own, from another folder."""
        env = os.environ | {"AERIE_RUNS_DIR": str(self.runs)}
        result = subprocess.run(self.command(), env=env, capture_output=True, text=True, timeout=600, cwd="/", check=False)
        return result.returncode, result.stdout, result.stderr


class FakeRun(RunOf):
    """One run against the fake server."""

    def __init__(self, folder: Path, model: Path, name: str, train: list[Sample], heldout: list[Sample] = (), extract: dict | None = None):
        self.folder, self.model, self.name, self.runs = folder, model, name, folder / "runs"
        self.dumps = folder / f"dumps-{name}"
        self.log = folder / f"requests-{name}.log"
        self.port = free_port()
        options = {"request_timeout_s": 2.0, "server_wait_s": 20.0, "max_in_flight": 8, "proof_samples": 2, "shard_gb": 2e-4} | (extract or {})
        self.config_path = write_config(folder / f"{name}.toml", model, [1, 2, 4], server={"port": self.port, "dump_dir": str(self.dumps)}, extract=options)
        self.env = os.environ | {"AERIE_RUNS_DIR": str(folder / "runs"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.root = folder / "runs" / name
        self.train, self.heldout = list(train), list(heldout)
        self.write_data()
        self.server: subprocess.Popen | None = None

    @property
    def store_path(self) -> Path:
        return self.root / "store"

    def config(self, *overrides: str) -> Config:
        return load_config(str(self.config_path), self.name, overrides)

    def write_data(self, **metadata: str) -> None:
        meta = {"tokenizer_hash": tokenizer_hash(self.model), "template_hash": "t", "mask_rule": "r", "model_path": str(self.model)} | metadata
        write_samples(self.root / "data" / "train.safetensors", self.train, meta)
        if self.heldout:
            write_samples(self.root / "data" / "heldout.safetensors", self.heldout, meta)

    def start_server(self, *options: str, port: int = 0) -> subprocess.Popen:
        port = port or self.port
        command = [sys.executable, str(ROOT / "tests" / "fake_dump_server.py"), "--port", str(port), "--dump-dir", str(self.dumps)]
        process = subprocess.Popen([*command, "--model", str(self.model), "--log", str(self.log), *options], env=self.env)
        deadline = time.monotonic() + 30
        while True:
            try:
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200:
                    break
            except requests.RequestException:
                assert process.poll() is None and time.monotonic() < deadline, "the fake server did not start"
                time.sleep(0.05)
        if port == self.port:
            self.server = process
        return process

    def end_server(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGKILL)
            self.server.wait()
            self.server = None

    def extract(self, *options: str, timeout: float = 120) -> subprocess.CompletedProcess:
        return subprocess.run(self.command(*options), env=self.env, capture_output=True, text=True, timeout=timeout, cwd="/")

    def report(self) -> dict:
        return json.loads((self.store_path / "report.json").read_text())

    def requested(self) -> list[str]:
        """Sample ids in the order they were asked for."""
        return [line.split(".")[2] for line in self.log.read_text().splitlines()]

    def set_extract(self, **options: object) -> None:
        """Change keys of [extract] in the config file."""
        text = self.config_path.read_text()
        for key, value in options.items():
            text = "".join(line for line in text.splitlines(True) if not line.startswith(f"{key} ="))
            text = text.replace("[extract]\n", f"[extract]\n{key} = {json.dumps(value)}\n")
        self.config_path.write_text(text)

    def assert_complete(self, expected: list[Sample] | None = None) -> Store:
        """Every sample is in, once, with the values that the fake model makes; every checksum holds; no dump is left."""
        store = Store.open(self.store_path)
        assert store.verify() == []
        wanted = {sample.id: sample for sample in (expected if expected is not None else self.train + self.heldout)}
        assert sorted(store.ids) == sorted(wanted)
        heldout = {sample.id for sample in self.heldout}
        for index in range(len(store)):
            got, sample = store.get(index), wanted[store.ids[index]]
            assert np.array_equal(got.input_ids.numpy(), sample.input_ids) and np.array_equal(got.loss_mask.numpy(), sample.loss_mask)
            aux = np.concatenate([known_states(sample.input_ids, layer, 64) for layer in range(3)], 1)
            rows = supervised_rows(sample.loss_mask)
            assert np.array_equal(got.aux_float().numpy(), aux) and got.final_rows.tolist() == rows.tolist()
            assert np.array_equal(got.final_float().numpy(), known_states(sample.input_ids, 3, 64)[rows])
            assert got.heldout == (sample.id in heldout)
        left = [path.name for path in self.dumps.glob("aerie.*")]
        assert not left, left
        assert not list(self.store_path.glob(".*tmp"))
        return store


@pytest.fixture
def fake_run(tmp_path: Path, tiny_model: Callable[..., Path]) -> Iterator[Callable[..., FakeRun]]:
    runs: list[FakeRun] = []

    def make(name: str = "fake", samples: int = 24, heldout: int = 4, **options) -> FakeRun:
        made = make_samples(samples + heldout)
        runs.append(FakeRun(tmp_path, tiny_model("llama"), name, made[heldout:], made[:heldout], **options))
        return runs[-1]

    yield make
    for run in runs:
        run.end_server()
