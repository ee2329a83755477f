"""Servers by their records: another program on the port, records that we did not write, an nvidia-smi that hangs or lost a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable

import pytest
from aerie import servers
from aerie.config import Config
from aerie.errors import UserError
from aerie.report import write_json
from aerie.servers import Server, has_gpu, start_ticks, url_of, watcher_path, watcher_record
from serve_fake import FakeServer

LISTENS = """import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()"""


def started(config: Config, *command: str) -> Server:
    """As Server.start() leaves it: a process of its own session, and its record."""
    config.run.logs.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(command, start_new_session=True)
    record = {"pid": process.pid, "start_ticks": start_ticks(process.pid), "url": url_of(config, "baseline"), "log": str(config.run.logs / "baseline.log"), "command": list(command)}
    Path(record["log"]).write_text("loading\n")
    write_json(Server.record_path(config, "baseline"), record)
    return Server(config, "baseline", process, record)


def test_another_program_s_health_is_not_ours(make_config: Callable[..., Config]) -> None:
    """Two runs with one port start at the same time: the first to listen must not count as the other's server while that one still loads."""
    config = make_config("llama", "port-race")
    other = FakeServer(config, "baseline")
    server = started(config, "sleep", "60")
    try:
        assert not server.healthy() and not Server.find(config, "baseline").healthy()  # type: ignore[union-attr]
        with pytest.raises(UserError, match="another program listens on .*was not ready within 1 s"):
            server.wait_ready(1.0)
    finally:
        server.stop()
        other.close()
    ours = started(config, sys.executable, "-c", LISTENS, str(config.bench.baseline_port))
    try:
        ours.wait_ready(30.0)
    finally:
        ours.stop()
    # a child of it that listens is it too
    ours = started(config, "sh", "-c", f"{sys.executable} -c '{LISTENS}' {config.bench.baseline_port}; true")
    try:
        ours.wait_ready(30.0)
    finally:
        ours.stop()


@pytest.mark.parametrize("text", [b"", b"[1]", b"3", b"\xff\xfe", b"{", b"{}", b'{"pid": "self", "start_ticks": 0}', b'{"pid": -1, "start_ticks": 0}', b'{"pid": null}', b"[" * 100_000,
                                  b'{"pid": 1, "start_ticks": 1}'])  # fmt: skip
def test_a_record_that_we_did_not_write_is_none(make_config: Callable[..., Config], text: bytes) -> None:
    config = make_config("llama", "records")
    for path in (Server.record_path(config, "serving"), watcher_path(config, "serving")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    assert Server.find(config, "serving") is None and watcher_record(config, "serving") is None
    record: dict[str, Any] = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}  # of a living process, but no server's
    write_json(Server.record_path(config, "serving"), record)
    write_json(watcher_path(config, "serving"), record)
    assert Server.find(config, "serving") is None and watcher_record(config, "serving") is None


def smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    has_gpu.cache_clear()


def test_nvidia_smi_that_hangs_or_lost_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One GPU of two is lost: the box must not become a CPU box. All hang: a sentence, no endless wait."""
    try:
        smi(tmp_path, monkeypatch, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1)'; echo 'Unable to determine the device handle for GPU0000:41:00.0: Unknown Error'; exit 15")
        assert has_gpu()
        smi(tmp_path, monkeypatch, "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9")
        assert not has_gpu()
        smi(tmp_path, monkeypatch, "sleep 30")
        monkeypatch.setattr(servers, "SMI_PATIENCE_S", 0.5)
        begin = time.monotonic()
        with pytest.raises(UserError, match="nvidia-smi did not answer within 0.5 s"):
            has_gpu()
        assert time.monotonic() - begin < 25
    finally:
        has_gpu.cache_clear()
