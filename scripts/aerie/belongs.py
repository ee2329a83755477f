"""What a training is of: the config sections and the data that decide its result, as a fingerprint and by name. Checkpoints and the drafter's training.json hold both."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Sequence

from safetensors import SafetensorError, safe_open

from .config import Config
from .errors import UserError
from .report import read_report

NOT_DECIDING = ("threads", "stop_server", "checkpoint_every", "max_bad_samples", "device", "gpus", "parallel")  # of [train]
TOGETHER = "accumulate x processes"  # how many processes share the batches of a step decides nothing
DATA = {"vocab": "the draft vocabulary (data/vocab_map.safetensors)", "samples": "the samples of the store"}


def deciding(config: Config, vocab: dict[str, str], samples: Sequence[str] | str, world: int = 1) -> dict[str, Any]:
    """All that decides a training: [target], [draft], most of [train], the vocabulary map's metadata, the samples (names; of a stream its data's hash)."""
    sections = config.as_dict()
    train = {key: value for key, value in sections["train"].items() if key not in NOT_DECIDING} | {"accumulate": config.train.accumulate * world}
    return {"target": sections["target"], "draft": sections["draft"], "train": train, "vocab": vocab, "samples": samples}


def fingerprint(parts: dict[str, Any]) -> str:
    """16 hex digits of deciding()."""
    text = json.dumps([parts[name] for name in ("target", "draft", "train", "vocab", "samples")], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def recorded(parts: dict[str, Any]) -> dict[str, Any]:
    """deciding() small enough to be kept, as plain JSON: the data as hashes."""
    plain = json.loads(json.dumps(parts, default=str))
    return plain | {name: hashlib.sha256(json.dumps(plain[name], sort_keys=True).encode()).hexdigest()[:16] for name in DATA}


def differences(then: Any, now: dict[str, Any]) -> str:
    """What differs between two recorded(): 'train.lr 0.0001, now 5e-05; the samples of the store'. A sentence where `then` does not say it."""
    if not isinstance(then, dict):
        return "it was made with other data or another config, and does not say which keys differ"
    found = []
    for section in ("target", "draft", "train"):
        old, new = then.get(section) or {}, now[section]
        for key in (*new, *(key for key in old if key not in new)):
            if old.get(key) != new.get(key):
                name = TOGETHER if (section, key) == ("train", "accumulate") else key
                found.append(f"{section}.{name} {old.get(key, 'not there')}, now {new.get(key, 'not there')}")
    found += [words for name, words in DATA.items() if then.get(name) != now[name]]
    return "; ".join(found) or "nothing that this version knows"


def other_training(config: Config) -> str:
    """Why the drafter in the run's folder is not of this config and this store, as training with train.gpus would make it; "" when it is.

    It may come from a stream (which knows its data by their hash) or from the whole store.
    """
    from .store import Store, read_manifest  # torch, which the scripts that start others do without

    folder, world = config.run.drafter, max(1, len(config.train.gpus))
    try:
        found = read_report(folder / "training.json")
        with safe_open(config.run.data / "vocab_map.safetensors", "np") as file:
            vocab = file.metadata() or {}
        streamed = deciding(config, vocab, (read_manifest(config.run.store) or {}).get("data_hash", ""), world)
        if not (folder / "model.safetensors").is_file():
            return f"{folder} holds no whole drafter"
        if found.get("fingerprint") == fingerprint(streamed):
            return ""
        parts = deciding(config, vocab, Store.open(config.run.store).ids, world)
    except (UserError, OSError, SafetensorError) as exc:
        return f"what {folder} was trained with cannot be told ({exc})"
    return "" if found.get("fingerprint") == fingerprint(parts) else f"the drafter in {folder} is of another training: {differences(found.get('settings'), recorded(parts))}"
