"""gpu_benchmark.sh without a GPU: its measuring part with stand-ins for Python's scripts and for make, and its table from real reports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "gpu_benchmark.sh"
PYTHON = f"""#!/bin/bash
# Notes what it is called with; fails where FAIL is among the words; the plain server leaves a record and a benchmark a report.
case "$1" in
    -) exec {sys.executable} "$@" ;;
    -c) echo 90; exit ;;
esac
words="${{1##*/}} ${{*:2}}"
echo "$words" >> "$CALLS"
[[ -z "$FAIL" || "$words" != *$FAIL* ]] || {{ echo "error: asked to fail"; exit 2; }}
case "$words" in
    *--without-drafter*--background*) echo '{{}}' > "$AERIE_RUNS_DIR/gpu-bench/baseline.json" ;;
    05_benchmark*"--run gpu-bench-tree"*) [ -f "$AERIE_RUNS_DIR/gpu-bench-tree/baseline.json" ] && [ -f "$AERIE_RUNS_DIR/gpu-bench-tree/drafter/config.json" ] ;;
esac
"""


@pytest.fixture
def measure(tmp_path: Path):
    """measure(fail='', **environment) -> (the process, what the scripts were called with)."""
    (tmp_path / "runs" / "gpu-bench" / "drafter").mkdir(parents=True)
    (tmp_path / "runs" / "gpu-bench" / "drafter" / "config.json").write_text("{}")
    for name, text in (("python", PYTHON), ("make", '#!/bin/bash\necho "make $*" >> "$CALLS"\n')):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def run(fail: str = "", **environment: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        calls = tmp_path / "calls"
        calls.write_text("")
        own = {"PY": str(tmp_path / "bin" / "python"), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), "FAIL": fail, "STAGE": "measure"}
        env = os.environ | own | {"AERIE_RUNS_DIR": str(tmp_path / "runs")} | environment
        done = subprocess.run([SCRIPT, tmp_path / "out"], env=env, capture_output=True, text=True, timeout=120, check=False)
        return done, calls.read_text().splitlines()

    return run


def test_measuring_alone_calls_every_part(measure, tmp_path: Path) -> None:
    done, calls = measure(OPS="1", PROMPTS="heldout")
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(call.split(" --run ")[1] for call in calls[:3]) == ["gpu-bench --stop", "gpu-bench-ops --stop", "gpu-bench-tree --stop"]
    calls = calls[3:]
    kinds = ["start" if "--background" in call else "stop" if "--stop" in call else call.split()[0] for call in calls]
    assert sorted(kinds[:4]) == ["make", "start", "start", "start"] and kinds[4:6] == ["05_benchmark.py", "05_benchmark.py"]
    # the chain's server goes on, bench_drafter_ops.py uses it; the other two end while it starts its own
    assert sorted(kinds[6:9]) == ["bench_drafter_ops.py", "stop", "stop"] and kinds[9:] == ["stop"]
    ended = [call for call in calls[6:9] if "--stop" in call]
    assert sorted(("--without-drafter" in call, "--run gpu-bench-tree" in call) for call in ended) == [(False, True), (True, False)]
    assert "--run gpu-bench --stop" in calls[9] and all("--run gpu-bench " in call for call in calls[6:9] if call.startswith("bench_drafter_ops.py"))
    assert not (tmp_path / "runs" / "gpu-bench-tree" / "baseline.json").exists()
    assert all("--prompts heldout" in call and "builtin" not in call for call in calls[4:6])


def test_a_part_that_fails_is_named_and_the_rest_goes_on(measure) -> None:
    done, calls = measure(fail="--run gpu-bench-tree", OPS="1")
    assert done.returncode == 1 and "failed: serve-tree bench-tree (2)" in done.stdout and any(call.startswith("bench_drafter_ops.py") for call in calls)


def test_without_ops_nothing_is_built(measure) -> None:
    done, calls = measure()
    assert done.returncode == 0 and not any(call.startswith(("make", "bench_drafter_ops.py")) for call in calls)
    assert "--prompts heldout builtin" in calls[6]


def test_reports_of_an_earlier_call_are_not_shown(measure, tmp_path: Path) -> None:
    for path in (tmp_path / "out" / "drafter_ops.json", tmp_path / "runs" / "gpu-bench" / "bench" / "report.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    done, _ = measure(OPS="1")
    assert done.returncode == 0 and "tok/s" not in done.stdout and not (tmp_path / "out" / "drafter_ops.json").exists()


def test_no_drafter_is_said_at_once(measure, tmp_path: Path) -> None:
    (tmp_path / "runs" / "gpu-bench" / "drafter" / "config.json").unlink()
    done, calls = measure()
    assert done.returncode == 2 and "holds no drafter; run STAGE=train first" in done.stderr and not calls
