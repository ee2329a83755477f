"""Words that a newcomer reads: the demo's table, how a server is ended, what --help says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from aerie.config import load_config, make_words
from aerie.errors import UserError
from aerie.paths import CONFIGS, ROOT
from demo import print_table


def report(*levels: tuple[int, float, float]) -> dict:
    """A bench/report.json with these levels: concurrency, tok/s without and with the drafter."""
    found = [{"concurrency": at, "baseline": {"tok_s": plain}, "speculative": {"tok_s": fast}, "speedup": fast / plain} for at, plain, fast in levels]
    return {
        "samples": 280, "tokens": 32257, "extract_tok_s": 538.0, "train_tok_s": 769.0, "predicted_accept_length": 1.672, "accept_length": 1.672, "num_steps": 3,
        "lossless": {"compared": 40, "equal": 40, "near_ties": 0}, "sets": {"heldout": {"levels": found}},
    }  # fmt: skip


def test_demo_has_a_row_for_each_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(report((1, 11.4, 11.6), (16, 51.5, 41.9)), 822.0, whole=True, gpu=False)
    said = capsys.readouterr().out
    for words in ("without / with the drafter, 1 at a time", "11.4 / 11.6 tok/s (1.02x)", "without / with the drafter, 16 at a time", "51.5 / 41.9 tok/s (0.81x)", "13.7 minutes"):
        assert words in said
    assert said.count("Below 1x is expected on a CPU: it checks 4 tokens") == 1


@pytest.mark.parametrize(("fast", "gpu"), [(60.0, False), (41.9, True)])
def test_nothing_is_excused_where_nothing_is_slow_or_a_gpu_is(fast: float, gpu: bool, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(report((16, 51.5, fast)), 60.0, whole=False, gpu=gpu)
    assert "expected on a CPU" not in capsys.readouterr().out


def test_stop_command_is_one_that_make_takes(tmp_path: Path) -> None:
    """`make stop` with the words that the servers' last lines name: a config of the user's own, with a space in its path."""
    (tmp_path / "my configs").mkdir()
    own = tmp_path / "my configs" / "own.toml"
    own.write_text((CONFIGS / "smollm2-135m.toml").read_text())
    done = subprocess.run(f"make stop{make_words(load_config(str(own), 'first'))} -n --no-print-directory PY={sys.executable}", shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"scripts/{name} '{own}' --run='first'  --stop" for name in ("01_launch_server.sh", "04_serve.sh")]


def test_serve_names_itself() -> None:
    command = [str(ROOT / "scripts" / "04_serve.sh"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=os.environ | {"PY": sys.executable})
    assert done.stdout.startswith("usage: 04_serve.sh ") and "serve_drafter.py" not in done.stdout


def test_half_a_set_value_is_explained() -> None:
    """SET='data.inputs=["a b"]' reaches the scripts in two parts."""
    with pytest.raises(UserError, match="in make's SET a space begins the next key"):
        load_config(overrides=['data.inputs=["a', 'b"]'])
