"""A stand-in for an SGLang server: answers /health, /flush_cache and /generate by a rule that a test can compute. Where the real thing is named, the tests use it."""

from __future__ import annotations

import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aerie.config import Config
from aerie.report import write_json
from aerie.servers import command_line, server_args, start_ticks, url_of


def next_token(ids: list[int]) -> int:
    """The 'target': depends on the last token and the length, so texts differ by prompt."""
    return (ids[-1] * 7 + len(ids)) % 300 + 1


def continuation(ids: list[int], count: int) -> list[int]:
    """The greedy answer of the rule."""
    all_ids = list(ids)
    for _ in range(count):
        all_ids.append(next_token(all_ids))
    return all_ids[len(ids) :]


def accepted_counts(count: int, steps: int) -> list[int]:
    """Draft tokens accepted by each verification for `count` tokens after prefill's: 0, 1, 2, 3, 0, ... cut at the end."""
    accepted, left, turn = [], count, 0
    while left > 0:
        n = min(turn % (steps + 1), left - 1)
        accepted.append(n)
        left, turn = left - n - 1, turn + 1
    return accepted


class FakeServer:
    """Listens where the config says that the server of `mode` listens, and leaves the record by which Server.find() finds it."""

    def __init__(self, config: Config, mode: str, dies_after: int = 0, changes_text: bool = False, margin: float | None = 2.0, wobble: float = 0.0):
        """changes_text: token 3 of every answer is one more than the rule's. wobble: it is less, by another number in each pass (/flush_cache begins one).
        Asked how likely tokens are, the server says `margin` below the likeliest of those above the rule's, `wobble` of those below it."""
        self.served = self.passes = 0
        self.busy_flushes = 0  # so often /flush_cache is refused, as by a server with other requests
        self.bodies: list[dict[str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply({})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                if self.path != "/generate":
                    if self.path == "/flush_cache" and fake.busy_flushes:
                        fake.busy_flushes -= 1
                        return self.reply({}, 400)
                    fake.passes += self.path == "/flush_cache"
                    return self.reply({})
                fake.served += 1
                if dies_after and fake.served > dies_after:
                    self.close_connection = True
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return None
                fake.bodies.append(body)
                if max(body["input_ids"]) >= 320:
                    return self.reply({"error": {"message": "input_ids contain an out-of-vocabulary token"}}, 400)
                answer = fake.answer(body)
                return self.stream(answer) if body.get("stream") else self.reply(answer)

            def stream(self, answer: dict[str, Any]) -> None:
                """The first token alone, then three at a time, as server-sent events."""
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True
                count = len(answer["output_ids"])
                for upto in [*range(1, count, 3), count]:
                    part = {"output_ids": answer["output_ids"][:upto], "meta_info": answer["meta_info"] | {"completion_tokens": upto}}
                    self.wfile.write(f"data: {json.dumps(part)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

            def reply(self, data: dict[str, Any], status: int = 200) -> None:
                content = json.dumps(data).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                pass

        self.mode, self.changes_text, self.margin, self.wobble = mode, changes_text, margin, wobble
        self.steps = config.serve.num_steps
        args = server_args(config, mode)
        self.httpd = ThreadingHTTPServer((args["host"], args["port"]), Handler)
        threading.Thread(target=self.httpd.serve_forever, daemon=True).start()
        config.run.logs.mkdir(parents=True, exist_ok=True)
        log = config.run.logs / f"{mode}.log"
        log.write_text("fake\n")
        record = {
            "pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "mode": mode, "url": url_of(config, mode), "log": str(log),
            "command": command_line(config, mode), "model_path": config.model_path, "started": 0.0,
        }  # fmt: skip
        write_json(config.run.root / f"{mode}.json", record)

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["input_ids"]
        output = continuation(ids, body["sampling_params"]["max_new_tokens"])
        meta: dict[str, Any] = {"completion_tokens": len(output), "prompt_tokens": len(ids)}
        if body.get("return_logprob"):
            places = range(output[0] - 60, output[0] + 60)  # the one that follows first, higher ones `margin` below it, lower ones `wobble`
            below = {output[0]: 0.0} | {token: self.margin if token > output[0] else self.wobble for token in places if token != output[0]}
            meta["output_top_logprobs"] = [[[None if distance is None else -0.5 - distance, token, None] for token, distance in below.items()]]
        if self.mode == "serving":
            accepted = accepted_counts(len(output) - 1, self.steps)
            histogram = [accepted.count(n) for n in range(self.steps + 1)]
            meta |= {"spec_verify_ct": len(accepted), "spec_correct_drafts_histogram": histogram, "spec_accept_length": len(output) / max(len(accepted), 1)}
        if len(output) > 3:
            output[3] += 1 if self.changes_text else -self.passes if self.wobble else 0
        return {"text": "", "output_ids": output, "meta_info": meta}

    def close(self) -> None:
        self.httpd.shutdown()
        self.httpd.server_close()
