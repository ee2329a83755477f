#!/usr/bin/env python3
"""A stand-in for the patched SGLang server: answers /generate and writes dumps of known values, with faults on demand. For tests and for the client's ceiling.

State `layer` (0, 1, 2: auxiliary, 3: final) of token `id` in row `r`, value h, is ((id*31 + r*7 + layer*13 + h*3) % 251) / 16: exact in bf16 and float16,
so a test can say what the store must hold. Faults: --fault KIND:N does KIND to every N-th request (NaN, Inf, wrong token, ...).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

FAULTS = ("nan", "inf", "token", "row", "torn", "header", "rid", "slow", "error", "nodump", "http500", "garbage", "die", "late")
ITEM = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
STATE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "fp8": "F8_E4M3"}


def known_states(ids: np.ndarray, layer: int, hidden: int) -> np.ndarray:
    """[T, H] float32: what the fake model computes."""
    row = ids.astype(np.int64) * 31 + np.arange(len(ids)) * 7 + layer * 13
    return ((row[:, None] + np.arange(hidden) * 3) % 251).astype(np.float32) / 16


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 -> the bytes of `dtype`; the values are exact in bfloat16."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    if dtype == "fp8":
        import torch

        return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return values.astype({"float32": np.float32, "float16": np.float16}[dtype])


class Fake:
    """What the handlers share."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.folder = Path(args.dump_dir)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.faults = {kind: int(every) for kind, _, every in (item.partition(":") for item in args.fault)}
        assert set(self.faults) <= set(FAULTS), self.faults
        self.count = 0
        self.lock = threading.Lock()
        self.busy = threading.Lock()
        self.head: np.ndarray | None = None
        self.payload: dict[int, np.ndarray] = {}
        self.pool: dict[int, list[Path]] = {}

    def metadata(self, rid: str, rows: int) -> dict[str, str]:
        args = self.args
        ids, points = json.dumps(args.layer_ids), json.dumps([layer + 1 for layer in args.layer_ids])
        return {
            "kind": "aerie-dump", "format": "1", "model_path": args.model, "model_class": "Fake", "sglang_version": "fake",
            "aux_layer_ids": ids, "capture_points": points,
            "normed": "true", "dtype": args.dtype, "logits": "{}", "rid": rid, "rows": str(rows),
        }  # fmt: skip

    def choices(self, final: np.ndarray) -> list[int]:
        if self.head is None:
            with safe_open(Path(self.args.model) / "model.safetensors", "np") as file:
                name = "lm_head.weight" if "lm_head.weight" in file.keys() else "model.embed_tokens.weight"
                self.head = file.get_tensor(name).astype(np.float64)
        return [int(token) for token in (final.astype(np.float64) @ self.head.T).argmax(1)]

    def header(self, rid: str, rows: int) -> tuple[bytes, dict[str, int]]:
        """Header bytes (8 aligned) and where each tensor starts behind it."""
        hidden, kind = self.args.hidden, STATE[self.args.dtype]
        names = [*(f"aux_{n}" for n in range(len(self.args.layer_ids))), "final"]
        fields = [("input_ids", "I32", [rows], 4 * rows)]
        if self.args.dtype == "fp8":
            fields += [(f"{name}_scale", "F32", [rows], 4 * rows) for name in names]
        fields += [(name, kind, [rows, hidden], rows * hidden * ITEM[kind]) for name in names]
        entries, starts, at = {"__metadata__": self.metadata(rid, rows)}, {}, 0
        for name, dtype, shape, size in fields:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            starts[name] = at
            at += size
        text = json.dumps(entries).encode()
        text += b" " * (-(len(text) + 8) % 512)
        return len(text).to_bytes(8, "little") + text, starts

    def write(self, rid: str, ids: np.ndarray, kind: str) -> None:
        """One dump with one fault or none."""
        if kind == "rid":
            rid_inside = rid.replace("aerie.", "aerie.other", 1)
        else:
            rid_inside = rid
        if kind == "row":
            ids = ids[:-1]
        head, _ = self.header(rid_inside, len(ids))
        shown = ids.copy()
        if kind == "token":
            shown[len(shown) // 2] += 1
        parts = [shown.astype(np.int32).tobytes()]
        layers = len(self.args.layer_ids) + 1
        if self.args.dtype == "fp8":
            parts += [np.full(len(ids), 0.5, np.float32).tobytes()] * layers
        for layer in range(layers):
            values = known_states(ids, layer, self.args.hidden)
            if self.args.wrong_final and layer == layers - 1:
                values = values[::-1]
            if kind == "nan" and layer == 1:
                values[len(ids) // 2, 1] = np.nan
            if kind == "inf" and layer == layers - 1:
                values[-1, 0] = np.nan if self.args.dtype == "fp8" else np.inf
            parts.append(encode(values, self.args.dtype).tobytes())
        data = head + b"".join(parts)
        if kind == "torn":
            data = data[: len(data) * 2 // 3]
        if kind == "header":
            data = data[:30] + bytes([data[30] ^ 0x20]) + data[31:]
        self.put(f"{rid}.safetensors", data)

    def put(self, name: str, data: bytes) -> None:
        temporary = self.folder / f".{name}.{threading.get_ident()}.tmp"
        temporary.write_bytes(data)
        temporary.rename(self.folder / name)

    def pooled(self, rid: str, ids: np.ndarray) -> None:
        """As fast as memory allows: a file of this length that was written before and that the client has deleted since gets a new header, ids and name."""
        rows = len(ids)
        with self.lock:
            free = self.pool.setdefault(rows, [])
            path = next((item for item in free if item.stat().st_nlink == 1), None)
            if path is None:
                path = self.folder / f".pool.{rows}.{len(free)}"
                free.append(path)
                head, _ = self.header(rid, rows)
                with open(path, "wb") as file:
                    file.write(head + ids.astype(np.int32).tobytes())
                    for layer in range(len(self.args.layer_ids) + 1):
                        file.write(encode(known_states(ids, layer, self.args.hidden), self.args.dtype).tobytes())
            target = self.folder / f".{rid}.tmp"
            os.link(path, target)  # reserved from here on
        head, _ = self.header(rid, rows)
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, head + ids.astype(np.int32).tobytes(), 0)
        os.close(fd)
        target.rename(self.folder / f"{rid}.safetensors")

    def generate(self, body: dict) -> tuple[int, bytes]:
        """Status and answer; the dump is written before (or, fault 'late', after)."""
        rid, ids = body.get("rid", ""), np.array(body["input_ids"], np.int32)
        with self.lock:
            self.count += 1
            number = self.count
        kind = next((kind for kind, every in self.faults.items() if number % every == 0), "")
        if self.args.log:
            with self.lock, open(self.args.log, "a") as file:
                file.write(f"{rid} {kind or '-'}\n")
        if self.args.tok_s:
            with self.busy:
                time.sleep(len(ids) / self.args.tok_s)
        if kind == "die":
            os._exit(9)
        if kind == "http500":
            return 500, b'{"error": {"message": "out of memory"}}'
        if kind == "slow":
            time.sleep(self.args.slow_s)
        if not rid.startswith("aerie."):
            pass  # somebody else's request
        elif kind == "error":
            self.put(f"{rid}.error", json.dumps({"rid": rid, "reason": "no room in the budget", "rows": 3}).encode())
        elif kind == "late":
            threading.Timer(0.3, self.write, (rid, ids, "")).start()
        elif kind != "nodump":
            self.pooled(rid, ids) if self.args.pool else self.write(rid, ids, kind)
        if kind == "garbage":
            return 200, b"not json"
        answer: dict = {"text": "", "output_ids": [0], "meta_info": {"id": rid, "finish_reason": {"type": "length"}}}
        if body.get("return_logprob"):
            start = body["logprob_start_len"]
            choices = self.choices(known_states(ids, len(self.args.layer_ids), self.args.hidden))
            answer["meta_info"]["input_top_logprobs"] = [None] + [[[-0.1, choices[row], None]] for row in range(start, len(ids) - 1)]
            answer["output_ids"] = [choices[-1]]
        return 200, json.dumps(answer).encode()


def serve(args: argparse.Namespace) -> None:
    fake = Fake(args)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *words: object) -> None:
            pass

        def answer(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.answer(200, b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/abort_request":
                self.answer(200, b"")
            else:
                self.answer(*fake.generate(body))

    class Listener(ThreadingHTTPServer):
        request_queue_size = 512
        daemon_threads = True

        def handle_error(self, *words: object) -> None:
            pass  # a client that was killed

    Listener(("127.0.0.1", args.port), Handler).serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dump-dir", required=True)
    parser.add_argument("--model", default="", help="folder whose LM head answers requests for log-probabilities")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layer-ids", type=json.loads, default=[1, 2, 4])
    parser.add_argument("--dtype", default="float32", choices=tuple(STATE))
    parser.add_argument("--fault", action="append", default=[], metavar="KIND:N")
    parser.add_argument("--slow-s", type=float, default=3.0)
    parser.add_argument("--tok-s", type=float, default=0.0, help="prefill speed; 0: at once")
    parser.add_argument("--pool", action="store_true", help="reuse written files: the producer costs almost nothing")
    parser.add_argument("--wrong-final", action="store_true", help="the rows of final in reverse order")
    parser.add_argument("--log", default="", help="a line a request")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
