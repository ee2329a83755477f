"""One config a target, TOML, read by this loader alone. It knows every key: anything else is an error that names file, key, value and the nearest key."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import shlex
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import errors
from .config_rules import check_together
from .errors import UserError
from .paths import CONFIGS, RunPaths, expanded, resolve_model

DEFAULT_CONFIG = "smollm2-135m"


@dataclass
class Target:
    """The model whose drafter is trained."""

    model_path: str  # a folder
    aux_layer_ids: list[int]  # as they stand in the drafter's eagle_aux_hidden_state_layer_ids; families read them differently
    from_package: str = ""  # a Python package with the model in GGUF: made into model_path when that is missing
    dtype: str = "auto"  # auto, bfloat16, float16, float32: the dtype it is served in, for extraction and for serving
    trust_remote_code: bool = False


@dataclass
class Server:
    """The extraction server, and what every server of this config has in common."""

    host: str = "127.0.0.1"
    port: int = 30000
    urls: list[str] = field(default_factory=list)  # extract from these servers instead of the one of host and port
    gpus: list[int] = field(default_factory=list)  # GPUs of every server of this config, from 0; empty: all that the environment shows
    dump_dir: str = ""  # default: /dev/shm/aerie-<run>; on a CPU server runs/<run>/dumps
    ready_timeout_s: float = 1800.0
    args: dict[str, Any] = field(default_factory=dict)  # SGLang options by their own names, for every server of this config
    cpu_args: dict[str, Any] = field(default_factory=dict)  # more of them, only where there is no GPU
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Data:
    """Chats in, token ids and loss mask out."""

    inputs: list[str] = field(default_factory=list)  # JSONL or JSON files
    regenerate: bool = True  # let the target write the answers
    url: str = ""  # who writes the answers: http://HOST:PORT of an SGLang server, or an OpenAI-compatible URL that ends in /v1; default: the extraction server
    model: str = ""  # the model's name at an OpenAI-compatible URL; default: the first that it lists
    api_key_env: str = ""  # environment variable that holds the key of an OpenAI-compatible URL
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 1024
    concurrency: int = 32
    max_tokens: int = 8192  # longer samples are cut or dropped
    too_long: str = "cut"  # cut (at a turn border) or drop
    truncated_answers: str = "keep"  # keep (without an end token) or drop, for finish_reason: length
    heldout: int = 200  # chats held out for the predicted accept length; fixed by content
    limit: int = 0  # use at most this many training chats; 0: all
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    request_timeout_s: float = 600.0


@dataclass
class Extract:
    """From the server's dumps to the store."""

    max_in_flight: int = 32  # requests
    dump_budget_gb: float = 0.0  # bytes of dumps in flight; 0: from the free space of the dump folder
    dtype: str = "model"  # model, or fp8 (e4m3 rows with one float32 scale)
    shard_gb: float = 1.0
    shard_s: float = 60.0  # a shard also ends at this age: what a crash can cost; 0: by size alone
    keep_gb: float = 0.0  # streaming: shards are deleted once trained on, so that the store stays under this; 0: keep all
    all_final_rows: bool = False  # keep `final` also where no supervised position needs it
    proof_samples: int = 16  # samples whose argmax(lm_head(final)) is compared with the server's own answer
    attempts: int = 3
    request_timeout_s: float = 300.0
    server_wait_s: float = 1800.0  # how long to wait for a server that went away
    max_failed: int = 100  # stop when more samples than this have failed for good


@dataclass
class Draft:
    """The drafter's shape. Zero or an empty string: from the target's config."""

    arch: str = "llama"  # llama (LlamaForCausalLMEagle3) or mla (the drafter class of kimi_k25_eagle3.py)
    vocab_size: int = 32000  # draft vocabulary; the most frequent supervised ids
    hidden_size: int = 0
    intermediate_size: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 0.0
    max_position_embeddings: int = 0
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    init: str = "auto"  # auto (the target's last layer and head where the shapes fit), fit (least squares on the store: for small targets and little data), random


@dataclass
class Train:
    """EAGLE-3 with training-time test."""

    ttt_steps: int = 7
    step_decay: float = 0.8  # weight of TTT step k in the loss: step_decay ** k
    epochs: int = 2
    batch_tokens: int = 8192  # rows a step, packed
    accumulate: int = 1
    lr: float = 1e-4
    min_lr_ratio: float = 0.1
    warmup_ratio: float = 0.02
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 0.5
    dtype: str = "auto"  # compute dtype; auto: bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"
    gpus: list[int] = field(default_factory=list)  # train on these, from 0, one process each; empty: the first that the environment shows
    train_lm_head: bool = True
    aux_noise: float = 0.0  # Gaussian noise on the auxiliary states in training, relative to their size: against overfitting on little data
    activation_checkpointing: bool = False
    parallel: str = "ddp"  # under torchrun: ddp (every process holds all) or fsdp (masters, gradients and moments are split)
    kernels: str = "auto"  # auto: our own kernels (Triton, and cuda/ where it is built) on a GPU; on: stop where they cannot run; off: PyTorch alone
    seed: int = 0
    eval_every: int = 0  # steps; 0: at the end of each epoch
    eval_samples: int = 200
    checkpoint_every: int = 500  # steps; also at the end of each epoch
    early_stop: int = 0  # evaluations without a better predicted accept length; 0: off
    init_from: str = ""  # an existing drafter folder
    max_bad_samples: int = 10  # stop when more samples than this hold a NaN or do not fit
    threads: int = 0  # CPU threads; 0: all
    stop_server: bool = True  # end this run's servers first, and the extraction server before serving: they hold the memory


@dataclass
class Serve:
    """Target and drafter under SGLang speculative decoding."""

    port: int = 30001
    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int = 0  # 0: num_steps + 1 for a chain
    draft_attention_backend: str = ""  # SGLang's --speculative-draft-attention-backend; empty: SGLang's choice
    drafter_ops: bool = False  # call Aerie's draft_topk and tree ops in the served SGLang (GPU)
    max_restarts: int = 3
    args: dict[str, Any] = field(default_factory=dict)  # on top of [server].args


@dataclass
class Bench:
    """With and without the drafter."""

    prompts: str = "heldout"  # heldout, builtin, or a file
    concurrency: list[int] = field(default_factory=lambda: [1, 4, 16])
    max_new_tokens: int = 256
    samples: int = 40  # prompts a set
    rounds: int = 3  # passes at each concurrency, whose median counts; above 1, one more before them warms up and does not count
    requests_per_slot: int = 8  # at concurrency c: c times this many prompts at most; the highest concurrency runs all of them
    latency: bool = True  # a shorter streamed pass beside each: time to first token, time between tokens, share of drafting
    baseline_port: int = 30002
    side_by_side: bool = False  # both servers at once (small targets); else one after the other


@dataclass
class Plan:
    """The machine and the amounts that `make plan` reckons with where it cannot look them up. Rates are tokens a second over all GPUs; 0: unknown, hours are not printed."""

    shape: str = ""  # configs/shapes/NAME.json: used while the target's own folder is not there
    gpus: int = 0  # of the machine this config was written for; 0: not named
    gpu_gib: float = 0.0  # memory a GPU as the driver gives it to a process
    samples: int = 0  # until data/report.json says
    tokens_per_sample: float = 2350.0
    supervised: float = 0.5  # share of tokens that are the assistant's, until data/report.json says
    decode_tok_s: float = 0.0  # the target writing answers, all requests together
    prefill_tok_s: float = 0.0  # extraction
    train_tok_s: float = 0.0
    rates_from: str = ""  # where these rates come from


@dataclass
class Config:
    """A whole config, with where it came from and which run it serves."""

    target: Target
    server: Server = field(default_factory=Server)
    data: Data = field(default_factory=Data)
    extract: Extract = field(default_factory=Extract)
    draft: Draft = field(default_factory=Draft)
    train: Train = field(default_factory=Train)
    serve: Serve = field(default_factory=Serve)
    bench: Bench = field(default_factory=Bench)
    plan: Plan = field(default_factory=Plan)
    path: Path = Path()
    run: RunPaths = field(default_factory=lambda: RunPaths("default"))

    @property
    def name(self) -> str:
        """configs/NAME.toml -> NAME."""
        return self.path.stem

    @property
    def model_path(self) -> str:
        """The target's folder, absolute where it is one."""
        return resolve_model(self.target.model_path)

    def as_dict(self) -> dict[str, Any]:
        """Sections and keys as plain values, for reports."""
        return {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}


SECTIONS: dict[str, type] = {
    "target": Target, "server": Server, "data": Data, "extract": Extract,
    "draft": Draft, "train": Train, "serve": Serve, "bench": Bench, "plan": Plan,
}  # fmt: skip

CHOICES: dict[str, tuple[str, ...]] = {
    "target.dtype": ("auto", "bfloat16", "float16", "float32"),
    "data.too_long": ("cut", "drop"),
    "data.truncated_answers": ("keep", "drop"),
    "extract.dtype": ("model", "fp8"),
    "draft.arch": ("llama", "mla"),
    "draft.init": ("auto", "fit", "random"),
    "train.dtype": ("auto", "bfloat16", "float32"),
    "train.kernels": ("auto", "on", "off"),
    "train.parallel": ("ddp", "fsdp"),
}

POSITIVE = {
    "server.ready_timeout_s", "data.max_new_tokens", "data.concurrency", "data.max_tokens", "extract.max_in_flight", "extract.shard_gb", "extract.attempts",
    "draft.vocab_size", "train.ttt_steps", "train.epochs", "train.batch_tokens", "train.accumulate", "train.lr", "serve.num_steps", "serve.topk",
    "bench.max_new_tokens", "bench.samples", "bench.requests_per_slot", "bench.rounds", "data.top_p", "data.request_timeout_s", "extract.request_timeout_s",
    "train.checkpoint_every",
}  # fmt: skip
LARGEST = 2**31 - 1  # of any whole number: PyTorch and SGLang read no more in most places
AT_MOST = {
    "data.top_p": 1, "data.concurrency": 4096, "extract.max_in_flight": 4096, "train.ttt_steps": 64, "train.epochs": 10_000, "train.threads": 1024, "train.min_lr_ratio": 1,
    "train.warmup_ratio": 1, "train.weight_decay": 1, "serve.num_steps": 64, "serve.topk": 64, "plan.supervised": 1, "plan.gpu_gib": 100_000,
    "plan.tokens_per_sample": LARGEST,
}  # fmt: skip
PORTS = {"server.port", "serve.port", "bench.baseline_port"}


def nearest(key: str, known: typing.Iterable[str]) -> str:
    """'; did you mean X?' or the list of what is known."""
    known = sorted(known)
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not isinstance(hint, types.GenericAlias) else str(hint).replace("typing.", "")


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if hint is Any:
        return isinstance(value, (bool, int, float, str, list, dict))
    if origin is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(item, typing.get_args(hint)[1]) for item in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _check_value(where: str, key: str, value: Any, hint: Any) -> Any:
    if not _fits(value, hint):
        raise UserError(f"{where}: {key} = {value!r} must be {_type_name(hint)}, not {type(value).__name__}")
    if hint is float:
        value = float(value)
    if key in CHOICES and value not in CHOICES[key]:
        raise UserError(f"{where}: {key} = {value!r} must be one of {', '.join(CHOICES[key])}")
    if key in PORTS and not 1 <= value <= 65535:
        raise UserError(f"{where}: {key} = {value} is not a port (1 to 65535)")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: {key} = {value} must be a finite number")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if key in POSITIVE and value <= 0:
            raise UserError(f"{where}: {key} = {value} must be greater than 0")
        if value < 0:
            raise UserError(f"{where}: {key} = {value} must not be negative")
        if value > AT_MOST.get(key, LARGEST if isinstance(value, int) else math.inf):
            raise UserError(f"{where}: {key} = {str(value)[:40]} must be at most {AT_MOST.get(key, LARGEST)}")
    if any("\0" in text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)):
        raise UserError(f"{where}: {key} = {value!r} holds a null character; take it out")
    if key == "target.model_path" and not value.strip():
        raise UserError(f"{where}: {key} is empty; name a model folder")
    if key == "train.betas" and (len(value) != 2 or not all(0 <= beta < 1 for beta in value)):
        raise UserError(f"{where}: {key} = {value} must be two numbers, each 0 or more and below 1")
    if key == "train.device" and not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise UserError(f"{where}: {key} = {value!r} must be auto, cpu, cuda or cuda:N")
    if key in ("server.gpus", "train.gpus") and (len(set(value)) != len(value) or min(value, default=0) < 0):
        raise UserError(f"{where}: {key} = {value} must be numbers of GPUs, 0 or more, without repeats")
    if key == "bench.concurrency" and (not value or min(value) < 1 or len(set(value)) != len(value)):
        raise UserError(f"{where}: {key} = {value} must list at least one number, each 1 or more, without repeats")
    if key == "target.aux_layer_ids" and (len(value) < 1 or sorted(set(value)) != value or value[0] < 0):
        raise UserError(f"{where}: {key} = {value} must be layer ids in rising order, without repeats, 0 or more")
    return value


def _parse_override(text: str) -> tuple[list[str], Any]:
    key, equals, raw = text.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2:
        raise UserError(f"--set {text!r}: write section.key=value, for example --set train.lr=5e-5 (in make's SET a space begins the next key)")
    try:
        value = tomllib.loads(f"value = {raw.strip()}")["value"]
    except (ValueError, RecursionError):
        value = raw.strip()  # a bare word is a string
    return parts, value


def config_path(name_or_path: str) -> Path:
    """configs/NAME.toml for a bare name, else the path as given (also relative to the repository)."""
    if "/" not in name_or_path and not name_or_path.endswith(".toml"):
        path = CONFIGS / f"{name_or_path}.toml"
        if not path.is_file():
            raise UserError(f"no config named {name_or_path!r} in {CONFIGS}: {nearest(name_or_path, (file.stem for file in CONFIGS.glob('*.toml')))}")
        return path
    path = expanded(name_or_path)
    if not path.is_file() and not path.is_absolute() and (CONFIGS.parent / path).is_file():
        path = CONFIGS.parent / path
    if not path.is_file():
        raise UserError(f"config file {path} does not exist; name a file, or a config in {CONFIGS}")
    return path.absolute()


def load_config(name_or_path: str = DEFAULT_CONFIG, run: str = "", overrides: typing.Sequence[str] = ()) -> Config:
    """Read a config; `overrides` are 'section.key=value' texts, `run` names the run (default: the config's name, with _ for a dot).

    Raises UserError naming file, key and value for anything unknown, missing or of a wrong type.
    """
    path = config_path(name_or_path)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as exc:  # TOML, UTF-8, a number too long, nested too deep
        raise UserError(f"{path}: not valid TOML: {exc}") from None
    except OSError as exc:
        raise UserError(f"config file {path} cannot be read ({exc.strerror}); mend its permissions, or name another") from None
    where: dict[str, str] = {}
    for text in overrides:
        (section, key, *rest), value = _parse_override(text)
        table = raw.setdefault(section, {})
        if isinstance(table, dict):
            for part in (key, *rest)[:-1]:
                table = table.setdefault(part, {}) if isinstance(table, dict) else table
            if not isinstance(table, dict):
                raise UserError(f"--set {text}: {section}.{key} holds no table")
            table[(key, *rest)[-1]] = value
        where[f"{section}.{key}"] = f"--set {text}"
    built: dict[str, Any] = {}
    for section, table in raw.items():
        if section not in SECTIONS:
            raise UserError(f"{path}: unknown section [{section}]; {nearest(section, SECTIONS)}")
        if not isinstance(table, dict):
            raise UserError(f"{path}: [{section}] must be a table, not {type(table).__name__}")
        hints = typing.get_type_hints(SECTIONS[section])
        for key, value in table.items():
            source = where.get(f"{section}.{key}", str(path))
            if key not in hints:
                raise UserError(f"{source}: unknown key {section}.{key} = {value!r}; {nearest(key, hints)}")
            table[key] = _check_value(source, f"{section}.{key}", value, hints[key])
        built[section] = table
    if "target" not in built:
        raise UserError(f"{path}: the section [target] is missing; it names model_path and aux_layer_ids")
    for item in dataclasses.fields(Target):
        if item.default is dataclasses.MISSING and item.name not in built["target"]:
            raise UserError(f"{path}: target.{item.name} is missing")
    sections = {name: SECTIONS[name](**table) for name, table in built.items()}
    config = Config(**sections, path=path, run=RunPaths(run or path.stem.replace(".", "_")))
    check_together(config, where)
    return config


def add_config_arguments(parser: argparse.ArgumentParser, positional: bool = False) -> None:
    """--config (or a positional CONFIG), --run and --set, the same for every script."""
    text = "a path, or a bare name meaning configs/NAME.toml (default: %(default)s)"
    if positional:
        parser.add_argument("config", nargs="?", default=DEFAULT_CONFIG, metavar="CONFIG", help=text)
    else:
        parser.add_argument("--config", default=DEFAULT_CONFIG, metavar="CONFIG", help=text)
    parser.add_argument("--run", default="", metavar="RUN", help="name of the run: its folder under runs/ (default: the config's name)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key of the config; may be repeated")


def make_words(config: Config) -> str:
    """' CONFIG=... RUN=...' as make takes them for this config and run; what make takes anyway is left out."""
    name = config.name if config.path == CONFIGS / f"{config.name}.toml" else str(config.path)
    words = [] if name == DEFAULT_CONFIG else [f"CONFIG={shlex.quote(name)}"]
    if config.run.name != config.name.replace(".", "_"):
        words.append(f"RUN={config.run.name}")
    return "".join(f" {word}" for word in words)


def config_from_args(args: argparse.Namespace) -> Config:
    """The Config that add_config_arguments() asked for."""
    config = load_config(args.config, args.run, args.overrides)
    errors.make_words = make_words(config)
    return config
