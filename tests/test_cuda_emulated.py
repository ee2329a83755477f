"""The CUDA kernels without a GPU: their own source, run on the CPU thread by thread (tests/cuda_emulated), against the references. Every kernel by number.

What this shows: indices, barriers, waits for copies, the arithmetic. What it does not: races between warps, speed, what the GPU's compiler makes of it.
"""

from __future__ import annotations

import ctypes
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "cuda"), str(ROOT / "tests"), str(ROOT / "tests" / "cuda_emulated")]

import cuda_naive as naive  # noqa: E402
import op_library  # noqa: E402
import reference  # noqa: E402
import reference_tree  # noqa: E402
from op_library import VARIANTS  # noqa: E402

pytestmark = pytest.mark.slow


def cuda_headers() -> Path | None:
    """Where cuda_bf16.h lies: the toolkit's, or what a Python package carries."""
    found = [Path(nvcc).resolve().parents[1] / "include" for nvcc in [shutil.which("nvcc")] if nvcc]
    found += [Path(path) / "nvidia" / "cu13" / "include" for path in sys.path] + sorted(Path("/usr/local").glob("cuda*/include"))
    return next((path for path in found if (path / "cuda_bf16.h").is_file() and (path / "cuda_fp8.h").is_file()), None)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if shutil.which("g++") is None or cuda_headers() is None:
        pytest.skip("no g++ or no CUDA headers here")
    from emulate import build

    return ctypes.CDLL(str(build(tmp_path_factory.mktemp("emulated"), cuda_headers())))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def run(kernels, name: str, *arguments) -> int:
    """Call with tensors as pointers, integers as 64 bit where the C side says so by its own declaration (x86-64 passes them alike), floats as floats."""
    words = [None if x is None else ctypes.c_void_p(x.data_ptr()) if isinstance(x, torch.Tensor) else ctypes.c_float(x) if isinstance(x, float) else ctypes.c_int64(int(x)) for x in arguments]
    return getattr(kernels, name)(*words)


def same(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("number", range(len(VARIANTS["soft_target"])), ids=VARIANTS["soft_target"])
def test_soft_target(kernels, number, late):
    kernels.set_late(late)
    threads, blocks = (512, 1) if number == 4 else (128, 2**number)  # of a row
    n, m, v = 7, 4, 8 * threads * blocks * 2 + 8 * 37  # two or three turns a thread, the last one not full
    draft, target = (torch.randn(n, v) * 3).bfloat16(), (torch.randn(m, v) * 3).bfloat16()
    draft[0, 1::2] = -torch.inf
    target[1, 1::2] = -torch.inf
    draft[1] *= 1000  # not of usual size
    draft[2, : v // 2] -= 40  # the largest comes late
    draft[3, 5] = draft[3].max() + 8
    draft[3, v - 3] = draft[3, 5]  # a tie: the lowest column
    rows = torch.tensor([0, 1, 2, 3, 1, 0, 2])
    weights = torch.tensor([1.0, 0.5, 2.0, 1.0, 0.0, 1.0, 1e-3])
    top = target.double().argmax(1)
    top[1] = -1
    lse = (torch.logsumexp(target.double(), 1) + torch.rand(m) * 0.5).float()
    for given, renormalize, inplace in ((lse, False, True), (None, False, False), (lse, True, False)):
        want = naive.soft_target(draft, target, top, given, weights, rows, renormalize)
        logits = draft.clone()
        grad = logits if inplace else torch.full_like(draft, torch.nan)
        loss, accept = (torch.full((n,), torch.nan) for _ in range(2))
        match, in_vocab = (torch.ones(n, dtype=torch.bool) for _ in range(2))
        assert run(kernels, "soft_target", number, 2, logits, v, target, v, given, top, weights, rows, n, m, v, renormalize, loss, match, accept, in_vocab, grad, v) == 0
        same(loss, want["loss"], 2e-4, 2e-4), same(accept, want["accept"], 2e-4, 2e-4)
        same(grad, want["grad"], 2**-8 + 2e-4, 1e-6)
        assert match.tolist() == want["match"].tolist() and in_vocab.tolist() == want["in_vocab"].tolist()


@pytest.mark.parametrize("number", range(len(VARIANTS["online"])), ids=VARIANTS["online"])
def test_online(kernels, number):
    n, v = 3, 30000  # the last chunk takes the second kernel two turns
    logits = (torch.randn(n, v) * 3).bfloat16()
    logits[0, 4500:] = logits[0].max()  # ties
    logits[1] *= 500
    logits[2, :5000] = -torch.inf
    best, total, at = torch.full((n,), -torch.inf), torch.zeros(n), torch.full((n,), -1)
    want = best.clone(), total.clone(), at.clone()
    for start, end in ((0, 4003), (4003, 4010), (4010, v)):  # off 16 bytes
        chunk = logits[:, start:end]
        run(kernels, "online", number, chunk, v, n, end - start, start, best, total, at)
        reference.online_update(chunk, start, *want)
    assert torch.equal(best, want[0]) and torch.equal(at, want[2])
    same(total, want[1], 1e-3, 0)


@pytest.mark.parametrize("h", [8, 1000, 4096])
def test_drafter_input(kernels, h):
    n, v = 11, 5
    table, state, ids = torch.randn(v, h).bfloat16(), torch.randn(n, h).bfloat16(), torch.randint(0, v, (n,))
    ids[3] = v  # out of range: NaN
    weights, out = [torch.randn(h) for _ in range(2)], torch.zeros(n, 2 * h, dtype=torch.bfloat16)
    run(kernels, "input_forward", ids, table, v, state, *weights, n, h, 1e-5, out)
    same(out, reference.drafter_input(ids, table, state, *weights, 1e-5), 2**-7, 1e-6)


@pytest.mark.parametrize("late", [False, True], ids=["copies at once", "copies late"])
@pytest.mark.parametrize("need_rows", [True, False], ids=["rows", "no rows"])
@pytest.mark.parametrize(
    ("number", "groups", "h", "n"),
    [*((0, 1, h, 12) for h in (8, 4096, 5000, 7168, 12000)), *((1, groups, h, 12) for groups in (1, 3) for h in (8, 3000, 4096)), (0, 1, 8, 3), (1, 1, 8, 3), (1, 3, 8, 3), (0, 1, 8, 0)],
)
def test_drafter_input_backward(kernels, number, groups, h, n, need_rows, late):
    kernels.set_late(late)
    v, blocks = 5, max(1, min(n, 5))  # no more blocks than rows
    table, state, ids, grad = torch.randn(v, h).bfloat16(), torch.randn(n, h).bfloat16(), torch.randint(0, v, (n,)), torch.randn(n, 2 * h).bfloat16()
    weights = [torch.randn(h) for _ in range(2)]
    rows, d_state = (torch.full((n, h), torch.nan).bfloat16() for _ in range(2))
    d_weights, sums = [torch.full((h,), torch.nan) for _ in range(2)], torch.full((blocks, 2, h), torch.nan)
    whole = h <= 64  # the second kernel takes 512 threads for 32 columns: once is enough
    wanted = rows if need_rows else None
    run(kernels, "input_backward", number, groups, blocks, grad, ids, table, v, state, *weights, n, h, 1e-5, wanted, d_state, *(d_weights if whole else (None, None)), sums)
    d_weights = d_weights if whole else list(sums.sum(0))
    want = reference.drafter_input_backward(grad, ids, table, state, *weights, 1e-5, True)
    for got, expected in list(zip((rows, d_state), want))[not need_rows :]:
        same(got, expected, 2**-7, 1e-5)
    for got, expected in zip(d_weights, want[2:]):
        same(got, expected, 1e-4, 1e-4)


@pytest.mark.parametrize("h", [8, 1000, 4096])
def test_fp8_rows(kernels, h):
    n = 9
    x = (torch.randn(n, h) * torch.logspace(-20, 20, n).unsqueeze(1)).bfloat16()
    x[2] = 0
    x[4, h // 2] = torch.nan
    x[5, 0] = -torch.inf
    q, scale = torch.full((n, h), 0x55, dtype=torch.uint8), torch.full((n,), -1.0)
    run(kernels, "quantize", x, n, h, q, scale)
    want, want_scale = reference.quantize_rows_fp8(x)
    assert torch.equal(scale.nan_to_num(-7), want_scale.nan_to_num(-7)) and torch.equal(q, want.view(torch.uint8))
    for number in range(len(VARIANTS["dequantize"])):
        out = torch.full((n, h), torch.nan, dtype=torch.bfloat16)
        run(kernels, "dequantize", number, q, want_scale, n, h, out)
        same(out, reference.dequantize_rows_fp8(want, want_scale, torch.bfloat16), 0, 0)


def by_blocks(op: str, *kernels: tuple[int, int]):
    """Parametrizes over kernels of top-k: the number of each and its blocks a row."""
    return pytest.mark.parametrize("number, blocks", kernels, ids=[f"{VARIANTS[op][number]} by {blocks}" for number, blocks in kernels])


@by_blocks("topk", (0, 8), (1, 8), (1, 2), (1, 1))
@pytest.mark.parametrize("v", [1, 7, 1003, 32000])
def test_topk_of_one(kernels, number, blocks, v):
    n = 2
    d2t = torch.randint(0, 9, (v,)).cumsum(0)
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.randn(n, v + 3).to(dtype)  # rows off 16 bytes
        logits = wide[:, 1 : v + 1]
        logits[0, v // 2 :] = logits[0].max()
        log_probs, ids = torch.full((n, 1), torch.nan), torch.full((n, 1), -1)
        positions, tokens = torch.tensor([5, 7]), torch.tensor([-1, -1])
        run(kernels, "topk_best", number, blocks, logits, dtype == torch.float32, v + 3, d2t, n, v, log_probs, ids, positions, tokens)
        want = reference.draft_topk(logits, d2t, 1)
        assert torch.equal(ids, want[1]) and torch.equal(tokens, ids[:, 0]) and positions.tolist() == [6, 8]
        same(log_probs, want[0], 1e-4, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("v, k", [(5003, 8), (32000, 8), (32768, 5), (131, 32), (9, 7), (20000, 32), (2, 2)])
@by_blocks("topk_ranked", (0, 8), (1, 8), (1, 2), (1, 1), (1, 4))
def test_topk_ranked(kernels, number, blocks, v, k, dtype):
    """Ties, sorted rows and infinities in one batch; the rows lie off 16 bytes where the width does."""
    logits, d2t = torch.randn(6, v), torch.randint(0, 9, (v,)).cumsum(0)
    logits[0, ::7] = 1.5
    logits[1] = 0.25  # all the same
    logits[2] = logits[2].sort(descending=True).values
    logits[3, 1:] = -torch.inf
    logits[4, : v // 2] = 0.0
    logits[4, v // 2 :] = -0.0  # ties with 0
    logits[5, v - 1] = torch.nan  # above all
    logits = logits.to(dtype)
    log_probs, ids = torch.full((6, k), torch.nan), torch.full((6, k), -1)
    positions, tokens = torch.arange(6), torch.full((6,), -1)
    run(kernels, "topk_of", number, blocks, logits, dtype == torch.float32, v, d2t, 6, v, k, log_probs, ids, positions, tokens)
    want = reference.draft_topk(logits, d2t, k)
    assert torch.equal(ids, want[1]) and torch.equal(tokens, ids[:, 0]) and positions.tolist() == [1, 2, 3, 4, 5, 6]
    same(log_probs, want[0], 1e-4, 1e-5)


@pytest.mark.parametrize("topk, steps, nodes, full", [(1, 3, 4, 1), (4, 5, 32, 1), (4, 5, 32, 0), (8, 3, 31, 1), (3, 4, 1, 1)])
@pytest.mark.parametrize("broken", [False, True], ids=["a tree", "any numbers"])
def test_small_trees(kernels, topk, steps, nodes, full, broken):
    n, count = 3, topk + (steps - 1) * topk**2
    parents = torch.stack([torch.cat([torch.tensor([-1]), torch.randperm(count)[: (steps - 1) * topk]]) for _ in range(n)])
    parents[:, 1 : topk + 1] = torch.arange(topk)
    chosen = torch.stack([torch.randperm(count)[: nodes - 1].sort().values for _ in range(n)])
    if broken:
        parents, chosen = torch.randint(-3, count + 2, parents.shape), torch.randint(-3, count * 2, chosen.shape)
        chosen[0, : nodes // 2] = 2**40
    lengths = torch.tensor([3, 40, 17])
    cells = nodes * nodes * n + int(lengths.sum()) * nodes * full
    if broken:  # the reference takes no such lists: as the kernel for any size has it
        want = torch.ones(cells, dtype=torch.bool), *(torch.full((n * nodes,), -9) for _ in range(4))
        run(kernels, "tree", 0, parents, parents.shape[1], chosen, lengths, want[0], cells, *want[1:], n, topk, steps, nodes, full)
    else:
        want = reference_tree.build_tree(parents, chosen, lengths, topk, steps, bool(full))
    mask, rest = torch.ones(cells, dtype=torch.bool), [torch.full_like(x, -9) for x in want[1:]]
    run(kernels, "tree", 1, parents, parents.shape[1], chosen, lengths, mask, mask.numel(), *rest, n, topk, steps, nodes, full)
    for got, expected in zip((mask, *rest), want):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("topk, steps, nodes", [(1, 3, 4), (4, 5, 32), (4, 5, 45), (8, 3, 64)])
def test_trees(kernels, topk, steps, nodes):
    n, count = 3, topk + (steps - 1) * topk**2
    parents = torch.stack([torch.cat([torch.tensor([-1]), torch.randperm(count)[: (steps - 1) * topk]]) for _ in range(n)])
    parents[:, 1 : topk + 1] = torch.arange(topk)
    chosen = torch.stack([torch.randperm(count)[: nodes - 1].sort().values for _ in range(n)])
    lengths = torch.tensor([3, 40, 17])
    want = reference_tree.build_tree(parents, chosen, lengths, topk, steps)
    mask = torch.ones_like(want[0])
    rest = [torch.full_like(x, -9) for x in want[1:]]
    run(kernels, "tree", 0, parents, parents.shape[1], chosen, lengths, mask, mask.numel(), *rest, n, topk, steps, nodes, 1)
    for got, expected in zip((mask, *rest), want):
        assert torch.equal(got, expected)
    candidates, target = (torch.randint(0, 3, (n, nodes)) for _ in range(2))
    width = steps + 1
    predicts, accept, number = torch.zeros(n * nodes, dtype=torch.int32), torch.full((n, width), -1, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    run(kernels, "verify", predicts, n * nodes, accept, number, candidates, *rest[1:], target, n, nodes, width)
    expected = reference_tree.verify_tree_greedy(candidates, *want[2:], target, width)
    assert torch.equal(accept, expected.accept_index) and torch.equal(number, expected.accept_token_num) and torch.equal(predicts, expected.predicts)


def test_capture_s_fp8_rows(kernels):
    """The extraction server calls the library by itself (patches/hidden_state_dump.py): bit for bit the rows that torch makes there, whatever the stride."""
    from capture_fakes import load_hook

    hook, strides = load_hook(), []
    assert hook.OPS_ABI == op_library.ABI

    @ctypes.CFUNCTYPE(ctypes.c_int, *[*op_library.SIGNATURES["aerie_quantize_rows_fp8"], ctypes.c_void_p])
    def launch(x, stride, n, h, q, scale, stream):
        strides.append(stride)
        rows = (ctypes.c_uint16 * (n * h))()
        for row in range(n):
            ctypes.memmove(ctypes.addressof(rows) + row * h * 2, x + row * stride * 2, h * 2)
        kernels.quantize(rows, ctypes.c_int64(n), ctypes.c_int64(h), ctypes.c_void_p(q), ctypes.c_void_p(scale))
        return 0 if stream == 7 else 1

    quantize = hook.library_quantize(types.SimpleNamespace(aerie_quantize_rows_fp8=launch), 7)
    for rows, columns in ((2, 8), (5, 104), (7, 4088)):
        x = torch.randn(rows, columns + 8).mul(3).bfloat16()
        x[0], x[-1, 1] = 0.0, float("inf")
        for part in (x, x[1:], x[:, :columns], x.t().contiguous().t()):  # the last is not row by row
            for found, wanted in zip(quantize(part), hook.quantize_rows_fp8(part)):
                assert torch.equal(found.view(torch.uint8), wanted.contiguous().view(torch.uint8))
        assert strides[-4:] == [columns + 8] * 4
    with pytest.raises(RuntimeError, match="aerie_quantize_rows_fp8 failed .CUDA error 1."):
        hook.library_quantize(types.SimpleNamespace(aerie_quantize_rows_fp8=launch), 8)(x)
