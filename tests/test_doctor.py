"""make doctor on machines that are not here: fake nvidia-smi, dmesg and nvcc on PATH, model folders with something missing. And with the standard library alone."""

import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from aerie.doctor import python_side
from aerie.paths import ROOT
from aerie.records import start_ticks
from safetensors.torch import save_file

DOCTOR = ROOT / "scripts" / "doctor.py"
BOX = dict(name="NVIDIA RTX PRO 6000 Blackwell Server Edition", capability="12.0", total=97887, driver="580.126.09", count=8)

SMI = r"""#!/bin/sh
case "$*" in
  *--query-gpu*) cat "$(dirname "$0")/gpus.txt" ;;
  *"-d MEMORY"*) cat "$(dirname "$0")/memory.txt" ;;
  *"topo -m"*) cat "$(dirname "$0")/topo.txt" ;;
  *"topo -p2p r"*) cat "$(dirname "$0")/p2p.txt" ;;
  -L) sed -E 's/^([0-9]+), ([^,]*), ([^,]*),.*/GPU \1: \3 (UUID: \2)/' "$(dirname "$0")/gpus.txt" ;;
esac
"""


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def matrix(count: int, link: str) -> str:
    names = [f"GPU{n}" for n in range(count)]
    rows = [f"{name}\t" + "\t".join("X" if other == name else link for other in names) + "\t0-31\t0" for name in names]
    return "\t".join(["", *names, "CPU Affinity", "NUMA Affinity"]) + "\n" + "\n".join(rows) + "\n"


@pytest.fixture
def box(tmp_path):
    """box(**what) -> PATH of a machine with such GPUs."""

    def make(link: str = "NODE", p2p: str = "OK", bar1: int = 131072, dmesg: str = "", used: int = 5, nvcc: str = "13.0", **changes) -> str:
        gpu = BOX | changes
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program(folder, "nvidia-smi", SMI)
        (folder / "gpus.txt").write_text("".join(f"{n}, GPU-{n}0, {gpu['name']}, {gpu['capability']}, {gpu['total']}, {used}, {gpu['driver']}\n" for n in range(gpu["count"])))
        each = f"    FB Memory Usage\n        Total                  : 97887 MiB\n    BAR1 Memory Usage\n        Total                  : {bar1} MiB\n"
        (folder / "memory.txt").write_text(each * gpu["count"])
        (folder / "topo.txt").write_text(matrix(gpu["count"], link))
        (folder / "p2p.txt").write_text("".join(f" {line}\n" for line in matrix(gpu["count"], p2p).splitlines()))  # indented, unlike the other matrix
        program(folder, "dmesg", f"#!/bin/sh\ncat <<'EOF'\n{dmesg}\nEOF\n")
        program(folder, "nvcc", f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V{nvcc}.1'\n")
        return f"{folder}:/usr/bin:/bin"

    return make


def doctor(*words: str, path: str = "/usr/bin:/bin", python: str = sys.executable, flags: tuple[str, ...] = (), **env: str) -> tuple[int, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL_", "PYTORCH_", "PY", "SGLANG_", "CUDA_"))}
    done = subprocess.run(
        [sys.executable, *flags, str(DOCTOR), "--python", python, *words], capture_output=True, text=True, check=False, env=clean | {"PATH": path} | env
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def line(text: str, name: str) -> str:
    found = [row for row in text.splitlines() if row.strip()[:1] in "✓✗·" and f" {name}" in row]
    assert found, f"no line about {name!r} in:\n{text}"
    return found[0].strip()


def test_standard_library_alone_and_no_gpu_and_no_venv(tmp_path):
    """-S -E: no site-packages, as on a machine where nothing has been set up."""
    code, text = doctor(python=str(tmp_path / "none"), flags=("-S", "-E"), PY="none")
    assert code == 1
    assert line(text, "Python").startswith("✗") and "make setup" in text
    assert line(text, "NVIDIA driver").startswith("·") and "CPU" in line(text, "NVIDIA driver")


def test_this_environment_meets_its_pins():
    _, text = doctor()
    for name in ("Python", "SGLang", "pinned packages", "Triton", "open files"):
        assert line(text, name).startswith(("✓", "·")), text


def test_a_good_box_of_eight(box):
    _, text = doctor("--config", "kimi-k2.5", path=box())
    assert line(text, "NVIDIA driver").startswith("✓")
    assert line(text, "8 x NVIDIA RTX PRO 6000").startswith("✓") and "SM120" in line(text, "8 x NVIDIA")
    assert "PCIe, no NVLink (NODE)" in line(text, "links between GPUs")
    for name in ("peer to peer", "resizable BAR", "driver messages", "tensor parallelism", "nvcc", "SM120: none"):
        assert line(text, name).startswith("✓"), text


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"driver": "550.54.15"}, "NVIDIA driver", ["✗", "550.54.15", "needs 580"]),
        ({"count": 4}, "tensor parallelism", ["✗", "8 of 4"]),
        ({"bar1": 256}, "resizable BAR", ["·", "GPU 0, 1"]),
        ({"p2p": "CNS"}, "peer to peer", ["·", "CNS"]),
        ({"link": "NV18"}, "links between GPUs", ["✓", "NVLink"]),
        ({"used": 90000}, "GPU memory", ["·", "GPU 0 87.9 GiB"]),
        ({"dmesg": "[1.0] NVRM: Xid (PCI:0000:41:00): 119, pid=1, Timeout waiting for RPC from GSP0!"}, "driver messages", ["✗", "119", "GSP"]),
        ({"dmesg": "[1.0] NVRM: Xid (PCI:0000:41:00): 31, pid=1, MMU Fault"}, "driver messages", ["·", "31"]),
        ({"nvcc": "12.6"}, "nvcc", ["✗", "12.6"]),
        ({"capability": "7.5", "name": "Tesla T4"}, "8 x Tesla T4", ["✗", "SM75"]),
    ],
)
def test_what_is_wrong_with_a_box(box, changes, name, words):
    _, text = doctor("--config", "kimi-k2.5", path=box(**changes))
    for word in words:
        assert word in line(text, name)


@pytest.mark.parametrize(("shown", "left"), [("0,1,2,3", 4), ("GPU-70,GPU-60", 2), ("3,9,4", 1)])
def test_gpus_that_are_hidden_do_not_count(box, shown, left):
    code, text = doctor("--config", "kimi-k2.5", path=box(), CUDA_VISIBLE_DEVICES=shown)
    assert code == 1 and f"leaves {left} of 8 GPUs" in line(text, "CUDA_VISIBLE_DEVICES") and f"8 of {left} GPU" in line(text, "tensor parallelism")
    assert line(text, f"{left} x NVIDIA RTX PRO 6000")


def test_all_gpus_hidden_is_a_machine_without(box):
    _, text = doctor(path=box(), CUDA_VISIBLE_DEVICES="")
    assert "hides all 8 GPUs" in line(text, "NVIDIA driver") and "x NVIDIA RTX" not in text


@pytest.mark.parametrize(("words", "asked"), [(["dp-size=2"], 16), (["dp-size=2", "enable-dp-attention=true"], 8)])
def test_copies_of_a_server_count(box, words, asked):
    _, text = doctor("--config", "kimi-k2.5", *(part for word in words for part in ("--set", f"server.args.{word}")), path=box())
    assert f"asks for {asked} of 8 GPUs" in line(text, "tensor parallelism")


@pytest.mark.parametrize(
    ("overrides", "env", "name"),
    [
        (["server.args.attention-backend=fa3"], {}, "attention backend fa3"),
        (["server.args.attention-backend=trtllm_mla"], {}, "attention backend trtllm_mla"),
        (["server.args.kv-cache-dtype=fp8_e4m3"], {}, "FP8 KV cache"),
        (["server.args.moe-runner-backend=flashinfer_cutlass"], {}, "MoE runner flashinfer_cutlass"),
        (["server.args.disable-custom-all-reduce=false"], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "expandable segments"),
        (["target.dtype=float32", "server.args.attention-backend=triton"], {}, "float32 with Triton attention"),
    ],
)
def test_combinations_known_to_fail_on_sm120(box, overrides, env, name):
    words = [word for text in overrides for word in ("--set", text)]
    code, text = doctor("--config", "kimi-k2.5", *words, path=box(), **env)
    assert code == 1 and line(text, name).startswith("✗")
    code, text = doctor("--config", "kimi-k2.5", *words, path=box(capability="9.0", name="NVIDIA H200"), **env)
    assert name not in text


def test_hmm(box, tmp_path):
    switch = tmp_path / "sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
    switch.parent.mkdir(parents=True)
    for value, mark in (("N", "✗"), ("Y", "✓")):
        switch.write_text(value + "\n")
        assert line(doctor(path=box(), AERIE_SYS=str(tmp_path / "sys"))[1], "nvidia_uvm").startswith(mark)


def test_model_folder(tmp_path):
    import torch

    folder = tmp_path / "model"
    folder.mkdir()

    def check(*words: str) -> str:
        return doctor("--set", f"target.model_path={folder}", "--set", "target.from_package=", *words)[1]

    assert "has no config.json" in line(check(), "model folder")
    (folder / "config.json").write_text("{}")
    for name in ("a", "b"):
        save_file({name: torch.zeros(1000)}, folder / f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors", "c": "c.safetensors"}}))
    assert "1 of 3 files missing, c.safetensors" in line(check(), "model folder")
    save_file({"c": torch.zeros(1000)}, folder / "c.safetensors")
    text = check()
    assert line(text, "model folder").startswith("✓") and line(text, "tokenizer").startswith("✗")
    (folder / "tiktoken.model").write_text("x")
    assert "trust_remote_code" in check() and "trust_remote_code" not in check("--set", "target.trust_remote_code=true")
    (folder / "b.safetensors").write_bytes((folder / "b.safetensors").read_bytes()[:-100])
    assert "b.safetensors has" in line(check(), "model folder")
    (folder / "b.safetensors").write_bytes(b"")
    assert "b.safetensors is empty" in line(check(), "model folder")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": ["x"]}}', "[" * 100000, "\udcff"])
def test_a_broken_index_is_said_not_raised(tmp_path, content):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode(errors="surrogateescape"))
    code, text = doctor("--set", f"target.model_path={tmp_path}", "--set", "target.from_package=")
    assert code == 1 and line(text, "model folder").startswith("✗") and "is not a safetensors index" in line(text, "model folder")


def test_a_config_for_gpus_on_a_machine_without(tmp_path):
    """Crosses for the GPUs and for the disk of its plan (4.4 TB for Kimi-K2.5); the demo's config gets neither."""
    code, text = doctor("--config", "kimi-k2.5", path=str(tmp_path), AERIE_RUNS_DIR=str(tmp_path))
    assert code == 1 and "not for kimi-k2.5.toml" in line(text, "NVIDIA driver")
    assert line(text, "tensor parallelism").startswith("✗") and "asks for 8 of 0 GPUs" in line(text, "tensor parallelism")
    assert "kimi-k2.5.toml needs 4,428 GB" in line(text, "disk") and "extract.dtype" in text
    _, text = doctor("--config", "qwen3-8b", path=str(tmp_path), AERIE_RUNS_DIR=str(tmp_path))
    assert line(text, "GPUs: none here").startswith("✗") and "written for 1" in text
    _, text = doctor("--set", "server.gpus=[1]", path=str(tmp_path), AERIE_RUNS_DIR=str(tmp_path))
    assert line(text, "GPUs by number").startswith("✗") and "not for smollm2" in text
    code, text = doctor("--set", "train.gpus=[0,1]", path=str(tmp_path), AERIE_RUNS_DIR=str(tmp_path))
    assert code == 1 and line(text, "GPUs by number").startswith("✗") and "the last here is none" in text
    _, text = doctor(path=str(tmp_path), AERIE_RUNS_DIR=str(tmp_path))
    assert "tensor parallelism" not in text and "not for" not in text and "needs 4" not in line(text, "disk")


def test_no_tick_for_a_need_that_is_not_known(tmp_path):
    _, text = doctor("--config", "kimi-k2.5", AERIE_RUNS_DIR=str(tmp_path))  # no weight file yet: a lower bound
    assert line(text, "host memory").startswith(("·", "✗")) and "not known before the download" in line(text, "host memory")
    _, text = doctor("--config", "kimi-k2.5", python=str(tmp_path / "none"), flags=("-S", "-E"), PY="none")
    assert line(text, "disk").startswith(("·", "✗")) and "cannot be computed yet" in line(text, "disk")
    assert "`make target CONFIG=smollm2-gpu`" in doctor("--config", "smollm2-gpu", AERIE_RUNS_DIR=str(tmp_path))[1]


def test_an_unknown_config_is_one_sentence():
    code, text = doctor("--config", "nonesuch")
    assert code == 1 and "known: " in line(text, "config: ") and "--config" not in text and "TOML" not in text


def test_memory_is_compared_with_the_plan(tmp_path, smollm2):
    """Eight billion parameters in float32 on the CPU take 31 GiB, smollm2's none worth a word; on GPUs it is 4 GB a rank at least."""
    from aerie.config import load_config
    from aerie.doctor.checks import Facts
    from aerie.doctor.needs import needs_of

    def memory(name: str, *overrides: str) -> float:
        return needs_of(Facts("", None, load_config(name, "needs", overrides), "")).memory / 1e9

    on_cpu = ("plan.gpus=0", "target.model_path=/nowhere", "target.dtype=float32")
    assert 34 < memory("llama-3.1-8b", *on_cpu) < 38 and memory("smollm2-135m", f"target.model_path={smollm2}") < 4.5
    assert 32 < memory("kimi-k2.5") < 40


def test_a_port_in_use(tmp_path):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        code, text = doctor("--set", f"server.port={port}")
        assert code == 1 and line(text, f"port {port}").startswith("✗") and "server.port=N" in text


def test_a_port_held_by_a_server_of_this_checkout(tmp_path):
    """It says which run's, and how to end it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        record = tmp_path / "first" / "serving.json"
        record.parent.mkdir()
        content = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "url": f"http://127.0.0.1:{port}", "log": "", "command": []}
        record.write_text(json.dumps(content))
        words = ("--set", f"serve.port={port}")
        code, text = doctor(*words, AERIE_RUNS_DIR=str(tmp_path))
        assert code == 1 and line(text, f"port {port}") == f"\u2717 port {port}: in use by the serving server of run first (serving)" and "make stop RUN=first ends it" in text
        _, text = doctor(*words, "--run", "first", AERIE_RUNS_DIR=str(tmp_path))
        assert line(text, f"port {port}") == f"\u00b7 port {port}: in use by this run's own serving server" and "make stop RUN=first ends it" in text
        record.write_text(json.dumps(content | {"start_ticks": 1}))  # a record that a reboot left: another program has the port
        _, text = doctor(*words, "--run", "first", AERIE_RUNS_DIR=str(tmp_path))
        assert line(text, f"port {port}").startswith("\u2717") and "end what listens there" in text


def test_a_bad_config_is_said_not_raised():
    code, text = doctor("--config", "no-such-config")
    assert code == 1 and "no-such-config" in line(text, "config")


def test_make_doctor_falls_back_to_another_python(tmp_path):
    done = subprocess.run(["make", "-s", "-C", str(ROOT), "doctor", f"VENV={tmp_path}/none", "PYTHON=/no/python"], capture_output=True, text=True, check=False,
                          env={key: value for key, value in os.environ.items() if key not in ("PY", "MAKEFLAGS", "MAKELEVEL")})  # fmt: skip
    assert "Machine" in done.stdout and "make setup" in done.stdout, done.stdout + done.stderr


def test_ops_that_are_older_than_their_sources(tmp_path, monkeypatch):
    monkeypatch.setattr(python_side, "ROOT", tmp_path)
    source, library = tmp_path / "cuda" / "src" / "fp8.cu", tmp_path / "cuda" / "build" / "libaerie_drafter.so"
    for path, changed in ((source, 2000), (library, 1000)):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (changed, changed))

    def found():
        return next(result for result in python_side.check_ops(SimpleNamespace(gpus=[])) if result.name == "drafter ops")

    assert found().ok is False and "older than its sources" in found().detail
    os.utime(library, (3000, 3000))
    assert found().ok
