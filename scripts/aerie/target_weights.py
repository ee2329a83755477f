"""A target's embedding, LM head, final norm and last layer, read by name from its safetensors without loading the model.

Names seen: plain (`model.embed_tokens.weight`, `lm_head.weight`), vision-language (`model.language_model.*`), Kimi-K2.5 (`language_model.model.*`,
`language_model.lm_head.weight`), tied (no head in the files), one file or shards with an index.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .errors import UserError
from .identity import read_model_config, text_config

BASES = ("model.", "language_model.model.", "model.language_model.", "language_model.", "")
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "model.language_model.lm_head.weight")
FLOATS = ("BF16", "F16", "F32")


class TargetWeights:
    """The parts of a target's folder that extraction and training need. Raises UserError naming folder, file or tensor for anything missing."""

    def __init__(self, folder: str | Path, how: str = ""):
        """how: what makes the folder where there is none, in place of a download."""
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise UserError(f"{self.folder} is not a model folder on this machine (no config.json); {how or 'download the model and put it there'}, or set target.model_path to another")
        self.raw_config: dict[str, Any] = read_model_config(self.folder)
        # Vision-language targets keep the language model's numbers one level down.
        self.config: dict[str, Any] = {**self.raw_config, **text_config(self.raw_config)}
        self.files = self._find_files()
        self.base = self._find_base()

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding."""
        return bool(self.config.get("tie_word_embeddings", self.raw_config.get("tie_word_embeddings", False)))

    def _find_files(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, RecursionError, KeyError, TypeError):
                raise UserError(f"{index} is not a safetensors index; download the model again") from None
        files = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            with self._open(path.name) as file:
                files.update(dict.fromkeys(file.keys(), path.name))
        if not files:
            raise UserError(f"{self.folder} holds no safetensors files; the target must be in that format")
        return files

    def _open(self, name: str):
        try:
            return safe_open(self.folder / name, "pt")
        except (FileNotFoundError, SafetensorError, OSError) as exc:
            raise UserError(f"{self.folder / name} cannot be read ({exc}); download the model again") from None

    def _find_base(self) -> str:
        for base in BASES:
            if f"{base}embed_tokens.weight" in self.files:
                return base
        raise UserError(f"{self.folder}: no embedding found ({', '.join(base + 'embed_tokens.weight' for base in BASES)}); this model's names are not known")

    def has(self, name: str) -> bool:
        """Whether the files hold this tensor (full name)."""
        return name in self.files

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor by its full name, in the file's own dtype."""
        if name not in self.files:
            raise UserError(f"{self.folder}: tensor {name} is missing")
        with self._open(self.files[name]) as file:
            try:
                return file.get_tensor(name)
            except SafetensorError:
                raise UserError(f"{self.folder / self.files[name]} does not hold {name}, which the index names; download the model again") from None

    def _float_tensor(self, name: str) -> torch.Tensor:
        with self._open(self.files[name]) as file:
            kind = file.get_slice(name).get_dtype()
        if kind not in FLOATS:
            raise UserError(f"{self.folder}: {name} is quantised ({kind}); a target with a bf16, fp16 or fp32 embedding and LM head is needed")
        return self.tensor(name)

    def embedding(self) -> torch.Tensor:
        """[V, H], the file's dtype."""
        return self._float_tensor(f"{self.base}embed_tokens.weight")

    def lm_head_name(self) -> str:
        """The head's tensor, or the embedding's when the target ties them."""
        for name in HEADS:
            if name in self.files:
                return name
        if not self.tied:
            raise UserError(f"{self.folder}: no LM head found ({', '.join(HEADS)}) and tie_word_embeddings is not set; the files are not whole")
        return f"{self.base}embed_tokens.weight"

    def lm_head(self) -> torch.Tensor:
        """[V, H], the file's dtype."""
        return self._float_tensor(self.lm_head_name())

    def final_norm(self) -> torch.Tensor | None:
        """[H] weight of the norm before the LM head, None where it has another name."""
        name = f"{self.base}norm.weight"
        return self.tensor(name) if name in self.files else None

    def last_layer(self) -> dict[str, torch.Tensor]:
        """Tensors of the last decoder layer, names relative to the layer; empty when it is not there (other naming)."""
        prefix = f"{self.base}layers.{int(self.config.get('num_hidden_layers', 0)) - 1}."
        return {name.removeprefix(prefix): self.tensor(name) for name in self.files if name.startswith(prefix)}
