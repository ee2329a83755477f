"""bench_extract.py goes through its motions (its numbers are for a quiet machine: no test asserts a time)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from cpu_tools import free_port
from extract_tools import ROOT, fake_run  # noqa: F401  (a fixture)


def bench(run, *words: str) -> dict:
    report = run.folder / "bench.json"
    command = [sys.executable, str(ROOT / "scripts" / "bench_extract.py"), "--config", str(run.config_path), "--run", run.name, "--report", str(report), *words]
    result = subprocess.run(command, env=run.env, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert not list(run.root.glob("bench-extract-*"))
    return json.loads(report.read_text())


@pytest.mark.slow
def test_plain_against_extraction(fake_run):
    run = fake_run()
    run.start_server()
    report = bench(run, "--url", f"http://127.0.0.1:{run.port}", "--samples", "12", "--tokens", "20", "60", "--rounds", "2")
    assert report["ratio"] > 0 and report["samples"] == 12 and len(report["plain_tok_s"]) == len(report["extract_tok_s"]) == 2 and report["retries"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_the_ceiling(fake_run, workers):
    run = fake_run()
    words = ["--samples", "8", "--tokens", "50", "50", "--hidden", "256", "--rounds", "1", "--port", str(free_port()), "--dumps", str(run.folder), "--workers", str(workers)]
    report = bench(run, "--ceiling", *words)
    assert report["ratio"] > 0 and report["store_bytes"] == 8 * (50 * 3 + 33) * 256 * 2 and report["workers"] == workers
    assert report["retries"] == 0 and report["client_cpu_ms_a_sample"] > 0 and report["worker_cpu_s_a_gb"] > 0 and report["workers_peak_bytes"] > 0
    assert not list(run.folder.glob("aerie-ceiling-*"))
