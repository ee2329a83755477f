"""The extraction server from start to ready: the patch is checked, one prefill goes through the dump path, and only then it counts as ready."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import requests

from . import dumps
from .config import Config
from .errors import UserError
from .identity import read_model_config, text_config
from .patching import Installation
from .rid import new_rid, sample_id
from .ports import port_is_free
from .running import refuse_other_options
from .servers import Server, dump_dir, port_of, server_args, url_of

MODE = "extraction"
SELF_TEST_TOKENS = 512


def check_patch() -> None:
    """Raise UserError unless this Python's SGLang carries exactly this checkout's capture code."""
    found = Installation.active()
    differing = found.differing()
    if differing:
        raise UserError(f"the SGLang {found.version} in {found.site} does not carry this version of the capture code ({differing[0]}); run scripts/00_apply_patch.sh")


def running_server(config: Config) -> Server | None:
    """This run's extraction server if it runs and fits the config. Raises UserError when it runs another model, captures other layers or was started with other options."""
    server = Server.find(config, MODE)
    if server is None:
        if not port_is_free(config.server.host, port_of(config, MODE)):
            other = model_at(url_of(config, MODE))
            if other is not None:
                raise UserError(
                    f"a server of another run already listens on {url_of(config, MODE)} (model {other}); end it, or choose another port with --set server.port=N"
                )
        return None
    if server.record["model_path"] != config.model_path:
        raise UserError(f"the running extraction server of run {config.run.name!r} serves {server.record['model_path']}, the config says {config.model_path}; end it with --stop first")
    for key, wanted in (("aux_layer_ids", config.target.aux_layer_ids), ("dtype", config.extract.dtype)):
        if server.record[key] != wanted:
            raise UserError(f"the running extraction server of run {config.run.name!r} captures with {key} = {server.record[key]}, the config says {wanted}; end it with --stop first")
    refuse_other_options(config, server)
    return server


def model_at(url: str) -> str | None:
    """The model that an SGLang server at `url` serves, or None when nothing there says so."""
    try:
        answer = requests.get(f"{url}/model_info", timeout=5)
        return str(answer.json()["model_path"]) if answer.ok else None
    except (requests.RequestException, ValueError, KeyError):
        return None


def self_test_ids(config: Config) -> np.ndarray:
    """[<= 512] int32: ids that every vocabulary of this size has, as many as the context allows."""
    args = server_args(config, MODE)
    limits = [SELF_TEST_TOKENS, *(int(args[name]) - 8 for name in ("context-length", "max-total-tokens") if args.get(name))]
    vocab = int(text_config(read_model_config(config.model_path)).get("vocab_size", 0)) or 256
    return (np.arange(max(min(limits), 2), dtype=np.int64) * 37 % max(vocab - 1, 1)).astype(np.int32)


def self_test(config: Config, server: Server, timeout_s: float = 300.0) -> str:
    """One prefill through the dump path, checked and deleted again; returns one line about it. Raises UserError.

    It also finds kernels that fail at this size on this GPU before an extraction of hours starts.
    """
    ids = self_test_ids(config)
    rid = new_rid(config.run.name, sample_id(ids, np.zeros(len(ids), np.uint8)), len(ids))
    folder = dump_dir(config)
    begin = time.monotonic()
    try:
        answer = requests.post(
            f"{server.url}/generate", timeout=timeout_s,
            json={"rid": str(rid), "input_ids": ids.tolist(), "sampling_params": {"temperature": 0, "max_new_tokens": 1}},
        )  # fmt: skip
    except requests.RequestException as exc:
        reason = server.last_error() if not server.alive() else str(exc)
        raise UserError(f"the server answered no {len(ids)}-token prefill: {reason} (log: {server.log})") from None
    if answer.status_code != 200:
        raise UserError(f"the server answered {answer.status_code} to a {len(ids)}-token prefill: {answer.text[:300]} (log: {server.log})")
    try:
        dump = dumps.read_dump(dumps.wait_dump(folder, rid, timeout_s))
        dumps.check_dump(dump, rid, ids)
        problem = wrong_metadata(config, dump.metadata)
        if problem:
            raise dumps.DumpError(problem)
    except dumps.DumpError as exc:
        raise UserError(f"the self-test's dump is not right: {exc} (folder: {folder}, log: {server.log})") from None
    finally:
        dumps.remove_dump(folder, rid)
    points = ", ".join(map(str, json.loads(dump.metadata["capture_points"])))
    return (
        f"self-test: {len(ids)} tokens in {time.monotonic() - begin:.2f} s, {dump.nbytes / 1e6:.1f} MB; layer ids {dump.metadata['aux_layer_ids']} = state after {points} decoder layers; "
        f"dtype {dump.metadata['dtype']}, folder {folder}"
    )


def wrong_metadata(config: Config, metadata: dict[str, Any]) -> str:
    """What in a dump's metadata does not fit the config; empty when all does."""
    wanted = {"model_path": config.model_path, "aux_layer_ids": json.dumps(config.target.aux_layer_ids), "normed": "true"}
    return "; ".join(f"{key} is {metadata.get(key)!r}, not {value!r}" for key, value in wanted.items() if metadata.get(key) != value)
