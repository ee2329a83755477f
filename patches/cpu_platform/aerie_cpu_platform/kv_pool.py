"""The key-value pool of a CPU server: accepted rows of a tree are moved by indexing, not by a Triton kernel."""

from __future__ import annotations

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """SGLang's pool without the Triton copy; the MLA pool moves its rows by indexing already."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None
        self.use_native_move_kv_cache = True
