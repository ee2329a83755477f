"""The platform class: what SGLang asks a device about itself, answered for a plain CPU."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformCapabilities, PlatformEnum, SRTPlatform


def _create_attention_backend(runner):
    from .attention import CpuAttnBackend  # late: it imports what imports the platform

    return CpuAttnBackend(runner)


class AerieCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Any x86 CPU: native PyTorch operators, no graphs, no Triton. SGLang's own CPU engine wants AMX kernels instead."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()

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
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.models.deepseek_common import attention_backend_handler as handler

        from .speculation import install_draft_backends, install_kernels

        ATTENTION_BACKENDS["torch_native"] = _create_attention_backend
        install_kernels()
        install_draft_backends()

        # Without this, MLA prefill takes the MHA path of the triton handler and reads the latent cache as if it were full keys.
        handler.AttentionBackendRegistry.register("torch_native", handler._dispatch_mla_subtype)
