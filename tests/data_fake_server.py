"""A stand-in for a served target, for tests of what can go wrong around it: /generate and an OpenAI-compatible chat endpoint, with delays, refusals and a record.

Run by hand it answers until it is ended: data_fake_server.py PORT RECORD SECONDS (each prompt is answered after a time that its content decides, up to SECONDS).
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable

Reply = dict[str, Any] | int  # a JSON body, or an error status


class FakeServer:
    """Serves on a free port of 127.0.0.1 until close(). `generate(input_ids, sampling)` and `chat(body)` make the replies; `asked` keeps every request body."""

    def __init__(self, generate: Callable[[list[int], dict[str, Any]], Reply] | None = None, chat: Callable[[dict[str, Any]], Reply] | None = None, port: int = 0):
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def reply(self, body: Reply) -> None:
                status, data = (body, b'{"error": "no"}') if isinstance(body, int) else (200, json.dumps(body).encode())
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:  # noqa: N802
                self.reply({"data": [{"id": "fake"}]} if self.path.endswith("/models") else {})

            def do_POST(self) -> None:  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                self.reply(generate(body["input_ids"], body["sampling_params"]) if self.path == "/generate" else chat(body))

        class Server(ThreadingHTTPServer):
            request_queue_size = 256
            daemon_threads = True

            def handle_error(self, *args: Any) -> None:
                pass  # a client that was killed: part of the test

        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def finished(output_ids: list[int], kind: str = "stop") -> dict[str, Any]:
    """A reply of /generate."""
    reason = {"type": "stop", "matched": output_ids[-1]} if kind == "stop" else {"type": kind}
    return {"text": "", "output_ids": output_ids, "meta_info": {"finish_reason": reason}}


def pause_of(prompt: list[int], longest_s: float) -> float:
    """A time that the prompt decides: answers come in an order that is not the order of asking."""
    return hashlib.sha256(str(prompt).encode()).digest()[0] / 255 * longest_s


def main() -> None:
    port, record, longest_s = int(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    lock = threading.Lock()

    def generate(prompt: list[int], sampling: dict[str, Any]) -> Reply:
        with lock, open(record, "a") as file:
            print(json.dumps(prompt), file=file)
        time.sleep(pause_of(prompt, longest_s))
        return finished([1 + prompt[-4] % 200, 1 + len(prompt) % 200, 3])

    with FakeServer(generate, port=port) as server:
        print(server.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
