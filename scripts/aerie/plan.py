"""What a run needs before it starts: memory a GPU by part, disk, hours; and the sentences that say what does not fit.

Every number is computed from shapes and settings, none is looked up per model. What SGLang does is written as SGLang 0.5.23 does it
(mem_cache/kv_cache_configurator.py: KV gets what is free after loading, less the share 1 - mem-fraction-static of what was free before).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .chats import count_rows
from .config import Config
from .config_rules import check_against_target, option_number
from .drafter_shapes import LLAMA, MLA, expected_tensors
from .errors import UserError
from .gpus import apart
from .paths import resolve_input
from .report import read_report
from .samples import SampleFile
from .servers import tensor_parallel
from .shapes import CHECKPOINT_BYTES, FLOAT_BYTES, Shape, load_shape
from .store_files import supervised_rows

GIB = 1 << 30
CONTEXT_GIB = 0.6  # CUDA context, libraries; NCCL's buffers come on top with more than one GPU
NCCL_GIB = 0.8
DEFAULT_FRACTION_RESERVE_GIB = 10.0  # SGLang's own choice on cards above 60 GB when mem-fraction-static is not given (arg_groups/memory_hook.py)
ALLOCATOR = 1.1  # caching allocators keep blocks of sizes no longer asked for
ID_AND_MASK = 4 + 1  # bytes a row: input_ids int32, loss_mask uint8


@dataclass(frozen=True)
class Part:
    """One line of the plan."""

    name: str
    bytes: float
    how: str = ""


@dataclass
class Amounts:
    """What goes through the pipeline."""

    samples: int
    tokens: float
    final_rows: float  # rows whose `final` is kept: labels of supervised predictions
    longest: int
    source: str


@dataclass
class Plan:
    """The answer: parts by phase, disk, hours, and what does not fit."""

    gpus: int
    gpu_bytes: float
    phases: dict[str, list[Part]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    disk: list[Part] = field(default_factory=list)
    hours: dict[str, float] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    training: str = ""  # the phase that is this config's training

    def total(self, phase: str) -> float:
        return sum(part.bytes for part in self.phases[phase])


def shape_of(config: Config) -> Shape:
    """The target's shape. Raises UserError that says how this config's target is got when neither its folder nor plan.shape is there,
    or where the config asks for layers or ids that the target has not."""
    shape = load_shape(config.model_path, config.plan.shape, "make the target with `make target`" if config.target.from_package else "download the model")
    check_against_target(config, shape.layers, shape.vocab)
    return shape


def planned_samples(config: Config) -> tuple[int, str]:
    """(samples, where that number comes from) before the run has data: plan.samples, else what [data] says, no more than the chats there are."""
    plan, data = config.plan, config.data
    if plan.samples:
        return plan.samples, "[plan]"
    counted = [rows for rows in (count_rows(resolve_input(name)) for name in data.inputs) if rows is not None]
    chats, asked = sum(counted), data.limit + data.heldout
    whole = len(counted) == len(data.inputs)  # every file could be read
    if data.limit and not (whole and 0 < chats < asked):
        return asked, f"samples: data.limit {data.limit:,} + data.heldout {data.heldout:,}"
    if chats:
        return chats, f"samples: the chats in {'the files' if whole else f'the {len(counted)} readable ones of the {len(data.inputs)} files'} of data.inputs"
    raise UserError(
        f"{config.path}: how many samples you mean to make is not known: the run has no data yet, no file of data.inputs can be read, data.limit and plan.samples are 0; "
        "give the number with --set plan.samples=10000 (make: SET='plan.samples=10000')"
    )


def read_amounts(config: Config) -> Amounts:
    """From the run's data where it is made, else from [plan] and [data]."""
    files = [config.run.data / name for name in ("train.safetensors", "heldout.safetensors")]
    if all(path.is_file() for path in files):
        splits = [SampleFile(path) for path in files]
        lengths = [(split.offsets[1:] - split.offsets[:-1]) for split in splits]
        return Amounts(
            sum(len(split) for split in splits), float(sum(int(split.offsets[-1]) for split in splits)),
            float(sum(len(supervised_rows(sample.loss_mask)) for split in splits for sample in split)),
            max((int(part.max()) for part in lengths if len(part)), default=0), "the run's data",
        )  # fmt: skip
    samples, source = planned_samples(config)
    each = min(config.plan.tokens_per_sample, config.data.max_tokens)
    if source != "[plan]":
        source += f"; {each:,.0f} tokens each: {'plan.tokens_per_sample' if each == config.plan.tokens_per_sample else 'data.max_tokens, the most there can be'}"
    return Amounts(samples, samples * each, samples * each * config.plan.supervised, config.data.max_tokens, source)


def row_bytes(shape: Shape, num_aux: int, dtype: str, stored: str = "model") -> tuple[float, float]:
    """Bytes of one row in a dump or the store: (ids, mask and auxiliary states, `final`)."""
    if stored == "fp8":
        return ID_AND_MASK + num_aux * (shape.hidden + 4), shape.hidden + 4
    size = FLOAT_BYTES.get(dtype, 2)
    return ID_AND_MASK + num_aux * shape.hidden * size, shape.hidden * size


def dump_bytes(shape: Shape, num_aux: int, dtype: str, rows: int) -> float:
    """One dump file: ids and every state of every row, without its header (a few KB)."""
    return rows * (4 + (num_aux + 1) * shape.hidden * FLOAT_BYTES.get(dtype, 2))


# --- the server ----------------------------------------------------------------------------------------------------------------------------


def activation_bytes(shape: Shape, chunk: int, tp: int, size: int) -> float:
    """Forward of one prefill chunk on one rank: residual stream and norms, the widest layer's intermediates. [chunk, ...] tensors alive at once."""
    stream = 4 * chunk * shape.hidden * size
    attention = chunk * (shape.heads / tp) * (4 * shape.head_dim if not shape.is_mla else 2 * 192 + 3 * 128) * size
    dense = chunk * 3 * shape.config.get("intermediate_size", shape.hidden) / tp * size if shape.dense_layers else 0
    routed = chunk * shape.experts_per_token * (max(shape.hidden, 2 * shape.expert_size / tp) + shape.expert_size / tp) * size if shape.experts else 0
    return stream + max(attention, dense, routed)


def capture_bytes(shape: Shape, num_aux: int, chunk: int, size: int) -> dict[str, float]:
    """What capture adds (patches/hidden_state_dump.py): auxiliary states that forward keeps on every rank; on the writing rank a copy of `final` beside them, and all of it
    a second time while a copy to the host overlaps the next chunk; in pinned host memory a ring of four chunks."""
    one = chunk * shape.hidden * size
    return {"every rank": num_aux * one, "writer": (num_aux + 2) * one, "host": max(4 * (num_aux + 1) * one, 256 << 20)}


def drafter_config(config: Config, shape: Shape) -> dict[str, Any]:
    """The keys of the drafter's config.json that fix its tensors; zeros in [draft] come from the target, as the trainer takes them."""
    draft = config.draft
    heads = draft.num_attention_heads or shape.heads
    found = {
        "hidden_size": draft.hidden_size or shape.hidden, "intermediate_size": draft.intermediate_size or shape.inner, "num_hidden_layers": 1,
        "num_attention_heads": heads, "num_key_value_heads": draft.num_key_value_heads or (heads if shape.is_mla else shape.kv_heads),
        "head_dim": draft.head_dim or (128 if shape.is_mla else shape.head_dim), "draft_vocab_size": min(draft.vocab_size, shape.vocab),
        "fc_norm": draft.fc_norm, "norm_before_fc": draft.norm_before_fc,
    }  # fmt: skip
    return found | {key: shape.config[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if key in shape.config}


def drafter_parameters(config: Config, shape: Shape) -> dict[str, float]:
    """Parameters of the drafter by part, from the tensors that SGLang's loader of its class reads."""
    drafter = drafter_config(config, shape)
    if config.draft.arch == "mla" and not shape.is_mla:
        raise UserError(f"{config.path}: draft.arch = 'mla' needs a target with latent attention, and {shape.name} has none; set draft.arch = \"llama\"")
    tensors = expected_tensors(drafter, MLA if config.draft.arch == "mla" else LLAMA, len(config.target.aux_layer_ids), shape.hidden)
    parts = {"fc": 0.0, "attention": 0.0, "MLP": 0.0, "LM head": 0.0, "norms": 0.0}
    for name, size in tensors.items():
        part = "norms" if len(size) == 1 else "fc" if name.startswith("fc") else "LM head" if "lm_head" in name else "attention" if "self_attn" in name else "MLP"
        parts[part] += math.prod(size)
    return parts


def drafter_kv(config: Config, shape: Shape, tp: int) -> float:
    """Elements of the drafter's KV a token on one GPU."""
    drafter = drafter_config(config, shape)
    if config.draft.arch == "mla":
        return drafter["kv_lora_rank"] + drafter["qk_rope_head_dim"]
    return 2 * max(drafter["num_key_value_heads"] / tp, 1) * drafter["head_dim"]


def plan_server(plan: Plan, config: Config, shape: Shape, mode: str, args: dict[str, Any]) -> None:
    """Adds the phase `mode` (extraction, serving): static share (weights, KV) and what must fit beside it."""
    tp = tensor_parallel(args)
    if tp > plan.gpus:
        plan.refusals.append(f"{mode}: server.args.tp-size = {tp} needs {tp} GPUs, and {plan.gpus} {'is' if plan.gpus == 1 else 'are'} there")
        return
    dtype = config.target.dtype
    size = FLOAT_BYTES.get(dtype, 2)
    free = plan.gpu_bytes
    running = option_number(args, "max-running-requests", default=32)
    context = option_number(args, "context-length", default=shape.context or 4096)
    chunk = option_number(args, "chunked-prefill-size", default=8192, least=-1)
    if chunk <= 0:  # SGLang prefills whole prompts then, several at once up to max-prefill-tokens
        chunk = max(option_number(args, "max-prefill-tokens", default=16384), min(config.data.max_tokens + 1, context))
    fraction = option_number(args, "mem-fraction-static", default=0, least=0.01, most=1, whole=False)
    share = free * fraction if fraction else max(free - DEFAULT_FRACTION_RESERVE_GIB * GIB, 0)
    weights = shape.weight_bytes(tp, dtype)
    parts = [Part(f"weights: {name}", value) for name, value in weights.items()]
    kv = shape.kv_bytes(tp, dtype, str(args.get("kv-cache-dtype", "auto")))
    if mode == "serving":
        drafter = drafter_parameters(config, shape)
        parts.append(Part("weights: drafter", sum(drafter.values()) * size / tp, f"{sum(drafter.values()) / 1e9:.2f} B parameters over {tp}"))
        kv += drafter_kv(config, shape, tp) * size
    graphs = Part("decode graphs", 0.0 if args.get("disable-cuda-graph") else 0.4 * GIB + option_number(args, "cuda-graph-max-bs-decode", default=32) * 2 * (1 << 20))
    if not shape.is_mla:  # sized after graphs were captured, so they come off the static share (kv_pool_runtime.py); with MLA before
        parts.append(graphs)
    pool = share - sum(part.bytes for part in parts)
    tokens = int(pool / kv)
    if "max-total-tokens" in args:
        tokens = min(tokens, option_number(args, "max-total-tokens", default=tokens))
    parts.append(Part("KV", max(tokens, 0) * kv, f"{max(tokens, 0):,} tokens of {kv / 1024:.1f} KB"))
    beside = [Part("activations of a chunk", activation_bytes(shape, chunk, tp, size) * ALLOCATOR, f"{chunk:,} tokens"),
              Part("logits and sampling", 3 * running * shape.vocab * 4),
              Part("request table", running * context * 4, f"{running} requests x {context:,}"), *([graphs] if shape.is_mla else [])]  # fmt: skip
    if mode == "extraction":
        capture = capture_bytes(shape, len(config.target.aux_layer_ids), chunk, size)
        beside += [Part("capture: auxiliary states", capture["every rank"], "on every rank"), Part("capture: rows on their way", capture["writer"], "final and a second chunk, on the writing rank")]
        plan.notes["host memory"] = f"{capture['host'] / GIB:.1f} GiB of pinned host memory for rows on their way to the dump files"
    plan.phases[mode] = parts + beside
    slack, needed = free - share, sum(part.bytes for part in beside)
    plan.notes[mode] = f"{slack / GIB:.1f} GiB beside the static share of mem-fraction-static = {share / free:.3f}, {needed / GIB:.1f} GiB of it needed"
    if tokens <= 0:
        held = (sum(part.bytes for part in parts[:-1])) / GIB
        plan.refusals.append(f"{mode}: weights of {held:.1f} GiB a GPU leave no KV in {share / GIB:.1f} GiB (mem-fraction-static x {free / GIB:.1f} GiB); more GPUs, or a smaller checkpoint")
        return
    longest = min(config.data.max_tokens + 1, context)
    if config.data.max_tokens + 1 > context:
        plan.refusals.append(f"{mode}: data.max_tokens = {config.data.max_tokens} does not fit server.args.context-length = {context}; samples need one token more than their length")
    if tokens < longest:
        plan.refusals.append(f"{mode}: KV for {tokens:,} tokens does not hold one sample of {longest:,}; raise mem-fraction-static, or lower data.max_tokens")
    if needed > slack:
        plan.refusals.append(
            f"{mode}: {needed / GIB:.2f} GiB are needed beside weights and KV, and mem-fraction-static = {share / free:.3f} leaves {slack / GIB:.2f}; "
            f"lower it to {1 - needed / free:.3f}, or lower chunked-prefill-size = {chunk}"
        )


# --- the trainer ---------------------------------------------------------------------------------------------------------------------------


def kept_bytes(rows: float, labels: float, steps: int, hidden: int, heads: int, q: int, kv: int, inner: int, compute: int, fused: bool) -> dict[str, float]:
    """What autograd keeps of one batch (scripts/aerie/unroll.py, drafter.py, fast_ops.py). rows: all; labels: supervised ones; q, kv: width of all query, key heads.

    Fused (the GPU's path): a step keeps inputs and outputs of the norms, gate and up, their product, the attention's output of the rows that ask; query and output of the
    flash kernel stand for every row; keys and values of the chain, and their gradients, are buffers of their own.
    Plain: a norm keeps its input, its normed value and its output; rotation keeps what it rotated; the SwiGLU keeps gate, up, silu(gate) and the product.
    """
    if not fused:
        first = rows * (3 * hidden + 2 * (q + 2 * kv)) * compute  # norms of embedding and state, projections of both, for the keys of every row
        return {"first keys": first, "steps": steps * labels * (8 * hidden + 3 * q + 4 * kv + 4 * inner) * compute}
    first = rows * (4 * hidden + (q + 2 * kv) + 2 * kv) * compute
    step = labels * (5 * hidden + q + 3 * inner) * compute + rows * (2 * q * compute + heads * 4)
    return {"first keys": first, "steps": steps * step, "chain": (4 * (steps - 1) * labels * kv + rows * q) * compute}


def training_parts(config: Config, shape: Shape, rows: int, supervised: float, ranks: int = 1, compute: int = 2, loss_kernel: bool = False) -> list[Part]:
    """Memory of 03_train.py on one GPU. rows: train.batch_tokens; ranks: over how many FSDP splits masters, gradients and moments; compute: bytes of a compute value;
    loss_kernel: `make cuda` has run, so that a chunk of logits is there once, in the compute dtype, and its gradient in its place (else three float32 tensors).

    Matrices: float32 masters, gradients and two moments of AdamW, and a copy in the compute dtype. Frozen: the target's embedding, LM head and its draft rows.
    """
    drafter = drafter_config(config, shape)
    count = sum(drafter_parameters(config, shape).values())
    hidden, inner, draft_vocab, heads = drafter["hidden_size"], drafter["intermediate_size"], drafter["draft_vocab_size"], drafter["num_attention_heads"]
    q, kv = heads * drafter["head_dim"], drafter["num_key_value_heads"] * drafter["head_dim"]
    labels, steps = rows * supervised, config.train.ttt_steps
    kept = kept_bytes(rows, labels, steps, hidden, heads, q, kv, inner, compute, fused=compute < 4)
    logits = min(256 << 20, max(labels, 16) * draft_vocab * 4)
    if loss_kernel and compute < 4:
        logits *= compute / 4
    else:
        logits *= 3
    return [
        Part("masters", count * 4 / ranks, f"{count / 1e9:.2f} B parameters, float32"),
        Part("gradients", count * 4 / ranks, "float32"),
        Part("AdamW moments", count * 8 / ranks, "float32"),
        Part("compute copy", count * compute if compute < 4 else 0),
        Part("target's embedding and heads", (2 * shape.vocab + draft_vocab) * hidden * compute),  # a tied head is read a second time
        Part("batch of states", (rows * (len(config.target.aux_layer_ids) * shape.hidden + hidden) + labels * shape.hidden) * compute),
        Part("teacher logits", labels * draft_vocab * compute),
        *(Part(f"activations: {name}", size, f"{steps} TTT steps" if name == "steps" else "") for name, size in kept.items()),
        Part("chunk of logits, or gradients inside the MLP", max(logits, labels * 3 * inner * compute)),
    ]


def plan_training(plan: Plan, config: Config, shape: Shape, supervised: float, loss_kernel: bool) -> None:
    """Adds training as this config does it, and for comparison on one card or split by FSDP over all. Refuses when a card is too small for what the config does."""
    compute = 4 if config.train.dtype == "float32" else 2
    several, fsdp = len(config.train.gpus), config.train.parallel == "fsdp"
    names = {1: "training, one GPU"}  # ranks that split the state: heading
    if several > 1 and fsdp:
        names = {1: "training, if one GPU did it alone", several: f"training, FSDP over {several} GPUs"}
    elif several > 1:
        names = {1: f"training, DDP over {several} GPUs"}
    if plan.gpus > 1 and len(names) == 1:
        names[plan.gpus] = f"training, if FSDP split it over {plan.gpus}"
    plan.training = names[several if several > 1 and fsdp else 1]
    for ranks, name in names.items():
        plan.phases[name] = training_parts(config, shape, config.train.batch_tokens, supervised, ranks, compute, loss_kernel)
        plan.notes[name] = f"{plan.total(name) / GIB:.1f} GiB of {plan.gpu_bytes / GIB:.1f}: {'fits' if plan.total(name) <= plan.gpu_bytes else 'does not fit'}"
    if len(names) > 1:
        plan.notes[plan.training] += "; this is what the config does" + (": train.gpus names fewer than two, so train.parallel = \"fsdp\" splits nothing" if fsdp and several < 2 else "")
    if plan.total(plan.training) > plan.gpu_bytes:
        plan.refusals.append(
            f"training: {plan.total(plan.training) / GIB:.1f} GiB are needed and {plan.gpu_bytes / GIB:.1f} are there; lower train.batch_tokens = {config.train.batch_tokens}, "
            "train.ttt_steps or draft.vocab_size"
        )
    resident = plan.total("extraction") if "extraction" in plan.phases else 0
    if resident and not config.train.stop_server and not apart(config) and resident + plan.total(plan.training) > plan.gpu_bytes:
        plan.refusals.append("training: train.stop_server = false, and server and trainer together do not fit one GPU; set it to true")


def streams(plan: Plan, config: Config, tp: int) -> bool:
    """Whether server and trainer have room at the same time: a GPU of its own for the trainer, or memory left beside the server; also where no GPUs are planned."""
    if tp < plan.gpus or not plan.gpus or apart(config) or "extraction" not in plan.phases:
        return True
    return plan.total("extraction") + plan.total(plan.training) <= plan.gpu_bytes


def plan_streaming(plan: Plan, config: Config, tp: int) -> None:
    """With extract.keep_gb server and trainer run at once: refuses when the server has every GPU and the trainer does not fit beside it."""
    if config.extract.keep_gb and not streams(plan, config, tp):
        half = "" if config.extract.dtype == "fp8" else " and extract.dtype = \"fp8\""
        plan.refusals.append(
            f"streaming: extract.keep_gb trains while extracting, the server takes {plan.total('extraction') / GIB:.1f} GiB of every GPU and the trainer needs "
            f"{plan.total(plan.training) / GIB:.1f} of the {plan.gpu_bytes / GIB:.1f}; give it a GPU of its own beside the server's {tp} (server.gpus, train.gpus), lower "
            f"mem-fraction-static, or set extract.keep_gb = 0{half}"
        )


def more_disk(plan: Plan, config: Config) -> str:
    """What would need less of a disk that is short: only what this config has not done yet, and what its machine can do."""
    advice = ["point AERIE_RUNS_DIR at a larger disk"]
    if config.extract.dtype != "fp8":
        advice.append("set extract.dtype = \"fp8\" (half)")
    if config.extract.keep_gb:
        advice.append(f"lower extract.keep_gb = {config.extract.keep_gb:g}")
    elif streams(plan, config, tensor_parallel(config.server.args)):
        advice.append("train while extracting: `make stream` with extract.keep_gb" + (", on a GPU of its own" if plan.gpus > 1 else ""))
    return ", ".join(advice[:-1]) + (", or " if len(advice) > 1 else "") + advice[-1]


# --- disk and hours ------------------------------------------------------------------------------------------------------------------------


def plan_disk(plan: Plan, config: Config, shape: Shape, amounts: Amounts, disk_free: float, dumps_free: float | None) -> None:
    """Adds store, data, checkpoints and the drafter; refuses what the disk, or the dump folder, cannot hold."""
    num_aux = len(config.target.aux_layer_ids)
    aux, final = row_bytes(shape, num_aux, config.target.dtype, config.extract.dtype)
    rows = amounts.tokens if config.extract.all_final_rows else amounts.final_rows
    store = amounts.tokens * aux + rows * (final + 8)
    kept = f"{amounts.tokens:,.0f} rows of {aux:,.0f} bytes, final {final:,.0f} for {rows:,.0f}"
    if config.extract.keep_gb and config.extract.keep_gb * 1e9 < store:
        kept = f"extract.keep_gb, of {store / 1e12:.2f} TB that go through: {kept}"
        store = config.extract.keep_gb * 1e9
    count = sum(drafter_parameters(config, shape).values())
    plan.disk = [Part("data", amounts.tokens * ID_AND_MASK), Part("store", store, kept), Part("checkpoints", 2 * count * CHECKPOINT_BYTES, "the last and the best: masters and moments"),
                 Part("drafter", count * 2)]  # fmt: skip
    needed = sum(part.bytes for part in plan.disk)
    if needed > disk_free:
        plan.refusals.append(
            f"disk: {needed / 1e9:,.0f} GB are needed under {config.run.root.parent} and {disk_free / 1e9:,.0f} GB are free; {more_disk(plan, config)}"
        )
    if dumps_free is not None:
        two = 2 * dump_bytes(shape, num_aux, config.target.dtype, min(amounts.longest, config.data.max_tokens) or config.data.max_tokens)
        plan.notes["dump folder"] = f"{dumps_free / 1e9:,.1f} GB free; the two longest samples take {two / 1e9:.2f} GB"
        if two > dumps_free:
            plan.refusals.append(
                f"dump folder: two samples of {config.data.max_tokens:,} tokens are {two / 1e9:.2f} GB and {dumps_free / 1e9:.2f} GB are free; "
                "enlarge /dev/shm, or set server.dump_dir to a folder on a fast disk"
            )


def measured_rates(config: Config) -> dict[str, float]:
    """Tokens a second that this run has measured itself: {rate of [plan]: value}; they go before those of the config."""
    found = {}
    for name, path, key in (("decode_tok_s", config.run.data, "answer_tok_s"), ("prefill_tok_s", config.run.store, "extract_tok_s"), ("train_tok_s", config.run.drafter, "train_tok_s")):
        if value := read_report(path / "report.json").get(key):
            found[name] = float(value)
    return found


def plan_hours(plan: Plan, config: Config, amounts: Amounts) -> None:
    """Hours by step for the rates that this run has measured, else those of [plan]; a step without a rate is left out."""
    measured = measured_rates(config)
    rates = {name: measured.get(name) or getattr(config.plan, name) for name in ("decode_tok_s", "prefill_tok_s", "train_tok_s")}
    steps = {"answers": ("decode_tok_s", amounts.final_rows if config.data.regenerate else 0), "extraction": ("prefill_tok_s", amounts.tokens),
             "training": ("train_tok_s", config.train.epochs * amounts.tokens)}  # fmt: skip
    for step, (name, tokens) in steps.items():
        if rates[name] and tokens:
            plan.hours[step] = tokens / rates[name] / 3600
            plan.notes[f"hours of {step}"] = f"{rates[name]:,.0f} tok/s, {'measured in this run' if name in measured else config.plan.rates_from or 'from [plan]'}"


def make_plan(config: Config, shape: Shape, amounts: Amounts, *, gpus: int, gpu_bytes: float, extraction_args: dict[str, Any], serving_args: dict[str, Any],
              disk_free: float, dumps_free: float | None, loss_kernel: bool = False) -> Plan:  # fmt: skip
    """The whole plan. gpu_bytes: free on a GPU before anything is loaded; 0 GPUs: memory of GPUs is left out; loss_kernel: see training_parts."""
    plan = Plan(gpus, gpu_bytes)
    if gpus:
        plan_server(plan, config, shape, "extraction", extraction_args)
        plan_server(plan, config, shape, "serving", serving_args)
        plan_training(plan, config, shape, amounts.final_rows / max(amounts.tokens, 1), loss_kernel)
        plan_streaming(plan, config, tensor_parallel(extraction_args))
    plan_disk(plan, config, shape, amounts, disk_free, dumps_free)
    plan_hours(plan, config, amounts)
    return plan
