"""04_serve.sh without a server: refusals before launch, host memory, the background watcher; with one: see test_serving_server.py."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
import torch
from aerie import servers
from aerie.capture_server import running_server
from aerie.config import Config, load_config
from aerie.errors import UserError
from aerie.host_memory import needed_bytes, refuse_short_memory
from aerie.records import loaded_models
from aerie.report import write_json
from aerie.servers import Server, server_env
from cpu_tools import write_config
from serve_fake import FakeServer
from serve_folders import LLAMA_TARGET, llama_drafter, write_drafter, write_target

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    target = write_target(tmp_path / "target", LLAMA_TARGET | {"torch_dtype": "float32"})
    path = write_config(tmp_path / "c.toml", target, [1, 2, 4])
    config = load_config(str(path), "serve-" + str(abs(hash(request.node.name)))[:8])
    write_drafter(config.run.drafter, *llama_drafter(torch.float32), {"predicted_accept_length": 2.5})
    return config


def serve(config: Config, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    command = [str(SCRIPTS / "04_serve.sh"), str(config.path), "--run", config.run.name, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=os.environ | {"PY": sys.executable}, cwd=cwd)


def test_a_bad_drafter_is_refused_before_launch(config: Config, tmp_path: Path) -> None:
    drafter, tensors = llama_drafter(torch.float32)
    del tensors["lm_head.weight"]
    write_drafter(config.run.drafter, drafter, tensors)
    done = serve(config, "--background", cwd=tmp_path)
    assert done.returncode == 1 and "lm_head.weight" in done.stdout and "nothing was launched" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert not (config.run.root / "serving.json").exists() and not (config.run.root / "serving-watcher.json").exists()


def test_no_drafter_at_all(config: Config) -> None:
    for name in ("config.json", "model.safetensors", "training.json"):
        (config.run.drafter / name).unlink()
    config.run.drafter.rmdir()
    done = serve(config)
    assert done.returncode == 2 and f"does not exist; train one with `make train CONFIG={config.path}" in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use(config: Config) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", config.serve.port))
        other.listen()
        done = serve(config)
    assert done.returncode == 2 and f"port {config.serve.port}" in done.stderr and "serve.port" in done.stderr and "Traceback" not in done.stderr
    assert not (config.run.root / "serving-watcher.json").exists()


def test_stop_without_a_server(config: Config) -> None:
    done = serve(config, "--stop")
    assert done.returncode == 0 and "no serving or baseline server" in done.stdout


def test_host_memory(config: Config) -> None:
    (Path(config.model_path) / "model.safetensors").write_bytes(b"x" * 1_000_000)
    drafter = (config.run.drafter / "model.safetensors").stat().st_size
    assert needed_bytes(config, "baseline", gpu=False) == 3.5e9 + 1e6 and needed_bytes(config, "serving", gpu=False) == 3.5e9 + 1e6 + drafter
    config.server.args["tp"] = 4
    assert needed_bytes(config, "serving", gpu=True) == 4 * (4e9 + 1e6)
    refuse_short_memory(config, "serving", available=20e9)
    with pytest.raises(UserError, match="1.0 GB of host memory are free"):
        refuse_short_memory(config, "serving", available=1e9)


def test_a_missing_drafter_names_the_run_that_has_one_and_makes_no_folder(config: Config, tmp_path: Path) -> None:
    """check, serve and bench of a run that is not there, after another run of the same target was trained: RUN= is what is missing."""
    other = config.run.root.parent / "finished"
    (other / "data").mkdir(parents=True)
    (other / "data" / "report.json").write_text(json.dumps({"config": config.as_dict()}))
    shutil.copytree(config.run.drafter, other / "drafter")
    for script, more in (("check_drafter.py", []), ("serve_drafter.py", ["--background"]), ("05_benchmark.py", [])):
        words = [str(config.path)] if script == "serve_drafter.py" else ["--config", str(config.path)]
        done = subprocess.run([sys.executable, str(SCRIPTS / script), *words, "--run", "absent", *more], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 2 and "finished" in done.stderr and "RUN=" in done.stderr and "--run " in done.stderr, done.stderr
        assert not (other.parent / "absent").exists(), script


def test_other_options_beside_a_running_server_are_refused(config: Config) -> None:
    """And named: the server would go on with its old ones."""
    server = FakeServer(config, "serving")
    try:
        same = serve(config, "--background")
        assert same.returncode == 0 and "already runs on" in same.stdout, same.stderr
        other = serve(config, "--background", "--set", "serve.num_steps=2")
        assert other.returncode == 2 and "speculative-num-steps = 3, the config says 2; speculative-num-draft-tokens = 4, the config says 3; end it with `make stop" in other.stderr
        assert "context-length = 2048, the config says 1024" in serve(config, "--set", "server.args.context-length=1024").stderr
        assert "skip-server-warmup = not set, the config says on" in serve(config, "--set", "serve.args.skip-server-warmup=true").stderr
        record = json.loads((config.run.root / "serving.json").read_text())
        write_json(config.run.root / "serving.json", record | {"env": server_env(config, "serving")})
        assert serve(config).returncode == 0
        changed = serve(config, "--set", "server.env.MY_TOKEN=secret")
        assert changed.returncode == 2 and "MY_TOKEN is another" in changed.stderr and "secret" not in changed.stderr
    finally:
        server.close()


def test_a_drafter_written_anew_under_a_running_server_is_refused(config: Config) -> None:
    """The server would go on with the one it loaded, and a benchmark would measure that."""
    server = FakeServer(config, "serving")
    path = config.run.root / "serving.json"
    try:
        record = json.loads(path.read_text())
        assert str(config.run.drafter) in loaded_models(record["command"])
        write_json(path, record | {"models": loaded_models(record["command"])})
        (config.run.drafter / "training.json").write_text("{}")  # what beside the model is written counts nothing
        same = serve(config, "--background")
        assert same.returncode == 0 and "already runs on" in same.stdout, same.stderr
        os.utime(config.run.drafter / "config.json")
        other = serve(config, "--background")
        assert other.returncode == 2 and f"loaded {config.run.drafter} before it was written anew; end it with `make stop" in other.stderr, other.stderr
    finally:
        server.close()


def test_other_options_beside_a_running_extraction_server_are_refused(config: Config) -> None:
    server = FakeServer(config, "extraction")
    path = config.run.root / "extraction.json"
    write_json(path, json.loads(path.read_text()) | {"aux_layer_ids": config.target.aux_layer_ids, "dtype": config.extract.dtype})
    try:
        assert running_server(config) is not None
        config.server.args["chunked-prefill-size"] = 512
        with pytest.raises(UserError, match="extraction server of run .* other options: chunked-prefill-size = not set, the config says 512"):
            running_server(config)
    finally:
        server.close()


def test_a_started_server_s_record_has_its_environment(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "command_line", lambda *_: ["sleep", "60"])
    config = make_config("llama", "serve-env", server={"env": {"MY_VARIABLE": "1"}})
    with Server.start(config, "serving") as server:
        assert server.record["env"]["MY_VARIABLE"] == "1" and Server.find(config, "serving").record == server.record
