"""A fake SGLang text model and batches for the capture hook: layer i adds a known amount to each row, so every captured value tells where it came from."""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch

HIDDEN = 8
LAYERS = 6
CODE = Path(__file__).parents[1] / "patches" / "hidden_state_dump.py"


def load_hook() -> types.ModuleType:
    """patches/hidden_state_dump.py of this checkout, as a module (it needs no SGLang until it is installed)."""
    if "aerie_hook_under_test" not in sys.modules:
        spec = importlib.util.spec_from_file_location("aerie_hook_under_test", CODE)
        sys.modules["aerie_hook_under_test"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["aerie_hook_under_test"])
    return sys.modules["aerie_hook_under_test"]


class Mode(enum.IntEnum):
    """The forward modes that matter here, by SGLang's names."""

    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4
    TARGET_VERIFY = 5


class Layer(torch.nn.Module):
    """Adds `amount` to every value."""

    def __init__(self, amount: float):
        super().__init__()
        self.amount = torch.nn.Parameter(torch.tensor(amount))


class TextModel(torch.nn.Module):
    """style 'list' reads layers_to_capture, 'flags' reads the per-layer flags, 'packed' returns one wide tensor; norm doubles the last state."""

    def __init__(self, style: str = "list"):
        super().__init__()
        self.style = style
        self.layers = torch.nn.ModuleList(Layer(10.0 ** -(index + 1)) for index in range(LAYERS))
        self.layers_to_capture: list[int] = []
        self.calls: list[bool] = []  # was capture on?

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any, input_embeds: torch.Tensor | None = None) -> Any:
        hidden = expected_state(forward_batch.input_ids, positions, 0)  # [N, H]
        aux = []
        for index, layer in enumerate(self.layers):
            if getattr(layer, "_is_layer_to_capture", False) if self.style == "flags" else index in self.layers_to_capture:
                aux.append(hidden.clone())
            hidden = hidden + layer.amount.detach()
        hidden = hidden * 2
        self.calls.append(bool(aux))
        if not aux:
            return hidden
        return hidden, torch.cat(aux, dim=-1) if self.style == "packed" else aux


class Model(torch.nn.Module):
    """The outer model: unpacks only when capture_aux_hidden_states is set, as SGLang's do."""

    def __init__(self, style: str = "list", shift: int = 1):
        super().__init__()
        self.model = TextModel(style)
        self.shift = shift
        self.capture_aux_hidden_states = False

    def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [layer + self.shift for layer in layer_ids]
        if self.model.style == "flags":
            for layer in self.model.layers_to_capture:
                self.model.layers[layer]._is_layer_to_capture = True

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        hidden = self.model(input_ids, positions, forward_batch)
        if self.capture_aux_hidden_states:
            hidden, _ = hidden
        assert isinstance(hidden, torch.Tensor)
        return hidden


def expected_state(ids: torch.Tensor, positions: torch.Tensor, point: int) -> torch.Tensor:
    """[N, H]: what the fake's residual stream holds after `point` layers, computed without it."""
    base = ids.double().unsqueeze(-1) + positions.double().unsqueeze(-1) * 1000 + torch.arange(HIDDEN).double() * 0.5
    return (base + sum(10.0 ** -(index + 1) for index in range(point))).float()


def batch_of(*requests: tuple[str, list[int], int], mode: Mode = Mode.EXTEND, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(rid, the ids of this chunk, its prefix length), ... -> input_ids, positions, forward batch; `padding` rows at the end belong to nobody."""
    ids = torch.tensor([token for _, chunk, _ in requests for token in chunk] + [0] * padding)
    positions = torch.tensor([prefix + row for _, chunk, prefix in requests for row in range(len(chunk))] + [0] * padding)
    batch = types.SimpleNamespace(
        forward_mode=mode, input_ids=ids, rids=[rid for rid, _, _ in requests],
        extend_seq_lens_cpu=[len(chunk) for _, chunk, _ in requests], extend_prefix_lens_cpu=[prefix for _, _, prefix in requests],
    )  # fmt: skip
    return ids, positions, batch


class Rig:
    """A fake model with the hook on it, writing into `folder`: in a thread (writer.files), or with `process` as a server does."""

    def __init__(self, folder: Path, style: str = "list", shift: int = 1, layer_ids: tuple[int, ...] = (0, 2, 4), model: Model | None = None, process: bool = False, **settings: Any):
        hook = load_hook()
        self.folder, self.hook = folder, hook
        self.model = model or Model(style, shift)
        self.settings = hook.Settings(str(folder), layer_ids, **{"budget_mb": 1, "writers": 2, **settings})
        hook.open_folder(str(folder))
        self.switch = hook.find_layers(self.model, layer_ids)
        metadata = {"kind": "aerie-dump", "format": "2", "capture_points": str(self.switch.points), "dtype": "fp8" if self.settings.dtype == "fp8" else "float32", "normed": "true"}
        self.counters = hook.Counters()
        self.writer = hook.Writer(self.settings, metadata, hook.Ring(self.settings.budget_mb << 20, False), self.counters, process)
        self.capture = hook.Capture(self.switch, self.settings, (Mode.EXTEND, Mode.MIXED), self.writer, torch.device("cpu"))
        self.switch.text.forward = self.capture.forward

    def run(self, *requests: tuple[str, list[int], int], mode: Mode = Mode.EXTEND, padding: int = 0) -> torch.Tensor:
        """One batch through the outer model; returns its answer, checked against what it must be with or without capture."""
        ids, positions, batch = batch_of(*requests, mode=mode, padding=padding)
        answer = self.model(ids, positions, batch)
        assert torch.equal(answer, expected_state(ids, positions, LAYERS) * 2) or torch.allclose(answer, expected_state(ids, positions, LAYERS) * 2, rtol=1e-6)
        return answer

    def close(self) -> None:
        self.writer.close()
