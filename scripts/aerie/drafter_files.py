"""A drafter's folder as SGLang reads it: config.json and the tensors of its weight files, by header; values only on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import json

import torch
from safetensors import SafetensorError, safe_open

from .errors import UserError
from .identity import read_model_config

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "BOOL": "bool", "U8": "uint8", "F8_E4M3": "float8_e4m3fn"}


class TensorInfo(NamedTuple):
    """What a weight file's header says of one tensor."""

    dtype: str  # as torch names it: float32, bfloat16, bool, ...
    shape: tuple[int, ...]
    file: str  # the file's name


class DrafterFolder:
    """config.json (`config`), what training wrote beside it (`training`, {} for a public drafter) and the tensors' headers (`tensors`).

    Raises UserError for what is not a drafter's folder at all: missing, a file, empty, no config, no weights, a torn file.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.exists():
            raise UserError(f"drafter folder {path} does not exist; train one with `make train`, or name the folder of another")
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; name the folder that holds the drafter's config.json and model.safetensors")
        if not any(path.iterdir()):
            raise UserError(f"drafter folder {path} is empty; train a drafter with `make train`, or name the folder of another")
        self.config: dict[str, Any] = read_model_config(path)
        self.training: dict[str, Any] = self._read_training()
        self.tensors: dict[str, TensorInfo] = {}
        self.repeated: list[str] = []  # names that more than one file holds
        self._values: dict[str, torch.Tensor] = {}  # of .bin files, which have no header to read alone
        files = self._weight_files()
        for file in files:
            self._read_safetensors(file) if file.suffix == ".safetensors" else self._read_bin(file)

    def _read_training(self) -> dict[str, Any]:
        path = self.path / "training.json"
        if not path.is_file():
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as exc:
            raise UserError(f"{path} is not valid JSON ({exc}); export the drafter again") from None
        if not isinstance(found, dict):
            raise UserError(f"{path} holds no JSON object; export the drafter again")
        return found

    def _weight_files(self) -> list[Path]:
        """SGLang's choice: the safetensors files (those of the index, where there is one), else the .bin files."""
        files = sorted(self.path.glob("*.safetensors"))
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            try:
                files = [self.path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as exc:
                raise UserError(f"{index} is not a valid index ({exc}); export the drafter again") from None
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise UserError(f"{index} names {missing[0]}, which is not in {self.path}; fetch or export the drafter again")
        files = files or sorted(file for file in self.path.glob("*.bin") if file.name != "training_args.bin")
        if not files:
            raise UserError(f"drafter folder {self.path} holds no weights (*.safetensors); export the drafter again")
        return files

    def _add(self, name: str, info: TensorInfo) -> None:
        if name in self.tensors:
            self.repeated.append(name)
        self.tensors[name] = info

    def _read_safetensors(self, file: Path) -> None:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    self._add(name, TensorInfo(DTYPES.get(part.get_dtype(), part.get_dtype()), tuple(part.get_shape()), file.name))
        except (SafetensorError, OSError) as exc:
            raise UserError(f"{file} is not a whole safetensors file ({exc}); fetch or export the drafter again") from None

    def _read_bin(self, file: Path) -> None:
        try:
            values = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as exc:  # torch raises half a dozen kinds for a file that is no checkpoint
            raise UserError(f"{file} is not a checkpoint that can be read without running code ({type(exc).__name__}); convert it to safetensors") from None
        for name, value in values.items():
            self._add(name, TensorInfo(str(value.dtype).removeprefix("torch."), tuple(value.shape), file.name))
            self._values[name] = value

    def get(self, name: str) -> torch.Tensor:
        """The tensor's values, on the CPU, in the file's dtype."""
        if name in self._values:
            return self._values[name]
        with safe_open(self.path / self.tensors[name].file, "pt") as opened:
            return opened.get_tensor(name)
