"""Attention in plain PyTorch for every batch that SGLang forms, speculative ones included; registered as `torch_native`.

SGLang's own torch_native backend works request by request and knows no tree masks. Here a batch whose requests have the same few queries (decode,
draft steps, verification, draft extend) is one padded computation, and prefill computes only its new rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_schedule, get_spec
from torch.nn.functional import scaled_dot_product_attention

MAX_ROWS = 64  # up to this many queries a request, a uniform batch is computed at once
PADDING = 1.5  # requests share a group while the padded keys are at most this many times the real ones


@dataclass
class Group:
    """Requests with `queries` rows each and about as many keys: computed at once."""

    rows: torch.Tensor | None  # [B * queries] rows of the batch, or None: all, in order
    slots: torch.Tensor  # [B, K] cache slots of the keys, 0 where padded
    bias: torch.Tensor  # [B, 1, queries, K] 0 or -inf, float32
    queries: int
    _picked: dict[int, torch.Tensor] = field(default_factory=dict)

    def picked(self, kv_heads: int) -> torch.Tensor:
        """[B * Hkv * K] rows of a cache seen as [slots * Hkv, D]: one gather brings the keys in the order that bmm wants. Every layer asks."""
        if kv_heads not in self._picked:
            self._picked[kv_heads] = (self.slots.unsqueeze(1) * kv_heads + torch.arange(kv_heads).view(1, -1, 1)).flatten()
        return self._picked[kv_heads]


class Prefill(NamedTuple):
    """One request of a prefill batch."""

    start: int
    end: int  # its rows of the batch
    slots: torch.Tensor  # [K] cache slots of all its keys
    mask: torch.Tensor | None  # [end - start, K] bool; None: plain causal, no prefix


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices of `lengths` in groups whose padding stays below PADDING; one group in their own order where that holds for all."""
    if len(lengths) * max(lengths) <= PADDING * sum(lengths) + 64:
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if groups and (len(groups[-1]) + 1) * lengths[i] <= PADDING * (total + lengths[i]) + 64:
            groups[-1].append(i)
            total += lengths[i]
        else:
            groups.append([i])
            total = lengths[i]
    return groups


def make_groups(table: torch.Tensor, lengths: torch.Tensor, visible: torch.Tensor) -> list[Group]:
    """Groups for a uniform batch.

    table [B, >= max length]: cache slots; lengths [B]: keys of each request, drafts included; visible [B, Q, D] bool: which of the last D keys
    each of its Q rows may see. All earlier keys are seen by all rows.
    """
    batch, queries, tail = visible.shape
    groups = []
    parts = group_by_length(lengths.tolist())
    for part in parts:
        index = torch.tensor(part)
        own = lengths[index].unsqueeze(1)  # [b, 1]
        width = int(own.max())
        column = torch.arange(width).unsqueeze(0)  # [1, K]
        offset = column - (own - tail)  # place among the last D keys, negative before them
        allowed = visible[index].gather(2, offset.clamp(0, tail - 1).unsqueeze(1).expand(-1, queries, -1))  # [b, Q, K]
        allowed = (allowed | (offset < 0).unsqueeze(1)) & (column < own).unsqueeze(1)
        bias = torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf")).unsqueeze(1)
        slots = table[index, :width].long().masked_fill_(column >= own, 0)
        rows = None if len(parts) == 1 else (index.unsqueeze(1) * queries + torch.arange(queries)).flatten()
        groups.append(Group(rows, slots, bias, queries))
    return groups


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, scaling: float) -> torch.Tensor:
    """q [B * Q, Hq, D], keys [slots, Hkv, D], values [slots, Hkv, Dv] -> [B * Q, Hq, Dv]; float32 softmax."""
    batch, width = group.slots.shape
    heads, kv_heads, queries = q.shape[1], keys.shape[1], group.queries
    per = heads // kv_heads
    picked = group.picked(kv_heads)
    k = keys.view(-1, keys.shape[2]).index_select(0, picked).view(batch * kv_heads, width, -1).to(q.dtype)
    if values.data_ptr() == keys.data_ptr():  # MLA: the values are the front of the keys
        v = k[..., : values.shape[2]]
    else:
        v = values.view(-1, values.shape[2]).index_select(0, picked).view(batch * kv_heads, width, -1).to(q.dtype)
    rows = q.view(batch, queries, kv_heads, per, -1).permute(0, 2, 3, 1, 4).reshape(batch * kv_heads, per * queries, -1)
    scores = torch.bmm(rows, k.transpose(1, 2)).float().mul_(scaling).view(batch, heads, queries, width).add_(group.bias)
    weights = torch.softmax(scores, dim=-1).to(q.dtype).view(batch * kv_heads, per * queries, width)
    out = torch.bmm(weights, v).view(batch, kv_heads, per, queries, -1)
    return out.permute(0, 3, 1, 2, 4).reshape(batch * queries, heads, -1)


class CpuAttnBackend(TorchNativeAttnBackend):
    """Plans once a forward pass, in init_forward_metadata; every layer then reads the plan."""

    def __init__(self, model_runner):
        super().__init__(model_runner)
        self.plan: list[Group] | list[Prefill] = []
        self._verify_mask = None
        self._is_draft = model_runner.is_draft_worker

    @property
    def verify_mask(self):
        """Where the draft stage writes the tree mask: the D x D part alone."""
        nodes = get_spec().speculative_num_draft_tokens
        if self._verify_mask is None and nodes and not self._is_draft:
            from sglang.srt.layers.attention.verify_mask import VerifyMask
            from sglang.srt.speculative.eagle_utils import TreeMaskMode

            requests = self.req_to_token_pool.req_to_token.shape[0]
            self._verify_mask = VerifyMask(torch.zeros(requests * nodes * nodes, dtype=torch.bool), TreeMaskMode.QLEN_ONLY, requests)
        return self._verify_mask

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Keys of a padding request: data-parallel attention brings the batches of all ranks to one size."""
        return 1

    def init_forward_metadata(self, forward_batch) -> None:
        super().init_forward_metadata(forward_batch)
        mode = forward_batch.forward_mode
        if mode.is_idle() or forward_batch.batch_size == 0:
            self.plan = []
            return
        table = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long()]
        batch = forward_batch.batch_size
        if mode.is_decode():
            self.plan = make_groups(table, forward_batch.seq_lens, torch.ones(batch, 1, 1, dtype=torch.bool))
        elif mode.is_target_verify():
            nodes = forward_batch.spec_info.draft_token_num
            mask = forward_batch.spec_info.custom_mask[: batch * nodes * nodes].view(batch, nodes, nodes)
            self.plan = make_groups(table, forward_batch.seq_lens + nodes, mask)
        else:
            new = forward_batch.extend_seq_lens.tolist()
            if min(new) == max(new) <= MAX_ROWS and batch > 1:
                causal = torch.ones(new[0], new[0], dtype=torch.bool).tril().expand(batch, -1, -1)
                self.plan = make_groups(table, forward_batch.seq_lens, causal)
            else:
                self.plan = self._prefills(table, forward_batch.seq_lens.tolist(), new)

    @staticmethod
    def _prefills(table: torch.Tensor, lengths: list[int], new: list[int]) -> list[Prefill]:
        plan, start = [], 0
        for i, (length, count) in enumerate(zip(lengths, new)):
            mask = None if length == count else torch.ones(count, length, dtype=torch.bool).tril(length - count)
            plan.append(Prefill(start, start + count, table[i, :length].long(), mask))
            start += count
        return plan

    def _run(self, q, k, v, layer, forward_batch, save_kv_cache: bool):
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        plan = self.plan
        if len(plan) == 1 and isinstance(plan[0], Group) and len(plan[0].slots) * plan[0].queries == len(q):
            return attend(q, keys, values, plan[0], layer.scaling).reshape(q.shape[0], -1)
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)  # data-parallel attention pads a batch with rows of no request
        for item in plan:
            if isinstance(item, Group):
                rows = slice(len(item.slots) * item.queries) if item.rows is None else item.rows
                out[rows] = attend(q[rows], keys, values, item, layer.scaling)
            else:
                picked = [cache.index_select(0, item.slots).transpose(0, 1).unsqueeze(0).to(q.dtype) for cache in (keys, values)]  # [1, Hkv, K, D]
                mine = q[item.start : item.end].transpose(0, 1).unsqueeze(0)  # [1, Hq, Q, D]
                part = scaled_dot_product_attention(
                    mine, *picked, attn_mask=item.mask, is_causal=item.mask is None, scale=layer.scaling, enable_gqa=mine.shape[1] != picked[0].shape[1]
                )  # fmt: skip
                out[item.start : item.end] = part[0].transpose(0, 1)
        return out.view(q.shape[0], -1)

    def _is_plain(self, layer) -> bool:
        window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        return not (layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY or window)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if self._is_plain(layer):
            return self._run(q, k, v, layer, forward_batch, save_kv_cache)
        if forward_batch.forward_mode.is_target_verify():
            raise NotImplementedError("the CPU platform verifies drafts with plain causal attention only: no sliding window, no cross attention")
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        if self._is_plain(layer):
            return self._run(q, k, v, layer, forward_batch, save_kv_cache)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)


class CpuMultiStepDraftBackend:
    """One backend for each draft step but the last; step s of branch j sees the prefix and its own branch's s + 1 slots."""

    def __init__(self, model_runner, topk: int, speculative_num_steps: int):
        if topk > 1 and get_schedule().page_size > 1:
            raise NotImplementedError("the CPU platform drafts trees with --page-size 1 only")
        self.topk, self.steps = topk, speculative_num_steps
        self.attn_backends = [CpuAttnBackend(model_runner) for _ in range(speculative_num_steps - 1)]

    def init_forward_metadata(self, forward_batch) -> None:
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            return
        table = self.attn_backends[0].req_to_token_pool.req_to_token[forward_batch.req_pool_indices.long()]
        lengths = forward_batch.seq_lens.repeat_interleave(self.topk)  # [B * topk]
        branch = torch.arange(self.topk).repeat(forward_batch.batch_size)
        rows = table.repeat_interleave(self.topk, dim=0)
        own = lengths.unsqueeze(1) + torch.arange(self.steps).unsqueeze(0)  # where the branch's slots go, right behind the prefix
        rows.scatter_(1, own, rows.gather(1, own + (branch * self.steps).unsqueeze(1)))
        for step, backend in enumerate(self.attn_backends):
            backend.plan = make_groups(rows, lengths + step + 1, torch.ones(len(lengths), 1, 1, dtype=torch.bool))
