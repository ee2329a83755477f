"""The load of bench_capture.py against a server of its own: which request goes when, under which name, and what is counted as whose. (A virtual clock; no SGLang.)"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator

import numpy as np
import pytest
from aerie import capture_bench, capture_loop
from aerie.capture_loop import Block, Loop
from aerie.rid import parse_rid

PROMPTS = [np.arange(length, dtype=np.int32) for length in (3, 5, 4, 6)]


class OneAtATime:
    """Answers in order, and a token takes a second of its clock: 1.25 seconds under our names, whose dump it writes."""

    def __init__(self, folder: Path, loops: list[Loop], cost: float = 1.25, dumps: bool = True):
        self.folder, self.loops, self.cost, self.dumps = folder, loops, cost, dumps
        self.now, self.answer, self.living = 0.0, b'{"meta_info": {}}', True
        self.batch = 1  # requests that are answered at the same time
        self.names: list[tuple[str, int]] = []
        self.waiting: queue.Queue[tuple[dict[str, Any], threading.Event]] = queue.Queue()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body, done = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), threading.Event()
                server.waiting.put((body, done))
                done.wait(30)
                self.send_response(200 if server.cost else 500)
                self.send_header("Content-Length", str(len(server.answer)))
                self.end_headers()
                self.wfile.write(server.answer)

            def log_message(self, *words: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url, self.record, self.log = f"http://127.0.0.1:{self.http.server_address[1]}", {"pid": os.getpgid(0)}, "its log"
        for work in (self.http.serve_forever, self.serve):
            threading.Thread(target=work, daemon=True).start()

    def alive(self) -> bool:
        return self.living

    def state(self) -> str:
        return "died: killed by signal 9"

    def serve(self) -> None:
        while True:
            loop = self.loops[-1] if self.loops else None
            deadline = time.monotonic() + 5  # until all are there again that the loop keeps under way
            while loop and loop.senders == loop.concurrency and self.waiting.qsize() < loop.concurrency - loop.held_back and time.monotonic() < deadline:
                time.sleep(0.0005)
            try:
                body, done = self.waiting.get(timeout=0.2)
            except queue.Empty:
                continue
            ours = parse_rid(body["rid"]) is not None
            self.names.append((body["rid"], len(body["input_ids"])))
            if len(self.names) % self.batch == 1 % self.batch:
                self.now += len(body["input_ids"]) * (self.cost if ours else 1.0)
            dump = self.folder / f"{body['rid']}.safetensors"
            if ours and self.dumps and self.cost:
                dump.write_bytes(b"states")
            before = self.loops[-1].ended
            done.set()
            while self.loops[-1].ended == before or dump.exists():
                time.sleep(0.0005)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[Loop]:
    """The loops that were made, the newest last."""
    made: list[Loop] = []
    begin = Loop.__init__

    def noted(self: Loop, plain: Any, *words: Any, **more: Any) -> None:
        begin(self, plain, *words, **more)
        self.clock, self.senders = lambda: plain.now, 0
        made.append(self)

    monkeypatch.setattr(Loop, "__init__", noted)
    return made


@pytest.fixture
def server(tmp_path: Path, loops: list[Loop]) -> Iterator[OneAtATime]:
    started = OneAtATime(tmp_path, loops)
    yield started
    started.http.shutdown()


def test_blocks_take_turns_without_a_break_and_are_told_apart_by_number(server: OneAtATime, tmp_path: Path) -> None:
    loop = Loop(server, server, PROMPTS, 3, tmp_path)
    blocks = loop.run(iter([Block(False, [0, 1, 2, 3], 1), Block(True, [0, 1, 2, 3], 1), Block(True, [3, 3], 0), Block(False, [0, 0, 0])]))
    assert [parse_rid(name) is not None for name, _ in server.names] == [False] * 4 + [True] * 6 + [False] * 3
    assert sorted(tokens for _, tokens in server.names[:4]) == [3, 4, 5, 6]
    assert [block.first for block in blocks] == [0, 4, 8, 10] and loop.strangers <= 2 and not loop.problems
    assert [block.whole_seconds for block in blocks[1:3]] == [18 * 1.25, 12 * 1.25] and blocks[2].seconds == 15.0 and blocks[2].tokens == 12
    for block in blocks[:2]:  # the first request is left out
        assert block.seconds == pytest.approx(block.tokens * (1.25 if block.capture else 1.0)) and block.tokens == 18 - (server.names[block.first][1])
    assert not list(tmp_path.iterdir()) and len(loop.lags) == 6 and blocks[0].cpu("client") >= 0


def measured(server: OneAtATime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Any]:
    config = SimpleNamespace(run=SimpleNamespace(root=tmp_path, name="measured"))
    monkeypatch.setattr(capture_bench, "dump_dir", lambda config: tmp_path)
    monkeypatch.setattr(capture_bench, "server_args", lambda config, mode: {"chunked-prefill-size": 4})
    monkeypatch.setattr(capture_bench.time, "sleep", lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.01)))
    return capture_bench.measure(config, server, server, capture_bench.Load(**{"prompts": PROMPTS, "concurrency": 3, "seconds": 0.0, "block_s": 60.0, "width": 0.0} | more), lambda text: None)


def test_the_ratio_is_that_of_tokens_a_second(server: OneAtATime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(server, tmp_path, monkeypatch)
    assert found["ratio"] == pytest.approx(0.8) and found["ratio_low"] == pytest.approx(0.8) and found["ratio_high"] == pytest.approx(0.8)
    assert found["ratio_of_neighbours"] == pytest.approx(0.8) and found["ratio_of_fastest"] == pytest.approx(0.8)
    assert found["plain_tok_s"] == pytest.approx(1.0) and found["capture_tok_s"] == pytest.approx(0.8) and found["pairs"] >= capture_bench.LEAST_PAIRS
    assert len(found["capture_blocks_tok_s"]) == found["pairs"] == len(found["plain_blocks_tok_s"]) and found["failed_requests"] == 0
    assert found["requests_a_block"] >= 8 and 0 < found["left_out_requests"] < found["requests_a_block"]
    assert found["hook_share_of_wall"] == 0.0 and not list(tmp_path.iterdir())


def test_it_goes_on_while_the_interval_is_wide_and_ends_with_the_time(server: OneAtATime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_bench, "intervals", lambda blocks, draws=0: dict.fromkeys(("ratio", "ratio_of_neighbours"), (0.0, 1.0 if len(blocks) < 30 else 0.01)))
    assert measured(server, tmp_path, monkeypatch, width=0.03, block_s=0.0)["pairs"] >= 15
    assert measured(server, tmp_path, monkeypatch, width=0.001, block_s=0.0, limit_s=0.0)["pairs"] < 15


def test_a_connection_that_the_server_may_have_closed_is_not_used(server: OneAtATime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang closes one that was idle for five seconds: two servers in turns, or slow dumps."""
    closings, close = [], capture_loop.Client.close
    monkeypatch.setattr(capture_loop.Client, "close", lambda self: closings.append(self) or close(self))
    for idle, closed in ((1e9, 3), (-1.0, 3 + 8)):  # once a sender at its end; before each request too
        closings.clear()
        monkeypatch.setattr(capture_loop, "IDLE_S", idle)
        loop = Loop(server, server, PROMPTS, 3, tmp_path)
        assert len(loop.run(iter([Block(True, [0] * 8)]))) == 1 and not loop.problems and len(closings) == closed


def test_a_plain_server_alone(server: OneAtATime, tmp_path: Path) -> None:
    found = capture_bench.plain_rate(server, capture_bench.Load(PROMPTS * 3, 3, 0.1))
    assert found["plain_tok_s"] == pytest.approx(1.0) and found["blocks_tok_s"] and found["failed_requests"] == 0
    assert not any(parse_rid(name) for name, _ in server.names)


def test_failures_end_it_with_their_reason(server: OneAtATime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.cost = 0.0
    with pytest.raises(capture_bench.UserError, match=r"(\d+) of \1 requests to http.* failed, the first: . tokens: status 500"):
        measured(server, tmp_path, monkeypatch)
    with pytest.raises(capture_bench.UserError, match="status 500"):
        capture_bench.plain_rate(server, capture_bench.Load(PROMPTS, 3, 30.0))


def test_a_dump_that_is_dropped_or_never_comes_is_a_problem(server: OneAtATime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_loop, "DUMP_TIMEOUT_S", -1.0)
    server.dumps = False
    loop = Loop(server, server, PROMPTS, 3, tmp_path)
    loop.run(iter([Block(True, [0, 1])]))
    assert len(loop.problems) == 2 and "no dump after" in loop.problems[0]


def test_an_aborted_request_is_a_problem_and_its_dump_is_not_waited_for(server: OneAtATime, tmp_path: Path) -> None:
    server.answer = b'{"meta_info": {"finish_reason": {"type": "abort", "message": "by another client"}}}'
    server.dumps = False
    loop = Loop(server, server, PROMPTS, 3, tmp_path)
    loop.run(iter([Block(True, [0, 1])]))
    assert len(loop.problems) == 2 and "the server aborted the request: by another client" in loop.problems[0] and not loop.due


def test_a_dead_server_is_called_dead(server: OneAtATime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.cost, server.living = 0.0, False
    with pytest.raises(capture_bench.UserError, match="status 500: .*; the server died: killed by signal 9 .see its log"):
        measured(server, tmp_path, monkeypatch)


@pytest.mark.parametrize("held_back", [False, True])
def test_a_dump_folder_that_is_removed_ends_the_loop(server: OneAtATime, tmp_path: Path, held_back: bool) -> None:
    """Also while all senders wait for a dump."""
    folder, server.dumps = tmp_path / "dumps", False
    folder.mkdir()
    loop = Loop(server, server, PROMPTS, 3, folder)
    found: list[BaseException] = []

    def run() -> None:
        try:
            loop.run(iter([Block(True, [0] * 200)]))
        except BaseException as exc:
            found.append(exc)

    done = threading.Thread(target=run, daemon=True)
    done.start()
    deadline = time.monotonic() + 30
    while (loop.held_back < 3 if held_back else not loop.ended) and time.monotonic() < deadline:
        time.sleep(0.01)
    folder.rmdir()
    done.join(30)
    assert not done.is_alive() and isinstance(found[0], capture_bench.UserError) and f"the folder {folder}" in str(found[0])


def test_what_the_plan_raises_ends_the_loop(server: OneAtATime, tmp_path: Path) -> None:
    """It says how far it is in a sender's thread, and standard output may be closed: `bench_capture.py | head`."""

    def plan() -> Iterator[Block]:
        yield Block(False, [0, 1])
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Loop(server, server, PROMPTS, 3, tmp_path).run(plan())


def test_one_prompt_does_not_make_the_warm_up_endless(server: OneAtATime, loops: list[Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of fewer requests than are in flight end together: no time passed between them (on a real clock so little that the next blocks held 150,000 requests)."""
    server.batch = 3
    found = measured(server, tmp_path, monkeypatch, prompts=PROMPTS[:1], block_s=10.0, limit_s=0.0)
    assert found["pairs"] >= capture_bench.LEAST_PAIRS and max(len(block.prompts) for loop in loops for block in loop.blocks) < 200


def test_senders_wait_when_dumps_do_not_come(server: OneAtATime, tmp_path: Path) -> None:
    """Else a server whose writing is slow would drop them for a full budget; it is counted."""
    server.dumps = False
    loop = Loop(server, server, PROMPTS, 3, tmp_path)
    done = threading.Thread(target=loop.run, args=(iter([Block(True, [0] * 12)]),), daemon=True)
    done.start()
    deadline = time.monotonic() + 30
    while loop.held_back < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loop.held_back == 3 and len(server.names) == 6 and loop.ended == 6
    server.dumps = True
    for name, _ in server.names[:6]:
        (tmp_path / f"{name}.error").write_text(json.dumps({"reason": "dropped"}))
    done.join(30)
    assert not done.is_alive() and loop.ended == 12 and loop.problems == ["dropped"] * 6
