"""What nvcc says of the kernels: no spills, at most 99 KB of shared memory a block, every target built, and an interface without torch."""

from __future__ import annotations

import ctypes
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

CUDA = Path(__file__).resolve().parents[1] / "cuda"
sys.path.insert(0, str(CUDA))
LIMIT = 99 * 1024  # bytes of shared memory a block of SM120 may have


def read_ptxas(text: str) -> list[dict]:
    """One entry a kernel and target: name, arch, registers, static shared memory, stack, spills."""
    kernels, entry = [], None
    for line in text.splitlines():
        if found := re.search(r"Compiling entry function '(.*)' for '(sm_\d+)'", line):
            entry = {"name": found[1], "arch": found[2]}
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            entry |= {"stack": int(found[1]), "spill_stores": int(found[2]), "spill_loads": int(found[3])}
        elif found := re.search(r"Used (\d+) registers", line):
            smem = re.search(r"(\d+) bytes smem", line)
            kernels.append(entry | {"registers": int(found[1]), "shared": int(smem[1]) if smem else 0})
    return kernels


def dynamic_shared_limits() -> dict[str, int]:
    """Largest dynamic shared memory a launch may ask for, by kernel name, from the sources' own constants."""
    soft = re.search(r"constexpr int LIMIT = (\d+) \* 1024;", (CUDA / "src" / "soft_target.cu").read_text())
    nodes = re.search(r"MAX_NODES = (\d+);", (CUDA / "src" / "tree.cu").read_text())
    source = (CUDA / "src" / "drafter_input.cu").read_text()
    plans = re.findall(r"split<(\d+), (\d+), (\d+), (\d+)>\(\)", source)
    backward = {f"drafter_input_backward_split<{', '.join(found)}>": 2 * int(found[3]) * int(found[1]) * int(found[0]) * 16 for found in plans}
    channels, stages = map(int, re.search(r"drafter_input_backward_whole<(\d+), (\d+)>", source).groups())
    backward |= {f"drafter_input_backward_whole<{channels}, {stages}>": 4 * stages * channels * 256 * 16}  # of one group: SM120 has room for no more
    assert len(backward) == 4
    return {"soft_target_resident": int(soft[1]) * 1024, "build_tree": int(nodes[1]) * 20, "verify_tree_greedy": int(nodes[1]) * 20} | backward


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.slow
def test_build_has_no_spills_and_fits_sm120():
    subprocess.run(["make", "-s", "-C", str(CUDA)], check=True, timeout=900)
    kernels = read_ptxas((CUDA / "build" / "ptxas.txt").read_text())
    assert {kernel["arch"] for kernel in kernels} == {"sm_90", "sm_100", "sm_120"}
    names = {kernel["name"] for kernel in kernels}
    dynamic = dynamic_shared_limits()
    assert len(kernels) == 3 * len(names) and len(names) > 20
    for kernel in kernels:
        assert kernel["spill_stores"] == kernel["spill_loads"] == kernel["stack"] == 0, kernel
        extra = max([size for name, size in dynamic.items() if name in kernel["name"]], default=0)
        assert kernel["shared"] + extra <= LIMIT, kernel
        assert kernel["registers"] <= 128, kernel
    for name in dynamic:
        assert any(name in kernel for kernel in names)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.slow
def test_library_exports_what_the_loader_declares():
    import op_library

    subprocess.run(["make", "-s", "-C", str(CUDA)], check=True, timeout=900)
    text = subprocess.run(["nm", "-D", "--defined-only", str(op_library.PATH)], check=True, capture_output=True, text=True).stdout
    exported = {line.split()[-1] for line in text.splitlines() if " T " in line}
    assert {*op_library.SIGNATURES, "aerie_abi", "aerie_prepare", "aerie_error", "aerie_backward_blocks", "aerie_choose"} == exported
    needed = subprocess.run(["ldd", str(op_library.PATH)], check=True, capture_output=True, text=True).stdout
    assert "torch" not in needed and "libcudart" not in needed


def test_header_and_loader_agree():
    """The C header's argument counts are those that ctypes declares, and the versions are one."""
    import op_library

    header = (CUDA / "src" / "aerie_drafter.h").read_text()
    assert f"#define AERIE_ABI {op_library.ABI}" in header
    counts = [int(number) for number in re.search(r"AERIE_VARIANTS\[AERIE_OPS\] = \{([\d, ]+)\};", header)[1].split(",")]
    assert counts == [len(names) for names in op_library.VARIANTS.values()] and f"#define AERIE_PREFER {op_library.PREFER} " in header
    assert len(counts) == header[header.index("enum {") : header.index("AERIE_OPS };")].count("AERIE_")
    declared = {name: arguments.count(",") + 1 for name, arguments in re.findall(r"int (aerie_\w+)\(([^)]+)\);", header)}
    for name, arguments in op_library.SIGNATURES.items():
        assert declared[name] == len(arguments) + 1, name
    assert declared["aerie_backward_blocks"] == 2  # rows and width


def test_sources_need_no_torch():
    for path in (CUDA / "src").iterdir():
        assert not re.search(r"#include\s*<(torch|ATen|c10|Python)", path.read_text()), path


def test_ptxas_reader_sees_a_spill():
    text = "ptxas info    : Compiling entry function 'k(int)' for 'sm_120'\n    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads\nptxas info    : Used 72 registers, used 1 barriers, 224 bytes smem\n"
    assert read_ptxas(text) == [{"name": "k(int)", "arch": "sm_120", "stack": 8, "spill_stores": 4, "spill_loads": 4, "registers": 72, "shared": 224}]


def test_session_table_marks_what_misses(tmp_path):
    """The table at the end of gpu_session.sh, from reports that are there; what is missing or broken is left out."""
    row = {"op": "5 quantize_rows_fp8", "size": "[4096, 4096]", "ms": 0.0148, "of_copy": 0.81, "row_ms": 0.0138, "row_of_copy": 0.87, "copy_ms": 0.0155, "copy_row_ms": 0.0126}
    short = {**row, "op": "5 dequantize_rows_fp8", "row_ms": 0.0145, "row_of_copy": 0.83}
    peer = {"op": "5 quantize_rows_fp8, PyTorch eager", "size": "[4096, 4096]", "ms": 0.4, "of_copy": 0.03}
    decode = {"op": "3 draft_topk float32, k 1", "size": "[1, 32000]", "graph_us": 4.5, "launch_us": 4.2, "host_us": 35.0, "floor": {"graph_us": 0.9, "launch_us": 4.0}}
    older = {"op": "4 verify_tree_greedy, 32 nodes", "size": "[1]", "graph_us": 1.0, "host_us": 27.0, "floor": {"graph_us": 0.9}}
    fastest = [{"op": row["op"], "size": row["size"], "usual": 0.0138, "best": "1: 256 threads", "row_ms": 0.0137}]
    report = {"copy_bytes_s": 4.17e12, "launch_ms": 0.002, "rows": [row, {**row, "op": row["op"] + " (1: 256 threads)"}, short, peer, decode, older], "fastest": fastest, "failed": ["online: it broke"]}
    (tmp_path / "ops.json").write_text(json.dumps(report))
    results = [{"size": "S", "share": share, "step_ms": 200.0, "tok_s": rate, "peak_gb": 16.6, "first_step_s": 8.5} for share, rate in ((0.7, 44000.0), (0.3, 57000.0))]
    (tmp_path / "train.json").write_text(json.dumps({"results": results}))
    (tmp_path / "eager.json").write_text("torn")
    (tmp_path / "parts.txt").write_text("build 0 40\nops 1 90 2 failed, 100 passed in 80 s\nlong - 0 no time was left\n")
    command = [sys.executable, str(CUDA / "session_table.py"), str(tmp_path), str(tmp_path / "parts.txt")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert [line[:4].strip() for line in lines] == ["copy", "ok", "MISS", "", "MISS", "ok", "ok", "ok", "MISS", "FAIL", "ok", "MISS", "MISS"]
    assert "0.0148 ms  81.0%, in a row   0.0138 ms  87.0%; a copy   0.0155, in a row   0.0126; fastest   0.0137 (1: 256 threads)" in lines[1]
    assert lines[4].endswith("4.50 us in a graph, 5.00 times an empty kernel; launched back to back 1.05 times (4.20 us)")
    assert lines[5].endswith("1.00 us in a graph, 1.11 times an empty kernel")
    assert "1.30 times the rate" in lines[8]


def test_bench_finds_the_c_calls_of_an_op(monkeypatch):
    """What bench.py launches back to back: the C function with the arguments that the op gave it, as C takes them, and nothing where the op made no such call."""
    sys.path.insert(0, str(CUDA))
    import bench
    import torch

    seen: list[tuple] = []

    class Tree:
        argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]

        def __call__(self, *arguments) -> int:
            assert [type(argument) for argument in arguments] == self.argtypes
            seen.append(tuple(argument.value for argument in arguments))
            return 0

    library = types.SimpleNamespace(aerie_tree=Tree())
    monkeypatch.setattr(bench, "load", lambda: library)
    monkeypatch.setattr(bench.ops, "call", lambda name, device, *arguments: seen.append(("usual", *arguments)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=7))
    usual = bench.ops.call

    def op() -> str:
        bench.ops.call("aerie_tree", torch.device("cpu"), 1, None)
        return "answer"

    made, kept = bench.c_calls(op)
    assert kept == "answer" and len(made) == 1 and made[0]() == 0
    assert seen == [("usual", 1, None), (1, None, 7)] and bench.ops.call is usual
    assert bench.c_calls(lambda: 3) == ([], 3) and bench.launch_us(lambda: 3) is None
