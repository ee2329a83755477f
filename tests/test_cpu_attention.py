"""The CPU platform's attention against a naive loop in float64: padding, groups, trees, draft branches, grouped heads, MLA's unequal widths."""

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

os.environ.setdefault("AERIE_CPU_PLATFORM", "1")

attention = pytest.importorskip("aerie_cpu_platform.attention", reason="SGLang is not installed")


def naive(q, keys, values, slots, visible, scaling):
    """One request: q [Q, Hq, D], slots [K], visible [Q, K] bool -> [Q, Hq, Dv] float64."""
    k, v = keys[slots].double(), values[slots].double()
    per = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            scores = (k[:, head // per] @ q[row, head].double()) * scaling
            weights = torch.softmax(scores.masked_fill(~visible[row], float("-inf")), 0)
            out[row, head] = weights @ v[:, head // per]
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=6), st.integers(1, 4), st.sampled_from([(4, 2, 8, 8), (4, 4, 8, 8), (4, 1, 12, 8)]), st.integers(0, 2**31)
)
def test_uniform_batches(prefixes, nodes, shape, seed):
    heads, kv_heads, width, value_width = shape
    generator = torch.Generator().manual_seed(seed)
    batch = len(prefixes)
    keys, values = torch.randn(800, kv_heads, width, generator=generator), torch.randn(800, kv_heads, value_width, generator=generator)
    keys[0] = values[0] = 1e4  # the slot that padding points to: it must not be seen
    table = (torch.randperm(799, generator=generator)[: batch * 100] + 1).view(batch, 100)
    visible = torch.rand(batch, nodes, nodes, generator=generator) > 0.5
    visible[:, :, 0] = True
    lengths = torch.tensor(prefixes) + nodes
    q = torch.randn(batch * nodes, heads, width, generator=generator)
    got = torch.zeros(batch * nodes, heads, value_width)
    for group in attention.make_groups(table, lengths, visible):
        rows = slice(None) if group.rows is None else group.rows
        got[rows] = attention.attend(q[rows], keys, values, group, 0.3)
    for b, prefix in enumerate(prefixes):
        seen = torch.cat([torch.ones(nodes, prefix, dtype=torch.bool), visible[b]], dim=1)
        want = naive(q[b * nodes : (b + 1) * nodes], keys, values, table[b, : prefix + nodes], seen, 0.3)
        torch.testing.assert_close(got[b * nodes : (b + 1) * nodes].double(), want, rtol=1e-4, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 2000), min_size=1, max_size=40))
def test_groups_hold_each_request_once_and_little_padding(lengths):
    groups = attention.group_by_length(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[i] for i in group]
        assert len(own) == 1 or len(own) * max(own) <= attention.PADDING * sum(own) + 64


def fake_backend(table, keys, values):
    backend = object.__new__(attention.CpuAttnBackend)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    backend.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: keys, get_value_buffer=lambda layer: values)
    backend.swa_out_cache_loc, backend.plan = None, []
    return backend


@pytest.mark.parametrize("prefixes, new", [([0, 0], [5, 3]), ([4, 0, 7], [1, 6, 3]), ([9], [1]), ([0, 6], [70, 70])])
def test_prefill_with_and_without_a_prefix(prefixes, new):
    torch.manual_seed(0)
    heads, kv_heads, width = 4, 2, 8
    keys, values = torch.randn(400, kv_heads, width), torch.randn(400, kv_heads, width)
    table = (torch.randperm(399)[: len(new) * 90] + 1).view(len(new), 90)
    lengths = [a + b for a, b in zip(prefixes, new)]
    backend = fake_backend(table, keys, values)
    backend.plan = backend._prefills(table, lengths, new)
    layer = SimpleNamespace(layer_id=0, tp_q_head_num=heads, qk_head_dim=width, v_head_dim=width, scaling=0.3)
    q = torch.randn(sum(new), heads * width)
    got = backend._run(q, None, None, layer, None, save_kv_cache=False).view(-1, heads, width)
    start = 0
    for i, count in enumerate(new):
        seen = torch.ones(count, lengths[i], dtype=torch.bool).tril(prefixes[i])
        want = naive(q[start : start + count].view(-1, heads, width), keys, values, table[i, : lengths[i]], seen, 0.3)
        torch.testing.assert_close(got[start : start + count].double(), want, rtol=1e-4, atol=1e-5)
        start += count


@pytest.mark.parametrize("topk", [1, 3])
def test_draft_steps_see_the_prefix_and_their_own_branch(topk):
    steps, prefixes = 4, [5, 11, 1]
    table = torch.arange(1, 1 + 3 * 60).view(3, 60).to(torch.int32)
    container = object.__new__(attention.CpuMultiStepDraftBackend)
    container.topk, container.steps = topk, steps
    container.attn_backends = [fake_backend(table, None, None) for _ in range(steps - 1)]
    mode = SimpleNamespace(is_idle=lambda: False)
    container.init_forward_metadata(SimpleNamespace(forward_mode=mode, batch_size=3, req_pool_indices=torch.arange(3), seq_lens=torch.tensor(prefixes)))
    for step, backend in enumerate(container.attn_backends):
        found = {}
        for group in backend.plan:
            rows = range(3 * topk) if group.rows is None else group.rows.tolist()
            for row, slots, bias in zip(rows, group.slots, group.bias[:, 0, 0]):
                found[row] = slots[bias == 0].tolist()
        for row in range(3 * topk):
            request, branch = divmod(row, topk)
            length = prefixes[request]
            own = [length + branch * steps + s for s in range(step + 1)]
            assert found[row] == table[request][[*range(length), *own]].tolist()
