#!/usr/bin/env python3
"""A stand-in for the patched SGLang server: answers /generate and writes dumps of known values, with faults on demand. For tests and for the client's ceiling.

State `layer` (0, 1, 2: auxiliary, 3: final) of token `id` in row `r`, value h, is ((id*31 + r*7 + layer*13 + h*3) % 251) / 16: exact in bf16 and float16,
so a test can say what the store must hold. Faults: --fault KIND:N does KIND to every N-th request (NaN, Inf, wrong token, ...).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from fake_dump_pool import DumpPool  # noqa: E402  beside this file

FAULTS = ("nan", "inf", "token", "row", "torn", "header", "flip", "rid", "slow", "error", "nodump", "http500", "garbage", "die", "late", "twice", "both", "again", *(CUT := ("close", "reset", "half")), *(ODD := {"list": b"[1]", "null": b"null", "nometa": b'{"meta_info": null}', "word": b'{"meta_info": {"finish_reason": "stop"}}'}))
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


def checksum(rows: np.ndarray) -> str:
    """[T] or [T, H] -> 16 hex digits: sum over rows of (2 row + 1) * (the row's 32-bit words added mod 2^32), mod 2^64. Widths of whole words only."""
    words = np.frombuffer(np.ascontiguousarray(rows).tobytes(), np.uint32).reshape(len(rows), -1)
    each = words.astype(np.uint64).sum(1) % np.uint64(1 << 32)
    return f"{int((each * (2 * np.arange(len(rows), dtype=np.uint64) + np.uint64(1))).sum(dtype=np.uint64)):016x}"


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
        self.pool = DumpPool(self.folder, self.states, checksum, self.header)

    def metadata(self, rid: str, rows: int) -> dict[str, str]:
        args = self.args
        ids, points = json.dumps(args.layer_ids), json.dumps([layer + 1 for layer in args.layer_ids])
        return {
            "kind": "aerie-dump", "format": args.format, "model_path": args.model, "model_class": "Fake", "sglang_version": "fake",
            "aux_layer_ids": ids, "capture_points": points,
            "normed": "true", "dtype": args.dtype, "logits": "{}", "rid": rid, "rows": str(rows), "checksums": "",
        }  # fmt: skip

    def choices(self, final: np.ndarray) -> list[int]:
        if self.head is None:
            with safe_open(Path(self.args.model) / "model.safetensors", "np") as file:
                name = "lm_head.weight" if "lm_head.weight" in file.keys() else "model.embed_tokens.weight"
                self.head = file.get_tensor(name).astype(np.float64)
        return [int(token) for token in (final.astype(np.float64) @ self.head.T).argmax(1)]

    def states(self, rows: int) -> dict[str, np.ndarray]:
        """States of `rows` tokens, for --pool: whatever the tokens are."""
        names = [*(f"aux_{layer}" for layer in range(len(self.args.layer_ids))), "final"]
        ids = np.arange(rows) % 1000
        parts = {f"{name}_scale": np.full(rows, 0.5, np.float32) for name in names} if self.args.dtype == "fp8" else {}
        return parts | {name: encode(known_states(ids, layer, self.args.hidden), self.args.dtype) for layer, name in enumerate(names)}

    def header(self, rid: str, rows: int, sums: dict[str, str], room: int = 512) -> bytes:
        """Header bytes of a dump whose tensors have these checksums, a multiple of `room`."""
        hidden, kind = self.args.hidden, STATE[self.args.dtype]
        names = [*(f"aux_{n}" for n in range(len(self.args.layer_ids))), "final"]
        fields = [("input_ids", "I32", [rows], 4 * rows)]
        if self.args.dtype == "fp8":
            fields += [(f"{name}_scale", "F32", [rows], 4 * rows) for name in names]
        fields += [(name, kind, [rows, hidden], rows * hidden * ITEM[kind]) for name in names]
        entries, at = {"__metadata__": self.metadata(rid, rows)}, 0
        for name, dtype, shape, size in fields:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(entries).encode()
        values = " ".join(f"{name}:{sums[name]}" for name, *_ in fields)
        text += b" " * (-(len(text) + len(values) + len(" header:01234567") + 8) % room)
        values += f" header:{zlib.crc32(text):08x}"
        text = text.replace(b'"checksums": ""', b'"checksums": "' + values.encode() + b'"', 1)
        return len(text).to_bytes(8, "little") + text

    def write(self, rid: str, ids: np.ndarray, kind: str) -> None:
        """One dump with one fault or none."""
        if kind == "rid":
            rid_inside = rid.replace("aerie.", "aerie.other", 1)
        else:
            rid_inside = rid
        if kind == "row":
            ids = ids[:-1]
        shown = ids.copy()
        if kind == "token":
            shown[len(shown) // 2] += 1
        parts = {"input_ids": shown.astype(np.int32)}
        layers = len(self.args.layer_ids) + 1
        names = [*(f"aux_{layer}" for layer in range(layers - 1)), "final"]
        if self.args.dtype == "fp8":
            parts |= {f"{name}_scale": np.full(len(ids), 0.5, np.float32) for name in names}
        for layer, name in enumerate(names):
            values = known_states(ids, layer, self.args.hidden)
            if self.args.wrong_final and layer == layers - 1:
                values = values[::-1]
            if kind == "nan" and layer == 1:
                values[len(ids) // 2, 1] = np.nan
            if kind == "inf" and layer == layers - 1:
                values[-1, 0] = np.nan if self.args.dtype == "fp8" else np.inf
            parts[name] = encode(values, self.args.dtype)
        head = self.header(rid_inside, len(ids), {name: checksum(part) for name, part in parts.items()})
        data = head + b"".join(part.tobytes() for part in parts.values())
        if kind == "flip":  # a small mistake: the value stays finite, and near
            place = len(head) + 4 * len(ids) + (self.count * 7919) % (len(data) - len(head) - 4 * len(ids))
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        if kind == "torn":
            data = data[: len(data) * 2 // 3]
        if kind == "header":
            data = data[:30] + bytes([data[30] ^ 0x20]) + data[31:]
        self.put(f"{rid}.safetensors", data)

    def put(self, name: str, data: bytes) -> None:
        temporary = self.folder / f".{name}.{threading.get_ident()}.tmp"
        temporary.write_bytes(data)
        temporary.rename(self.folder / name)

    def generate(self, body: dict) -> tuple:
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
        if kind == "http500" or self.args.bad_while and Path(self.args.bad_while).exists():
            return 500, b'{"error": {"message": "out of memory"}}'
        if kind == "slow":
            time.sleep(self.args.slow_s)
        if not rid.startswith("aerie."):
            pass  # somebody else's request
        elif kind == "error":
            self.put(f"{rid}.error", json.dumps({"rid": rid, "reason": "no room in the budget", "rows": 3}).encode())
        elif kind == "late":
            threading.Timer(0.3, self.write, (rid, ids, "")).start()
        elif kind == "again":
            self.write(rid, ids, "")
            threading.Timer(0.3, self.write, (rid, ids, "")).start()
        elif kind == "both":
            self.write(rid, ids, "")
            self.put(f"{rid}.error", json.dumps({"rid": rid, "reason": "no room in the budget", "rows": 3}).encode())
        elif kind != "nodump":
            self.pool.hand_out(rid, ids) if self.args.pool else self.write(rid, ids, kind)
        if kind == "garbage":
            return 200, b"not json"
        answer: dict = {"text": "", "output_ids": [0], "meta_info": {"id": rid, "finish_reason": {"type": "length"}}}
        if body.get("return_logprob"):
            start = body["logprob_start_len"]
            choices = self.choices(known_states(ids, len(self.args.layer_ids), self.args.hidden))
            answer["meta_info"]["input_top_logprobs"] = [None] + [[[-0.1, choices[row], None]] for row in range(start, len(ids) - 1)]
            answer["output_ids"] = [choices[-1]]
        if kind in ODD:
            return 200, ODD[kind]
        return 200, json.dumps(answer).encode(), kind if kind in (*CUT, "twice") else ""


def serve(args: argparse.Namespace) -> None:
    fake = Fake(args)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = args.idle_s or None  # a connection that idles so long is closed, as SGLang closes it after five seconds
        disable_nagle_algorithm = True  # headers and body are two writes: without this the second waits for the client's delayed answer to the first

        def log_message(self, *words: object) -> None:
            pass

        def answer(self, status: int, data: bytes, how: str = "") -> None:
            self.close_connection = self.close_connection or how in CUT
            if how == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if how in ("close", "reset"):
                self.connection.close()
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if how == "half" else data)
            if how == "twice":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)

        def do_GET(self) -> None:
            self.answer(200, b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/abort_request":
                self.answer(200, b"")
            elif self.path == "/prepare":
                self.answer(200, json.dumps(fake.pool.prepare(body["rows"], body["count"])).encode())
            else:
                self.answer(*fake.generate(body))

    class Listener(ThreadingHTTPServer):
        request_queue_size = 512
        daemon_threads = True

        def server_bind(self) -> None:
            if args.processes > 1:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the kernel spreads connections over the processes
            super().server_bind()

        def handle_error(self, *words: object) -> None:
            pass  # a client that was killed

    for _ in range(args.processes - 1):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the first process
            break
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
    parser.add_argument("--pool", action="store_true", help="hand out dumps that POST /prepare {rows, count} has made beforehand")
    parser.add_argument("--idle-s", type=float, default=0.0, help="close connections on which nothing comes for so long; 0: never")
    parser.add_argument("--processes", type=int, default=1, help="that answer on this port")
    parser.add_argument("--format", default="2", help="of the dumps, as their metadata says it")
    parser.add_argument("--wrong-final", action="store_true", help="the rows of final in reverse order")
    parser.add_argument("--bad-while", default="", help="every request is answered 500 while this file is there")
    parser.add_argument("--log", default="", help="a line a request")
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
