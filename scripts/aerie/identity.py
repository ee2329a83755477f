"""Which model and which tokenizer: short names by content, so that states, drafter and target can be told to belong together."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from .errors import UserError

VOLATILE = ("_name_or_path", "transformers_version")  # change when the same model is saved again
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt", "added_tokens.json")


def read_model_config(folder: Path | str) -> dict[str, Any]:
    """The folder's config.json as a dict. Raises UserError when it is missing or not JSON."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; name a model folder that holds a config.json") from None
    except NotADirectoryError:
        raise UserError(f"{folder} is not a folder; name a model folder that holds a config.json") from None
    except (ValueError, RecursionError) as exc:  # JSON, UTF-8, nested too deep
        raise UserError(f"{path} is not valid JSON ({exc}); fetch or export the model again") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds no JSON object; fetch or export the model again")
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own part of a config: `text_config` where there is one (Kimi-K2.5 and other multimodal models), else the whole."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def model_hash(folder: Path | str) -> str:
    """sha256 (hex) of the target's config.json in canonical form, without the keys that change when the same model is saved again."""
    config = {key: value for key, value in read_model_config(folder).items() if key not in VOLATILE}
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def tokenizer_hash(folder: Path | str) -> str:
    """sha256 (hex) over the files that define the vocabulary, names and contents. Raises UserError when the folder has none of them."""
    digest = hashlib.sha256()
    found = [Path(folder) / name for name in VOCABULARY_FILES if (Path(folder) / name).is_file()]
    if not found:
        raise UserError(f"{folder} holds no tokenizer ({', '.join(VOCABULARY_FILES[:3])}, ...); name a model folder with its tokenizer")
    for path in found:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
