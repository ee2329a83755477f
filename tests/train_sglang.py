"""Run as a script: SGLang's own drafter class, loaded from an export, on given states; prints nothing, writes its logits. No server, no kernels: attention is plain here.

    python train_sglang.py FOLDER...

Each FOLDER holds drafter/ and states.safetensors; logits.safetensors is written beside them. States: input_ids [T], aux [T, A*H], embedding [V, H], steps [];
logits: logits_<k> [T-1-k, Vd]: row t at TTT step k, drafted from the given text.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["AERIE_CPU_PLATFORM"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "patches" / "cpu_platform"))
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from safetensors.torch import load_file, save_file


class Quiet:
    """Stands for SGLang's forward batch and mode: what is not set is None, every is_...() is False."""

    def __init__(self, **fields) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str):
        return (lambda *_: False) if name.startswith(("is_", "contains_")) else None


class PlainAttention:
    """Keeps every key by row and chain. Each call after the first is one later step of all rows."""

    prefill_attention_backend_str = decode_attention_backend_str = "torch_native"

    def __init__(self) -> None:
        self.prefix: tuple[torch.Tensor, torch.Tensor] | None = None  # first-step keys and values
        self.chain: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
        q, k, v = q.view(len(q), heads, -1), k.view(len(k), kv_heads, -1), v.view(len(v), kv_heads, -1)
        if self.prefix is None:
            self.prefix = (k, v)
        else:
            self.chain.append((k, v))
        out = torch.zeros(len(q), heads, v.shape[-1])
        for row in range(len(q)):
            for head in range(heads):
                group = head // (heads // kv_heads)
                keys = torch.cat([self.prefix[0][: row + 1, group], *(part[0][row : row + 1, group] for part in self.chain)])
                values = torch.cat([self.prefix[1][: row + 1, group], *(part[1][row : row + 1, group] for part in self.chain)])
                out[row, head] = torch.softmax(keys @ q[row, head] * layer.scaling, dim=0) @ values
        return out.flatten(1)


def start(folder: Path) -> None:
    """What SGLang wants to be there before a model is built: arguments and process groups."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.models.deepseek_common import attention_backend_handler
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path=str(folder), device="cpu", dtype="float32", attention_backend="torch_native", disable_radix_cache=True)
    get_context().set_server_args(server_args)
    get_parallel().override_permanently(tp_rank=0, pp_rank=0)
    parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{folder}.rendezvous", backend="gloo")
    parallel_state.initialize_model_parallel()
    attention_backend_handler.AttentionBackendRegistry.register("torch_native", attention_backend_handler._dispatch_mla_subtype)  # as the CPU platform does
    initialize_dp_attention(server_args)


def load(folder: Path):
    """The model as SGLang's loader builds it, on the CPU, in float32."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_loader import get_model

    model_config = ModelConfig(str(folder), dtype="float32", is_draft_model=True)
    return get_model(model_config=model_config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))


@torch.no_grad()
def draft(folder: Path) -> None:
    """Logits of the drafter in folder/drafter on folder/states.safetensors."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    given, model, backend = load_file(folder / "states.safetensors"), load(folder / "drafter"), PlainAttention()
    model.model.embed_tokens.weight.data[: len(given["embedding"])] = given["embedding"]  # SGLang pads vocabularies to 64
    ids, hidden = given["input_ids"].long(), given["aux"]
    logits = {"hot_token_id": model.hot_token_id.clone()}
    for step in range(int(given["steps"])):
        count = len(ids) - 1 - step
        batch = Quiet(spec_info=Quiet(hidden_states=hidden[:count]), forward_mode=Quiet())
        with forward_context(ForwardContext(attn_backend=backend)):
            normed, aux = model.model(ids[1 + step :], torch.arange(count) + step, batch)
        logits[f"logits_{step}"] = (normed @ model.lm_head.weight[: model.config.draft_vocab_size].T).contiguous()
        hidden = aux[0]
    save_file(logits, folder / "logits.safetensors")


def main() -> None:
    folders = [Path(word) for word in sys.argv[1:]]
    start(folders[0] / "drafter")
    for folder in folders:
        draft(folder)


if __name__ == "__main__":
    main()
