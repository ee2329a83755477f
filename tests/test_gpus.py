"""server.gpus and train.gpus: what the environment of the processes says that they start."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from aerie import gpus
from aerie.config import load_config
from aerie.errors import UserError
from aerie.paths import ROOT
from aerie.servers import Server
from cpu_tools import write_config
from train_runs import torchrun


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setenv("AERIE_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def make(*overrides: str):
        return load_config(str(write_config(tmp_path / "gpus.toml", "a-hub/name", [1, 2, 4])), "gpus", overrides)

    return make


@pytest.mark.parametrize("shown, wanted, named", [(None, [1], "1"), ("4,5,6", [2, 0], "6,4"), ("GPU-aa, GPU-bb", [1], "GPU-bb"), ("", [1], "")])
def test_gpus_are_counted_among_those_shown(shown, wanted, named):
    assert gpus.visible_devices(wanted, "server.gpus", {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}) == named


def test_more_than_are_shown_is_refused():
    with pytest.raises(UserError, match=r"train.gpus = \[2\] .*CUDA_VISIBLE_DEVICES='4,5'.* shows 2"):
        gpus.visible_devices([2], "train.gpus", {"CUDA_VISIBLE_DEVICES": "4,5"})


@pytest.mark.parametrize("value", ["[-1]", "[1,1]", "0", '["0"]'])
def test_the_config_refuses_what_is_no_list_of_gpus(value, config_of):
    with pytest.raises(UserError, match="train.gpus"):
        config_of(f"train.gpus={value}")


def test_the_server_process_sees_its_gpus_alone(config_of, monkeypatch):
    config = config_of("server.gpus=[1]")
    config.run.logs.mkdir(parents=True)
    program = "import os; print('gpus:', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)"
    monkeypatch.setattr("aerie.servers.command_line", lambda config, mode: [sys.executable, "-c", program])
    for mode in ("extraction", "serving", "baseline"):
        server = Server.start(config, mode)
        server.process.wait(30)
        assert "gpus: 1" in server.log.read_text()
        server.stop()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_the_trainer_of_a_stream_sees_its_gpu_alone():
    env = gpus.training_env([1], {})
    assert env == {"CUDA_VISIBLE_DEVICES": "1", "AERIE_TRAIN_GPUS": "1"}
    assert gpus.training_env([1], env) == {}  # a process that these variables started
    with pytest.raises(UserError, match="without torchrun"):
        gpus.training_env([0, 1], {"WORLD_SIZE": "2"})


def test_torchrun_gives_every_process_the_gpus():
    said = "f\"seen {os.environ['RANK']} {os.environ['CUDA_VISIBLE_DEVICES']} {sys.argv[1:]}\\n\""
    program = f"import os, sys; os.write(1, {said}.encode())"  # in one write: both processes have the same pipe
    command = torchrun(2, ["-c", program, "--resume"])
    command[command.index("--") : command.index("--") + 1] = ["--no-python", "--", sys.executable]
    done = subprocess.run(command, env=os.environ | gpus.training_env([3, 5], {}), capture_output=True, text=True, timeout=120, check=True)
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("seen")) == ["seen 0 3,5 ['--resume']", "seen 1 3,5 ['--resume']"]


def test_run_stream_shows_each_process_its_gpus(config_of):
    """What make stream starts: the trainer's process is shown its GPU, the client of the extraction needs none."""
    spec = importlib.util.spec_from_file_location("run_stream", ROOT / "scripts" / "run_stream.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_stream"] = module
    spec.loader.exec_module(module)
    end = module.training(config_of("server.gpus=[0]", "train.gpus=[1]"), [], "--stream")
    end.command = [sys.executable, "-c", "import os, sys; sys.exit(os.environ['CUDA_VISIBLE_DEVICES'] != '1')"]
    assert module.watch([end]) == 0
    assert module.training(config_of("train.gpus=[1,2]"), []).env == {}  # 03_train.py starts a process on each


def test_apart_means_no_gpu_in_common(config_of):
    assert gpus.apart(config_of("server.gpus=[0,1]", "train.gpus=[2]"))
    assert not gpus.apart(config_of("server.gpus=[0,1]", "train.gpus=[1]"))
    assert not gpus.apart(config_of("server.gpus=[0,1]"))
