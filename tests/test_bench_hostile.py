"""05_benchmark.py and 04_serve's warm-up, maltreated: other programs on the port, other traffic, two at once, signals, full disks, odd names, damaged predictions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pytest
from aerie import bench, bench_prompts, bench_servers, generate, servers
from aerie.bench_prompts import Item, PromptSet, load_set, with_followups
from aerie.chats import BadRow
from aerie.config import Config
from aerie.errors import UserError
from aerie.generate import Answer, Prompt
from aerie.paths import lock_folder
from aerie.predicted import Prediction, read_walks
from aerie.render import ChatTokenizer
from aerie.samples import SampleFile
from aerie.servers import Server
from aerie.serving import warm_up
from serve_fake import FakeServer
from test_benchmark import SCRIPTS, config, fakes, run_benchmark  # noqa: F401  fixtures


def report_of(config: Config) -> dict[str, Any]:
    return json.loads((config.run.bench / "report.json").read_text())


def test_a_server_that_somebody_started_anew_on_its_port_does_not_count(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The run's own process is gone after the first passes; what answers on the port from then on is another program's."""
    fakes()
    real = generate.generate_all

    def dies(*args: Any, **more: Any) -> Any:
        found = real(*args, **more)
        monkeypatch.setattr(Server, "alive", lambda server: server.mode != "serving")
        return found

    monkeypatch.setattr(generate, "generate_all", dies)
    assert run_benchmark(monkeypatch, config) == 2
    err = capsys.readouterr().err
    assert "the serving server" in err and "died" in err and not (config.run.bench / "report.json").exists()


def test_a_cache_that_is_not_flushed_is_waited_for_then_refused(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """SGLang answers 400 to /flush_cache while other requests run: prompts of the pass before would come from the cache."""
    servers = fakes()
    monkeypatch.setattr(bench, "FLUSH_PATIENCE_S", 0.5)
    servers["serving"].busy_flushes = 2
    assert run_benchmark(monkeypatch, config) == 0
    servers["serving"].busy_flushes = 10**9
    assert run_benchmark(monkeypatch, config) == 2
    err = capsys.readouterr().err
    assert "serving server" in err and "other requests" in err and "Traceback" not in err


def test_an_answer_of_another_program_is_said(config: Config, fakes: Callable) -> None:
    serving = fakes()["serving"]
    url = Server.find(config, "serving").url  # type: ignore[union-attr]
    for reply in ({"text": "hello"}, [1, 2], {"meta_info": 3, "output_ids": [1]}, None):
        serving.answer = lambda body, reply=reply: reply  # type: ignore[method-assign]
        with pytest.raises(UserError, match="no answer of SGLang"):
            generate.generate(url, Prompt("a", [1, 2], 4))


def test_a_stream_of_another_program_is_said(config: Config, fakes: Callable) -> None:
    serving = fakes()["serving"]
    url = Server.find(config, "serving").url  # type: ignore[union-attr]
    real = serving.answer
    serving.answer = lambda body: {"output_ids": [1], "meta_info": {}}  # type: ignore[method-assign]
    with pytest.raises(UserError, match="no answer of SGLang"):
        generate.answer_of(url, Prompt("a", [1], 4), {"output_ids": 3, "meta_info": {}}, 1.0)
    for line in (b"data: {", b"data: 3", b'data: {"meta_info": {}}', b'data: {"meta_info": 3}'):
        with pytest.raises(UserError, match="broke off the answer|no answer of SGLang"):
            generate.chunk_of(url, Prompt("a", [1], 4), line)
    for meta in ({}, {"output_top_logprobs": []}, {"output_top_logprobs": [[]]}, {"output_top_logprobs": [[3]]}):
        serving.answer = lambda body, meta=meta: {"output_ids": [1], "meta_info": meta}  # type: ignore[method-assign]
        with pytest.raises(UserError, match="did not say how likely"):
            generate.next_token_distance(url, [1, 2], 5, 6)
    serving.answer = real  # type: ignore[method-assign]


def test_two_benchmarks_of_one_run_at_once(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    servers = fakes()
    config.run.bench.mkdir(parents=True)
    handle, locked = lock_folder(config.run.bench, "")
    assert locked and run_benchmark(monkeypatch, config) == 2
    assert "another benchmark of run" in capsys.readouterr().err and not servers["serving"].bodies
    os.close(handle)
    assert run_benchmark(monkeypatch, config) == 0


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_servers_of_its_own_end_with_it(config: Config, sign: signal.Signals, tmp_path: Path) -> None:
    """The signal comes while its first server starts (here: a program that never answers)."""
    started = tmp_path / "started"
    code = (
        "import runpy, sys, subprocess; sys.path.insert(0, sys.argv[1]); from aerie import servers\n"
        f"servers.problem_with = lambda *_: ''; servers.command_line = lambda *_: ['sh', '-c', 'echo $$ > {started}; exec sleep 300']\n"
        "sys.argv = [sys.argv[1] + '/05_benchmark.py', *sys.argv[2:]]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(SCRIPTS), "--config", str(config.path), "--run", config.run.name]
    usual = lambda: signal.signal(sign, signal.SIG_DFL)  # noqa: E731  these tests may run under nohup, whose children ignore SIGHUP
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=usual)
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text().strip()):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read() if process.poll() is not None else "no server after 60 s"
        time.sleep(0.1)
    process.send_signal(sign)
    said, _ = process.communicate(timeout=60)
    server = int(started.read_text())
    try:
        assert process.returncode == 130 and "Traceback" not in said, said
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)
    finally:
        try:
            os.kill(server, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.mark.parametrize("trouble", ["SIGTERM while it starts", "no room for its record"])
def test_a_server_that_nobody_knows_of_yet_ends_too(trouble: str, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes as the new process writes, before its parent has even returned from starting it; or the record cannot be written."""
    started, real = tmp_path / "started", servers.write_json
    begin = f"kill -TERM {os.getpid()}; " if "SIGTERM" in trouble else ""
    monkeypatch.setattr(servers, "command_line", lambda *_: ["sh", "-c", f"echo $$ > {started}; {begin}exec sleep 300"])
    monkeypatch.setattr(servers, "problem_with", lambda *_: "")

    def write(path: Path, content: Any) -> None:
        while not (started.exists() and started.read_text().strip()):
            time.sleep(0.01)
        if "record" in trouble:
            raise OSError(28, "No space left on device", str(path))
        real(path, content)

    monkeypatch.setattr(servers, "write_json", write)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    try:
        with pytest.raises((SystemExit, OSError)):
            servers.Server.start(config, "baseline")
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    assert not servers.Server.record_path(config, "baseline").exists()


def test_the_numbers_are_said_even_where_the_report_cannot_be_written(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fakes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device", str(config.run.bench / "report.json"))

    monkeypatch.setattr("aerie.report.write_json", full)
    assert run_benchmark(monkeypatch, config) == 2
    said = capsys.readouterr()
    assert "speed-up" in said.out and "gap" in said.out and "no space left" in said.err


def test_a_report_folder_that_cannot_be_made_is_known_first(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    servers = fakes()
    config.run.bench.write_text("a file")
    assert run_benchmark(monkeypatch, config) == 2
    assert not servers["serving"].bodies and str(config.run.bench) in capsys.readouterr().err


def test_speed_is_reported_where_texts_cannot_be_compared(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """The plain server dies when it is asked about the first difference: hours of passes are not lost, and the exit code is no 0."""
    fakes(changes_text=True)

    def gone(*_: Any) -> float:
        raise UserError("the baseline server stopped answering")

    monkeypatch.setattr(bench, "next_token_distance", gone)
    assert run_benchmark(monkeypatch, config) == 1
    said = capsys.readouterr()
    assert "texts: not compared" in said.out and "the baseline server stopped answering" in said.err and "Traceback" not in said.err
    assert report_of(config)["lossless"] is None and report_of(config)["speedup"] > 0 and (config.run.bench / "report.html").exists()


def test_a_sweep_s_server_that_does_not_start_loses_nothing(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fakes()

    def other(self: Any, setting: tuple[int, int, int]) -> Server:
        if setting[1] == 4:
            raise UserError("the serving server ended while starting: out of memory")
        return self.get("serving")

    monkeypatch.setattr(bench_servers.BenchServers, "other_settings", other)
    assert run_benchmark(monkeypatch, config, "--sweep", "3,4,16", "3,1,4") == 1
    said, report = capsys.readouterr(), report_of(config)
    assert [row["topk"] for row in report["sweep"]] == [1] and "3,4,16" in said.err and "out of memory" in said.err and report["speedup"] > 0


def test_your_server_that_does_not_start_again_costs_no_numbers(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fakes()

    def leave(*_: Any) -> None:
        raise UserError("the serving server ended while starting: out of memory")

    monkeypatch.setattr(bench_servers.BenchServers, "__exit__", leave)
    assert run_benchmark(monkeypatch, config) == 2
    said = capsys.readouterr()
    assert "gap" in said.out and "out of memory" in said.err and report_of(config)["speedup"] > 0 and (config.run.bench / "report.html").exists()


@pytest.mark.parametrize("name", ["store/report.json", "drafter/report.json", "drafter/training.json"])
def test_a_damaged_report_of_an_earlier_step_is_known_first(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, name: str) -> None:
    servers = fakes()
    (config.run.root / name).write_text('{"samples": 3')
    assert run_benchmark(monkeypatch, config) == 2
    assert name in capsys.readouterr().err and not servers["serving"].bodies


def test_sets_of_one_name_are_refused(config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    assert run_benchmark(monkeypatch, config, "--prompts", "heldout", "heldout") == 2
    assert "heldout" in capsys.readouterr().err


def test_a_file_named_like_a_set_is_not_that_set(make_config: Callable[..., Config], tmp_path: Path) -> None:
    """A user's heldout.jsonl is not what training walked."""
    config = make_config("llama", "bench-names", bench={"max_new_tokens": 8})
    path = tmp_path / "heldout.jsonl"
    path.write_text(json.dumps({"prompt": "hi"}) + "\n")
    assert load_set(config, str(path)).name == "heldout.jsonl"


@pytest.mark.parametrize("name", ["cost$\\frac$", "_hidden", "\udcff", "日本\n語"])
def test_a_page_for_sets_of_any_name(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fakes()
    real = bench_prompts.load_set
    monkeypatch.setattr(bench_prompts, "load_set", lambda config, _: PromptSet(name, real(config, "heldout").prompts))
    assert run_benchmark(monkeypatch, config) == 0
    assert (config.run.bench / "report.html").stat().st_size > 1000


def test_answers_of_one_token_accuse_nobody(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """One token is prefill's own: there was nothing to verify."""
    fakes()
    assert run_benchmark(monkeypatch, config, "--set", "bench.max_new_tokens=1") == 2
    err = capsys.readouterr().err
    assert "does not speculate" not in err and "one token" in err and "bench.max_new_tokens" in err


def test_concurrencies_in_any_order(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fakes()
    assert run_benchmark(monkeypatch, config, "--set", "bench.concurrency=[4,1]") == 0
    assert report_of(config)["concurrency"] == 1
    assert run_benchmark(monkeypatch, config, "--set", "bench.concurrency=[4,4]") == 2 and "without repeats" in capsys.readouterr().err


@pytest.mark.parametrize("text", [
    '{"walks": {"a": ["\u00b2"]}}', '{"walks": {"a": ["' + "9" * 5000 + '"]}}', '{"walks": {"a": "2 2"}}', '{"walks": {"a": {"2": 1}}}', '{"walks": {"a": ["0 0"]}}', '{"walks": {"a": ["-1"]}}',
])  # fmt: skip
def test_a_walk_of_no_numbers_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "walk.json").write_text(text, encoding="utf-8")
    assert read_walks(tmp_path / "walk.json") == {}


@pytest.mark.parametrize("predicted", ["0.0", "NaN", "-1", '"2.5"', "[2.5]", "true", "1e999"])
def test_a_prediction_that_is_no_length_is_none(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, predicted: str) -> None:
    """0 is what training says where its held-out answers had nothing to verify."""
    (config.run.drafter / "training.json").write_text(f'{{"predicted_accept_length": {predicted}}}')
    assert Prediction.load(config).accept_length is None
    fakes()
    assert "training predicted none" in warm_up(config, Server.find(config, "serving"))  # type: ignore[arg-type]
    assert run_benchmark(monkeypatch, config) == 0 and report_of(config)["gap"] is None


def test_a_walk_without_a_pooled_prediction(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    file = SampleFile(config.run.data / "heldout.safetensors")
    (config.run.drafter / "training.json").write_text("{}")
    (config.run.drafter / "walk.json").write_text(json.dumps({"walks": {file.sample_id(0): ["2 2 1"]}}))
    fakes()
    assert run_benchmark(monkeypatch, config) == 0
    assert "predicted accept length 1.667" in capsys.readouterr().out


def test_a_server_that_dies_in_the_warm_up(config: Config, fakes: Callable) -> None:
    fakes(dies_after=2)
    with pytest.raises(UserError, match="serving server stopped answering"):
        warm_up(config, Server.find(config, "serving"))  # type: ignore[arg-type]


def test_a_server_that_dies_while_later_turns_are_asked_for(make_config: Callable[..., Config]) -> None:
    config = make_config("llama", "bench-turns", bench={"max_new_tokens": 8})
    FakeServer(config, "baseline").close()
    one = bench.SetBenchmark(config, PromptSet("x", [Prompt("x:1", [1], 4)], {"x:1": Item("x:1", "", [], followups=["more"])}))
    with pytest.raises(UserError, match="baseline server stopped answering"):
        one.run([Server.find(config, "baseline")], 1)  # type: ignore[list-item]


def test_a_later_turn_that_the_template_refuses_is_left_out(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("llama", "bench-refused", bench={"max_new_tokens": 8})
    prompts = PromptSet("x", [Prompt("x:1", [1], 4)], {"x:1": Item("x:1", "", [{"role": "user", "content": "hi"}], followups=["more", "again"])})

    def refuses(*_: Any) -> list[int]:
        raise BadRow("the chat template refuses it: no")

    monkeypatch.setattr(ChatTokenizer, "prompt", refuses)
    done = with_followups(config, prompts, lambda asked: [Answer(prompt, [5, 6], 0, [], 0.0) for prompt in asked])
    assert len(done.prompts) == 1 and done.skipped == 2
