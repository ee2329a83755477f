"""SGLang's attention and expert kernels, compiled here for a card that is not here: they fit SM120, and the crash that owners reported comes out with its very number."""

import json
import subprocess
import sys

import pytest
from aerie.paths import ROOT


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")

    def run(name: str, *words: str) -> tuple[int, dict]:
        report = folder / f"{name}.json"
        done = subprocess.run([sys.executable, str(ROOT / "scripts/check_kernels.py"), *words, "--report", str(report)], capture_output=True, text=True, check=False)
        assert report.is_file(), done.stderr
        return done.returncode, json.loads(report.read_text())

    return run


def test_every_kernel_fits_sm120(check):
    code, report = check("fits")
    assert code == 0
    assert len(report["kernels"]) >= 8 and all(0 < kernel["shared_bytes"] <= 101376 for kernel in report["kernels"])
    assert {"_fwd_grouped_kernel_stage1", "_fwd_kernel", "fused_moe_kernel"} <= {kernel["kernel"] for kernel in report["kernels"]}


@pytest.mark.slow
def test_hopper_tiles_ask_for_what_owners_saw(check):
    """sglang #14311, ktransformers #1570: 'Required: 106496, Hardware limit: 101376' at Kimi-K2's first prefill; #16975: 147,456 of the FP8 expert kernel without blocks."""
    code, report = check("hopper", "--tiles-of", "90")
    assert code == 1
    assert [kernel["shared_bytes"] for kernel in report["kernels"] if kernel["shared_bytes"] > report["limit_bytes"]] == [106496, 147456]
