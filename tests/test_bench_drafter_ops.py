"""bench_drafter_ops.py against servers with known answers: whose server it uses, what it starts and ends, what it reports, and when it fails."""

from __future__ import annotations

import json
import runpy
import socket
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
import torch
from aerie import bench as bench_module
from aerie.config import Config, load_config
from aerie.errors import UserError
from aerie.rid import sample_id
from aerie.samples import Sample, write_samples
from aerie.servers import Server
from cpu_tools import gpu_benchmark_table, write_config
from serve_fake import FakeServer, continuation
from serve_folders import LLAMA_TARGET, llama_drafter, write_drafter, write_target

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "bench_drafter_ops.py"
ALL = ("aerie_draft_topk", "aerie_build_tree", "aerie_verify_tree_greedy")


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    target = write_target(tmp_path / "target", LLAMA_TARGET | {"torch_dtype": "float32"})
    path = write_config(tmp_path / "c.toml", target, [1, 2, 4], bench={"max_new_tokens": 8, "samples": 6})
    config = load_config(str(path), "ops-" + str(abs(hash(request.node.name)))[:8])
    write_drafter(config.run.drafter, *llama_drafter(torch.float32), {"predicted_accept_length": 2.5})
    samples = []
    for index in range(6):
        prompt = [index + 1, 5, 9]
        ids = np.array(prompt + continuation(prompt, 8), dtype=np.int32)
        mask = np.array([0] * 3 + [1] * 8, dtype=np.uint8)
        samples.append(Sample(sample_id(ids, mask), ids, mask))
    write_samples(config.run.data / "heldout.safetensors", samples, {})
    return config


class Farm:
    """Fake servers in place of SGLang's: those that the script started and ended, by run."""

    def __init__(self) -> None:
        self.fakes: dict[str, FakeServer] = {}
        self.started: list[Config] = []
        self.ended: list[str] = []
        self.kernels: tuple[str, ...] = ALL
        self.options: dict[str, Any] = {}

    def serve(self, config: Config, **options: Any) -> Server:
        """A fake of this config's serving server, as if it ran."""
        self.fakes[config.run.name] = FakeServer(config, "serving", **options)
        server = Server.find(config, "serving")
        assert server is not None
        return server

    def start(self, config: Config, mode: str) -> Server:
        self.started.append(config)
        server = self.serve(config, **self.options if config.serve.drafter_ops else {})
        if config.serve.drafter_ops:
            server.log.write_text("".join(f"[2026-11-30 05:00:00] Aerie: the drafter uses {name}\n" for name in self.kernels))
        return server

    def end(self, server: Server) -> None:
        name = server.config.run.name
        self.ended.append(name)
        self.fakes.pop(name).close()
        server.record_path(server.config, server.mode).unlink()


@pytest.fixture
def farm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Farm]:
    farm = Farm()
    monkeypatch.setattr(Server, "start", classmethod(lambda cls, config, mode, *_: farm.start(config, mode)))
    monkeypatch.setattr(Server, "stop", lambda server: farm.end(server))
    yield farm
    for fake in farm.fakes.values():
        fake.close()


@pytest.fixture
def bench(config: Config, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(*more: str) -> int:
        words = ["--config", str(config.path), "--run", config.run.name, "--prompts", "heldout", "--concurrency", "1", "2", "--rounds", "2", *more]
        monkeypatch.setattr(sys, "argv", ["bench_drafter_ops.py", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return int(ended.value.code or 0)

    return run


def report_of(config: Config) -> dict[str, Any]:
    return json.loads((config.run.root / "bench_drafter_ops.json").read_text())


def test_both_servers_are_started_and_ended(config: Config, farm: Farm, bench: Callable, capsys: pytest.CaptureFixture) -> None:
    assert bench() == 0
    off, on = farm.started
    assert (off.serve.drafter_ops, on.serve.drafter_ops) == (False, True)
    assert farm.ended == [off.run.name, on.run.name] == [config.run.name, f"{config.run.name}-ops"]
    assert on.run.drafter.resolve() == config.run.drafter.resolve()
    report = report_of(config)
    assert [level["concurrency"] for level in report["levels"]] == [1, 2] and report["ops_in_use"] == sorted(ALL) and report["ratio"] == report["levels"][0]["ratio"]
    for level in report["levels"]:
        assert level["requests"] == 6 and len(level["on_rounds"]) == len(level["off_rounds"]) == 2
        assert level["lossless"]["equal"] == 6 and level["lossless"]["control"]["compared"] == 6
    (config.run.root / "bench_drafter_ops.json").rename(config.run.root / "drafter_ops.json")
    table = gpu_benchmark_table(config.run.root).splitlines()
    assert table[0] == f"drafter ops, called: {', '.join(sorted(ALL))}" and len(table) == 3 and all("different texts 0" in line for line in table[1:])
    said = capsys.readouterr().out
    assert "kernels called: aerie_build_tree, aerie_draft_topk, aerie_verify_tree_greedy" in said and said.count("6 compared, 6 equal") == 2


def test_the_run_s_own_server_is_used_and_goes_on(config: Config, farm: Farm, bench: Callable) -> None:
    farm.serve(config)
    assert bench() == 0
    assert [each.run.name for each in farm.started] == farm.ended == [f"{config.run.name}-ops"]
    assert Server.find(config, "serving") is not None
    assert bench() == 0  # links of the first time are made again


def test_a_server_left_by_a_killed_benchmark_is_ended_first(config: Config, farm: Farm, bench: Callable) -> None:
    assert bench() == 0
    left = farm.started[1]
    farm.serve(left)
    farm.started.clear(), farm.ended.clear()
    assert bench() == 0
    assert farm.ended == [left.run.name, config.run.name, left.run.name]


def test_the_port_is_nobody_else_s(config: Config, farm: Farm, bench: Callable) -> None:
    port = config.serve.port
    with socket.socket() as listener:
        try:
            listener.bind(("127.0.0.1", port + 1))
        except OSError:
            pytest.skip("another program has the port")
        listener.listen()
        assert bench("--set", f"bench.baseline_port={port + 2}") == 0
    assert farm.started[1].serve.port > port + 2


@pytest.mark.parametrize("missing", [ALL, ("aerie_build_tree",)])
def test_a_kernel_that_never_ran_is_a_failure(config: Config, farm: Farm, bench: Callable, capsys: pytest.CaptureFixture, missing: tuple[str, ...]) -> None:
    farm.kernels = kernels = tuple(name for name in ALL if name not in missing)
    assert bench() == 1
    assert f"error: {', '.join(sorted(missing))} never called" in capsys.readouterr().err and report_of(config)["ops_in_use"] == sorted(kernels)


def test_a_level_that_fails_does_not_cost_the_others(config: Config, farm: Farm, bench: Callable, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server with the ops dies at the second concurrency: the first one's numbers are in the report, and the exit code says that something failed."""
    real = bench_module.measure

    def measure(server: Server, prompts: Any, concurrency: int, timeout_s: float, streamed: bool = False, **which: str) -> Any:
        if concurrency == 2 and server.config.serve.drafter_ops:
            raise UserError("the serving server stopped answering")
        return real(server, prompts, concurrency, timeout_s, streamed, **which)

    monkeypatch.setattr(bench_module, "measure", measure)
    assert bench() == 1
    assert [level["concurrency"] for level in report_of(config)["levels"]] == [1]
    assert "2 at a time was not measured: the serving server stopped answering" in capsys.readouterr().err and sorted(farm.ended) == sorted([config.run.name, f"{config.run.name}-ops"])
    assert bench("--concurrency", "2") == 2


def test_other_texts_are_a_failure(config: Config, farm: Farm, bench: Callable, capsys: pytest.CaptureFixture) -> None:
    farm.options = {"changes_text": True}
    assert bench() == 1
    assert "texts differ without a near tie" in capsys.readouterr().err


def test_the_speed_is_reported_where_texts_cannot_be_compared(config: Config, farm: Farm, bench: Callable, capsys: pytest.CaptureFixture) -> None:
    """The server with the ops off dies when it is asked how likely tokens are."""
    farm.serve(config, dies_after=2 * 3 * 6)  # two levels, a warm-up and two rounds of six prompts
    farm.options = {"changes_text": True}
    assert bench() == 1
    said = capsys.readouterr().err
    assert "texts were not compared" in said and "stopped answering when asked" in said
    assert all(level["ratio"] > 0 and level["lossless"] is None for level in report_of(config)["levels"])


def test_a_running_server_with_the_ops_is_refused(config: Config, farm: Farm, bench: Callable, capsys: pytest.CaptureFixture) -> None:
    server = farm.serve(config)
    server.log.write_text("[2026-11-30 05:00:00] Aerie: the drafter uses aerie_draft_topk\n")
    assert bench() == 2 and "was started with serve.drafter_ops = true" in capsys.readouterr().err and not farm.started
