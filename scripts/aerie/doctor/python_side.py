"""Python, packages against the pins, the patch, the CUDA library of the drafter ops."""

from __future__ import annotations

import shutil
import sys
from typing import Iterator

from ..nvidia import ask
from ..paths import ROOT
from .checks import Facts, Result, pins, version_tuple


def check_python(facts: Facts) -> Iterator[Result]:
    if facts.probe is None:
        yield Result(False, "Python", f"{facts.python} does not run", "run `make setup`, or name one that has everything: make doctor PY=/path/to/python")
        return
    version = facts.probe["python"]
    good = version_tuple(version) >= (3, 11)
    yield Result(good, "Python", f"{version} ({facts.python})", "Aerie needs Python 3.11 or later: make setup PYTHON=/path/to/python3.11")
    if facts.config is None:
        old = "tomllib" in facts.config_error
        yield Result(False, "config", f"{sys.executable} is too old to read it" if old else facts.config_error, "name a newer one: make doctor PY=/path/to/python3.11" if old else "")


def check_packages(facts: Facts) -> Iterator[Result]:
    if facts.probe is None:
        return
    supported = sorted(path.parent.name.removeprefix("sglang-") for path in (ROOT / "patches").glob("sglang-*/hidden_state_dump.patch"))
    wanted = pins()
    missing = [name for name in wanted if not facts.version(name)]
    if missing:
        yield Result(False, "packages", f"missing: {', '.join(missing)}", "run `make setup`; with PY=... install what requirements.txt names")
    sglang = facts.version("sglang")
    if sglang:
        if sglang == wanted["sglang"]:
            yield Result(True, "SGLang", sglang)
        elif sglang in supported:
            yield Result(None, "SGLang", f"{sglang}; the pin is {wanted['sglang']}, and there is a patch for this one too")
        else:
            yield Result(False, "SGLang", f"{sglang} has no patch (there are {', '.join(supported) or 'none'})", f"pip install sglang=={wanted['sglang']}, or add the version: patches/README.md")
    others = {name: version for name, version in wanted.items() if name != "sglang" and facts.version(name) and facts.version(name).split("+")[0] != version}
    same_sglang = sglang == wanted["sglang"]
    for name, version in others.items():
        yield Result(False if same_sglang and name in ("torch", "transformers") else None, name, f"{facts.version(name)}, the pin is {version}", "run `make setup` again")
    if not missing and not others:
        yield Result(True, "pinned packages", f"all {len(wanted)} as requirements.txt says")
    triton = facts.version("triton")
    asked = facts.probe["torch_needs"].get("triton", "").partition(";")[0].strip()
    if triton and asked:
        operator, wanted_version = asked.removeprefix("triton")[:2], version_tuple(asked)
        fits = version_tuple(triton)[:2] == wanted_version[:2] if operator == "~=" else version_tuple(triton) == wanted_version if operator == "==" else None
        yield Result(fits, "Triton", f"{triton}, torch asks for {asked}", f"pip install '{asked}'")
    if facts.probe["torch_cuda"]:
        yield Result(None, "torch", f"{facts.version('torch')}, built for CUDA {facts.probe['torch_cuda']}")


def check_patch(facts: Facts) -> Iterator[Result]:
    script = ROOT / "scripts" / "00_apply_patch.sh"
    if facts.probe is None or not facts.version("sglang"):
        return
    code, text = ask(["env", f"PY={facts.python}", str(script), "--check"], 120)
    yield Result(code == 0, "capture patch", text.strip().splitlines()[-1] if text.strip() else "its state could not be read", "run scripts/00_apply_patch.sh")


def check_ops(facts: Facts) -> Iterator[Result]:
    nvcc = shutil.which("nvcc") or next((path for path in ("/usr/local/cuda/bin/nvcc",) if shutil.which(path)), None)
    library = ROOT / "cuda" / "build" / "libaerie_drafter.so"
    version = ""
    if nvcc:
        words = ask([nvcc, "--version"])[1].partition("release ")[2]
        version = words.split(",")[0]
        enough = version_tuple(version) >= (12, 8)
        yield Result(enough if facts.gpus else None, "nvcc", f"{version} ({nvcc})", "sm_120 needs nvcc 12.8 or later")
    else:
        yield Result(False if facts.gpus else None, "nvcc", "not found", "needed by `make cuda` alone; install the CUDA toolkit 12.8 or later, and put its bin/ on PATH")
    if library.is_file():
        newest = max((path.stat().st_mtime for path in (ROOT / "cuda" / "src").iterdir()), default=0)
        fresh = library.stat().st_mtime >= newest
        yield Result(fresh, "drafter ops", f"{library.relative_to(ROOT)}{'' if fresh else ' is older than its sources'}", "run `make cuda`")
    else:
        yield Result(False if facts.gpus and nvcc else None, "drafter ops", "not built; PyTorch does their work", "run `make cuda`" if nvcc else "")


CHECKS = (check_python, check_packages, check_patch, check_ops)
