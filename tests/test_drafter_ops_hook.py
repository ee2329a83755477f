"""The SGLang plugin of serve.drafter_ops: found and off by default, fits the installed SGLang, answers as the ops it calls."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "patches" / "drafter_ops"
sys.path[:0] = [str(PLUGIN), str(ROOT / "cuda"), str(ROOT / "scripts")]

import drafter_ops_hook as hook  # noqa: E402

needs_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="no SGLang here")


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    """A fresh interpreter that finds the plugin as the server does."""
    path = os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=120)


def test_entry_point_is_found_and_off_by_default():
    code = (
        "from importlib.metadata import entry_points\n"
        "(ep,) = [e for e in entry_points(group='sglang.srt.plugins') if e.name == 'aerie_drafter_ops']\n"
        "ep.load()()\n"
        "import sys; assert not any(m.startswith('sglang') for m in sys.modules)\n"
    )
    done = run_python(code, AERIE_SERVE_DRAFTER_OPS="")
    assert done.returncode == 0, done.stderr


CODE_OF_SGLANG_S_OWN_CALLS = """
import json, sys
import torch
from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask
from sglang.srt.speculative import eagle_utils, eagle_worker_v2
import drafter_ops_hook as hook
hook.patch({"eagle_worker_v2": eagle_worker_v2, "eagle_utils": eagle_utils})
hook._on_gpu = lambda x: True
called = []
hook._call = lambda name, device, *arguments: called.append(name)
hook._hand_over = lambda kernel, *tensors: sys.exit(f"{kernel} was handed over: {[(x.dtype, x.shape, x.stride()) for x in tensors]}")
lengths, steps = torch.tensor([7, 3]), 3
for topk, nodes in ((1, 4), (4, 16)):
    score, token, parents = [], [], []
    for step in range(steps):  # as SGLang's select_top_k_tokens gives them
        width = topk if step == 0 else topk * topk
        score.append(torch.rand(2, 1 if step == 0 else topk, topk)), token.append(torch.randint(0, 9, (2, width)))
        parents.append(torch.arange(-1, topk).expand(2, -1) if step == 0 else torch.randint(0, width, (2, topk)))
    parent_list, chosen, drafted = eagle_utils.organize_draft_results(score, token, parents, nodes)
    for dtype in (torch.bool, torch.uint8):  # the buffer of SGLang's Triton attention is uint8
        sizes = {"max_bs": 4, "max_context_len": 64, "num_draft_tokens": nodes}
        buffer = maybe_create_verify_mask(is_draft_runner=False, skip_prefill=False, device="cpu", is_read=True, dtype=dtype, **sizes)
        full = eagle_utils.TreeMaskMode.FULL_MASK
        for mask in (None, buffer.buffer):
            last = torch.tensor([5, 6], dtype=torch.int32)
            built = eagle_utils.build_tree_kernel_efficient(last, parent_list, chosen, drafted, lengths, 10, topk, steps, nodes, full, mask)
    _, _, index, child, sibling, drafted = built
    eagle_utils.verify_tree_greedy_func(
        predicts=torch.zeros(2 * nodes, dtype=torch.int32), accept_index=torch.full((2, steps + 1), -1, dtype=torch.int32),
        accept_token_num=torch.empty(2, dtype=torch.int32),
        candidates=drafted.reshape(2, nodes), retrieve_index=index, retrieve_next_token=child, retrieve_next_sibling=sibling,
        target_predict=torch.argmax(torch.rand(2 * nodes, 9), dim=-1).reshape(2, nodes), topk=topk,
    )
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.rand(2 * topk, 40, dtype=dtype)
        probabilities, ids = eagle_worker_v2.fast_topk(eagle_worker_v2.renorm_draft_probs(logits, None, False), topk, dim=-1)
        assert probabilities.shape == ids.shape == (2 * topk, topk)
        eagle_worker_v2.draft_topk1_postprocess(logits, torch.arange(2 * topk), None, 1)
print(json.dumps({name: called.count(name) for name in sorted(set(called))}))
"""


@needs_sglang
@pytest.mark.slow  # imports SGLang's worker: a minute on a small machine
def test_what_sglang_itself_hands_over_is_taken():
    """SGLang's own Python builds the arguments; only the kernels and the GPU are stand-ins."""
    done = run_python(CODE_OF_SGLANG_S_OWN_CALLS, AERIE_CPU_PLATFORM="1", PYTHONPATH=os.pathsep.join([str(PLUGIN), str(ROOT / "patches" / "cpu_platform")]))
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"aerie_build_tree": 8, "aerie_draft_topk": 8, "aerie_verify_tree_greedy": 2}


@needs_sglang
@pytest.mark.slow  # imports SGLang's worker: a minute on a small machine
def test_targets_are_those_of_the_installed_sglang():
    code = """
import inspect, json
from sglang.srt.speculative import eagle_utils, eagle_worker_v2
import drafter_ops_hook as hook
names = {"eagle_worker_v2": eagle_worker_v2, "eagle_utils": eagle_utils}
before = {n: {a: inspect.signature(getattr(m, a)) for a in hook.TARGETS[n] if hasattr(m, a)} for n, m in names.items()}
print(sorted(hook.patch(names)))
for n, m in names.items():
    for a, signature in before[n].items():
        old, new = list(signature.parameters.values()), list(inspect.signature(getattr(m, a)).parameters.values())
        assert len(old) == len(new) and [p.default for p in old] == [p.default for p in new], (a, old, new)
        if a != "build_tree_kernel_efficient_func":
            assert [p.name for p in old] == [p.name for p in new], (a, old, new)
"""
    done = run_python(code, AERIE_CPU_PLATFORM="1", PYTHONPATH=os.pathsep.join([str(PLUGIN), str(ROOT / "patches" / "cpu_platform")]))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "'draft_topk1_postprocess', 'fast_topk', 'renorm_draft_probs', 'verify_tree_greedy_func'" in done.stdout


def test_another_sglang_is_refused():
    worker = types.SimpleNamespace(draft_topk1_postprocess=print, renorm_draft_probs=print, fast_topk=print)
    utils = types.SimpleNamespace(verify_tree_greedy_func=print, build_tree_kernel_efficient_func=print)
    assert len(hook.patch({"eagle_worker_v2": worker, "eagle_utils": utils})) == 5
    del utils.build_tree_kernel_efficient_func
    with pytest.raises(SystemExit, match="builds its trees elsewhere"):
        hook.patch({"eagle_worker_v2": worker, "eagle_utils": utils})
    del worker.fast_topk
    with pytest.raises(SystemExit, match="no eagle_worker_v2.fast_topk"):
        hook.patch({"eagle_worker_v2": worker, "eagle_utils": utils})


@pytest.mark.parametrize("dtype, taken", [(torch.bool, True), (torch.uint8, True), (torch.int32, False)])
def test_masks_of_a_byte_a_cell_are_taken(monkeypatch, dtype, taken):
    """The mask buffer of SGLang's Triton attention is uint8."""
    called = []
    monkeypatch.setattr(hook, "_on_gpu", lambda x: True)
    monkeypatch.setattr(hook, "_call", lambda name, *arguments: called.append(name))
    ints = torch.zeros(2, 3, dtype=torch.int64)
    answer = hook.make_build_tree(lambda *_: "sglang")(*[ints] * 2, ints[:, 0].contiguous(), torch.ones(80, dtype=dtype), *[ints] * 4, 1, 2, 3, 0)
    assert (answer, called) == ((None, ["aerie_build_tree"]) if taken else ("sglang", []))


def test_a_library_that_does_not_fit_ends_the_server_at_start(monkeypatch, tmp_path):
    import op_library

    monkeypatch.setattr(op_library, "PATH", tmp_path / "libaerie_drafter.so")
    with pytest.raises(SystemExit, match="is missing; build it with make cuda"):
        hook._library()
    op_library.PATH.write_bytes(b"")
    with pytest.raises(SystemExit, match="is no library of the drafter ops .*make cuda"):
        hook._library()
    if shutil.which("gcc"):
        (tmp_path / "old.c").write_text("int aerie_abi(void) { return 4; }\n")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", op_library.PATH, tmp_path / "old.c"], check=True)
        with pytest.raises(SystemExit, match=f"its interface is 4, not {op_library.ABI}"):
            hook._library()


def test_what_the_kernels_do_not_take_goes_to_sglang(caplog):
    """On CPU tensors every replacement hands over to the original, with the same arguments; the log says so once a kernel."""
    hook._handed_over.clear()
    seen = []
    original = lambda *args: seen.append(args) or "sglang"  # noqa: E731
    logits, ints = torch.randn(2, 8), torch.zeros(2, 3, dtype=torch.int64)
    assert hook.make_topk1(original)(logits, ints[:, 0].contiguous()) == "sglang"
    assert hook.make_renorm(original)(logits, None, False) == "sglang"
    assert hook.make_fast_topk(original)(logits, 2, -1) == "sglang"
    assert hook.make_build_tree(original)(*[ints] * 2, ints[:, 0].contiguous(), torch.ones(4, dtype=torch.bool), *[ints] * 4, 1, 2, 3, 0) == "sglang"
    assert hook.make_verify(original)(*[ints.int()] * 3, *[ints] * 5) == "sglang"
    assert len(seen) == 5
    said = [record.getMessage() for record in caplog.records]
    assert [text.split()[1] for text in said] == ["aerie_draft_topk", "aerie_build_tree", "aerie_verify_tree_greedy"]
    assert "float32 [2, 8] on cpu" in said[0]


def test_the_server_gets_it_only_when_asked_for(monkeypatch, tmp_path):
    from aerie import servers
    from aerie.config import load_config
    from aerie.errors import UserError

    config = load_config(str(ROOT / "configs" / "smollm2-135m.toml"), "", [])
    assert "AERIE_SERVE_DRAFTER_OPS" not in servers.server_env(config, "serving")
    on = load_config(str(ROOT / "configs" / "smollm2-135m.toml"), "", ["serve.drafter_ops=true"])
    monkeypatch.setattr(servers, "has_gpu", lambda: False)
    with pytest.raises(UserError, match="serve.drafter_ops = true needs an NVIDIA GPU"):
        servers.server_env(on, "serving")
    monkeypatch.setattr(servers, "has_gpu", lambda: True)
    library = tmp_path / "libaerie_drafter.so"
    monkeypatch.setattr(servers, "OPS_LIBRARY", library)
    with pytest.raises(UserError, match="is missing; build it with `make cuda`"):
        servers.server_env(on, "serving")
    library.touch()
    env = servers.server_env(on, "serving")
    assert env["AERIE_SERVE_DRAFTER_OPS"] == "1" and env["PYTHONPATH"].startswith(str(PLUGIN))
    assert "AERIE_SERVE_DRAFTER_OPS" not in servers.server_env(on, "baseline") | servers.server_env(on, "extraction")


def test_the_extraction_server_gets_it_for_fp8_rows_on_a_gpu_alone(monkeypatch, tmp_path):
    from aerie import servers
    from aerie.config import load_config

    library = tmp_path / "libaerie_drafter.so"
    monkeypatch.setattr(servers, "OPS_LIBRARY", library)
    monkeypatch.delenv("AERIE_DRAFTER_OPS", raising=False)
    bf16, fp8 = (load_config(str(ROOT / "configs" / "smollm2-135m.toml"), "", [f"extract.dtype={dtype}"]) for dtype in ("model", "fp8"))

    def given(config, gpu=True):
        monkeypatch.setattr(servers, "has_gpu", lambda: gpu)
        return servers.server_env(config, "extraction").get("SGLANG_HS_DUMP_OPS")

    assert given(fp8) is None  # not built
    library.touch()
    assert given(fp8) == str(library) and given(bf16) is None and given(fp8, gpu=False) is None
    monkeypatch.setenv("AERIE_DRAFTER_OPS", "reference")
    assert given(fp8) is None


@pytest.mark.gpu
def test_replacements_cuda():
    if not torch.cuda.is_available():
        pytest.skip("no GPU here")
    import reference_tree

    refuse = lambda *_: pytest.fail("handed over to SGLang")  # noqa: E731
    logits = torch.randn(5, 32000, device="cuda") * 3
    positions, tokens = torch.arange(5, device="cuda"), torch.zeros(5, 4, dtype=torch.int64, device="cuda")
    _, ids = hook.make_topk1(refuse)(logits, positions, tokens, 2)
    assert torch.equal(ids.squeeze(1), logits.argmax(1)) and torch.equal(tokens[:, 2], logits.argmax(1)) and not tokens[:, [0, 1, 3]].any()
    assert positions.tolist() == [1, 2, 3, 4, 5]
    probabilities, ids = hook.make_fast_topk(refuse)(hook.make_renorm(refuse)(logits, None, False), 8, -1)
    want = torch.topk(logits.double().softmax(-1), 8)
    assert torch.equal(ids, want.indices)
    torch.testing.assert_close(probabilities.double(), want.values, rtol=1e-5, atol=1e-9)
    parents, chosen = torch.tensor([[-1, 0, 1, 2, 3]] * 2, device="cuda"), torch.tensor([[0, 1, 2, 3, 6], [0, 1, 2, 4, 7]], device="cuda")
    lengths = torch.tensor([7, 3], device="cuda")
    want_tree = reference_tree.build_tree(parents.cpu(), chosen.cpu(), lengths.cpu(), 2, 3)
    for cells in (torch.bool, torch.uint8):
        mask, places = torch.ones(want_tree.mask.numel(), dtype=cells, device="cuda"), torch.empty(12, dtype=torch.int64, device="cuda")
        links = torch.full((3, 2, 6), -1, dtype=torch.int64, device="cuda")
        hook.make_build_tree(refuse)(parents, chosen, lengths, mask, places, *links, 2, 3, 6, 0)
        assert mask.to(torch.uint8).max().item() == 1
        for got, expected in zip((mask.bool(), places, *links), want_tree, strict=True):
            assert torch.equal(got.cpu(), expected)
    candidates, target = (torch.randint(0, 2, (2, 6), device="cuda") for _ in range(2))
    outputs = torch.zeros(12, dtype=torch.int32, device="cuda"), torch.full((2, 4), -1, dtype=torch.int32, device="cuda"), torch.empty(2, dtype=torch.int32, device="cuda")
    got = hook.make_verify(refuse)(*outputs, candidates, *links, target)
    for value, expected in zip(got, reference_tree.verify_tree_greedy(candidates.cpu(), *want_tree[2:], target.cpu(), 4), strict=True):
        assert torch.equal(value.cpu(), expected)
    # what SGLang captures: both top-k paths, and they follow the captured logits
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, best = hook.make_topk1(refuse)(logits, positions, None, 0)
        _, ranked = hook.make_fast_topk(refuse)(hook.make_renorm(refuse)(logits, None, False), 4, -1)
    logits.copy_(torch.randn_like(logits) * 3)
    before = positions.clone()
    graph.replay()
    assert torch.equal(best.squeeze(1), logits.argmax(1)) and torch.equal(ranked, torch.topk(logits, 4).indices) and torch.equal(positions, before + 1)
