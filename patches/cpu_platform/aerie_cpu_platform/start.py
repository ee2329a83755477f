"""A quicker start: SGLang's processes are forked from the one that has imported everything, instead of importing it again each (10 s of CPU time a process)."""

from __future__ import annotations

import multiprocessing

from . import wanted


def register() -> None:
    """Entry point of SGLang's general plugins (group `sglang.srt.plugins`); does nothing on a GPU, where a process with CUDA must not be forked."""
    if not wanted():
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork, HookType.AFTER)


def _fork(result, *args, **kwargs):
    """After SGLang has asked for spawn: nothing has run yet in this process but imports and argument checks, so that forking it is safe."""
    multiprocessing.set_start_method("fork", force=True)
    return result
