"""The GPU path's kernels in Triton's interpreter on the CPU: the whole unroll against the plain path, losses and every gradient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = ["{}", "{'num_key_value_heads': 4}", "{'num_attention_heads': 6, 'head_dim': 12, 'fc_norm': True}", "{'norm_output': True, 'norm_before_fc': True}"]
LATENT = "{'arch': 'mla', 'q_lora_rank': 24, 'kv_lora_rank': 16, 'qk_nope_head_dim': 8, 'qk_rope_head_dim': 4, 'v_head_dim': 8, 'head_dim': 12, 'num_key_value_heads': 4}"

PROGRAM = """
import sys
import torch
from train_helpers import make_drafter, make_fixed, make_sample, make_shape
from aerie.batches import build_batch
from aerie.unroll import Rope, unroll

MASKS = [[0, 0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]]
for options in eval(sys.argv[1]):
    shape = make_shape(**options)
    fixed = make_fixed(shape, 4)
    samples = [make_sample(f"{i:016x}", mask, shape, seed=i) for i, mask in enumerate(MASKS)]
    results = []
    for fast in (False, True):
        drafter = make_drafter(shape)
        drafter.fast = fast
        drafter.zero_grads()
        batch = build_batch(samples, 4)
        loss, counts, _ = unroll(drafter, batch, fixed, Rope(drafter, torch.device("cpu"), torch.float32), float(batch.counts[0]))
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in drafter.named_parameters()}, [int(c.accepted) for c in counts]))
    (plain, plain_grads, plain_counts), (loss, grads, counts) = results
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
    assert counts == plain_counts
    for name in grads:
        torch.testing.assert_close(grads[name], plain_grads[name], rtol=1e-4, atol=1e-5, msg=lambda text: f"{options} {name}: {text}")
print("same")
"""


@pytest.mark.parametrize("cases", [pytest.param(CASES[:1], id="plain"), pytest.param([LATENT], id="mla"), pytest.param(CASES[1:], id="heads and options", marks=pytest.mark.slow)])
def test_fast_path_equals_plain_path(cases):
    pytest.importorskip("triton")
    here = Path(__file__).parent
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{here}{os.pathsep}{here.parent / 'scripts'}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, f"[{', '.join(cases)}]"], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and "same" in done.stdout, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_fast_path_on_a_gpu():
    done = subprocess.run([sys.executable, str(Path(__file__).with_name("gpu_train_check.py"))], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_bench_train_runs_at_tiny_size(tmp_path):
    script = Path(__file__).resolve().parents[1] / "scripts" / "bench_train.py"
    report = tmp_path / "report.json"
    command = [sys.executable, str(script), "--sizes", "tiny,tinyM", "--eager", "tiny", "--loading", "tiny", "--steps-timed", "2", "--scratch", str(tmp_path), "--device", "cpu", "--profile", "--report", str(report)]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert found["ratio"]["tiny"]["loss_difference"] < 1e-5 and found["results"][0]["parts_ms"]["matrices"] > 0
    assert [row["size"] for row in found["results"]] == ["tiny", "tinyM"] and not found["failed"]
    assert [row["stored"] for row in found["loading"]] == ["float32", "fp8"] and all(row["bytes"] > 0 for row in found["loading"])
    assert found["loading"][1]["bytes"] < found["loading"][0]["bytes"] / 2
