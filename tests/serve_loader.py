"""Load drafter folders with SGLang's own classes on the CPU, no server: serve_loader.py PORT TARGET FOLDER... prints, for each, the parameters that no tensor filled."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from transformers import AutoConfig


def unfilled(folder: Path) -> list[str]:
    """Names of parameters (SGLang's, fused ones by part) whose values the loader left as they were."""
    config = AutoConfig.from_pretrained(folder)
    if config.architectures[0] == "LlamaForCausalLMEagle3":
        from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3 as Model
    else:
        from sglang.srt.models.kimi_k25_eagle3 import Eagle3DeepseekV2ForCausalLM as Model
    model = Model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    return sorted(name for name, parameter in model.named_parameters() if not bool(parameter.isfinite().all()))


def main() -> None:
    port, target, *folders = sys.argv[1:]
    args = ServerArgs(model_path=target, device="cpu", attention_backend="torch_native", mem_fraction_static=0.1)
    args.resolve() if hasattr(args, "resolve") else None
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=f"tcp://127.0.0.1:{port}", backend="gloo")
    initialize_model_parallel(backend="gloo")
    torch.set_default_dtype(torch.float32)
    found = {}
    for folder in folders:
        try:
            found[folder] = unfilled(Path(folder))
        except Exception as exc:  # noqa: BLE001  what the server would die of
            found[folder] = [f"{type(exc).__name__}: {exc}"]
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    main()
