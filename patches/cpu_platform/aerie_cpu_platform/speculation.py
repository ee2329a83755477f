"""EAGLE speculation on the CPU: SGLang's Triton kernels on its path, replaced by PyTorch functions that do the same.

Those that build and verify the tree are the references of cuda/ (reference_tree.py), the same functions that the CUDA kernels are checked against.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Callable

import torch

NAME = "reference_tree"


def load_reference_tree() -> ModuleType:
    """cuda/reference_tree.py of the checkout that started the server (AERIE_ROOT), of this file's own checkout, or the copy installed beside this file."""
    here = Path(__file__).resolve().parent
    places = [here.parents[2] / "cuda", here]
    if os.environ.get("AERIE_ROOT"):
        places.insert(0, Path(os.environ["AERIE_ROOT"]) / "cuda")
    for place in places:
        path = place / f"{NAME}.py"
        if path.is_file():
            spec = importlib.util.spec_from_file_location(f"aerie_cpu_platform.{NAME}", path)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            return module
    raise ImportError(f"{NAME}.py is in none of {', '.join(map(str, places))}; set AERIE_ROOT to the Aerie checkout")


def replace(module: ModuleType, name: str, function: Callable) -> None:
    """module.name = function, also in every SGLang module that has already imported it by name (a name without a CPU kernel is None there)."""
    old = getattr(module, name)
    for other in [item for key, item in sys.modules.items() if key.startswith("sglang.")]:
        if getattr(other, "__dict__", {}).get(name) is old:
            setattr(other, name, function)


def assign_draft_cache_locs(req_pool_indices, req_to_token, seq_lens, out_cache_loc, topk, num_cols, positions=None, mrope=None) -> None:
    """The topk * num_cols slots of each request from seq_lens on, into out_cache_loc [B * topk * num_cols]."""
    batch, count = seq_lens.shape[0], topk * num_cols
    columns = seq_lens.long().unsqueeze(1) + torch.arange(count)
    out_cache_loc.copy_(req_to_token[req_pool_indices.long().unsqueeze(1), columns].view(batch * count))
    if positions is not None:
        positions.copy_(seq_lens.repeat_interleave(topk))
    if mrope is not None:
        mrope.copy_(seq_lens.repeat_interleave(topk).expand(3, -1))


def assign_req_to_token_pool(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, batch_size) -> None:
    """Write each request's new slots, end to end in out_cache_loc, to columns start_offset .. end_offset of its row."""
    counts = (end_offset - start_offset).long()
    first = counts.cumsum(0) - counts
    columns = torch.arange(int(counts.sum())) + (start_offset.long() - first).repeat_interleave(counts)
    req_to_token[req_pool_indices.long().repeat_interleave(counts), columns] = out_cache_loc[: columns.numel()].to(req_to_token.dtype)


def gather_cache_locs(*, req_pool_indices, req_to_token, start_offset, end_offset, batch_size, draft_token_num, device) -> torch.Tensor:
    """Slots start_offset .. end_offset of each request, end to end [B * draft_token_num]."""
    columns = start_offset.long().unsqueeze(1) + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices.long().unsqueeze(1), columns].flatten().to(torch.int64)


def fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, accept_stride, batch_size) -> None:
    """The last accepted token of each request; accept_lens counts the bonus token."""
    last = accept_lens.long() - 1 + torch.arange(batch_size) * accept_stride
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_front_out_cache_loc(num_front, out_cache_loc, front_out_cache_loc) -> None:
    """The first num_front[i] slots of each request's window, packed end to end."""
    window = out_cache_loc.view(num_front.numel(), -1)
    kept = window[torch.arange(window.shape[1]).unsqueeze(0) < num_front.unsqueeze(1)]
    front_out_cache_loc[: kept.numel()] = kept.to(front_out_cache_loc.dtype)


def fill_accept_out_cache_loc(accept_index, out_cache_loc, accept_out_cache_loc, size) -> None:
    """The slots of the accepted rows (accept_index > -1), packed end to end."""
    index = accept_index.flatten()[:size].long()
    kept = out_cache_loc[index[index > -1]]
    accept_out_cache_loc[: kept.numel()] = kept.to(accept_out_cache_loc.dtype)


def top_k_renorm(probs: torch.Tensor, top_ks: torch.Tensor) -> torch.Tensor:
    """probs [N, V] with all but each row's top_ks [N] largest set to 0, summing to 1 again; equals of the smallest one kept stay too."""
    ordered = probs.sort(dim=-1, descending=True).values
    smallest = ordered.gather(1, (top_ks.long().clamp(1, probs.shape[1]) - 1).unsqueeze(1))
    kept = probs.masked_fill(probs < smallest, 0.0)
    return kept / kept.sum(dim=-1, keepdim=True)


def top_p_renorm(probs: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """probs [N, V] cut to the fewest tokens that reach top_ps [N] together, summing to 1 again."""
    ordered, order = probs.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # mass of the likelier ones
    kept = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(before >= top_ps.unsqueeze(1), 0.0))
    return kept / kept.sum(dim=-1, keepdim=True)


def draw(target_probs: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One token for each node: target_probs [B, D, V] and a number in [0, 1) for each node [B, D] -> [B, D] int64, by the inverse of the sums."""
    sums = target_probs.double().cumsum(-1)
    found = torch.searchsorted(sums, (coins.double().unsqueeze(-1) * sums[..., -1:]), right=True).squeeze(-1)
    return torch.minimum(found, (target_probs > 0).double().cumsum(-1).argmax(-1))  # never past the last token that can come


def install_kernels() -> None:
    """Put the PyTorch functions where SGLang's EAGLE worker looks. Runs before the worker is imported or after, in each process."""
    from sglang.kernels.ops.sampling import renorm
    from sglang.kernels.ops.speculative import cache_locs, eagle, spec_tree, verify_sampling
    from sglang.srt.mem_cache import allocation

    tree = load_reference_tree()

    def build_tree(
        parent_list, top_scores_index, seq_lens, tree_mask, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling,
        topk, spec_steps, num_verify_tokens, tree_mask_mode,
    ) -> None:  # fmt: skip
        if tree_mask_mode not in (spec_tree.TreeMaskMode.FULL_MASK, spec_tree.TreeMaskMode.QLEN_ONLY):
            raise NotImplementedError(f"the CPU platform builds no tree mask of mode {tree_mask_mode!r}")
        built = tree.build_tree(parent_list, top_scores_index, seq_lens, topk, spec_steps, full_mask=tree_mask_mode == spec_tree.TreeMaskMode.FULL_MASK)
        tree_mask[: built.mask.numel()] = built.mask
        positions.copy_(built.positions)
        retrieve_index.copy_(built.retrieve_index)
        retrieve_next_token.copy_(built.retrieve_next_token)
        retrieve_next_sibling.copy_(built.retrieve_next_sibling)

    def verify_tree_greedy(
        predicts, accept_index, accept_token_num, candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict, topk=-1
    ):  # fmt: skip
        taken = tree.verify_tree_greedy(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict, accept_index.shape[1])
        predicts.copy_(taken.predicts)
        accept_index.copy_(taken.accept_index)
        accept_token_num.copy_(taken.accept_token_num)
        return predicts, accept_index, accept_token_num

    def sample_tree(
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, uniform_samples,
        uniform_samples_for_final_sampling, target_probs, draft_probs, threshold_single=1.0, threshold_acc=1.0, deterministic=True,
    ) -> None:  # fmt: skip
        # Draw the target's own next token at every node, then walk as greedy verification does: each answer is an exact sample of the target's
        # distribution, which is what SGLang's kernel computes with both thresholds at 1. (Thresholds below 1 accept more there, not here.)
        drawn = draw(target_probs, uniform_samples)
        verify_tree_greedy(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, retrive_next_sibling, drawn)

    replace(verify_sampling, "tree_speculative_sampling_target_only", sample_tree)
    replace(renorm, "top_k_renorm_prob", top_k_renorm)
    replace(renorm, "top_p_renorm_prob", top_p_renorm)
    replace(spec_tree, "build_tree_kernel_efficient_func", build_tree)
    replace(spec_tree, "verify_tree_greedy_func", verify_tree_greedy)
    replace(cache_locs, "assign_draft_cache_locs_contiguous_func", assign_draft_cache_locs)
    replace(cache_locs, "fill_front_out_cache_loc_func", fill_front_out_cache_loc)
    replace(eagle, "fill_accept_out_cache_loc_func", fill_accept_out_cache_loc)
    replace(allocation, "assign_req_to_token_pool_func", assign_req_to_token_pool)
    replace(eagle, "fill_bonus_tokens_func", fill_bonus_tokens)


def install_draft_backends() -> None:
    """Teach SGLang's factory of draft attention backends the name torch_native."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    original = DraftBackendFactory._create_backend

    def create_backend(self, backend_name, backend_map, error_template, stamps_children=False):
        def make():
            from .attention import CpuAttnBackend, CpuMultiStepDraftBackend

            if stamps_children:  # the container of the draft steps
                return "torch_native", CpuMultiStepDraftBackend(self.draft_model_runner, self.topk, self.speculative_num_steps)
            return "torch_native", CpuAttnBackend(self.draft_model_runner)

        return original(self, backend_name, backend_map | {"torch_native": make}, error_template, stamps_children)

    DraftBackendFactory._create_backend = create_backend
