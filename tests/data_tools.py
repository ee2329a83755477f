"""Small tokenizers with the templates of tests/templates/, and chats to render with them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
CORPUS = [
    "What is the capital of France? The capital of France is Paris.", "You are a helpful assistant. Be short.", "Let me think about it: two and two is four.",
    "system user assistant tool ipython developer", '{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}, "defer_loading": null}',
    "Grüße aus Köln, 東京は晴れです。 Привет! 👩‍👩‍👧‍👦 🎉🎉 naïve café", "\n\n\n \n\t  code:\n    x = 1\n", "[INST] hello [/INST]", "<tools> </tools> Reasoning: medium # Valid channels",
]  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One kind of template and what its tokenizer knows."""

    template: str
    special: list[str]  # special tokens
    markers: list[str] = field(default_factory=list)  # added tokens that are not 'special'
    ends: list[str] = field(default_factory=list)  # eos_token_id of generation_config.json
    eos: str = ""  # the tokenizer's own


FAMILIES = {
    "chatml": Family("chatml", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"], ["<tool_call>", "</tool_call>"], ["<|im_end|>"], "<|endoftext|>"),
    "llama3": Family(
        "llama3", ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>",
                   *(f"<|reserved_special_token_{i}|>" for i in range(8))],
        [], ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"], "<|eot_id|>",
    ),
    "qwen3": Family("qwen3", ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|image_pad|>"],
                    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"], ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
    "deepseek_v3": Family("deepseek_v3", ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
                          ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", *(f"<｜tool▁{name}｜>" for name in (
                              "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep", "outputs▁begin", "outputs▁end", "output▁begin", "output▁end"))],
                          ["<｜end▁of▁sentence｜>"], "<｜end▁of▁sentence｜>"),
    "kimi_k2": Family("kimi_k2", ["[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"],
                      ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
                       "<think>", "</think>"], ["<|im_end|>"], "[EOS]"),
    "gpt_oss": Family("gpt_oss", ["<|startoftext|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"],
                      [], ["<|return|>", "<|endoftext|>", "<|call|>"], "<|return|>"),
    "glm46": Family("glm46", ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
                    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink"],
                    ["<|endoftext|>", "<|user|>", "<|observation|>"], "<|endoftext|>"),
    "no_generation_prompt": Family("no_generation_prompt", ["<s>", "</s>"], [], ["</s>"], "</s>"),
}  # fmt: skip
FAMILIES["deepseek_r1"] = Family("deepseek_r1", *list(vars(FAMILIES["deepseek_v3"]).values())[1:])
FAMILIES["deepseek_v31"] = Family("deepseek_v31", *list(vars(FAMILIES["deepseek_v3"]).values())[1:])
FAMILIES["kimi_k2_thinking"] = Family("kimi_k2_thinking", *list(vars(FAMILIES["kimi_k2"]).values())[1:])
FAMILIES["kimi_k25"] = Family("kimi_k25", *list(vars(FAMILIES["kimi_k2"]).values())[1:])


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


# Words with one character before them, digits by three, line breaks with the spaces before them: the kind that Llama-3, Qwen and DeepSeek cut with.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_bytes(gpt2_words: bool = False) -> Any:
    """A byte-level BPE tokenizer without any added token; GPT-2's words make a token of a space or line break depend on what follows it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if gpt2_words
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def finish_folder(folder: Path, family: Family, ids: dict[str, int], size: int) -> Path:
    """Template, config.json and generation_config.json beside a tokenizer."""
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8"), encoding="utf-8")
    write_json(folder / "config.json", {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": size + 10})
    write_json(folder / "generation_config.json", {"eos_token_id": [ids[token] for token in family.ends]})
    return folder


def make_gpt2_words(folder: Path, name: str) -> Path:
    """As make_fast(), cut into words as GPT-2 does it."""
    return make_fast(folder, name, gpt2_words=True)


def make_fast(folder: Path, name: str, gpt2_words: bool = False) -> Path:
    """A model folder with a fast byte-level tokenizer of this family (no weights)."""
    from tokenizers import AddedToken

    family = FAMILIES[name]
    folder.mkdir(parents=True)
    tokenizer = train_bytes(gpt2_words)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "clean_up_tokenization_spaces": False})
    ids = {token: tokenizer.token_to_id(token) for token in [*family.special, *family.markers]}
    return finish_folder(folder, family, ids, tokenizer.get_vocab_size())


def make_sentencepiece_like(folder: Path, name: str) -> Path:
    """The same with spaces as '▁', a prefix space on the first word, and a BOS that encode() adds by itself, as Llama-2 and Mistral have it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    family = FAMILIES[name]
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))])
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos, "bos_token": "<s>"})
    return finish_folder(folder, family, {token: tokenizer.token_to_id(token) for token in family.special}, tokenizer.get_vocab_size())


def make_tiktoken(folder: Path, name: str) -> Path:
    """Kimi's way: tiktoken behind Python code in the model folder, loaded with trust_remote_code, no offset mapping."""
    family = FAMILIES[name]
    folder.mkdir(parents=True)
    merges = sorted({text.encode()[i : i + n] for text in CORPUS for n in (2, 3, 4) for i in range(0, len(text.encode()) - n, n)})[:240]
    merges.sort(key=lambda piece: (len(piece), piece))
    ranks = {bytes([i]): i for i in range(256)}
    for piece in merges:
        ranks.setdefault(piece, len(ranks))
    import base64

    (folder / "tiktoken.model").write_text("".join(f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks.items()))
    tokens = [*family.special, *family.markers]
    ids = {token: len(ranks) + i for i, token in enumerate(tokens)}
    decoder = {str(ids[token]): {"content": token, "special": token in family.special, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False} for token in tokens}
    (folder / "tokenization_small.py").write_text((TEMPLATES / "tokenization_small.py").read_text())
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "SmallTikToken", "auto_map": {"AutoTokenizer": ["tokenization_small.SmallTikToken", None]}, "eos_token": family.eos,
        "bos_token": "[BOS]", "added_tokens_decoder": decoder,
    })  # fmt: skip
    return finish_folder(folder, family, ids, len(ranks) + len(tokens))
