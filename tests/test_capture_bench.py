"""What bench_capture.py makes of its rounds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from aerie import capture_bench
from aerie.capture_bench import Round
from aerie.config import load_config
from aerie.processor_time import processor_time
from aerie.servers import CAPTURE_OFF, dump_dir, server_env
from cpu_tools import write_config


def round_of(capture: bool, seconds: float, forward: float = 0.9) -> Round:
    """1,000 tokens in so long; the forward thread worked for `forward` seconds."""
    return Round(capture, 1000, seconds, 1000 / seconds, {"server": 4.0 + capture, "forward": forward, "forward_wait": 0.0, "writer": 1.0 * capture, "client": 0.5, "machine": 6.0})


def test_ratio_is_the_median_of_neighbours_and_counters_are_differences() -> None:
    pairs = [(1.0, 1.25), (2.0, 2.0), (10.0, 12.5), (1.0, 4.0), (4.0, 5.0)]  # the machine's rate wanders by ten, one round stands still
    rounds = [one for plain, capture in pairs for one in (round_of(False, plain), round_of(True, capture, 1.0))]
    rounds[3].problems.append("17 tokens: no")
    found = capture_bench.summary(rounds, {"hook_s": 1.0, "dumps": 5}, {"hook_s": 3.5, "dumps": 9, "copy_s": 0.25}, [round_of(True, 0.25), round_of(False, 9.0)])
    assert found["ratio"] == 0.8 and found["pairs"] == 5 and (found["ratio_low"], found["ratio_high"]) == (0.25, 1.0)
    assert found["ratio_of_medians"] == 0.5 and found["ratio_by_all_seconds"] == pytest.approx(18 / 24.75)
    assert found["plain_tok_s"] == 500 and found["capture_tok_s"] == 250 and found["cpu_ratio"] == 0.8 and found["forward_ratio"] == pytest.approx(0.9)
    assert found["counters"] == {"hook_s": 2.5, "dumps": 4, "copy_s": 0.25} and found["hook_share_of_wall"] == 0.1 and found["copy_share_of_wall"] == 0.01
    assert found["capture_cores"]["writer"] == 5 / 24.75 and found["plain_rounds_forward_us_a_token"] == [900.0] * 5
    assert found["failed_requests"] == 1 and found["problems"] == ["17 tokens: no"]


def test_without_a_forward_thread_to_look_at_there_is_no_ratio_of_it() -> None:
    found = capture_bench.summary([round_of(False, 1.0, 0.0), round_of(True, 1.0, 0.0)], {}, {})
    assert found["forward_ratio"] is None and found["ratio"] == 1.0


@pytest.mark.parametrize("count", [6, 8, 12, 20])
def test_the_interval_holds_the_median_as_often_as_it_says(count: int) -> None:
    draws = np.random.default_rng(0).lognormal(0.0, 1.0, (20_000, count))  # the median is 1
    intervals = np.array([capture_bench.median_interval(list(values)) for values in draws])
    assert np.mean((intervals[:, 0] <= 1) & (1 <= intervals[:, 1])) >= 0.948
    tighter = np.sort(draws, axis=1)[:, tighter_places(count)]
    assert np.mean((tighter[:, 0] <= 1) & (1 <= tighter[:, 1])) < 0.95


def tighter_places(count: int) -> list[int]:
    """The order statistics one further in than those that the interval takes."""
    place = int(capture_bench.median_interval(list(range(count)))[0]) + 1
    return [place, count - 1 - place]


def test_the_interval_of_a_few_values_is_their_extremes() -> None:
    assert capture_bench.median_interval([0.9, 1.2, 0.8]) == (0.8, 1.2) and capture_bench.median_interval([0.9]) == (0.9, 0.9)
    assert capture_bench.median_interval([float(value) for value in range(12)]) == (2.0, 9.0)


def test_the_steady_part_of_a_round_leaves_out_both_ends() -> None:
    # four under way: answers of 100 tokens every 0.5 s from 2.0 s on; the last four come late, as dumps that are waited for do
    ends = [(2.0 + index * 0.5, 100) for index in range(16)] + [(30.0 + index, 100) for index in range(4)]
    assert capture_bench.steady_rate(ends[::-1], 4) == 200.0
    assert capture_bench.steady_rate(ends[:7], 4) == 0.0 and capture_bench.steady_rate([], 4) == 0.0 and capture_bench.steady_rate([(1.0, 5)] * 9, 4) == 0.0


def test_warm_up_ends_when_two_rounds_of_each_kind_agree() -> None:
    seconds = {False: iter([2.0, 1.0, 0.99, 0.98, 5.0]), True: iter([9.0, 3.0, 2.0, 2.02, 5.0])}
    said: list[str] = []
    rounds = capture_bench.warm_up(lambda kind: round_of(kind, next(seconds[kind])), (False, True), said.append)
    assert len(rounds) == 8 and "4 rounds of each kind" in said[0]
    wild = (round_of(False, value) for value in (1.0, 2.0) * 50)
    assert len(capture_bench.warm_up(lambda kind: next(wild), (False,), said.append)) == capture_bench.WARM_ROUNDS


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
