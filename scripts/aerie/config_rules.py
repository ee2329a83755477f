"""What one key alone does not tell: options of SGLang that must be numbers, keys that must fit each other, keys that must fit the target."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Mapping

from .errors import UserError
from .identity import read_model_config, text_config

if TYPE_CHECKING:
    from .config import Config

WHOLE = {"tp-size": 1, "tp": 1, "tensor-parallel-size": 1, "context-length": 1, "max-total-tokens": 1, "max-running-requests": 1, "chunked-prefill-size": -1,
         "max-prefill-tokens": 1, "cuda-graph-max-bs-decode": 1}  # fmt: skip  whole numbers among SGLang's options that the plan reckons with: the least


def option_number(args: Mapping[str, Any], *names: str, default: float, least: float = 1, most: float = math.inf, whole: bool = True) -> Any:
    """An option of SGLang by its names, as a number; `default` where it is not given. Raises UserError that names it where it is none, or out of bounds."""
    name = next((name for name in names if name in args), None)
    if name is None:
        return default
    try:
        number = float(args[name]) if isinstance(args[name], (int, float, str)) and not isinstance(args[name], bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or not least <= number <= most or (whole and number != int(number)):
        bounds = f"{least:g} or more" if most == math.inf else f"{least:g} to {most:g}"
        raise UserError(f"the SGLang option {name} = {args[name]!r} must be a {'whole ' if whole else ''}number, {bounds}; set it right in server.args or serve.args")
    return int(number) if whole else number


def draft_tokens_problem(steps: int, topk: int, tokens: int) -> str:
    """Why SGLang would not draft so many tokens a verification, and which it would; '' where it does."""
    if topk == 1:
        return "" if tokens == steps + 1 else f"a chain of {steps} step{'s' if steps > 1 else ''} has {steps + 1} draft tokens"
    most = topk + (steps - 1) * topk * topk + 1  # the root, topk nodes of the first step, topk * topk of each later one
    return "" if 2 <= tokens <= most else f"{steps} steps with topk {topk} give 2 to {most} draft tokens"


def check_together(config: Config, where: Mapping[str, str]) -> None:
    """Raise UserError where keys of a config do not fit each other. where: {section.key: what set it}, for those of the command line."""
    for table in (config.server.args, config.server.cpu_args, config.serve.args):
        given = {name: value for name, value in table.items() if value is not False}  # false leaves an option out
        option_number(given, "mem-fraction-static", default=0, least=0, most=1, whole=False)
        for name, least in WHOLE.items():
            option_number(given, name, default=0, least=least)
    serve, source = config.serve, lambda *keys: next((where[key] for key in keys if key in where), str(config.path))
    if serve.num_draft_tokens and (problem := draft_tokens_problem(serve.num_steps, serve.topk, serve.num_draft_tokens)):
        raise UserError(f"{source('serve.num_draft_tokens', 'serve.num_steps', 'serve.topk')}: serve.num_draft_tokens = {serve.num_draft_tokens}, but {problem}; set it right, or to 0 to leave it to num_steps and topk")
    together = [("serve.port", serve.port, "bench.baseline_port", config.bench.baseline_port, config.bench.side_by_side, "bench.side_by_side = true"),
                *((key, port, "server.port", config.server.port, not (config.train.stop_server or config.server.urls), "train.stop_server = false")
                  for key, port in (("serve.port", serve.port), ("bench.baseline_port", config.bench.baseline_port)))]  # fmt: skip
    for key, port, other, taken, both, why in together:  # else one is ended before the other starts
        if both and port == taken:
            raise UserError(f"{source(key, other)}: {key} = {port} is {other} too, and with {why} both servers run at once; set one of them to another port")


def check_against_target(config: Config, layers: int, vocab: int) -> None:
    """Raise UserError where the config asks for what a target of so many decoder layers and token ids has not. 0: not known."""
    ids = config.target.aux_layer_ids
    if layers and max(ids) >= layers:
        raise UserError(f"target.aux_layer_ids = {ids}: {config.model_path} has {layers} decoder layers, so no layer {max(ids)}; set ids below {layers}")
    size, default = config.draft.vocab_size, type(config.draft)().vocab_size
    if vocab and size > vocab and size != default:  # the default is cut to the vocabulary of a small target
        raise UserError(f"draft.vocab_size = {size}: the vocabulary of {config.model_path} has {vocab:,} ids; set it to {vocab} or less")


def check_against_model_config(config: Config) -> None:
    """check_against_target() by the config.json of the target's folder; nothing where there is none yet."""
    if not (Path(config.model_path) / "config.json").is_file():
        return
    model = text_config(read_model_config(config.model_path))
    layers, vocab = (value if isinstance(value := model.get(key), int) else 0 for key in ("num_hidden_layers", "vocab_size"))
    check_against_target(config, layers, vocab)
