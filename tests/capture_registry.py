"""Walk SGLang's model registry: which classes can be captured. Run as a script it prints JSON; it imports every model file of SGLang (about 20 s)."""

from __future__ import annotations

import inspect
import json
import re
import sys
from types import SimpleNamespace
from unittest import mock

# Classes that draft for another model, or embed: they inherit the setter and are no targets.
NO_TARGET = re.compile(r"NextN|MTP|Eagle|Assistant|Embedding|^MindSpore")


def walk() -> dict[str, object]:
    """`targets`: architectures with set_eagle3_layers_to_capture, `text_models`: the classes whose forward captures, with forward's parameters and returns."""
    from sglang.srt.models.registry import ModelRegistry

    models = ModelRegistry.models
    setters = {name for name, model in models.items() if hasattr(model, "set_eagle3_layers_to_capture")}
    text_models: dict[str, dict[str, object]] = {}
    for module in {sys.modules[model.__module__] for model in models.values()}:
        for name, model in inspect.getmembers(module, inspect.isclass):
            if model.__module__ != module.__name__ or "forward" not in model.__dict__:
                continue
            try:
                source = inspect.getsource(model.forward)
            except (OSError, TypeError):
                continue
            if re.search(r"self\.layers_to_capture|_is_layer_to_capture", source):
                returns = re.findall(r"return ((?:\(.*\)|[\w, ]+), \w*aux_hidden_states\w*(?:\.finalize\(\))?)$", source, re.MULTILINE)
                text_models[f"{module.__name__.rpartition('.')[2]}.{name}"] = {"parameters": list(inspect.signature(model.forward).parameters), "returns": returns}
    return {
        "registered": len(models), "targets": sorted(name for name in setters if not NO_TARGET.search(name)),
        "drafts": sorted(name for name in setters if NO_TARGET.search(name)), "text_models": text_models,
    }  # fmt: skip


def prefill_graphs() -> dict[str, bool]:
    """Whether capture refuses prefill CUDA graphs, for each of SGLang's backends of that phase and for a config that is not published; as on a machine with a GPU."""
    import torch
    from capture_fakes import load_hook
    from sglang.srt import runtime_context
    from sglang.srt.model_executor import cuda_graph_config as graphs

    found = {}
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        found["not published"] = load_hook()._prefill_graphs()
        for backend in graphs.ALLOWED_BACKENDS_PER_PHASE[graphs.Phase.PREFILL]:
            config = graphs.CudaGraphConfig(prefill=graphs.PhaseConfig(backend=backend))
            published = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config))
            with mock.patch.object(runtime_context, "get_exec", lambda: published), mock.patch.object(graphs, "get_exec", lambda: published, create=True):
                found[backend] = load_hook()._prefill_graphs()
    return found


if __name__ == "__main__":
    print("REGISTRY " + json.dumps(walk() | {"prefill_graphs": prefill_graphs()}))
