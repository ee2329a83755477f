"""What bench_capture.py makes of its blocks."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from aerie import capture_bench
from aerie.bench_servers import only_benchmark
from aerie.capture_loop import Block, Mark
from aerie.config import Config, load_config
from aerie.errors import UserError
from aerie.paths import ROOT
from aerie.processor_time import processor_time
from aerie.servers import CAPTURE_OFF, dump_dir, server_env
from cpu_tools import write_config


CPU = {"server": 4.0, "forward": 0.9, "forward_wait": 0.0, "writer": 0.0, "client": 0.5, "machine": 6.0}  # of a block without capture


def chain(*seconds: float, tokens: int = 1000, forward: float = 1.0) -> list[Block]:
    """Blocks in turns, the first without capture: `tokens` in so long, after a part that is left out and takes as long again.

    With capture the forward thread works for `forward` seconds, the server for 5.
    """
    blocks, now = [], 0.0
    for index, each in enumerate(seconds):
        block = Block(index % 2 == 1, range(20), 10)
        spent = CPU | ({"server": 5.0, "forward": forward, "writer": 1.0} if block.capture else {})
        block.marks = {"start": Mark(now, 0, {}), "begin": Mark(now + each, tokens, dict.fromkeys(CPU, 7.0))}
        block.marks["end"] = Mark(now + 2 * each, 2 * tokens, {name: 7.0 + spent[name] for name in CPU})
        now += 2 * each
        blocks.append(block)
    return blocks


def test_ratio_is_that_of_all_tokens_a_second_and_counters_are_differences() -> None:
    blocks = chain(1.0, 1.25, 2.0, 2.0, 10.0, 12.5, 1.0, 4.0, 4.0, 5.0)  # the machine's rate wanders by ten, one block stands still
    found = capture_bench.summary(blocks, {"hook_s": 1.0, "dumps": 5}, {"hook_s": 3.5, "dumps": 9, "copy_s": 0.25}, [*chain(9.0, 0.125), *blocks])
    assert found["ratio"] == pytest.approx(18 / 24.75) and found["pairs"] == 5 and found["ratio_low"] < found["ratio"] < found["ratio_high"] <= 1.0
    near = capture_bench.neighbour_ratios(blocks)
    assert len(near) == 8 and near[0] == pytest.approx((1.0 * 2.0) ** 0.5 / 1.25) and near[1] == pytest.approx(2.0 / (1.25 * 2.0) ** 0.5)
    assert found["ratio_of_neighbours"] == pytest.approx(float(np.median(near)))
    assert found["ratio_of_fastest"] == pytest.approx(1 / 1.25)
    assert found["plain_tok_s"] == pytest.approx(5000 / 18) and found["capture_tok_s"] == pytest.approx(5000 / 24.75)
    assert found["longer_with_capture"] == pytest.approx(24.75 / 18 - 1) and found["left_out_s"] == 3.0 and found["measured_s"] == pytest.approx(2 * 42.75)
    assert found["cpu_ratio"] == 0.8 and found["forward_ratio"] == pytest.approx(0.9)
    assert found["counters"] == {"hook_s": 2.5, "dumps": 4, "copy_s": 0.25}
    assert found["hook_share_of_wall"] == pytest.approx(2.5 / 49.75) and found["copy_share_of_wall"] == pytest.approx(0.25 / 49.75)
    assert found["capture_cores"]["writer"] == pytest.approx(5 / 24.75) and found["plain_blocks_forward_us_a_token"] == [900.0] * 5


def test_without_a_forward_thread_to_look_at_there_is_no_ratio_of_it() -> None:
    found = capture_bench.summary(chain(1.0, 1.0, 1.0, 1.0, forward=0.0), {}, {})
    assert found["forward_ratio"] is None and found["ratio"] == 1.0


def test_a_machine_of_two_speeds_moves_the_median_against_neighbours_by_nothing() -> None:
    seconds = [(1.8 if index // 7 % 2 else 1.0) * (1.25 if index % 2 else 1.0) for index in range(64)]
    found = capture_bench.summary(chain(*seconds), {}, {})
    assert [found[name] for name in ("ratio_of_neighbours", "neighbours_low", "neighbours_high", "ratio_of_fastest")] == pytest.approx([0.8] * 4)
    assert found["ratio_high"] - found["ratio_low"] > 0.05


def wandering(generator: np.random.Generator, blocks: int, correlation: float) -> list[float]:
    """Seconds of blocks in turns on a machine whose rate wanders; capture costs 5%."""
    level, found = generator.normal(), []
    for index in range(blocks):
        level = correlation * level + (1 - correlation**2) ** 0.5 * generator.normal()
        found.append(float(np.exp(0.23 * level) * (1 / 0.95 if index % 2 else 1.0)))
    return found


@pytest.mark.parametrize(("blocks", "correlation"), [(40, 0.5), (160, 0.5), (160, 0.9)])
def test_the_interval_holds_the_ratio_as_often_as_it_says(blocks: int, correlation: float) -> None:
    generator, held = np.random.default_rng(0), 0
    for _ in range(150):
        low, high = capture_bench.intervals(chain(*wandering(generator, blocks, correlation)), 200)["ratio"]
        held += low <= 0.95 <= high
    assert held >= 0.9 * 150


def test_the_two_blocks_of_a_pair_send_the_same_prompts() -> None:
    load = capture_bench.Load([np.zeros(4, np.int32)] * 10, 2)
    assert capture_bench.some_prompts(load, 0, 4) == [0, 1, 2, 3] and capture_bench.some_prompts(load, 2, 4) == [8, 9, 0, 1] and load.mean_tokens == 4


def test_prompts_are_the_same_every_time_and_inside_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 50}}))
    config = load_config(str(write_config(tmp_path / "bench.toml", tmp_path, [1, 2, 3])), "bench")
    first, again = (capture_bench.make_prompts(config, 20, 64) for _ in range(2))
    assert [ids.tolist() for ids in first] == [ids.tolist() for ids in again]
    assert all(32 <= len(ids) <= 96 and 0 <= ids.min() and ids.max() < 50 for ids in first)


def test_the_plain_server_differs_in_nothing_but_capture(tmp_path: Path) -> None:
    config = load_config(str(write_config(tmp_path / "bench.toml", tmp_path, [1, 2, 3])), "bench")
    plain = capture_bench.plain_config(config)
    assert plain.run.name == "bench-plain" and plain.server.port == config.bench.baseline_port and plain.server.args == config.server.args
    environ = server_env(plain, "extraction") | CAPTURE_OFF
    assert environ["SGLANG_HS_DUMP_DIR"] == "" and server_env(config, "extraction")["SGLANG_HS_DUMP_DIR"] == str(dump_dir(config))


def test_processor_time_tells_who_worked() -> None:
    burn = "sum(index * index for index in range(6_000_000))"
    title = "from pathlib import Path; Path('/proc/self/comm').write_text('sglang::schedul')"
    codes = {"forward": f"{title}; {burn}; input()", "writer": f"{burn}; input() # hidden_state_dump.py", "other": f"{burn}; input()"}
    script = "import subprocess, sys; [subprocess.Popen([sys.executable, '-c', code]) for code in sys.argv[1:]]; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script, *codes.values()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as group:
        deadline = time.monotonic() + 60
        while min((found := processor_time(group.pid))["forward"], found["writer"]) < 0.2 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(group.pid, signal.SIGKILL)
    assert found["forward"] >= 0.2 and found["writer"] >= 0.2 and found["server"] >= found["forward"] + found["writer"] and found["forward_wait"] >= 0.0
    assert found["machine"] > 0 and found["client"] > 0


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """bench_capture.py as a module; its command line names a config whose context is 2048 tokens."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 50, "max_position_embeddings": 4096}))
    spec = importlib.util.spec_from_file_location("bench_capture", ROOT / "scripts" / "bench_capture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "check_patch", lambda: None)
    monkeypatch.setattr(module, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_capture.py", "--config", str(write_config(tmp_path / "c.toml", tmp_path, [1, 2, 3])), "--run", f"bench-{tmp_path.name}"[:48]])
    return module


@pytest.mark.parametrize(("words", "said"), [
    ("--concurrency 5000", "at most 4096"), ("--concurrency -1", "1 or more"), ("--seconds nan", "must be numbers"), ("--limit nan", "must be numbers"), ("--width -1", "0 or more"),
    ("--block-seconds inf", "shorten the blocks"), ("--block-seconds 40", "shorten the blocks"), ("--tokens 100000000", "the server takes 2040"), ("--tokens 1400", "at most 1360 fit"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused_before_a_server_starts(script: ModuleType, monkeypatch: pytest.MonkeyPatch, words: str, said: str) -> None:
    monkeypatch.setattr(sys, "argv", [*sys.argv, *words.split()])
    monkeypatch.setattr(script, "start", lambda *_: pytest.fail("a server was started"))
    with pytest.raises(UserError, match=said):
        script.main()


class Started:
    """A server that was started and writes a dump that nobody takes."""

    def __init__(self, config: Config):
        self.config, self.ended = config, False

    def wait_ready(self) -> None:
        folder = dump_dir(self.config)
        folder.mkdir(parents=True)
        rid = f"aerie.{self.config.run.name}.{'0' * 16}.{'0' * 8}.9"
        for name in (f"{rid}.safetensors", f"{rid}.error", f"aerie.other.{'0' * 16}.{'0' * 8}.9.safetensors", "capture.7.json"):
            (folder / name).touch()

    def stop(self) -> None:
        self.ended = True

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_no_server_and_no_dumps(script: ModuleType, monkeypatch: pytest.MonkeyPatch, sign: int) -> None:
    """SIGHUP comes when the terminal is closed."""
    servers: list[Started] = []
    monkeypatch.setattr(script, "start", lambda config, capture: servers.append(Started(config)) or servers[-1])
    monkeypatch.setattr(script, "measure", lambda *_: signal.raise_signal(sign) or pytest.fail("it went on"))
    handler = signal.signal(signal.SIGHUP, signal.default_int_handler)  # not ignored, as under nohup
    try:
        with pytest.raises(KeyboardInterrupt if sign == signal.SIGINT else SystemExit):
            script.main()
    finally:
        signal.signal(signal.SIGHUP, handler)
    (server,) = servers
    assert server.ended and sorted(path.name.split(".")[1] for path in dump_dir(server.config).iterdir()) == ["7", "other"]


def test_a_second_benchmark_of_the_run_touches_nothing(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "start", lambda *_: pytest.fail("a server was started"))
    config = load_config(sys.argv[2], sys.argv[4])
    with only_benchmark(config), pytest.raises(UserError, match="another benchmark of run"):
        script.main()
