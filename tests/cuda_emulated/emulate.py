"""cuda/src/*.cu -> a shared library that runs the kernels on the CPU (simt.h): their own source, with launches and PTX taken out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "cuda" / "src"
PTX = [  # what each PTX statement does, for one thread
    ("ex2.approx", "y = exp2f(x);"), ("max.NaN", "y = std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);"), ("ld.global.L1::no_allocate", "v = *p;"), ("cp.async.cg", "simt::copy_async(shared, global);"),
    ("bar.sync %0", "simt::sync_group(group);"), ("cp.async.wait_group %0", "simt::wait_groups(LEFT);"), ("cp.async.wait_all", "simt::wait_all();"),
    ("cp.async.commit_group", "simt::commit();"), ("barrier.cluster.arrive", "simt::arrive();"), ("barrier.cluster.wait", "simt::wait_cluster();"),
]  # fmt: skip
HOST = (  # functions and tables that launch
    r"template <[^>]*>\n(?:int|constexpr Variant) (?:launch_\w+|variant_of)\(.*?\n}\n", r"struct (?:Variant|OnlineVariant) \{.*?\n};\n", r"const (?:Variant|OnlineVariant) \w+\[\] = \{.*?\};\n",
    r"template <typename\.\.\. \w+, typename\.\.\. \w+>\nint launch.*?\n}\n", r"int (?:prepare|pick|launch|groups)_\w+\(.*?\n}\n", r"inline bool aligned16.*?\n", r"inline int multiprocessors.*?\n}\n", r"template <typename Fits>\nint pick.*?\n}\n",
)  # fmt: skip


def device_part(text: str) -> str:
    """The kernels of one source file and what they call."""
    text = text.split('\nextern "C"')[0] if 'extern "C" int' in text else text
    for pattern in HOST:
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    for pattern, replacement in PTX:
        text = re.sub(r'asm(?: volatile)?\("' + pattern + r".*?\);(?=[ \n])", replacement, text, flags=re.DOTALL)
    text = re.sub(r"#include.*\n|#pragma (?:once|unroll.*)\n", "", text)
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1* \2 = (\1*)simt::dynamic_shared();", text)
    assert "asm" not in text, text[text.index("asm") - 200 : text.index("asm") + 200]
    return text


def build(folder: Path, include: Path) -> Path:
    """Compile into `folder`; `include` holds the CUDA headers. Raises CalledProcessError."""
    for name in ("common.cuh", "soft_target.cu", "drafter_input.cu", "fp8.cu", "topk.cu", "tree.cu", "online.cu"):
        text = device_part((SOURCES / name).read_text())
        if name == "online.cu":  # its own shift_of stands beside op 1's
            text = text.replace("shift_of", "online_shift_of")
        (folder / f"{name.split('.')[0]}.inc").write_text(text)
    library = folder / "libemulated.so"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-w", "-ffp-contract=off", f"-I{HERE}", f"-I{folder}", f"-isystem{include}", str(HERE / "kernels.cpp"), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    return library
