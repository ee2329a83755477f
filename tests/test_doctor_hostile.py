"""make doctor where nvidia-smi, Python, paths and files answer strangely: a line each, never a traceback, and all the other lines too."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import pytest
from aerie.doctor import gpu, machine
from aerie.errors import UserError
from aerie.nvidia import HANGS
from aerie.paths import ROOT
from test_doctor import box, doctor, line, program  # noqa: F401  fixtures

LOST = "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error"
XID = "[1.0] NVRM: Xid (PCI:0000:41:00): 79, pid=1, GPU has fallen off the bus."


def folder_of(path: str) -> Path:
    return Path(path.split(":")[0])


@pytest.mark.parametrize("silent", ["[N/A]", "[Insufficient Permissions]", "[Not Supported]", ""])
def test_a_driver_that_does_not_say_the_memory(box: Callable[..., str], silent: str) -> None:  # noqa: F811
    """Boards with memory of their own for both sides, and a GPU cut into parts."""
    code, text = doctor(path=box(total=silent, used=silent, count=1, name="NVIDIA GB10", capability="12.1"))
    assert "memory not said" in line(text, "1 x NVIDIA GB10") and "SM121" in text and line(text, "model folder")


def test_a_driver_that_does_not_say_the_capability(box: Callable[..., str]) -> None:  # noqa: F811
    _, text = doctor(path=box(capability="[N/A]", count=1))
    assert line(text, "1 x NVIDIA RTX").startswith("·") and line(text, "model folder")


def test_one_gpu_of_eight_is_lost(box: Callable[..., str]) -> None:  # noqa: F811
    """nvidia-smi writes a sentence in place of its row and fails; dmesg says why."""
    path = box(dmesg=XID)
    rows = (folder_of(path) / "gpus.txt").read_text().splitlines()
    (folder_of(path) / "gpus.txt").write_text("\n".join([*rows[:2], LOST, *rows[3:]]) + "\n")
    program(folder_of(path), "nvidia-smi", (folder_of(path) / "nvidia-smi").read_text().replace('gpus.txt" ;;\n', 'gpus.txt"; exit 15 ;;\n', 1))
    code, text = doctor("--config", "kimi-k2.5", path=path)
    assert code == 1 and line(text, "7 x NVIDIA RTX") and "asks for 8 of 7 GPUs" in line(text, "tensor parallelism")
    assert line(text, "nvidia-smi").startswith("✗") and LOST in line(text, "nvidia-smi") and "Xid 79" in line(text, "driver messages")


def test_all_gpus_are_lost(box: Callable[..., str]) -> None:  # noqa: F811
    """Then what the driver said counts most."""
    path = box(dmesg=XID, count=0)
    _, text = doctor(path=path)
    assert line(text, "NVIDIA driver").startswith("✗") and "Xid 79" in line(text, "driver messages")


def test_nvidia_smi_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ask", lambda *_: (HANGS, ""))
    facts: Any = SimpleNamespace(gpus=[], hidden=0, config=None, smi_says="")
    (found,) = gpu.check_driver(facts)
    assert found.ok is False and "does not answer" in found.detail and "reboot" in found.todo


def test_messages_that_are_no_text(box: Callable[..., str]) -> None:  # noqa: F811
    path = box()
    program(folder_of(path), "dmesg", f"#!/bin/sh\nprintf '\\377\\376 junk\\n'\necho '{XID}'\n")
    _, text = doctor("--config", "kimi-k2.5", path=path)
    assert "Xid 79" in line(text, "driver messages")


@pytest.mark.parametrize("python", ["/bin/echo", "/etc/passwd", "/etc/passwd/python", "/bin/true", "/bin"])
def test_a_python_that_is_none(python: str) -> None:
    code, text = doctor(python=python)
    assert code == 1 and line(text, "Python").startswith("✗") and line(text, "host memory")


def test_runs_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for value in ("~nobody-of-this-name/x", str(tmp_path / "loop"), "/etc/passwd/x"):
        code, text = doctor(AERIE_RUNS_DIR=value)
        assert code == 1 and line(text, "open files") and line(text, "space").startswith("✗"), text


@pytest.mark.parametrize("host", ["a..b", "::1", "no host", "", "\u00e4" * 70])
def test_odd_hosts(host: str) -> None:
    _, text = doctor("--set", f'server.host="{host}"', "--set", "server.port=45671")
    assert ("free (extraction)" in line(text, "port 45671")) == (host == "::1") and line(text, "model folder")


def test_a_dump_folder_in_a_home(tmp_path: Path) -> None:
    _, text = doctor("--set", 'server.dump_dir="~/dumps"', HOME=str(tmp_path))
    assert str(tmp_path / "dumps") in line(text, "dump folder")
    _, text = doctor("--set", 'server.dump_dir="~nobody-of-this-name/dumps"')
    assert line(text, "space").startswith("✗") and "~nobody-of-this-name" in line(text, "space") and line(text, "model folder")


def test_weights_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    monkeypatch.setattr(machine, "open", refuses, raising=False)
    assert machine.safetensors_problem(tmp_path / "model.safetensors") == "cannot be read (Permission denied)"


def test_plan_where_the_memory_is_not_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("plan_run", ROOT / "scripts" / "plan_run.py")
    plan_run = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(plan_run)  # type: ignore[union-attr]
    program(tmp_path, "nvidia-smi", "#!/bin/sh\necho '0, GPU-1, [N/A]'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UserError, match=r"does not say the memory of GPU 0 \(\[N/A\]\).*--gpu-gib"):
        plan_run.gpus_here()
