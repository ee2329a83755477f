#!/usr/bin/env python3
"""Compile SGLang's Triton attention and expert kernels for a GPU that is not here (default SM120) and compare their shared memory with what that GPU gives a block.

Needs no GPU: SGLang's own wrappers choose tiles as they would on that card, and Triton's compiler says what the kernel asks for. Exit code 1 when one does not fit.
"""

import argparse
import sys
from importlib import metadata, import_module
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.errors import UserError, run_main
from aerie.report import write_report

SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}  # bytes a block may have, CUDA C programming guide
POINTERS = {"torch.bfloat16": "*bf16", "torch.float16": "*fp16", "torch.float32": "*fp32", "torch.int32": "*i32", "torch.int64": "*i64", "torch.bool": "*i1", "torch.uint8": "*u8", "torch.float8_e4m3fn": "*fp8e4nv"}


class Recorder:
    """Stands in for a @triton.jit kernel: a launch compiles it for `capability` instead, and remembers the shared memory."""

    def __init__(self, kernel: Any, capability: int, found: list[tuple[str, int, dict[str, Any]]]):
        self.kernel, self.capability, self.found = kernel, capability, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *args: Any, **kwargs: Any) -> None:
        import torch
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        params = self.kernel.params
        values = {param.name: param.default for param in params if param.has_default} | dict(zip(self.kernel.arg_names, args, strict=False))
        options = {name: kwargs[name] for name in ("num_warps", "num_stages") if name in kwargs}
        values |= {name: value for name, value in kwargs.items() if name in self.kernel.arg_names}
        signature, constants, attributes = {}, {}, {}
        for index, param in enumerate(params):
            value = values[param.name]
            if param.is_constexpr or value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
                signature[param.name], constants[(index,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[param.name], attributes[(index,)] = POINTERS[str(value.dtype)], [["tt.divisibility", 16]]
            elif isinstance(value, bool):
                signature[param.name] = "i1"
            elif isinstance(value, int):
                signature[param.name] = "i32"
                if value % 16 == 0:
                    attributes[(index,)] = [["tt.divisibility", 16]]
            else:
                signature[param.name] = "fp32"
        source = ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options)
        blocks = {name: value for name, value in values.items() if name.startswith("BLOCK") and isinstance(value, int)} | options
        self.found.append((self.kernel.__name__, compiled.metadata.shared, blocks))


def as_if(module: Any, capability: int, found: list, tiles_of: int = 0) -> dict[str, Any]:
    """Make `module` believe it runs on that GPU, with its kernels replaced; returns what to put back. tiles_of: choose tiles as for another GPU."""
    kernels = {name: value for name, value in vars(module).items() if type(value).__name__ == "JITFunction" and (name.startswith(("_fwd", "_verify")) or name == "fused_moe_kernel")}
    changed = {name: Recorder(value, capability, found) for name, value in kernels.items()} | {"_is_cuda": True, "_is_hip": False, "CUDA_CAPABILITY": divmod(tiles_of or capability, 10), "is_arch_support_pdl": lambda: False}
    if hasattr(module, "scaled_fp8_quant"):
        changed["scaled_fp8_quant"] = lambda rows, scale, **options: (rows, scale)  # a kernel of its own, which runs on a GPU alone
    before = {name: vars(module).get(name) for name in changed}
    vars(module).update(changed)
    return before


def cases() -> dict[str, tuple[str, Callable[[Any], None]]]:
    """What the configs of this repository run under --attention-backend triton, and Kimi's vision tower: name -> (module, call)."""
    import torch

    def rows(count: int, heads: int, dim: int) -> torch.Tensor:
        return torch.empty(count, heads, dim, dtype=torch.bfloat16)

    def indptr(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def extend(heads: int, kv_heads: int, key: int, value: int) -> Callable[[Any], None]:
        def call(module: Any) -> None:
            module.extend_attention_fwd(
                rows(64, heads, key), rows(64, kv_heads, key), rows(64, kv_heads, value), rows(64, heads, value), rows(256, kv_heads, key), rows(256, kv_heads, value),
                indptr(0, 64), indptr(0, 128), torch.zeros(128, dtype=torch.int64), None, True, None, 64, 1.0, 1.0, sm_scale=0.1,
            )  # fmt: skip
        return call

    def decode(heads: int, kv_heads: int, key: int, value: int) -> Callable[[Any], None]:
        def call(module: Any) -> None:
            splits = 8
            module.decode_attention_fwd_grouped(
                rows(4, heads, key), rows(256, kv_heads, key), rows(256, kv_heads, value), rows(4, heads, value), indptr(0, 8, 16, 24, 32), torch.zeros(32, dtype=torch.int64),
                torch.empty(4, heads, splits, value), torch.empty(4, heads, splits), indptr(8, 8, 8, 8), splits, 0.1, 1.0,
            )  # fmt: skip
        return call

    def verify(function: str, heads: int, kv_heads: int, key: int, value: int) -> Callable[[Any], None]:
        def call(module: Any) -> None:
            ran = getattr(module, function)(
                rows(16, heads, key), rows(16, kv_heads, key), rows(16, kv_heads, value), rows(16, heads, value), rows(256, kv_heads, key), rows(256, kv_heads, value),
                indptr(0, 4, 8, 12, 16), indptr(0, 8, 16, 24, 32), torch.zeros(32, dtype=torch.int64), None, True, None, 4, 1.0, 1.0, sm_scale=0.1, max_bs=4,
            )  # fmt: skip
            assert ran, f"{function} did not take this shape"
        return call

    def vision(module: Any) -> None:
        module.context_attention_fwd(rows(256, 16, 72), rows(256, 16, 72), rows(256, 16, 72), rows(256, 16, 72), indptr(0), indptr(256), 256, is_causal=False)

    def experts(*tiles: int, hopper: tuple[int, ...] = (), blocks: bool = True) -> Callable[[Any], None]:
        """One FP8 expert GEMM of DeepSeek-V3 at TP 8: H 7168, gate and up of 256 each; tiles (M, N, K, warps, stages) as get_default_config() of fused_moe_triton_config.py
        gives them for blocks of 128, and for FP8 without blocks where shared memory is small; hopper: those that it gives elsewhere, under --tiles-of 90."""

        def call(module: Any) -> None:
            import triton.language as tl

            tokens, hidden, wide, fp8 = 64, 7168, 512, torch.float8_e4m3fn
            chosen = hopper if hopper and module.CUDA_CAPABILITY[0] == 9 else tiles
            config = dict(zip(("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps", "num_stages"), chosen, strict=True)) | {"GROUP_SIZE_M": 32}
            scales = (torch.empty(tokens, hidden // 128), torch.empty(8, wide // 128, hidden // 128)) if blocks else (torch.empty(1), torch.empty(8))
            module.invoke_fused_moe_kernel(
                torch.empty(tokens, hidden, dtype=fp8), torch.empty(8, wide, hidden, dtype=fp8), None, torch.empty(tokens, 8, wide, dtype=torch.bfloat16),
                *scales, None, torch.empty(tokens, 8), torch.zeros(tokens, 8, dtype=torch.int32),
                torch.zeros(1024, dtype=torch.int32), torch.zeros(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), False, 8,
                config, tl.bfloat16, True, False, False, False, False, [128, 128] if blocks else None,
            )  # fmt: skip

        return call

    ops, moe = "sglang.kernels.ops.attention", "sglang.kernels.ops.moe.fused_moe_triton_kernels"
    return {
        "prefill, MLA 192/128 (Kimi, DeepSeek)": (f"{ops}.extend_attention", extend(8, 8, 192, 128)),
        "prefill over the latent, MLA 576/512": (f"{ops}.extend_attention", extend(8, 1, 576, 512)),
        "prefill, heads of 128 (drafters, Llama, Qwen)": (f"{ops}.extend_attention", extend(8, 8, 128, 128)),
        "decode, MLA 576/512": (f"{ops}.decode_attention", decode(8, 1, 576, 512)),
        "decode, grouped heads of 128": (f"{ops}.decode_attention", decode(32, 8, 128, 128)),
        "verify four drafted tokens, heads of 128": (f"{ops}.verify_splitkv", verify("verify_splitkv_fwd", 32, 8, 128, 128)),
        "verify four drafted tokens, MLA 576/512": (f"{ops}.verify_mla", verify("verify_shared_kv_fwd", 8, 1, 576, 512)),
        "experts, FP8 in blocks (DeepSeek-V3, Kimi-K2)": (moe, experts(64, 128, 128, 4, 3)),
        "experts, FP8 without blocks, many tokens": (moe, experts(64, 128, 256, 4, 2, hopper=(128, 256, 128, 8, 4), blocks=False)),
        "experts, FP8 without blocks, few tokens": (moe, experts(32, 64, 256, 4, 4, hopper=(64, 128, 128, 4, 4), blocks=False)),
        "vision tower, heads of 72 (Kimi-K2.5)": (f"{ops}.prefill_attention", vision),
    }


def measure(capability: int, tiles_of: int = 0) -> list[dict[str, Any]]:
    """Compile every case; shared memory in bytes and the tiles that SGLang chose. A kernel that this SGLang does not have is left out."""
    results = []
    for name, (path, call) in cases().items():
        try:
            module = import_module(path)
        except ModuleNotFoundError as exc:
            if exc.name != path:
                raise
            continue
        found: list[tuple[str, int, dict[str, Any]]] = []
        before = as_if(module, capability, found, tiles_of)
        try:
            call(module)
        finally:
            vars(module).update(before)
        results += [{"case": name, "kernel": kernel, "shared_bytes": shared, "tiles": tiles} for kernel, shared, tiles in found if kernel != "_fwd_kernel_stage2"]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sm", type=int, default=120, choices=sorted(SHARED), help="compute capability times ten (default: %(default)s)")
    parser.add_argument("--tiles-of", type=int, default=0, choices=sorted(SHARED), help="choose tiles as for another GPU: 90 shows the crash that sglang #14311 mended")
    parser.add_argument("--report", default="", metavar="FILE", help="write the numbers as JSON")
    args = parser.parse_args()
    try:
        versions = f"SGLang {metadata.version('sglang')}, Triton {metadata.version('triton')}"
    except metadata.PackageNotFoundError as exc:
        raise UserError(f"{sys.executable} has no {exc.name}; run `make setup`, or use a Python that has it") from None
    limit = SHARED[args.sm]
    print(f"{versions}; SM{args.sm} gives a block {limit:,} bytes of shared memory")
    results = measure(args.sm, args.tiles_of)
    for result in results:
        mark = "✓" if result["shared_bytes"] <= limit else "✗"
        tiles = " ".join(f"{key.removeprefix('BLOCK_')}={value}" for key, value in result["tiles"].items())
        print(f"  {mark} {result['shared_bytes']:8,}  {result['case']}: {result['kernel']} ({tiles})")
    if args.report:
        write_report(Path(args.report), sm=args.sm, limit_bytes=limit, kernels=results)
    return 0 if all(result["shared_bytes"] <= limit for result in results) else 1


if __name__ == "__main__":
    run_main(main)
