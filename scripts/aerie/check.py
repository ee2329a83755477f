"""Is a drafter's folder one that SGLang will draft well with? Every key and tensor that its loader reads, before the server is launched.

SGLang's loader reports none of these: a missing tensor keeps random values, a missing key gets a default, and the server answers 200 and is only slower.
With engine "vllm" the same for vLLM's llama_eagle3.py and its capture of auxiliary states (vllm/v1/worker; read at the sources of early 2026, not run here).
Sources: sglang/srt/models/llama_eagle3.py, kimi_k25_eagle3.py, model_executor/model_runner_components/spec_aux_hidden_state.py, configs/model_config.py (0.5.17 to 0.5.23).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterator

import torch

from .drafter_files import DrafterFolder
from .drafter_shapes import ARCHITECTURES, HARMLESS, LLAMA, MLA, canonical_name, capture_points, expected_tensors, layers_in_file, norm_before_fc, widths_of_tensors
from .errors import UserError
from .identity import model_hash, read_model_config, text_config, tokenizer_hash

SGLANG_VERSIONS = ("0.5.17", "0.5.23")  # whose loaders were read for these checks
COMMON_KEYS = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "draft_vocab_size",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "rope_theta", "tie_word_embeddings", "eagle_config",
)  # fmt: skip
REQUIRED_KEYS = {
    LLAMA: (*COMMON_KEYS, "num_key_value_heads", "head_dim"),
    MLA: (*COMMON_KEYS, "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}
WHY = {  # what SGLang does without the key
    "head_dim": "the loader takes hidden_size / num_attention_heads, which another head size does not fit",
    "rope_theta": "the loader takes 10000, and the drafter's positions turn at another rate than in training",
    "eagle_config": "the loader guesses the auxiliary layers (2, N/2, N-3) and the drafter reads states that it was not trained on",
    "draft_vocab_size": "the loader stops, or takes the target's vocabulary",
    "max_position_embeddings": "the loader takes 2048 and the server stops at start, or drafts at random past it",
    "num_key_value_heads": "the loader takes num_attention_heads",
    "tie_word_embeddings": "a tied drafter takes the embedding as its LM head and ignores its draft vocabulary",
}
MLA_BACKENDS = ("flashmla", "trtllm_mla", "cutedsl_mla", "tokenspeed_mla", "cutlass_mla")
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    ok: bool | None  # None: cannot be told from this folder
    key: str
    text: str


@dataclass
class Serving:
    """What the server will be started with, as far as it matters here. Empty: unknown, SGLang's default."""

    dtype: str = "auto"  # --dtype
    context_length: int = 0  # --context-length; 0: the target's own
    quantization: str = ""  # --quantization
    draft_quantization: str = ""  # --speculative-draft-model-quantization
    attention_backend: str = ""  # --attention-backend
    draft_attention_backend: str = ""  # --speculative-draft-attention-backend
    gpu: bool = False
    server_version: str = ""  # of SGLang
    engine: str = "sglang"  # or vllm: another place and another meaning of the auxiliary ids, fewer options
    store: dict[str, Any] = field(default_factory=dict)  # the manifest of the store that the drafter was trained on


def context_length(config: dict[str, Any]) -> int:
    """The longest context by a config's own words, as SGLang derives it (utils/hf_transformers/common.py: get_context_length)."""
    scaling = config.get("rope_scaling") or {}
    stretched = scaling and "original_max_position_embeddings" not in scaling and scaling.get("rope_type", scaling.get("type")) != "llama3"
    factor = scaling.get("factor", 1) if stretched else 1
    for key in ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings"):
        if config.get(key) is not None:
            return int(factor * config[key])
    return 2048


def served_dtype(config: dict[str, Any], flag: str) -> str:
    """The dtype SGLang runs a model in; `auto` reads the config's dtype, and makes float16 of float32 or of nothing."""
    if flag != "auto":
        return {"half": "float16", "float": "float32"}.get(flag, flag)
    own = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    return "float16" if own == "float32" else own


class Check:
    """Runs the checks of one folder in order; `lines` is the table. A group of checks is skipped when one before it that it builds on has failed."""

    def __init__(self, drafter: Path, target: Path | str, serving: Serving | None = None):
        self.folder = DrafterFolder(drafter)
        self.target_path = target
        self.config, self.training, self.serving = self.folder.config, self.folder.training, serving or Serving()
        self.target_config = read_model_config(target)
        self.target = text_config(self.target_config)
        for key in ("hidden_size", "vocab_size", "num_hidden_layers"):
            if not isinstance(self.target.get(key), int):
                raise UserError(f"{target}/config.json has no {key}; name the target's own folder")
        self.lines: list[Line] = []
        self.names: dict[str, str] = {}  # canonical name -> the file's name
        self.mended: dict[str, int] = {}  # widths that the tensors have and the config's keys do not
        self.arch = ""

    @property
    def failed(self) -> list[Line]:
        return [line for line in self.lines if line.ok is False]

    def run(self) -> list[Line]:
        """All checks; the first failing line is the one to mend first."""
        groups: tuple[Callable[[], Iterator[Line]], ...] = (
            self.architecture, self.keys, self.widths, self.fits_target, self.layers, self.aux_layers, self.positions, self.flags, self.tensors, self.vocabulary_map, self.values,
            self.dtypes, self.quantisation, self.attention_backend, self.provenance,
        )  # fmt: skip
        for group in groups:
            before = len(self.failed)
            self.lines.extend(group())
            if len(self.failed) > before and group in (self.architecture, self.keys):
                break  # nothing below can be told without these
        return self.lines

    def architecture(self) -> Iterator[Line]:
        if "speculators_model_type" in self.config or "speculators_config" in self.config:
            yield Line(False, "speculators_config", "a folder in the speculators format, which SGLang cannot load; convert it to the layout of "
                "LlamaForCausalLMEagle3")
            return
        version = self.serving.server_version
        if self.serving.engine == "sglang" and version and version not in SGLANG_VERSIONS:
            yield Line(None, "SGLang", f"{version}: its loader was not read for these checks, the rules of {SGLANG_VERSIONS[-1]} are taken")
        names = self.config.get("architectures") or []
        self.arch = names[0] if names else ""
        known = ARCHITECTURES if self.serving.engine == "sglang" else (LLAMA,)
        ok = self.arch in known
        yield Line(ok, "architectures", self.arch if ok else f"{names or 'missing'}; the EAGLE-3 classes of {self.serving.engine} that are known here: "
            f"{' and '.join(known)}")
        if not ok:
            return
        self.names = {canonical_name(name, self.arch): name for name in self.folder.tensors}

    def keys(self) -> Iterator[Line]:
        missing = [key for key in REQUIRED_KEYS[self.arch] if key not in self.config]
        for key in missing:
            yield Line(False, key, f"missing in config.json{'; without it ' + WHY[key] if key in WHY else ''}")
        numbers = [key for key in REQUIRED_KEYS[self.arch] if key in self.config and key.endswith(("_size", "_dim", "_rank", "_heads", "_layers", "_embeddings"))]
        for key in numbers:
            value = self.config[key]
            if key == "tie_word_embeddings" or (key == "draft_vocab_size" and value is None):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                yield Line(False, key, f"{value!r} is not a number above 0")
        if not missing:
            yield Line(True, "config keys", f"all {len(REQUIRED_KEYS[self.arch])} that the loader reads")

    def widths(self) -> Iterator[Line]:
        """Before everything that builds on a width: where all tensors agree and a key does not, that key is the one to mend, not the tensors one by one."""
        shapes = {name: self.folder.tensors[own].shape for name, own in self.names.items()}
        self.mended = widths_of_tensors(self.config, self.arch, self.aux_count(), shapes)
        for key, value in self.mended.items():
            yield Line(False, key, f"{self.config[key]} in config.json, but the file's tensors are all made for {value}" + (f'; write "{key}": {value}' if len(self.mended) == 1 else ""))

    def fits_target(self) -> Iterator[Line]:
        hidden = self.config.get("target_hidden_size", self.config["hidden_size"])
        key = "target_hidden_size" if "target_hidden_size" in self.config else "hidden_size"
        ok = hidden == self.target["hidden_size"]
        yield Line(ok, key, f"{hidden}" if ok else f"{hidden}, but the target's hidden_size is {self.target['hidden_size']}: a drafter of another target")
        vocab, wanted = self.config["vocab_size"], self.target["vocab_size"]
        yield Line(vocab == wanted, "vocab_size", f"{vocab:,}" if vocab == wanted else f"{vocab}, but the target's is {wanted}: a drafter of another target")
        tied = self.config["tie_word_embeddings"]
        yield Line(tied is False, "tie_word_embeddings", "false" if tied is False else f"{tied!r} must be false: {WHY['tie_word_embeddings']}")
        draft = self.config["draft_vocab_size"]
        ok = draft is None or draft <= vocab
        yield Line(ok, "draft_vocab_size", f"{'null: the LM head is the target' if draft is None else format(draft, ',')}" if ok else f"{draft} is larger "
            f"than vocab_size {vocab}")

    def layers(self) -> Iterator[Line]:
        said, found = self.config["num_hidden_layers"], layers_in_file(list(self.names))
        if said != found:
            also = ", the target's own number: copied from its config" if said == self.target["num_hidden_layers"] else ""
            yield Line(False, "num_hidden_layers", f"{said}{also}, but the file holds {found} decoder layer{'s' if found != 1 else ''}; the rest would "
                f"be random")
        elif self.arch == MLA and said != 1:
            yield Line(False, "num_hidden_layers", f"{said}, but {MLA} takes 1")
        else:
            yield Line(True, "num_hidden_layers", str(said))

    def aux_ids(self) -> list[int]:
        """The auxiliary layer ids where the engine reads them (SGLang: in eagle_config, vLLM: at the top level), [] when there are none."""
        place = self.config if self.serving.engine == "vllm" else self.config["eagle_config"] or {}
        ids = place.get("eagle_aux_hidden_state_layer_ids")
        return ids if isinstance(ids, list) else []

    def points(self, ids: list[int]) -> list[int]:
        """'State after N decoder layers' that the engine makes of ids: vLLM takes them as they are."""
        return list(ids) if self.serving.engine == "vllm" else capture_points(self.target, ids)

    def aux_count(self) -> int:
        """How many states fc reads, as SGLang resolves it."""
        return self.config.get("num_aux_hidden_states") or len(self.aux_ids()) or 3

    def aux_layers(self) -> Iterator[Line]:
        key, ids, depth = "eagle_aux_hidden_state_layer_ids", self.aux_ids(), self.target["num_hidden_layers"]
        if not ids or not all(isinstance(value, int) for value in ids):
            where = "at the top level of config.json" if self.serving.engine == "vllm" else "in eagle_config"
            yield Line(False, key, f"missing {where}; without it {WHY['eagle_config']}")
            return
        points = self.points(ids)
        if sorted(set(ids)) != ids:
            yield Line(False, key, f"{ids} must rise without repeats")
        elif points[0] < 0 or points[-1] >= depth:
            yield Line(False, key, f"{ids} asks for states after {points} decoder layers, but the target has {depth} and its last state to capture is after "
                f"{depth - 1}")
        else:
            yield Line(True, key, f"{ids}: the states after {', '.join(map(str, points))} of {depth} decoder layers")
        if (self.config["eagle_config"] or {}).get("use_aux_hidden_state", True) is not True:
            yield Line(False, "use_aux_hidden_state", "must be true: without it the server feeds the last state instead of the auxiliary ones")
        count = self.config.get("num_aux_hidden_states")
        if count is not None and count != len(ids):
            yield Line(False, "num_aux_hidden_states", f"{count}, but eagle_config names {len(ids)} layers")
        recorded = (("training.json", self.training), ("the store", self.serving.store))
        for where, record in recorded:
            if self.serving.engine == "sglang" and record.get("aux_layer_ids", ids) != ids:
                yield Line(False, key, f"{ids}, but {where} says that it was trained on {record['aux_layer_ids']}")
            elif record.get("capture_points", points) != points:
                yield Line(False, "capture_points", f"this target captures after {points} layers, but {where} says that it was trained on the states after "
                    f"{record['capture_points']}")

    def positions(self) -> Iterator[Line]:
        own, needed = context_length(self.config), self.serving.context_length or context_length(self.target)
        ok = own >= needed
        text = f"{own:,} (the target is served up to {needed:,})"
        yield Line(ok, "max_position_embeddings", text if ok else f"{own}, but the target is served up to {needed} tokens: the server stops at start, or "
            f"drafts at random past {own}")
        new, old = self.config.get("rope_parameters"), self.config["rope_theta"]
        if isinstance(new, dict) and "rope_theta" in new and new["rope_theta"] != old:
            yield Line(False, "rope_parameters", f"rope_theta is {new['rope_theta']} here and {old} at the top level; engines read one or the other")
        elif isinstance(new, dict) and self.config.get("rope_scaling") and new.get("factor") != self.config["rope_scaling"].get("factor"):
            yield Line(False, "rope_scaling", "says another factor than rope_parameters; engines read one or the other")
        else:
            yield Line(True, "rope_theta", f"{old:g}{', in both spellings' if isinstance(new, dict) else ', in the old spelling (transformers 5 reads it too)'}")
        if self.arch == LLAMA and self.config["num_attention_heads"] % self.config["num_key_value_heads"]:
            yield Line(False, "num_key_value_heads", f"{self.config['num_key_value_heads']} does not divide num_attention_heads "
                f"{self.config['num_attention_heads']}")

    def flags(self) -> Iterator[Line]:
        nested = (self.config["eagle_config"] or {}).get("norm_before_fc")
        if nested is not None and "norm_before_fc" in self.config and bool(nested) != bool(self.config["norm_before_fc"]):
            yield Line(False, "norm_before_fc", f"{nested} in eagle_config and {self.config['norm_before_fc']} at the top level")
        if self.serving.engine == "vllm":
            for name in ("fc_norm", "use_aux_norm", "norm_output", "norm_before_fc", "bias"):
                if self.config.get(name) or (name == "norm_before_fc" and norm_before_fc(self.config)):
                    yield Line(False, name, "true, which vLLM's llama_eagle3.py does not read: it would draft with another network than was trained")
            if len(self.aux_ids()) != 3:
                yield Line(False, "eagle_aux_hidden_state_layer_ids", f"names {len(self.aux_ids())} layers, vLLM's fc reads 3")
        elif self.config.get("norm_before_residual"):
            yield Line(False, "norm_before_residual", "true, which SGLang does not read: the residual would be another than in training")
        if self.arch == MLA and norm_before_fc(self.config):
            yield Line(False, "norm_before_fc", f"true, which {MLA} does not read: the states would not be normed")
        flags = [name for name in ("fc_norm", "use_aux_norm", "norm_output") if self.config.get(name)] + (["norm_before_fc"] if norm_before_fc(self.config) else [])
        for name in ("fc_norm", "norm_before_fc", "norm_output"):
            if name in self.training and bool(self.training[name]) != (name in flags):
                yield Line(False, name, f"{name in flags} in config.json, but training.json says that it was trained with {self.training[name]}")
        yield Line(True, "norm flags", ", ".join(flags) or "none")

    def tensors(self) -> Iterator[Line]:
        if self.folder.repeated:
            yield Line(False, self.folder.repeated[0], "is in more than one file of the folder")
        config = self.config | self.mended  # one line a wrong key is enough
        target_hidden = config.get("target_hidden_size", config["hidden_size"])
        expected = expected_tensors(config, self.arch, self.aux_count(), target_hidden)
        for name, shape in expected.items():
            if name not in self.names:
                yield Line(False, name, "not in the file; the loader does not say so and keeps random values")
                continue
            found = self.folder.tensors[self.names[name]].shape
            if found != shape:
                why = ""
                if name == "fc.weight" and found[0] == shape[0] and found[1] % target_hidden == 0:
                    why = f": it reads {found[1] // target_hidden} auxiliary states, the config names {self.aux_count()}"
                yield Line(False, name, f"shape {list(found)} must be {list(shape)}{why}")
        if config["hidden_size"] != target_hidden and "embed_tokens.weight" not in self.names:
            yield Line(False, "embed_tokens.weight", "not in the file, and the target's does not fit a drafter of another hidden size")
        unknown = [name for name in self.names if name not in expected and not HARMLESS.search(name) and name != "d2t"]
        for name in unknown[:5]:
            yield Line(False, self.names[name], "is no tensor that the loader reads with this config: it would be left out without a word")
        if not self.failed:
            yield Line(True, "tensors", f"{len(expected)} names and shapes")

    def vocabulary_map(self) -> Iterator[Line]:
        draft, vocab = self.config["draft_vocab_size"], self.config["vocab_size"]
        if "d2t" not in self.names:
            if draft is None or draft == vocab:
                yield Line(True, "d2t", "not needed: the draft vocabulary is the target's")
            else:
                yield Line(False, "d2t", "not in the file: draft ids would be taken for target ids")
            return
        if draft is None:
            yield Line(False, "d2t", "is in the file, but draft_vocab_size is null: the LM head would be the target's whole one")
            return
        d2t = self.folder.get(self.names["d2t"])
        if d2t.dtype not in (torch.int64, torch.int32) or tuple(d2t.shape) != (draft,):
            yield Line(False, "d2t", f"{str(d2t.dtype).removeprefix('torch.')} {list(d2t.shape)} must be int64 [{draft}]")
            return
        ids = d2t.long() + torch.arange(draft)
        t2d = self.folder.get(self.names["t2d"]) if "t2d" in self.names else None
        if t2d is not None and (t2d.dtype != torch.bool or tuple(t2d.shape) != (vocab,)):
            yield Line(False, "t2d", f"{str(t2d.dtype).removeprefix('torch.')} {list(t2d.shape)} must be bool [{vocab}]: the map of another vocabulary")
            return
        good = int(ids.min()) >= 0 and int(ids.max()) < vocab and len(ids.unique()) == draft
        kept = None if t2d is None else set(t2d.nonzero().flatten().tolist())
        if good and (kept is None or kept == set(ids.tolist())):
            yield Line(True, "d2t", f"{draft:,} offsets to distinct target ids below {vocab:,}{', the ones of t2d' if kept is not None else ''}")
            if kept is None:
                yield Line(None, "t2d", "not in the file (SGLang does not read it)")
            return
        absolute = int(d2t.min()) >= 0 and int(d2t.max()) < vocab and len(d2t.unique()) == draft and draft > 1
        if absolute and (kept is None or kept == set(d2t.tolist())):
            yield Line(False, "d2t", "holds target ids; it must hold offsets: target id - draft id")
        elif not good:
            yield Line(False, "d2t", f"as offsets it gives target ids {int(ids.min())} to {int(ids.max())}, {draft - len(ids.unique())} of them twice; they "
                f"must be distinct, in 0 to {vocab - 1}")
        else:
            yield Line(False, "t2d", f"marks {len(kept or ())} ids, of which {len((kept or set()) & set(ids.tolist()))} are those of d2t: the map of another "
                f"vocabulary")

    def values(self) -> Iterator[Line]:
        bad = 0
        for name, info in self.folder.tensors.items():
            if not info.dtype.startswith(("float", "bfloat")):
                continue
            value = self.folder.get(name)
            broken = int((~value.float().isfinite()).sum())
            if broken:
                yield Line(False, name, f"{broken} of {value.numel()} values are not finite")
            elif value.dim() == 2 and value.numel() > 1 and not value.any():
                yield Line(False, name, "all values are zero")
            else:
                continue
            bad += 1
        if not bad:
            yield Line(True, "values", "all finite")

    def dtypes(self) -> Iterator[Line]:
        target = served_dtype(self.target if self.target.get("dtype") or self.target.get("torch_dtype") else self.target_config, self.serving.dtype)
        own = served_dtype(self.config, self.serving.dtype)
        stored = sorted({info.dtype for name, info in self.folder.tensors.items() if canonical_name(name, self.arch) not in ("d2t", "t2d")})
        odd = [dtype for dtype in stored if dtype not in FLOATS]
        new, old = (str(self.config.get(key) or "").removeprefix("torch.") for key in ("dtype", "torch_dtype"))
        if new and old and new != old:  # transformers keeps `dtype` where both are given, and SGLang takes what transformers kept
            yield Line(False, "dtype", f"{new}, and torch_dtype is {old}: SGLang reads dtype, older programs torch_dtype; write the same in both, or leave torch_dtype out")
        if odd:
            yield Line(False, "dtype", f"the file holds {', '.join(odd)} tensors; SGLang's loader takes {', '.join(FLOATS)}")
        elif "float16" in stored and target != "float16":
            yield Line(False, "dtype", f"float16 weights under a target served in {target}; export the drafter in {target}")
        elif own != target:
            said = self.config.get("dtype") or self.config.get("torch_dtype") or "missing"
            yield Line(False, "dtype", f"{said}: SGLang would run the drafter in {own} and the target in {target}; write \"dtype\": \"{target}\""
                + (", or name the dtype that both are served in (target.dtype of the config; check_drafter.py --dtype)" if self.serving.dtype == "auto" else ""))
        else:
            yield Line(True, "dtype", f"{', '.join(stored)} in the file, served in {target} like the target")

    def quantisation(self) -> Iterator[Line]:
        serving = self.serving
        if self.config.get("quantization_config") or self.config.get("compression_config"):
            key = "quantization_config" if self.config.get("quantization_config") else "compression_config"
            copied = ", the same as the target's" if self.config.get(key) == self.target_config.get(key) else ""
            yield Line(False, key, f"stands in config.json{copied}, but the tensors are not quantised")
        elif (self.folder.path / "hf_quant_config.json").is_file():
            yield Line(False, "hf_quant_config.json", "lies in the folder, but the tensors are not quantised")
        elif serving.quantization and serving.quantization != "unquant" and not serving.draft_quantization:
            yield Line(False, "speculative-draft-model-quantization", f"not set: the drafter would inherit the target's --quantization "
                f"{serving.quantization}; set it to unquant")
        else:
            yield Line(True, "quantisation", "none of its own, none inherited")

    def attention_backend(self) -> Iterator[Line]:
        key, serving = "speculative-draft-attention-backend", self.serving
        mla_target, mla_drafter = "kv_lora_rank" in self.target and self.target["kv_lora_rank"], self.arch == MLA
        chosen = serving.draft_attention_backend or serving.attention_backend
        if mla_drafter or not mla_target:
            yield Line(True, "attention backend", "the drafter's attention is of the "
                "target's kind" if bool(mla_target) == mla_drafter else chosen or "SGLang's choice")
        elif chosen in MLA_BACKENDS:
            yield Line(False, key, f"{chosen} takes MLA only, the drafter has plain attention; set serve.draft_attention_backend to fa3, flashinfer or triton")
        elif serving.gpu and not serving.draft_attention_backend:
            yield Line(False, key, "not set: a drafter with plain attention under an MLA target would inherit the target's backend; set "
                "serve.draft_attention_backend to fa3, flashinfer or triton")
        else:
            yield Line(True, "attention backend", chosen or "a plain drafter under an MLA target needs its own on a GPU: set serve.draft_attention_backend")

    def provenance(self) -> Iterator[Line]:
        if not self.training:
            yield Line(None, "training.json", "not in the folder: which target, layers and tokenizer it was trained with cannot be checked, nor its accept "
                "length predicted")
        elif self.training.get("model_hash", "") not in ("", model_hash(self.target_path)):
            yield Line(False, "model_hash", "training.json says that it was trained for another target than this folder's config.json")
        elif "tokenizer_hash" in self.training and self.training["tokenizer_hash"] != tokenizer_hash(self.target_path):
            yield Line(False, "tokenizer_hash", "training.json says that it was trained with another tokenizer than the target's")
        else:
            predicted = self.training.get("predicted_accept_length")
            yield Line(True, "training.json", f"of this target{f', predicted accept length {predicted:.3f}' if predicted else ''}")


def table(lines: list[Line]) -> str:
    """The lines with a tick, a cross, or a dash for what cannot be told."""
    width = max(len(line.key) for line in lines)
    signs = {True: "✓", False: "✗", None: "–"}
    return "\n".join(f"  {signs[line.ok]} {line.key:<{width}}  {line.text}" for line in lines)
