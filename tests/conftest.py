"""Fixtures that the tests share: tiny models, the demo target, and servers that are always ended."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
from aerie.config import Config
from aerie.paths import runs_dir
from aerie.servers import Server
from aerie.target import problem_with
from aerie.tiny import make_tiny
from cpu_tools import tiny_config

REAL_RUNS = runs_dir()

# A shell that starts `make test &` makes SIGINT ignored in everything below it; the tests send it as a user at a terminal would.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def test_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """AERIE_RUNS_DIR of the whole session: a temporary folder, so that no test writes into the repository. Its models/ is the real one."""
    folder = tmp_path_factory.mktemp("runs")
    if (REAL_RUNS / "models").is_dir():
        (folder / "models").symlink_to((REAL_RUNS / "models").resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AERIE_RUNS_DIR", str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture
def mount_tmpfs() -> Iterator[Callable[[Path, str], Path]]:
    """mount_tmpfs(folder, size) -> folder, a small file system of its own in memory; skips where this user may not mount."""
    mounted: list[Path] = []

    def mount(folder: Path, size: str) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False).returncode:
            pytest.skip("cannot mount a tmpfs here (not root?)")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct (`make target` makes it)."""
    folder = REAL_RUNS / "models" / "smollm2-135m"
    problem = problem_with(folder)
    if problem:
        pytest.fail(f"{folder}: {problem}; run make target first")
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny_model(family, dtype='float32') -> folder of a tiny random checkpoint, made once a session."""
    root = tmp_path_factory.mktemp("tiny")

    def get(family: str, dtype: str = "float32") -> Path:
        import torch

        folder = root / f"{family}-{dtype}"
        return folder if folder.is_dir() else make_tiny(family, folder, dtype=getattr(torch, dtype))

    return get


@pytest.fixture(scope="session")
def make_config(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Config]:
    """make_config(family, run, **sections) -> Config of a tiny model with free ports; the file is Config.path, for scripts started by hand."""
    folder = tmp_path_factory.mktemp("configs")

    def make(family: str, run: str, **sections: dict[str, Any]) -> Config:
        return tiny_config(folder, tiny_model(family), family, run, **sections)

    return make


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., Server]]:
    """start_server(config, mode, extra_args=None, extra_env=None) -> a server that answers; all are ended with the session (or earlier by .stop())."""
    started: list[Server] = []

    def start(config: Config, mode: str, extra_args: dict[str, Any] | None = None, extra_env: dict[str, str] | None = None) -> Server:
        server = Server.start(config, mode, extra_args, extra_env)
        started.append(server)
        server.wait_ready(240)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def capture_server(make_config: Callable[..., Config], start_server: Callable[..., Server]) -> Server:
    """The extraction server on the tiny DeepSeek-V3 (six layers, capture points 2, 3, 5, chunks of 256 tokens, float32, aborted requests given up after 10 s); .config, .url, .log."""
    config = make_config("deepseek_v3", "capture", server={"args": {"chunked-prefill-size": 256}, "env": {"SGLANG_HS_DUMP_STALE_S": "10", "SGLANG_HS_DUMP_LOG_S": "5"}})
    return start_server(config, "extraction")
