"""What is known to go wrong on SM120 (RTX PRO 6000, RTX 5090), as rules over the config, the versions and the environment. Facts with their source; docs/sm120.md has the table."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Callable, Iterator

from .checks import Facts, Result, version_tuple

NOT_BUILT = {
    "fa3": "its kernels are built for SM90 alone: 'no kernel image' (sglang #22280)",
    "flashmla": "its kernels are built for SM90 alone",
    "trtllm_mla": "its kernels need tcgen05, which SM120 has not: 'Unsupported architecture' (sglang #24633, #17880)",
    "cutedsl_mla": "its kernels need tcgen05, which SM120 has not",
    "tokenspeed_mla": "reported as not compatible with SM120 (vllm #42426)",
}


@dataclass(frozen=True)
class Rule:
    """applies(facts): the combination is there. wrong: a cross, else a note."""

    name: str
    applies: Callable[[Facts], bool]
    detail: str
    todo: str
    wrong: bool = True


def backends(facts: Facts) -> set[str]:
    """Attention backends that the config names, for prefill, decode and the drafter."""
    names = ("attention-backend", "prefill-attention-backend", "decode-attention-backend", "speculative-draft-attention-backend")
    found = {str(facts.server_args[name]) for name in names if name in facts.server_args}
    if facts.config and facts.config.serve.draft_attention_backend:
        found.add(facts.config.serve.draft_attention_backend)
    return found


def env(facts: Facts, name: str) -> str:
    """A variable as the server will see it."""
    return (facts.config.server.env.get(name) if facts.config else None) or os.environ.get(name, "")


def before(package: str, version: str) -> Callable[[Facts], bool]:
    return lambda facts: bool(facts.version(package)) and version_tuple(facts.version(package)) < version_tuple(version)


RULES = (
    *(Rule(f"attention backend {name}", lambda facts, name=name: name in backends(facts), why, "use flashinfer or triton") for name, why in NOT_BUILT.items()),
    Rule("Triton attention before sglang #14311", lambda facts: before("sglang", "0.5.7")(facts),
         "Hopper's tiles ask for 106,496 bytes of shared memory and SM120 has 101,376: crash at the first prefill", "use SGLang 0.5.17 or 0.5.23"),
    Rule("float32 with Triton attention", lambda facts: bool(facts.config) and facts.config.target.dtype == "float32" and "triton" in backends(facts),
         "heads of 128 and more ask for 131,072 bytes of shared memory in float32 (scripts/check_kernels.py), and SM120 has 101,376", "serve in bfloat16, or set attention-backend = \"flashinfer\""),
    Rule("FP8 KV cache", lambda facts: str(facts.server_args.get("kv-cache-dtype", "auto")).startswith("fp8"),
         "16 tok/s instead of 90 on Kimi-K2.5's own checkpoint, garbled text on GLM-5 (owners' notes, May 2026)", "kv-cache-dtype = \"auto\"; compare texts before you trust another"),
    Rule("MoE runner flashinfer_cutlass", lambda facts: facts.server_args.get("moe-runner-backend") == "flashinfer_cutlass",
         "finite, plausible and wrong answers were seen on SM120 (flashinfer #2708, #2723; CUTLASS #3096)", "leave moe-runner-backend to SGLang (Marlin for INT4), and compare with a reference"),
    Rule("MoE runner deep_gemm or flashinfer_trtllm", lambda facts: facts.server_args.get("moe-runner-backend") in ("deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed"),
         "kernels for SM90 and SM100", "leave moe-runner-backend to SGLang"),
    Rule("FP4 checkpoint", lambda facts: "fp4" in str(facts.server_args.get("quantization", "")),
         "slower than INT4 with Marlin (53 against 90 tok/s on Kimi-K2.5), and FP4 kernels that fail to start or answer wrongly (CUTLASS #3096)", "prefer the INT4 checkpoint", wrong=False),
    Rule("DeepGEMM", lambda facts: env(facts, "SGLANG_ENABLE_JIT_DEEPGEMM") not in ("0", "false", "False"),
         "owners switch it off on SM120", 'server.env: SGLANG_ENABLE_JIT_DEEPGEMM = "0"', wrong=False),
    Rule("expandable segments", lambda facts: "expandable_segments:True" in env(facts, "PYTORCH_CUDA_ALLOC_CONF") and len(facts.gpus) > 1 and not facts.server_args.get("disable-custom-all-reduce"),
         "crashes together with the one-shot all-reduce over PCIe (owners' notes, May 2026)", "disable-custom-all-reduce = true, or drop it from PYTORCH_CUDA_ALLOC_CONF"),
    Rule("NCCL over PCIe", lambda facts: len(facts.gpus) > 1 and not env(facts, "NCCL_P2P_LEVEL") and not env(facts, "NCCL_P2P_DISABLE"),
         "neither NCCL_P2P_LEVEL nor NCCL_P2P_DISABLE is set", 'server.env: NCCL_P2P_LEVEL = "SYS" for latency; NCCL_P2P_DISABLE = "1" with more channels for throughput on two sockets', wrong=False),
    Rule("flex attention backward", lambda facts: bool(facts.version("torch")),
         "torch has no configuration for heads above 128 on SM120 (pytorch #198224, open): 114,688 bytes of 101,376", "the trainer here does not use it; nothing to do", wrong=False),
    Rule("speculation with flashinfer", lambda facts: before("sglang", "0.5.12")(facts) and "flashinfer" in backends(facts),
         "illegal memory access every few hours under NGRAM speculation (sglang #24361)", "use SGLang 0.5.17 or 0.5.23"),
)  # fmt: skip


def check_sm120(facts: Facts) -> Iterator[Result]:
    """Every rule that applies; one tick when none does. Nothing on other cards."""
    if not facts.sm120:
        return
    found = [Result(False if rule.wrong else None, rule.name, rule.detail, rule.todo) for rule in RULES if rule.applies(facts)]
    yield from found
    if not any(result.ok is False for result in found):
        yield Result(True, "SM120", f"none of the {sum(rule.wrong for rule in RULES)} combinations that are known to fail; docs/sm120.md lists them")
