"""Drafter ops against naive float64 references: the CPU references run everywhere, the kernels (the same tests) on a GPU."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "cuda"), str(ROOT / "tests")]

import cuda_naive as naive  # noqa: E402
import drafter_ops as ops  # noqa: E402
import reference  # noqa: E402
from op_library import VARIANTS, chosen  # noqa: E402

gpu = pytest.mark.gpu
BOTH = ["cpu", pytest.param("cuda", marks=gpu)]


@pytest.fixture(autouse=True)
def seed(request):
    torch.manual_seed(hash(request.node.name) % 2**31)
    if "cuda" in request.node.name and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    if "cuda" in request.node.name:
        assert ops.status() == "loaded", ops.status()  # on a GPU the kernels must run, not the references


def same(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> None:
    torch.testing.assert_close(a.detach().cpu().double(), b.detach().cpu().double(), rtol=rtol, atol=atol, equal_nan=True)


# --- 1. soft-target cross-entropy -------------------------------------------------------------------------------------------------------------------


def make(n: int, v: int, device: str, dtype=torch.bfloat16, scale: float = 3.0, m: int | None = None):
    """Draft and target logits, the target's argmax (some outside the draft vocabulary) and a log-sum-exp over more than the slice."""
    m = n if m is None else m
    draft = (torch.randn(n, v) * scale).to(dtype)
    target = (torch.randn(m, v) * scale).to(dtype)
    top = target.double().argmax(1)
    top[1::3] = -1
    lse = (torch.logsumexp(target.double(), 1) + torch.rand(m) * 0.5).float()
    return draft.to(device), target.to(device), top.to(device), lse.to(device)


def check_soft_target(draft, target, top, lse=None, weights=None, rows=None, renormalize=False, rtol=2e-4, inplace=True):
    want = naive.soft_target(draft, target, top, lse, weights, rows, renormalize)
    base = draft.detach().clone()
    # a leaf in front, as a linear layer's output has; clone() so that the op may overwrite it
    leaf = base.clone().requires_grad_()
    logits = leaf.clone() if base.stride(0) == base.shape[1] or base.shape[0] < 2 else leaf * 1
    got = ops.soft_target_cross_entropy(logits, target, top, lse, weights, rows, renormalize, inplace=inplace)
    same(got.loss, want["loss"], rtol, rtol)
    same(got.accept, want["accept"], rtol, rtol)
    assert got.match.tolist() == want["match"].tolist()
    assert got.in_vocab.tolist() == want["in_vocab"].tolist()
    got.loss.sum().backward()
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(draft.dtype, 1e-6)
    same(leaf.grad, want["grad"], rounding + rtol, 1e-6)
    if not inplace:
        assert torch.equal(logits.detach(), base)
    quiet = ops.soft_target_cross_entropy(base, target, top, lse, weights, rows, renormalize)  # no gradient wanted: the logits stay
    same(quiet.loss, want["loss"], rtol, rtol)
    assert torch.equal(base, draft.detach())


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("v", [1, 7, 8, 64, 320, 1000, 8192, 8200, 20000])
def test_soft_target_widths(device, v):
    draft, target, top, lse = make(5, v, device)
    check_soft_target(draft, target, top, lse)
    check_soft_target(draft, target, top, None)


@gpu
@pytest.mark.parametrize("v", [32000, 32768, 50000, 163840, 163843, 300000])
def test_soft_target_wide_cuda(v):
    draft, target, top, lse = make(3, v, "cuda")
    check_soft_target(draft, target, top, lse)
    check_soft_target(draft, target, top, None, renormalize=True)


@gpu
@pytest.mark.parametrize("v", [64, 8000, 32000])
def test_soft_target_every_variant_cuda(v):
    """The kernels that the size does not choose give the same answers."""
    n = 301 if v == 64 else 3
    draft, target, top, lse = make(n, v, "cuda")
    draft[0, 1::2] = -torch.inf
    target[0, 1::2] = -torch.inf
    draft[1] *= 1000  # not of usual size
    want = naive.soft_target(draft, target, top, lse, None, None, False)
    for number, name in enumerate(VARIANTS["soft_target"]):
        with chosen("soft_target", number):
            if "x 1" in name and v > 25000:  # one block alone has no room for it
                with pytest.raises(RuntimeError, match="invalid argument"):
                    ops.OPS.soft_target_ce(draft, target, lse, top, None, None, False, True)
                continue
            loss, match, accept, in_vocab, grad = ops.OPS.soft_target_ce(draft, target, lse, top, None, None, False, True)
        same(loss, want["loss"], 2e-4, 2e-4), same(accept, want["accept"], 2e-4, 2e-4)
        same(grad, want["grad"], 2**-8 + 2e-4, 1e-6)
        assert match.tolist() == want["match"].tolist() and in_vocab.tolist() == want["in_vocab"].tolist()


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("n", [0, 1, 2, 700])
def test_soft_target_row_counts(device, n):
    draft, target, top, lse = make(n, 72, device)
    check_soft_target(draft, target, top, lse)


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_soft_target_other_dtypes(device, dtype):
    draft, target, top, lse = make(4, 33, device, dtype)
    lse = lse.double() if dtype == torch.float64 else lse
    check_soft_target(draft, target, top, lse, rtol=1e-5)


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_soft_target_weights_and_rows(device, renormalize, inplace):
    draft, target, top, lse = make(9, 320, device, m=4)
    rows = torch.tensor([0, 3, 3, 1, 0, 2, 2, 1, 3], device=device)
    weights = torch.tensor([1, 0, 0.5, 2, 0, 0, 1e-3, 1, 0], device=device)
    check_soft_target(draft, target, top, lse, weights, rows, renormalize, inplace=inplace)
    check_soft_target(draft, target, top, lse, torch.zeros_like(weights), rows, renormalize, inplace=inplace)


@pytest.mark.parametrize("device", BOTH)
def test_soft_target_edges_of_the_vocabulary_and_ties(device):
    draft, target, top, lse = make(6, 8192, device)
    for row, (columns, answer) in enumerate([((0,), 0), ((8191,), 8191), ((5, 8191), 5), ((5, 8191), 8191), ((0, 1, 2), 0), ((4095, 4096), 4095)]):
        draft[row, list(columns)] = 50.0
        top[row] = answer
    check_soft_target(draft, target, top, lse)
    got = ops.soft_target_cross_entropy(draft, target, top, lse)
    assert got.match.tolist() == [True, True, True, False, True, True]  # a tie is the lowest id's


@pytest.mark.parametrize("device", BOTH)
def test_soft_target_infinities(device):
    draft, target, top, lse = make(5, 328, device)
    draft[0, ::2] = -torch.inf  # q = 0 where p > 0: infinitely bad, but no NaN in the gradient
    target[1, ::2] = -torch.inf
    target[2] = -torch.inf  # a masked row
    lse[2] = -torch.inf
    draft[3, 1:] = -torch.inf
    target[3, 1:] = -torch.inf
    lse[3] = target[3, 0].float()
    check_soft_target(draft[1:4], target[1:4], top[1:4], lse[1:4])
    check_soft_target(draft[1:4], target[1:4], top[1:4], None)
    leaf = draft.clone().requires_grad_()
    got = ops.soft_target_cross_entropy(leaf.clone(), target, top, lse)
    assert got.loss[0].item() == math.inf and got.loss[2].item() == 0
    got.loss.sum().backward()
    assert torch.isfinite(leaf.grad).all() and not leaf.grad[2].any()


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("v", [40, 1000, 999])
def test_soft_target_huge_logits_make_no_nan(device, v):
    for scale in (1e2, 1e4, 1e8, 1e30, 3.3e38):
        draft = (torch.rand(4, v) * 2 - 1).mul(scale).bfloat16().to(device)
        target = (torch.rand(4, v) * 2 - 1).mul(scale).bfloat16().to(device)
        draft[3], target[3] = -scale, -scale
        top = target.double().argmax(1)
        leaf = draft.clone().requires_grad_()
        got = ops.soft_target_cross_entropy(leaf.clone(), target, top)
        got.loss.sum().backward()
        assert not got.loss.isnan().any() and not got.accept.isnan().any() and not leaf.grad.isnan().any(), scale
        if scale <= 1e30:
            same(got.loss, naive.soft_target(draft, target, top, None, None, None, False)["loss"], 1e-4, 1e-4)


@pytest.mark.parametrize("device", BOTH)
def test_soft_target_nan_is_seen(device):
    for v in (264, 261):
        draft, target, top, lse = make(5, v, device)
        draft[0, 3], target[1, 5], draft[3, 7], target[4, 2] = torch.nan, torch.nan, torch.inf, torch.inf
        got = ops.soft_target_cross_entropy(draft, target, top, lse)
        assert got.loss.isfinite().tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("offset,stride", [(0, 336), (1, 336), (8, 328), (3, 331)])
def test_soft_target_strides(device, offset, stride):
    """Slices of wider tensors, on 16 bytes or not."""
    draft, target, top, lse = make(6, 320, device)
    wide_draft = torch.full((6, stride + offset), torch.nan, dtype=torch.bfloat16, device=device)
    wide_target = torch.full((6, stride + offset), torch.nan, dtype=torch.bfloat16, device=device)
    d, t = (w[:, offset : offset + 320] for w in (wide_draft, wide_target))
    d.copy_(draft), t.copy_(target)
    want = naive.soft_target(draft, target, top, lse, None, None, False)
    got = torch.ops.aerie.soft_target_ce_(d, t, lse, top, None, None, False)
    same(got[0], want["loss"], 2e-4, 2e-4)
    same(d, want["grad"], 2**-8, 1e-6)
    outside = torch.ones_like(wide_draft, dtype=torch.bool)
    outside[:, offset : offset + 320] = False
    assert wide_draft[outside].isnan().all()  # nothing beside the slice was touched
    for bad in (draft.t(), draft[:, ::2], draft.expand(6, 320)[:1].expand(6, 320)):
        with pytest.raises(ValueError, match="contiguous|overlap|fit"):
            ops.soft_target_cross_entropy(bad, target, top, lse)


@pytest.mark.parametrize("device", BOTH)
def test_soft_target_backward_scales_rows_and_runs_once(device):
    draft, target, top, lse = make(4, 96, device)
    leaf = draft.clone().requires_grad_()
    scale = torch.tensor([1.0, 0.25, 0.0, -2.0], device=device)
    loss = ops.soft_target_cross_entropy(leaf.clone(), target, top, lse).loss
    (loss * scale).sum().backward(retain_graph=True)
    want = naive.soft_target(draft, target, top, lse, None, None, False)["grad"] * scale.cpu().double().unsqueeze(1)
    same(leaf.grad, want, 2**-7, 1e-6)
    with pytest.raises(RuntimeError, match="second time"):
        loss.sum().backward()


@pytest.mark.parametrize("device", BOTH)
def test_soft_target_unchecked_rows_out_of_range_are_nan(device):
    draft, target, top, lse = make(3, 64, device)
    rows = torch.tensor([0, 7, -1], device=device)
    with pytest.raises(ValueError, match="target_rows holds ids from -1 to 7; they must be in 0 .. 2"):
        ops.soft_target_cross_entropy(draft, target, top, lse, None, rows)
    leaf = draft.clone().requires_grad_()
    got = ops.soft_target_cross_entropy(leaf.clone(), target, top, lse, None, rows, check_range=False)
    got.loss.sum().backward()
    assert got.loss.isnan().tolist() == [False, True, True] and leaf.grad.isnan().all(1).tolist() == [False, True, True]


def test_soft_target_gradcheck():
    draft = torch.randn(5, 11, dtype=torch.float64, requires_grad=True)
    target = torch.randn(4, 11, dtype=torch.float64)
    lse, top, rows = target.logsumexp(1) + 0.2, target.argmax(1), torch.tensor([3, 0, 1, 1, 2])
    weights = torch.tensor([1.0, 0.5, 0.0, 2.0, 1.0], dtype=torch.float64)
    for renormalize in (False, True):
        for given in (lse, None):
            assert torch.autograd.gradcheck(
                lambda x: ops.soft_target_cross_entropy(x, target, top, given, weights, rows, renormalize, inplace=False).loss, draft  # noqa: B023
            )


@pytest.mark.parametrize("device", BOTH)
def test_soft_target_compiles(device):
    draft, target, top, lse = make(4, 64, device)

    def step(x):
        return ops.soft_target_cross_entropy(x * 1, target, top, lse).loss.sum()

    plain, compiled = draft.clone().requires_grad_(), draft.clone().requires_grad_()
    step(plain).backward()
    torch.compile(step, backend="aot_eager", fullgraph=True)(compiled).backward()
    same(plain.grad, compiled.grad, 1e-6, 1e-6)


def test_soft_target_refusals():
    draft, target, top, lse = make(4, 64, "cpu")
    for arguments, text in [
        ((draft, target[:, :32], top, lse), "does not fit"),
        ((draft, target.float(), top, lse), "same columns, same dtype"),
        ((draft, target[:3], top[:3], lse[:3]), "pass target_rows"),
        ((draft, target, top.int(), lse), "target_top has dtype torch.int32"),
        ((draft, target, top, lse[:2]), r"target_lse has the shape \[2\]; it must be \[4\]"),
        ((draft, target, top + 70, lse), "target_top holds ids"),
        ((draft.int(), target.int(), top, lse), "draft_logits has dtype torch.int32"),
        ((draft[0], target, top, lse), "2 dimensions"),
        ((draft[:, :0], target[:, :0], top, lse), "empty"),
    ]:
        with pytest.raises(ValueError, match=text):
            ops.soft_target_cross_entropy(*arguments)


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("n,v,chunk", [(3, 1000, 1000), (5, 1003, 100), (1, 1, 1), (4, 97, 13), (0, 50, 10), (2, 20000, 7777)])
def test_online_target(device, n, v, chunk):
    logits = (torch.randn(n, v) * 4).bfloat16()
    if n > 2:
        logits[0] = -torch.inf
        logits[1, [2, v - 1]] = 40.0  # a tie: the lowest id
        logits[2, ::2] = -torch.inf
    online = ops.OnlineTarget(n, device)
    for start in range(0, v, chunk):
        online.update(logits[:, start : start + chunk].to(device), start)  # chunk 13: rows off 16 bytes
        online.update(logits[:, :0].to(device), start)
    same(online.lse, torch.logsumexp(logits.double(), 1), 1e-5, 1e-5)
    assert online.argmax.tolist() == [int((row == row.max()).nonzero()[0]) for row in logits]
    view = logits.to(device)
    online = ops.OnlineTarget(n, device)
    for start in range(0, v, chunk):
        online.update(view[:, start : start + chunk], start)  # slices of a wider tensor
    same(online.lse, torch.logsumexp(logits.double(), 1), 1e-5, 1e-5)


@pytest.mark.parametrize("device", BOTH)
def test_draft_ids(device):
    d2t = torch.tensor([0, 2, 2, 6], device=device)  # target ids 0, 3, 4, 9
    assert ops.draft_ids(d2t, 10).tolist() == [0, -1, -1, 1, 2, -1, -1, -1, -1, 3]


# --- 2. drafter input -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("n,h", [(0, 64), (1, 8), (5, 7), (9, 576), (300, 64), (2, 4096), (2, 7168), (3, 9000), (2, 20000)])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_drafter_input(device, n, h, weight_dtype):
    if device == "cpu" and n * h > 10_000:
        pytest.skip("the widths of the kernels")
    table = torch.randn(50, h).bfloat16()
    state = (torch.randn(n, h) * 5).bfloat16()
    ids = torch.randint(0, 50, (n,), dtype=torch.int64 if h % 2 else torch.int32)
    if n > 1:
        ids[0], ids[1] = 0, 49
        state[1] = 0  # rms 0: eps alone
    weights = [torch.randn(h).to(weight_dtype) for _ in range(2)]
    inputs = [x.clone().to(device).requires_grad_() for x in (table, state, *weights)]
    got = ops.drafter_input(ids.to(device), *inputs, eps=1e-5)
    double = [x.double().requires_grad_() for x in (table, state, *weights)]
    want = torch.cat([naive.rms_norm(double[0][ids.long()], double[2], 1e-5), naive.rms_norm(double[1], double[3], 1e-5)], 1)
    same(got, want, 2**-8, 1e-5)
    grad = torch.randn(n, 2 * h).bfloat16()
    got.backward(grad.to(device))
    if n == 0:
        return
    want.backward(grad.double())
    for x, y, name in zip(inputs, double, ("table", "state", "embed_weight", "state_weight"), strict=True):
        error = (x.grad.cpu().double() - y.grad).norm() / y.grad.norm().clamp_min(1e-9)
        assert error < 2**-7, (name, float(error))


@pytest.mark.parametrize("device", BOTH)
def test_drafter_input_frozen_table_strides_and_range(device):
    table, state = torch.randn(20, 64, device=device).bfloat16(), torch.randn(6, 80, device=device).bfloat16()
    weight = torch.ones(64, device=device).bfloat16().requires_grad_()
    ids = torch.tensor([0, 19, 3, 3, 7, 1], device=device)
    for view in (state[:, 8:72], state[:, 3:67]):
        got = ops.drafter_input(ids, table, view, weight, weight)
        same(got, ops.drafter_input(ids, table, view.clone(), weight, weight), 0, 0)
        got.float().sum().backward()
        assert weight.grad is not None
    with pytest.raises(ValueError, match="ids holds ids from 1 to 20; they must be in 0 .. 19"):
        ops.drafter_input(ids + 1, table, state[:, :64], weight, weight)
    got = ops.drafter_input(ids + 1, table, state[:, :64], weight, weight, check_range=False)
    assert got.isnan().any(1).tolist() == [False, True, False, False, False, False]  # never an illegal access
    with pytest.raises(ValueError, match="same hidden size"):
        ops.drafter_input(ids, table, state, weight, weight)


def test_drafter_input_gradcheck():
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    ids = torch.tensor([4, 0, 4])
    assert torch.autograd.gradcheck(lambda *x: ops.drafter_input(ids, *x), (make(5, 6), make(3, 6), make(6), make(6)))


# --- 3. top-k ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("n,v,k", [(0, 10, 1), (1, 1, 1), (3, 32, 32), (2, 33, 5), (4, 1000, 10), (2, 8192, 32), (1, 32000, 8)])
def test_draft_topk(device, dtype, n, v, k):
    logits = (torch.randn(n, v) * 3).to(dtype)
    if n > 2:
        logits[0] = 1.0  # all tied: the lowest ids
        logits[1, : v // 2] = -torch.inf
    d2t = torch.randint(0, 1000, (v,))
    log_probs, ids = ops.draft_topk(logits.to(device), k, d2t.to(device))
    values, columns = naive.topk(logits, k)
    assert ids.tolist() == [[c + int(d2t[c]) for c in row] for row in columns]
    if n:
        same(log_probs, torch.tensor(values), 1e-5, 2e-5)
    assert ops.draft_topk(logits.to(device), k)[1].tolist() == columns


@gpu
@pytest.mark.parametrize("v", [32000, 49153, 98304, 163840])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_draft_topk_wide_cuda(v, dtype):
    wide = (torch.randn(3, v + 3) * 3).to(dtype).cuda()
    wide[0], wide[1, :40] = 2.0, 9.0
    for logits in (wide[:, :v], wide[:, 3:]):  # rows on 16 bytes and off
        _, ids = ops.draft_topk(logits, 32)
        order = torch.sort(logits.double().cpu(), dim=1, descending=True, stable=True).indices[:, :32]
        assert torch.equal(ids.cpu(), order)


@pytest.mark.parametrize("device", BOTH)
def test_draft_topk_refuses_and_takes_nan_first(device):
    logits = torch.randn(2, 40, device=device).bfloat16()
    for k in (0, 33, 41):
        with pytest.raises(ValueError, match=f"k = {k} must be 1 to 32"):
            ops.draft_topk(logits, k)
    with pytest.raises(ValueError, match="k is a Tensor; it must be an int"):
        ops.draft_topk(logits, torch.zeros(40, dtype=torch.int64, device=device), 2)  # arguments in the other order
    with pytest.raises(ValueError, match="d2t has the shape"):
        ops.draft_topk(logits, 2, torch.zeros(3, dtype=torch.int64, device=device))
    logits[1, 7] = torch.nan
    assert ops.draft_topk(logits, 2)[1][1, 0].item() == 7


# --- 5. fp8 rows ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", BOTH)
@pytest.mark.parametrize("n,h", [(0, 8), (1, 1), (3, 7), (4, 64), (5, 576), (2, 1032), (3, 4096), (2, 7168), (2, 8200), (2, 20000)])
def test_fp8_rows(device, n, h):
    x = (torch.randn(n, h) * torch.logspace(-6, 6, n).unsqueeze(1) if n else torch.randn(n, h)).bfloat16()
    if n > 2:
        x[1] = 0
    q, scale = ops.quantize_rows_fp8(x.to(device))
    assert q.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    for i in range(n):
        amax = float(x[i].double().abs().max())
        assert math.isclose(float(scale[i]), max(amax, 1e-30) / 448, rel_tol=1e-6)
        for j in range(0, h, max(1, h // 50)):  # rounding to nearest: as near as e4m3 gets, but for the float32 product's own rounding
            exact = float(x[i, j]) / float(scale[i])
            assert abs(float(q[i, j].float()) - exact) <= naive.nearest_e4m3_distance(exact) + 1e-6 * abs(exact)
    back = ops.dequantize_rows_fp8(q, scale)
    same(back, (q.cpu().double() * scale.cpu().double().unsqueeze(1)), 2**-8, 0)
    assert torch.equal(ops.dequantize_rows_fp8(q, scale, torch.float32).cpu(), q.cpu().float() * scale.cpu().unsqueeze(1))
    if device == "cuda":  # the same bits as the reference
        q_cpu, scale_cpu = ops.quantize_rows_fp8(x)
        assert torch.equal(q.cpu().view(torch.uint8), q_cpu.view(torch.uint8)) and torch.equal(scale.cpu(), scale_cpu)
        assert torch.equal(back.cpu(), ops.dequantize_rows_fp8(q_cpu, scale_cpu))


@pytest.mark.parametrize("device", BOTH)
def test_fp8_rows_every_bf16_value(device):
    """All 65,536 bf16 patterns, each alone in a row beside 448: exact scale 1, round to nearest even; NaN and infinities mark their row."""
    patterns = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.stack([patterns, torch.full_like(patterns, 448.0)], 1)
    q, scale = ops.quantize_rows_fp8(x.to(device))
    small = patterns.float().abs() <= 448
    assert torch.equal(scale.cpu()[small], torch.ones(int(small.sum())))
    assert torch.equal(q.cpu()[small, 0].float(), patterns[small].float().to(torch.float8_e4m3fn).float())
    assert scale.cpu().isnan().equal(~torch.isfinite(patterns.float()))
    assert ops.dequantize_rows_fp8(q, scale).cpu()[~torch.isfinite(patterns.float())].isnan().all()


@pytest.mark.parametrize("device", BOTH)
def test_fp8_rows_strides_and_refusals(device):
    wide = torch.randn(4, 100, device=device).bfloat16()
    for view in (wide[:, :64], wide[:, 4:68], wide[:, 3:67]):
        q, scale = ops.quantize_rows_fp8(view)
        q2, scale2 = ops.quantize_rows_fp8(view.clone())
        assert torch.equal(q.view(torch.uint8), q2.view(torch.uint8)) and torch.equal(scale, scale2)
        padded = torch.zeros(4, 100, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        padded[:, 5:69] = q
        assert torch.equal(ops.dequantize_rows_fp8(padded[:, 5:69], scale), ops.dequantize_rows_fp8(q, scale))
    with pytest.raises(ValueError, match="dtype"):
        ops.quantize_rows_fp8(wide.double())
    with pytest.raises(ValueError, match="scale has the shape"):
        ops.dequantize_rows_fp8(q, scale[:2])
    assert ops.quantize_rows_fp8(wide.float())[0].shape == wide.shape  # float32 takes the reference


# --- all of them ------------------------------------------------------------------------------------------------------------------------------------


@gpu
def test_graph_replay_cuda():
    """Every op inside one CUDA graph; the replay sees new inputs."""
    draft, target, top, lse = make(8, 32000, "cuda")
    table, state, weight = torch.randn(40, 4096, device="cuda").bfloat16(), torch.randn(8, 4096, device="cuda").bfloat16(), torch.ones(4096, device="cuda").bfloat16()
    ids, online = torch.randint(0, 40, (8,), device="cuda"), ops.OnlineTarget(8, "cuda")

    def work():
        soft = torch.ops.aerie.soft_target_ce(draft, target, lse, top, None, None, False, True)
        pair = ops.drafter_input(ids, table, state, weight, weight)
        back = torch.ops.aerie.drafter_input_backward(pair, ids, table, state, weight, weight, 1e-5, True)  # its second kernel is launched early
        q, scale = ops.quantize_rows_fp8(state)
        online.maximum.fill_(-torch.inf), online.total.zero_(), online.argmax.fill_(-1)
        online.update(target, 0)
        return soft[0], soft[4], pair, *back, online.lse, online.argmax.clone(), ops.draft_topk(draft, 8)[1], ops.dequantize_rows_fp8(q, scale)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = work()
    draft.copy_(torch.randn(8, 32000).mul(3)), state.copy_(torch.randn(8, 4096)), ids.copy_(torch.randint(0, 40, (8,)))
    graph.replay()
    for got, want in zip(captured, work(), strict=True):
        assert torch.equal(got, want)


@gpu
@pytest.mark.parametrize("captured", [False, True], ids=["stream", "graph"])
def test_early_launches_wait_cuda(captured):
    """Kernels are launched before the one in front of them has ended: one behind the other, each on what the last wrote, and behind a copy, a fill and another stream's work, they
    answer what they answer alone."""
    n, h = 4096, 4096
    inputs = [torch.randn(n, h).bfloat16().pin_memory() for _ in range(4)]
    state, table = torch.empty(n, h, device="cuda", dtype=torch.bfloat16), torch.randn(64, h, device="cuda").bfloat16()
    weight, ids = torch.rand(h, device="cuda").bfloat16(), torch.randint(0, 64, (n,), device="cuda")
    filled, side = torch.empty(n, h, device="cuda", dtype=torch.bfloat16), torch.cuda.Stream()

    def chain(wait):
        state.copy_(staged, non_blocking=True)
        wait()
        answers = []
        for _ in range(3):  # the memory of one turn is another one's in the next
            q, scale = ops.quantize_rows_fp8(state)
            wait()
            back = ops.dequantize_rows_fp8(q, scale)
            wait()
            pair = ops.drafter_input(ids, table, back, weight, weight)
            wait()
            gradients = torch.ops.aerie.drafter_input_backward(pair, ids, table, back, weight, weight, 1e-5, True)
            wait()
            best = ops.draft_topk(gradients[1][:8], 1), ops.draft_topk(gradients[1][:8], 8)
            wait()
            answers += [pair[:, :h].clone(), gradients[1].clone(), gradients[3].clone(), *(x for pair in best for x in pair)]
        filled.zero_()
        wait()
        answers.append(ops.quantize_rows_fp8(filled)[0].view(torch.uint8).clone())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            filled.copy_(state * 2)
        torch.cuda.current_stream().wait_stream(side)
        wait()
        return [*answers, ops.quantize_rows_fp8(filled)[1]]

    staged = inputs[0].clone().pin_memory()
    chain(torch.cuda.synchronize)
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured_answers = chain(lambda: None)
    for values in inputs:
        torch.cuda.synchronize()
        staged.copy_(values)
        if captured:
            graph.replay()
            got = [x.clone() for x in captured_answers]
        else:
            got = chain(lambda: None)
        for x, want in zip(got, chain(torch.cuda.synchronize), strict=True):
            assert torch.equal(x, want)


def test_fake_kernels_match():
    """Shapes and dtypes of the fakes, as torch.library itself checks them."""
    draft, target, top, lse = make(4, 32, "cpu", torch.float32)
    x = torch.randn(3, 16)
    q, scale = ops.quantize_rows_fp8(x)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.aerie.soft_target_ce, (draft, target, lse, top, None, None, False, True), test_utils=checks)
    torch.library.opcheck(torch.ops.aerie.soft_target_ce_, (draft.clone(), target, lse, top, None, None, False), test_utils=checks)
    torch.library.opcheck(torch.ops.aerie.drafter_input, (torch.tensor([0, 1, 2]), x, x, x[0], x[1], 1e-5), test_utils=checks)
    torch.library.opcheck(torch.ops.aerie.draft_topk, (draft, None, 4), test_utils=checks)
    torch.library.opcheck(torch.ops.aerie.quantize_rows_fp8, (x,), test_utils=("test_faketensor",))
    torch.library.opcheck(torch.ops.aerie.dequantize_rows_fp8, (q, scale, torch.float32), test_utils=("test_faketensor",))


# --- every kernel by number -------------------------------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("op", ["online", "drafter_input_backward", "dequantize", "topk", "topk_ranked"])
def test_every_variant_cuda(op):
    """The kernels that are not the usual choice: the same function on sizes that several of them share, rows enough for persistent blocks to go round."""
    if op in ("topk", "topk_ranked"):
        for n, v, k in ((1, 32000, 8), (3, 131, 32), (12, 4001, 5), (64, 31999, 32), (150, 300, 32), (2, 1, 1)):  # 8, 4, 2 blocks a row, and one
            k = 1 if op == "topk" else k
            logits = torch.randn(n, v, device="cuda")
            logits[-1] = logits[-1].sort(descending=True).values  # many of few groups are among the best
            logits[0, v // 2 :] = logits[0].max()  # ties: the lowest id
            d2t = torch.randint(0, 1000, (v,), device="cuda").cumsum(0)
            for dtype in (torch.float32, torch.bfloat16):
                x = logits.to(dtype)
                want = reference.draft_topk(x, d2t, k)
                for number in range(len(VARIANTS[op])):
                    with chosen(op, number):
                        got = ops.draft_topk(x, k, d2t)
                    assert torch.equal(got[1], want[1]), (number, n, v, dtype)
                    same(got[0], want[0], 1e-4, 1e-4)
        return
    for n, h in ((5000, 64), (3001, 4096), (1500, 7168), (1, 8), (2, 4096)):
        x = torch.randn(n, h, device="cuda").bfloat16()
        ids, table = torch.randint(0, 50, (n,), device="cuda"), torch.randn(50, h, device="cuda").bfloat16()
        weights = [torch.randn(h, device="cuda") for _ in range(2)]
        grad = torch.randn(n, 2 * h, device="cuda").bfloat16()
        rows, scale = reference.quantize_rows_fp8(x)

        def run(o):
            if op == "online":
                found = ops.OnlineTarget(n, "cuda")
                for start in range(0, h, 40):
                    o.online_update_(x[:, start : start + 40], start, found.maximum, found.total, found.argmax)
                return [found.maximum, found.lse, found.argmax]
            if op == "drafter_input_backward":
                return [y for rows in (True, False) for y in o.drafter_input_backward(grad, ids, table, x, *weights, 1e-5, rows)]
            return [o.dequantize_rows_fp8(rows, scale, torch.bfloat16)]

        class Reference:
            online_update_ = staticmethod(reference.online_update)
            drafter_input_backward = staticmethod(reference.drafter_input_backward)
            dequantize_rows_fp8 = staticmethod(reference.dequantize_rows_fp8)

        want = run(Reference)
        for number in range(len(VARIANTS[op])):
            if op == "drafter_input_backward" and number == 1 and h > 4096:
                continue  # a kernel for narrow rows
            with chosen(op, number):
                got = run(ops.OPS)
            for one, other in zip(got, want):
                if op == "dequantize" or one.dtype == torch.int64:
                    assert torch.equal(one, other), (number, n, h)
                elif one.dim() == 1 and op == "drafter_input_backward":  # sums over rows
                    assert (one - other).norm() <= 1e-4 * other.norm(), (number, n, h)
                else:
                    same(one, other, 2**-7, 2**-7 if op != "online" else 1e-4)


@gpu
def test_which_kernel_goes_by_rows_cuda():
    """Op 2's backward: no more partial sums than rows; both kernels of H 4096 beside the reference on either side of the number of rows from which the other one is usual."""
    library = ops.load()
    assert [library.aerie_backward_blocks(n, h) for n in (0, 1, 5) for h in (8, 4096, 7168, 20000)] == [1, 1, 1, 1, 1, 1, 1, 1, 5, 5, 5, 5]
    for n, number in ((6143, 0), (6144, 1)):
        x, table, ids = torch.randn(n, 4096, device="cuda").bfloat16(), torch.randn(9, 4096, device="cuda").bfloat16(), torch.randint(0, 9, (n,), device="cuda")
        arguments = torch.randn(n, 8192, device="cuda").bfloat16(), ids, table, x, *torch.randn(2, 4096, device="cuda"), 1e-5, True
        blocks, got = library.aerie_backward_blocks(n, 4096), ops.OPS.drafter_input_backward(*arguments)
        with chosen("drafter_input_backward", number):
            assert library.aerie_backward_blocks(n, 4096) == blocks
            for one, other in zip(got, ops.OPS.drafter_input_backward(*arguments)):
                assert torch.equal(one, other), n
        for one, other in zip(got, reference.drafter_input_backward(*arguments)):
            assert (one.float() - other.float()).norm() <= (1e-4 if one.dim() == 1 else 2**-7) * other.float().norm(), n


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 8, 32])
def test_topk_goes_by_rows_cuda(k, dtype):
    """One to eight blocks share a row, by the number of rows: the same answer on either side of every border."""
    logits, d2t = (torch.randn(280, 32000, device="cuda") * 3).to(dtype), torch.randint(0, 9, (32000,), device="cuda").cumsum(0)
    want = reference.draft_topk(logits, d2t, k)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for n in {1, processors // 16, processors // 16 + 1, processors // 8, processors // 8 + 1, processors // 2, processors // 2 + 1, 280}:
        log_probs, ids = ops.draft_topk(logits[:n], k, d2t)
        assert torch.equal(ids, want[1][:n]), n
        same(log_probs, want[0][:n], 1e-4, 1e-4)


def test_a_variant_that_is_none_is_refused(monkeypatch):
    class Library:
        @staticmethod
        def aerie_choose(op, number):
            return int(number >= len(list(VARIANTS.values())[op]))

    monkeypatch.setattr("op_library.load", lambda: Library)
    with pytest.raises(ValueError, match="topk has no kernel of number 2; it has 0 to 1"), chosen("topk", 2):
        pass
    with chosen("topk", 1):
        pass
