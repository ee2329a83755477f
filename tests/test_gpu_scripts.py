"""The scripts that run by hand on a GPU machine: their order, a failing part, the end of the time, and that no server is left. (No GPU, no server.)"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aerie.paths import ROOT
from aerie.target import problem_with


def load(name: str) -> Any:
    """tests/gpu/NAME.py as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "tests" / "gpu"), *sys.path])
        spec = importlib.util.spec_from_file_location(f"gpu_script_{name}", ROOT / "tests" / "gpu" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu_parts() -> Any:
    return load("gpu_parts")


def test_parts_go_on_after_a_failing_one_and_end_with_the_time(tmp_path: Path, gpu_parts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parts = gpu_parts.Parts(tmp_path / "r.json", 100.0, gpu="none")
    assert parts("a", lambda: {"ratio": 0.123456, "more": [1]}) == {"ratio": 0.123456, "more": [1]}
    assert parts("b", lambda: 1 / 0) is None
    parts.seconds = 0.0
    assert parts("c", lambda: pytest.fail("begun after the end")) is None
    saved = json.loads((tmp_path / "r.json").read_text())
    assert saved["a"]["more"] == [1] and "ZeroDivisionError" in saved["b"]["failed"] and "over" in saved["c"]["skipped"]
    parts.summary(("ratio",))
    lines = capsys.readouterr().out.split("\n", 3)
    assert json.loads(lines[0])["ratio"] == 0.1235 and "failed" in json.loads(lines[1]) and "skipped" in json.loads(lines[2])
    summary = json.loads(lines[3])["summary"]
    assert summary["a"]["ratio"] == 0.1235 and "more" not in summary["a"] and "failed" in summary["b"] and "skipped" in summary["c"]


class FakeServer:
    """Notes what is done to it."""

    def __init__(self, name: str, events: list[str], log: Path):
        self.name, self.events, self.log = name, events, log
        log.write_text("log")
        events.append(f"start {name}")

    url = "http://nowhere"

    def wait_ready(self, timeout: float) -> None:
        self.events.append(f"ready {self.name}")

    def stop(self) -> None:
        self.events.append(f"stop {self.name}")


def test_capture_parts_run_in_order_with_one_server_ahead(tmp_path: Path, gpu_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: two servers start at first, rates are measured while none does; a failing part harms no later one; nothing is left running."""
    module, events = load("capture_gpu"), []
    keys = [("one", "capture"), ("two", "fp8"), ("one", "plain")]
    monkeypatch.setattr(module, "DEVICE", "cuda")
    monkeypatch.setattr(module, "LOADS", {"one": (4, 8, 2), "two": (4, 8, 2)})
    monkeypatch.setattr(module, "config_of", lambda work, name, model, kind: SimpleNamespace(key=f"{name}-{kind}"))
    monkeypatch.setattr(module, "dump_dir", lambda config: tmp_path / "dumps" / config.key)
    monkeypatch.setattr(module.capture_bench, "start", lambda config, capture: FakeServer(config.key, events, tmp_path / f"{config.key}.server.log"))
    monkeypatch.setattr(module.capture_bench, "make_prompts", lambda *words: [])

    def measure(config: Any, plain: Any, capture: Any, *words: Any) -> dict[str, Any]:
        assert plain is capture
        events.append(f"cost {config.key}")
        if config.key == "two-fp8":
            raise RuntimeError("no number")
        return {"ratio": 0.9, "capture_tok_s": 90.0, "plain_tok_s": 100.0, "counters": {"dropped": 0}}

    monkeypatch.setattr(module.capture_bench, "measure", measure)
    monkeypatch.setattr(module.capture_bench, "plain_rate", lambda *words: {"plain_tok_s": 120.0, "blocks_tok_s": [], "failed_requests": 0})
    targets = SimpleNamespace(work=tmp_path, folder=lambda name: tmp_path, reference=lambda name: [1], prompts=[])
    parts = gpu_parts.Parts(tmp_path / "r.json", 100.0)
    run = module.Run(parts, targets, tmp_path, keys)
    monkeypatch.setattr(run, "load", lambda key: events.append(f"load {'-'.join(key)}") or {})
    monkeypatch.setattr(run, "check", lambda key: events.append(f"states {'-'.join(key)}") or {"right": True})
    run.all()
    assert events == [
        "start one-capture", "start two-fp8", "ready one-capture", "ready two-fp8", "cost one-capture", "load one-capture", "states one-capture", "stop one-capture",
        "ready two-fp8", "load two-fp8", "states two-fp8", "cost two-fp8", "start one-plain", "stop two-fp8", "ready one-plain", "stop one-plain",
    ]  # fmt: skip
    assert "no number" in parts.results["two-fp8 cost"]["failed"]
    assert parts.results["one-plain cost"]["ratio"] == 0.75 and parts.results["one-plain cost"]["ratio_without_names"] == pytest.approx(100 / 120)
    assert not run.servers and (tmp_path / "two-fp8.log").read_text() == "log"

    events.clear()
    late = module.Run(gpu_parts.Parts(tmp_path / "late.json", -1.0), targets, tmp_path, keys)
    late.all()
    assert events == [] and all("skipped" in late.parts.results[f"{name}-{kind} start"] for name, kind in keys)


def test_sigterm_ends_the_servers_of_the_capture_run(tmp_path: Path) -> None:
    """A `timeout` around it: while rates are measured, with requests under way that would wait for a minute."""
    code = f"""
import sys, subprocess, threading, time
from types import SimpleNamespace
sys.path.insert(0, {str(ROOT / "tests" / "gpu")!r})
import capture_gpu as module
class Server:
    url, log = "http://nowhere", module.Path({str(tmp_path / "server.log")!r})
    def __init__(self):
        self.log.write_text("log")
        self.process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        print("server", self.process.pid, flush=True)
    def wait_ready(self, timeout): pass
    def stop(self):
        self.process.kill()
        self.process.wait()
def measure(*words):
    threads = [threading.Thread(target=time.sleep, args=(60,), daemon=True) for _ in range(3)]
    [thread.start() for thread in threads]
    print("measuring", flush=True)
    [thread.join() for thread in threads]
module.config_of = lambda *words: None
module.dump_dir = lambda config: {str(tmp_path / "dumps")!r}
module.Targets = lambda *words: SimpleNamespace(work=None, folder=lambda name: None, reference=lambda name: [[]])
module.capture_bench.start, module.capture_bench.measure, module.capture_bench.make_prompts = lambda *words: Server(), measure, lambda *words: []
sys.argv = ["capture_gpu.py", {str(tmp_path / "out")!r}, "--no-patch", "--parts", "deepseek-capture"]
module.main()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        lines: list[str] = []
        while "measuring" not in (line := process.stdout.readline()) and line:
            lines.append(line)
        process.terminate()
        rest = process.stdout.read()
        assert process.wait(20) == 143
    assert '"summary"' in rest
    assert not Path(f"/proc/{next(line for line in lines if line.startswith('server')).split()[1]}").exists()


def test_a_benchmark_that_does_not_end_is_ended_with_what_it_started(tmp_path: Path) -> None:
    module, note = load("extract_gpu"), tmp_path / "child"
    code = f"import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); open({str(note)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    with pytest.raises(RuntimeError, match="exit code none after 5 s"):
        module.bench(tmp_path, "slow", [sys.executable, "-c", code], 5)
    state = Path(f"/proc/{note.read_text()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    report = f"import json, sys; json.dump({{'ratio': 0.9, 'plain_tok_s': [1, 3, 2], 'config': {{}}}}, open(sys.argv[2], 'w'))"
    assert module.bench(tmp_path, "good", [sys.executable, "-c", report], 60) == {"ratio": 0.9, "plain_tok_s": [1, 3, 2], "plain_tok_s_median": 2.0}


def test_a_make_target_that_does_not_end_is_ended_whole(tmp_path: Path, gpu_parts: Any) -> None:
    """make's own children go with it; what it left in a session of its own (a server) is ended by its record, not here."""
    note, code = tmp_path / "child", "import time; print('so far', flush=True); time.sleep(600)"
    shell = f"{sys.executable} -c \"{code}\" & echo $! > {note}; wait"
    with pytest.raises(RuntimeError, match="exit code none after 3 s: so far"):
        gpu_parts.call(tmp_path / "log", ["sh", "-c", shell], 3)
    state = Path(f"/proc/{note.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    with pytest.raises(RuntimeError, match="exit code 3: no"):
        gpu_parts.call(tmp_path / "log", ["sh", "-c", "echo no; exit 3"], 30)
    assert gpu_parts.call(tmp_path / "log", ["echo", "yes"], 30) == {"last": "yes"}


def test_two_gpu_servers_start_together_and_wait_for_their_turn(tmp_path: Path, gpu_parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: all four start at once, nothing is asked before the file of --go is there, and one that never got ready harms the others' parts in nothing."""
    module, events = load("two_capture"), []

    class Slow(FakeServer):
        def wait_ready(self, timeout: float) -> None:
            super().wait_ready(timeout)
            if self.name == "dp":
                raise RuntimeError("not ready")

        def alive(self) -> bool:
            return self.name != "dp"

    monkeypatch.setattr(module, "DEVICE", "cuda")
    monkeypatch.setattr(module, "config_of", lambda work, model, kind: SimpleNamespace(kind=kind))
    monkeypatch.setattr(module, "dump_dir", lambda config: tmp_path / "dumps" / config.kind)
    monkeypatch.setattr(module.capture_bench, "start", lambda config, capture: Slow(config.kind, events, tmp_path / f"{config.kind}.server.log"))
    targets = SimpleNamespace(work=tmp_path, folder=lambda name: tmp_path, reference=lambda name: [1], prompts=[], states={})
    run = module.Run(gpu_parts.Parts(tmp_path / "r.json", 100.0), targets, tmp_path, tmp_path / "go")
    for name in ("states", "cost", "proof", "writers", "each_once", "plain_cost"):
        monkeypatch.setattr(run, name, lambda *kind, name=name: events.append(" ".join([name, *kind])) or {})
    threading.Timer(0.5, lambda: events.append("go") or (tmp_path / "go").touch()).start()
    run.all()
    kinds = ("tp1", "tp2", "dp", "plain")
    asked = ["states tp1", "states tp2", "proof", "writers", "cost", "plain_cost"]
    assert events[:-4] == [*(f"start {kind}" for kind in kinds), *(f"ready {kind}" for kind in kinds), "go", *asked]
    assert sorted(events[-4:]) == sorted(f"stop {kind}" for kind in kinds) and not run.servers and run.parts.results["go"]["done"] == "there"


def test_the_model_of_dummy_weights_passes_the_look_before_a_start(tmp_path: Path) -> None:
    """Stand-in servers on a CPU never look; on a GPU a folder without weights ended all of two_extract.py."""
    assert problem_with(load("two_extract").make_model(tmp_path / "model")) == ""


def test_the_scripts_name_their_parts() -> None:
    module = load("capture_gpu")
    assert module.PARTS and all(name in module.SHAPES and name in module.LAYER_IDS and name in module.LOADS for name, _ in module.PARTS)
    assert load("extract_gpu").BUDGET_MB > 0
