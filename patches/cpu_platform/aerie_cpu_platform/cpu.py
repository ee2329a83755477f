"""The platform class: what SGLang asks a device about itself, answered for a plain CPU."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform

SMALL = {"max_total_tokens": 16384, "max_running_requests": 32, "mem_fraction_static": 0.5, "sampling_backend": "pytorch", "attention_backend": "torch_native"}


def _create_attention_backend(runner):
    from .attention import CpuAttnBackend  # late: it imports what imports the platform

    return CpuAttnBackend(runner)


class AerieCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Any x86 CPU: native PyTorch operators, no graphs, no Triton. SGLang's own CPU engine wants AMX kernels instead."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

    def apply_server_args_defaults(self, server_args) -> None:
        """What the command line leaves open is set for a small machine: with SGLang's own defaults a 135 M model takes 19 GB."""
        for name, value in SMALL.items():
            if getattr(server_args, name) is None:
                setattr(server_args, name, value)

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # ServerArgs takes the name, not a torch.device

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in ("EAGLE", "EAGLE3")

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        from .kv_pool import CpuMHATokenToKVPool

        return CpuMHATokenToKVPool

    def get_speculative_cache_locs_fn(self):
        from .speculation import gather_cache_locs

        return gather_cache_locs

    def init_backend(self) -> None:
        """Runs once in each process that computes, before the first model runner is built."""
        from sglang.srt.distributed import parallel_state
        from sglang.srt.layers import dp_attention
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.model_executor import forward_batch_info
        from sglang.srt.models.deepseek_common import attention_backend_handler as handler

        from .speculation import install_draft_backends, install_kernels

        ATTENTION_BACKENDS["torch_native"] = _create_attention_backend
        install_kernels()
        install_draft_backends()

        # Data-parallel attention: they ask for AMX before they believe in a CPU, and would pin memory, copy with Triton and gather with a CUDA operator.
        forward_batch_info._is_cpu = True
        parallel_state._is_cpu = True
        dp_attention.memcpy_func = dp_attention.memcpy_cpu

        # Without this, MLA prefill takes the MHA path of the triton handler and reads the latent cache as if it were full keys.
        handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)
