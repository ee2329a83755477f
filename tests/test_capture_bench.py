"""What bench_capture.py makes of its rounds."""

from __future__ import annotations

import json
import os
from pathlib import Path

from aerie import capture_bench
from aerie.capture_bench import Round
from aerie.config import load_config
from aerie.servers import CAPTURE_OFF, dump_dir, server_env
from cpu_tools import write_config


def test_ratio_is_median_over_median_and_counters_are_differences() -> None:
    rounds = [Round(False, 1000, seconds, 4.0) for seconds in (1.0, 2.0, 10.0)] + [Round(True, 1000, seconds, 5.0) for seconds in (2.5, 1.0, 20.0)]
    rounds[3].problems.append("17 tokens: no")
    found = capture_bench.summary(rounds, {"copy_s": 1.0, "dumps": 5}, {"copy_s": 3.35, "dumps": 9, "hook_s": 0.47})
    assert found["plain_tok_s"] == 500 and found["capture_tok_s"] == 400 and found["ratio"] == 0.8 and found["cpu_ratio"] == 0.8
    assert found["counters"] == {"copy_s": 2.35, "dumps": 4, "hook_s": 0.47}
    assert found["copy_share_of_wall"] == 2.35 / 23.5 and found["seconds_longer_with_capture"] == 10.5
    assert found["failed_requests"] == 1 and found["problems"] == ["17 tokens: no"]


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


def test_processor_time_counts_a_process_group() -> None:
    before = capture_bench.cpu_seconds(os.getpgid(0))
    sum(index * index for index in range(3_000_000))
    assert capture_bench.cpu_seconds(os.getpgid(0)) > before > 0
