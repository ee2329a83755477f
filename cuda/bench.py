#!/usr/bin/env python3
"""Times of the drafter ops on this GPU against its own copy bandwidth: CUDA events, medians, random data, inputs larger than the L2.

    python cuda/bench.py --report report.json            every size
    python cuda/bench.py --quick                         one size an op
    python cuda/bench.py --variants                      every kernel by number too, and which is the fastest for each size

`ms` is one call between two events, a launch (`launch_ms`) included; `row_ms` is a call inside a CUDA graph of several calls one behind the other, each on inputs and
outputs of its own. `copy_ms` and `copy_row_ms` are a plain copy of as many bytes, timed both ways: what a small op can be compared with.
Decode ops beside an empty kernel (`floor`, timed before and behind each), each timed in the same ways: `graph_us` in a CUDA graph, which is what the goal is judged by; `launch_us` launched one behind
the other through the library's C function into a stream, its arguments prepared, host time included; `host_us` through torch.library.
Bytes are counted as each input read once and each output written once. Predicted times for SM120 are those bytes over 1.79 TB/s: predictions, not results.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "cuda"), str(ROOT / "scripts")]

import bench_peers as peers_of  # noqa: E402
import drafter_ops as ops  # noqa: E402
import torch  # noqa: E402
from aerie.report import write_report  # noqa: E402
from op_library import VARIANTS, chosen, load  # noqa: E402

Work = Callable[[int], Any]  # the op on the i-th set of inputs
SM120_BYTES_S = 1.79e12
FLUSH_BYTES = 400 << 20  # sets of inputs are rotated until they are larger than this
MIN_CALLS = 4  # in a graph
OPS = torch.ops.aerie


def sets_for(data_bytes: int) -> int:
    """How many sets of inputs of this many bytes are larger than the L2 together."""
    return 1 + FLUSH_BYTES // data_bytes


def calls_for(data_bytes: int) -> int:
    """Calls in a graph: one a set, and a few at the least."""
    return max(MIN_CALLS, sets_for(data_bytes))


def median_ms(work: Work, repeats: int, before: Work | None = None) -> float:
    """Median time of work(i) by CUDA events after three warm-up calls; before(i) runs outside the events.

    The device is kept busy while the host puts everything into the queue, so that no event waits for Python.
    """
    times = []
    for i in range(3):
        if before is not None:
            before(i)
        work(i)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(2e9 * min(0.1, 2e-4 * repeats)))  # cycles: about 0.2 ms for each repeat
    for i in range(repeats):
        if before is not None:
            before(i)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work(i)
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in times)


def row_ms(work: Work, calls: int, repeats: int, before: Work | None = None) -> float:
    """Time of one work(i) of `calls` in a row: a CUDA graph of them all, replayed; before(i) runs for all of them outside the events.

    The outputs are kept while the graph is made, so that every call writes memory of its own.
    """
    work(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [work(i) for i in range(calls)]
    ms = median_ms(lambda _: graph.replay(), repeats, before and (lambda _: [before(i) for i in range(calls)])) / calls
    del kept
    return ms


def graph_us(work: Callable[[], Any], copies: int = 20, repeats: int = 30) -> float:
    """Time of one work() inside a CUDA graph that holds `copies` of it, microseconds."""
    return 1e3 * row_ms(lambda _: work(), copies, repeats)


def copy_times(data_bytes: int, repeats: int) -> tuple[float, float]:
    """A plain copy that moves so many bytes, half of them read and half written: one between two events, and one of several in a graph, milliseconds.

    The faster of cudaMemcpyAsync and an elementwise kernel, which are not equally fast in a graph.
    """
    sets, numbers = sets_for(data_bytes), max(1, data_bytes // 8)
    pairs = [tuple(torch.randn(numbers, device="cuda") for _ in range(2)) for _ in range(sets)]
    ways: list[Work] = [lambda i: pairs[i % sets][1].copy_(pairs[i % sets][0]), lambda i: torch.neg(pairs[i % sets][0], out=pairs[i % sets][1])]
    return min(median_ms(way, repeats) for way in ways), min(row_ms(way, calls_for(data_bytes), repeats) for way in ways)


def host_us(work: Callable[[], Any], calls: int = 200) -> float:
    """Host time of one eager call, microseconds: launch-bound work costs this."""
    for _ in range(20):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e6


def c_calls(work: Callable[[], Any]) -> tuple[list[Callable[[], int]], Any]:
    """The calls of the library's C functions that work() makes, with the same arguments and the stream, each answering an error code; and what work() answered, to be kept
    as long as they are called, because they write there. No calls: work() is another package's, or the reference ran.
    """
    made: list[Callable[[], int]] = []
    usual = ops.call

    def note(name: str, device: torch.device, *arguments: object) -> None:
        usual(name, device, *arguments)
        function = getattr(load(), name)
        given = zip(function.argtypes, (*arguments, torch.cuda.current_stream(device).cuda_stream), strict=True)
        made.append(functools.partial(function, *[kind(argument) for kind, argument in given]))  # as C takes them, so that a launch is timed and not their number

    ops.call = note
    try:
        kept = work()
    finally:
        ops.call = usual
    return made, kept


def launch_us(work: Callable[[], Any], launches: int = 200, repeats: int = 25) -> float | None:
    """Time of one launch of `launches` back to back into a stream through the C function, microseconds: the host's part or the device's, whichever is longer. None: no such call."""
    made, kept = c_calls(work)
    if len(made) != 1:
        return None
    launch, times = made[0], []
    for _ in range(repeats + 1):  # the first one warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(launches):
            if code := launch():
                raise RuntimeError(f"a launch failed with CUDA error {code}")
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / launches * 1e3)
    del kept
    return statistics.median(times[1:])


def decode_times(work: Callable[[], Any]) -> dict[str, float]:
    """Of one call, microseconds: in a CUDA graph, through torch.library, and launched through the C function where it is one launch of ours."""
    times = {"graph_us": graph_us(work), "launch_us": launch_us(work), "host_us": host_us(work)}
    return {name: time for name, time in times.items() if time is not None}


class Bench:
    """Rows of the report, printed as they come."""

    def __init__(self, repeats: int, variants: bool, peers: bool) -> None:
        self.repeats, self.variants, self.rows = repeats, variants, []
        self.copies: dict[int, tuple[float, float]] = {}  # bytes -> copy_times()
        self.floor: dict[str, float] = {}  # decode_times() of an empty kernel, the latest
        source = torch.randn(1 << 28, device="cuda").bfloat16()  # 512 MB
        to = torch.empty_like(source)
        ms = median_ms(lambda _: to.copy_(source), 20)
        self.copy_bytes_s = 2 * source.numel() * 2 / ms * 1e3
        one, scale = torch.ones(1, 8, device="cuda", dtype=torch.bfloat16), torch.ones(1, device="cuda")
        self.empty: Callable[[], Any] = lambda: OPS.scale_rows_(one, scale)  # a launch that reads one number and returns
        self.launch_ms = median_ms(lambda _: self.empty(), 50)
        print(f"copy bandwidth {self.copy_bytes_s / 1e12:.2f} TB/s, an empty launch between events {1e3 * self.launch_ms:.1f} us, {torch.cuda.get_device_name()}", flush=True)
        self.liger, self.sgl = (peers_of.liger(print), peers_of.sgl(print)) if peers else ({}, {})

    def add(self, op: str, size: str, data_bytes: int, work: Work, before: Work | None = None, in_a_row: bool = True) -> None:
        """One row of the report: work(i) for any i takes its inputs out of sets_for(data_bytes) sets, or restored by before(i) out of calls_for(data_bytes)."""
        floor = data_bytes / self.copy_bytes_s * 1e3
        ms = median_ms(work, self.repeats, before)
        row = {"op": op, "size": size, "ms": ms, "bytes": data_bytes, "of_copy": floor / ms, "predicted_sm120_ms": data_bytes / SM120_BYTES_S * 1e3}
        text = f"{op:58} {size:16} {ms:8.4f} ms {floor / ms:6.1%}"
        if in_a_row:
            if data_bytes not in self.copies:
                self.copies[data_bytes] = copy_times(data_bytes, self.repeats)
            copy_ms, copy_row_ms = self.copies[data_bytes]
            each = row_ms(work, calls_for(data_bytes), self.repeats, before)
            row |= {"row_ms": each, "row_of_copy": floor / each, "copy_ms": copy_ms, "copy_row_ms": copy_row_ms}
            text += f" | in a row {each:8.4f} ms {floor / each:6.1%} | a copy {copy_ms:8.4f}, in a row {copy_row_ms:8.4f} ms"
        self.rows.append(row)
        print(text, flush=True)

    def add_all(self, op: str, which: str, size: str, data_bytes: int, work: Work, before: Work | None = None) -> None:
        """add(), with --variants by number too."""
        self.by_number(op, which, lambda label: self.add(label, size, data_bytes, work, before))

    def by_number(self, op: str, which: str, add: Callable[[str], None]) -> None:
        """add(label) under the usual kernel, and with --variants under every one by number that takes this size, as `op (number)`."""
        add(op)
        for number, name in enumerate(VARIANTS[which] if self.variants else []):
            try:
                with chosen(which, number):
                    add(f"{op} ({number}: {name})")
            except RuntimeError as exc:
                if "invalid argument" not in str(exc):
                    raise

    def peer(self, op: str, size: str, data_bytes: int, work: Work) -> None:
        """Another package's way: one that does not run on this machine is said and left out."""
        try:
            self.add(op, size, data_bytes, work, in_a_row=False)
        except Exception as exc:  # theirs, not ours
            print(f"{op}: {type(exc).__name__}: {str(exc)[:120]}", flush=True)

    def add_decode(self, op: str, size: str, work: Callable[[], Any]) -> None:
        """One row of a decode op. Its floor is the mean of an empty kernel timed before it and behind it: a host's speed wanders by more than the goal allows."""
        before = self.floor or decode_times(self.empty)
        times = decode_times(work)
        self.floor = decode_times(self.empty)
        floor = {name: (before[name] + self.floor[name]) / 2 for name in before}
        row = {"op": op, "size": size, **times, "floor": floor}
        self.rows.append(row)
        names = {"graph_us": "in a graph", "launch_us": "a launch back to back", "host_us": "through torch.library"}
        texts = [f"{row[key]:7.2f} us {name} ({row[key] / floor[key]:5.2f} times an empty one)" for key, name in names.items() if key in row]
        print(f"{op:58} {size:16} {', '.join(texts)}", flush=True)

    def winners(self) -> list[dict[str, Any]]:
        """For each op and size the kernel by number that is the fastest in a row, beside the usual one."""
        found = []
        for usual in [row for row in self.rows if "(" not in row["op"]]:
            key = "row_ms" if "row_ms" in usual else "graph_us"
            others = [row for row in self.rows if row["size"] == usual["size"] and row["op"].startswith(f"{usual['op']} (")]
            if others:
                best = min(others, key=lambda row: row[key])
                times = {name: best[name] for name in ("ms", "of_copy", "row_ms", "row_of_copy", "graph_us") if name in best}
                found.append({"op": usual["op"], "size": usual["size"], "usual": usual[key], "best": best["op"][len(usual["op"]) + 2 : -1], **times})
        return found


def soft_target(bench: Bench, rows: list[int], vd: int, peers: bool) -> None:
    for n in rows:
        draft, target = ((torch.randn(n, vd, device="cuda") * 3).bfloat16() for _ in range(2))
        lse, top = target.float().logsumexp(-1) + 0.1, target.argmax(-1)
        size, data = f"[{n}, {vd}]", 3 * n * vd * 2
        calls = calls_for(data)
        scratch = [draft.clone() for _ in range(calls)]  # the gradient replaces the logits
        bench.add_all(
            "1 soft_target, in place", "soft_target", size, data, lambda i: OPS.soft_target_ce_(scratch[i % calls], target, lse, top, None, None, False),  # noqa: B023
            lambda i: scratch[i % calls].copy_(draft),  # noqa: B023
        )  # fmt: skip
        del scratch
        bench.add("1 soft_target, no lse given", size, data, lambda _: OPS.soft_target_ce(draft, target, None, top, None, None, False, True))  # noqa: B023
        bench.add("1 soft_target, no gradient", size, data // 3 * 2, lambda _: OPS.soft_target_ce(draft, target, lse, top, None, None, False, False))  # noqa: B023
        if peers and n == 8192:
            compiled = torch.compile(peers_of.soft_target)
            for name, work in (("PyTorch eager", peers_of.soft_target), ("torch.compile", compiled), ("liger-kernel KLDiv", bench.liger.get("soft_target"))):
                if work:
                    bench.peer(f"1 soft_target, {name}", size, data, lambda _: work(draft, target, lse, top))  # noqa: B023


def online(bench: Bench, rows: list[int], columns: int, peers: bool) -> None:
    for n in rows:
        data = n * columns * 2
        sets = sets_for(data)
        chunks = [(torch.randn(n, columns, device="cuda") * 3).bfloat16() for _ in range(sets)]
        state = ops.OnlineTarget(n, "cuda")
        update = (0, state.maximum, state.total, state.argmax)
        bench.add_all("1 online target, a chunk", "online", f"[{n}, {columns}]", data, lambda i: OPS.online_update_(chunks[i % sets], *update))  # noqa: B023
        if peers and n == 8192:
            bench.peer("1 online target, PyTorch eager", f"[{n}, {columns}]", data, lambda i: (chunks[i % sets].float().logsumexp(-1), chunks[i % sets].max(-1)))  # noqa: B023


def online_whole(bench: Bench, n: int, vocab: int, columns: int) -> None:
    """A full vocabulary, chunk by chunk as the trainer does it."""
    logits = torch.cat([(torch.randn(n, columns, device="cuda") * 3).bfloat16() for _ in range(0, vocab, columns)], 1)[:, :vocab]
    chunks, state = [(start, logits[:, start : start + columns]) for start in range(0, vocab, columns)], ops.OnlineTarget(n, "cuda")

    def work(_: int) -> None:
        for start, chunk in chunks:
            OPS.online_update_(chunk, start, state.maximum, state.total, state.argmax)

    bench.add_all(f"1 online target, {len(chunks)} chunks", "online", f"[{n}, {vocab}]", n * vocab * 2, work)


def drafter_input(bench: Bench, rows: list[int], hidden: int, vocab: int, peers: bool) -> None:
    table = torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
    for n in rows:
        sets = sets_for(n * hidden * 8)
        states = [torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        ids = [torch.randint(0, vocab, (n,), device="cuda") for _ in range(sets)]
        grads = [torch.randn(n, 2 * hidden, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        size = f"[{n}, {hidden}]"
        bench.add("2 drafter_input", size, 8 * n * hidden, lambda i: OPS.drafter_input(ids[i % sets], table, states[i % sets], weight, weight, 1e-5))  # noqa: B023
        bench.add_all(
            "2 drafter_input, backward", "drafter_input_backward", size, 10 * n * hidden,
            lambda i: OPS.drafter_input_backward(grads[i % sets], ids[i % sets], table, states[i % sets], weight, weight, 1e-5, False),  # noqa: B023
        )  # fmt: skip
        if peers and n == 8192:
            compiled = torch.compile(peers_of.drafter_input)
            for name, work in (("PyTorch eager", peers_of.drafter_input), ("torch.compile", compiled), ("liger-kernel RMSNorm", bench.liger.get("drafter_input"))):
                if work:
                    bench.peer(f"2 drafter_input, {name}", size, 8 * n * hidden, lambda i: work(ids[i % sets], table, states[i % sets], weight))  # noqa: B023
            bench.peer(
                "2 drafter_input, PyTorch eager, both ways", size, 18 * n * hidden,
                lambda i: peers_of.drafter_input_backward(ids[i % sets], table, states[i % sets], weight, grads[i % sets]),  # noqa: B023
            )  # fmt: skip


def fp8_rows(bench: Bench, rows: list[int], hidden: int, peers: bool) -> None:
    for n in rows:
        sets = sets_for(n * hidden * 3)
        xs = [torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
        qs = [ops.quantize_rows_fp8(x) for x in xs]
        size, data = f"[{n}, {hidden}]", 3 * n * hidden + 4 * n
        bench.add("5 quantize_rows_fp8", size, data, lambda i: OPS.quantize_rows_fp8(xs[i % sets]))  # noqa: B023
        bench.add_all("5 dequantize_rows_fp8", "dequantize", size, data, lambda i: OPS.dequantize_rows_fp8(*qs[i % sets], torch.bfloat16))  # noqa: B023
        if peers and n == 8192:
            compiled = torch.compile(peers_of.quantize)
            bench.peer("5 quantize_rows_fp8, PyTorch eager", size, data, lambda i: peers_of.quantize(xs[i % sets]))  # noqa: B023
            bench.peer("5 quantize_rows_fp8, torch.compile", size, data, lambda i: compiled(xs[i % sets]))  # noqa: B023
            if theirs := bench.sgl.get("quantize"):
                out = torch.empty_like(xs[0], dtype=torch.float8_e4m3fn), torch.empty(n, 1, device="cuda")
                bench.peer("5 quantize_rows_fp8, sgl_kernel", size, data, lambda i: theirs(xs[i % sets], *out))  # noqa: B023


def decode_ops(bench: Bench, batches: list[int], vd: int, peers: bool) -> None:
    d2t = torch.arange(vd, device="cuda")
    for n in batches:
        for dtype in (torch.bfloat16, torch.float32):
            logits = torch.randn(n, vd, device="cuda").to(dtype)
            for k in (1, 4, 8, 32):
                work = lambda: OPS.draft_topk(logits, d2t, k)  # noqa: B023, E731
                which = "topk" if k == 1 else "topk_ranked"
                bench.by_number(f"3 draft_topk {str(dtype)[6:]}, k {k}", which, lambda label: bench.add_decode(label, f"[{n}, {vd}]", work))  # noqa: B023
        if peers:
            bench.add_decode("3 the largest alone, PyTorch", f"[{n}, {vd}]", lambda: logits.max(-1))  # noqa: B023

            def eager():
                values, ids = torch.topk(logits.softmax(-1), 8)  # noqa: B023
                return values, ids + d2t[ids]

            bench.add_decode("3 top-k float32, k 8, PyTorch eager", f"[{n}, {vd}]", eager)
        topk, steps, nodes = 4, 5, 32
        parents = torch.randint(0, topk, (n, 1 + (steps - 1) * topk), device="cuda").cumsum(1)
        chosen_nodes = torch.randperm(topk + (steps - 1) * topk**2, device="cuda")[: nodes - 1].sort().values.repeat(n, 1)
        lengths = torch.randint(1, 500, (n,), device="cuda")
        tree = ops.build_tree(parents, chosen_nodes, lengths, topk, steps)
        build = (parents, chosen_nodes, lengths, *tree, topk, steps)
        work = lambda: ops.build_tree_into(*build)  # noqa: B023, E731
        bench.by_number("4 build_tree, 32 nodes", "build_tree", lambda label: bench.add_decode(label, f"[{n}]", work))  # noqa: B023
        tokens, target = (torch.randint(0, 3, (n, nodes), device="cuda") for _ in range(2))
        buffers = (torch.zeros(n * nodes, dtype=torch.int32, device="cuda"), torch.zeros(n, 6, dtype=torch.int32, device="cuda"), torch.zeros(n, dtype=torch.int32, device="cuda"))
        bench.add_decode("4 verify_tree_greedy, 32 nodes", f"[{n}]", lambda: ops.verify_tree_greedy_into(*buffers, tokens, *tree[2:], target))  # noqa: B023
        if peers and bench.sgl:
            theirs = bench.sgl["build_tree"], bench.sgl["verify_tree"]
            full = torch.ones(int(lengths.sum()) * nodes + n * nodes * nodes, dtype=torch.bool, device="cuda")
            out = torch.zeros(n * nodes, dtype=torch.int64, device="cuda"), *(torch.full((n, nodes), -1, device="cuda") for _ in range(3))
            try:
                bench.add_decode("4 build_tree, sgl_kernel", f"[{n}]", lambda: theirs[0](parents, chosen_nodes, lengths, full, *out, topk, steps, nodes, 0))  # noqa: B023
                bench.add_decode("4 verify_tree_greedy, sgl_kernel", f"[{n}]", lambda: theirs[1](*buffers, tokens, *tree[2:], target))  # noqa: B023
            except Exception as exc:  # theirs, not ours
                print(f"4, sgl_kernel: {type(exc).__name__}: {str(exc)[:120]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="", help="take the draft vocabulary's size from this config instead of 32,000")
    parser.add_argument("--report", type=Path, help="write report.json here")
    parser.add_argument("--quick", action="store_true", help="N 8,192 alone, batches 1 and 32")
    parser.add_argument("--variants", action="store_true", help="every kernel by number too")
    parser.add_argument("--no-peers", action="store_true", help="leave PyTorch and other packages out")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    if ops.status() != "loaded":
        print(f"error: the benchmark needs a GPU and the library: {ops.status()}", file=sys.stderr)
        return 2
    vd = 32000
    if args.config:
        from aerie.config import load_config

        vd = load_config(args.config, "", []).draft.vocab_size
    torch.manual_seed(0)
    rows, peers = [8192] if args.quick else [4096, 8192, 16384, 32768], not args.no_peers
    bench = Bench(args.repeats, args.variants, peers)
    parts: list[tuple[str, Callable[[], Any]]] = [
        ("soft_target", lambda: soft_target(bench, rows, vd, peers)),
        ("soft_target, other widths", lambda: [soft_target(bench, [n], v, False) for n, v in ((32768, 8192), (2048, 163840))]),
        ("online", lambda: online(bench, rows, 16384, peers)),
        ("online, a full vocabulary", lambda: online_whole(bench, 4096, 163840, 16384)),
        ("drafter_input", lambda: [drafter_input(bench, rows, hidden, 163840, peers) for hidden in (4096, 7168)]),
        ("fp8", lambda: [fp8_rows(bench, rows, hidden, peers) for hidden in (4096, 7168)]),
        ("decode", lambda: decode_ops(bench, [1, 32] if args.quick else [1, 4, 16, 64], vd, peers)),
    ]
    failed = []
    for name, part in parts:
        try:
            part()
        except Exception as exc:  # the other parts' numbers are still wanted; the exit code says that one failed
            failed.append(f"{name}: {type(exc).__name__}: {exc}")
            print(f"FAILED {failed[-1]}", flush=True)
        torch.cuda.empty_cache()
    winners = bench.winners()
    for row in winners:
        unit, value = ("ms", row["row_ms"]) if "row_ms" in row else ("us", row["graph_us"])
        share = f"{row['row_of_copy']:6.1%} of copy" if "row_of_copy" in row else ""
        print(f"fastest: {row['op']:28} {row['size']:16} {value:8.4f} {unit} {row['best']:36} (usual {row['usual']:8.4f}) {share}")
    ours = [row for row in bench.rows if row.get("size") == f"[8192, {vd}]" and row["op"] == "1 soft_target, in place"]
    if args.report:
        write_report(args.report, copy_bytes_s=bench.copy_bytes_s, launch_ms=bench.launch_ms, rows=bench.rows, fastest=winners, failed=failed, ratio=ours[0]["of_copy"] if ours else None)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
