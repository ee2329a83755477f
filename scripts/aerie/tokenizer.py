"""The target's tokenizer: text to ids as SGLang does it, text that must stay text, and which ids end a turn or mark tools and reasoning."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

from .errors import UserError
from .identity import read_model_config, text_config, tokenizer_hash

GUARD = "\uf8f2"  # a private-use character put into text that looks like a special token, so that it is not read as one; never reaches the ids
MARKER = re.compile(r"^<\|(?:start|end)\|>$|python|think|tool|function|reason|call|channel|message|constrain|return|section|argument|answer|response|im_end|eot|eom", re.IGNORECASE)
NOT_MARKER = re.compile(r"reserved|unused|image|audio|vision|video|fim|media|pad|mask|placeholder", re.IGNORECASE)
INLINE = re.compile(r"think|tool|function|channel|message|constrain", re.IGNORECASE)  # markers that recorded answers hold on purpose


class TargetTokenizer:
    """A Hugging Face tokenizer, fast or slow, with or without offset mapping (Kimi's is tiktoken behind Python code)."""

    def __init__(self, folder: str, trust_remote_code: bool = False):
        from transformers import AutoTokenizer  # seconds to import; only those who tokenise pay

        self.folder = folder
        self.hash = tokenizer_hash(folder)
        self.model_config = read_model_config(folder)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except Exception as exc:  # noqa: BLE001  the libraries raise whatever a broken file leads them to
            reason = (str(exc).strip() or type(exc).__name__).splitlines()[0][:200]
            hint = "set target.trust_remote_code = true if you trust its code" if "trust_remote_code" in str(exc) else "fetch or export the model again"
            raise UserError(f"the tokenizer in {folder} cannot be loaded ({reason}); {hint}") from None
        # As the server does: add_special_tokens=False only where the tokenizer would add any (Kimi's encode() takes no such argument well).
        self._encode_kwargs = {"add_special_tokens": False} if len(self.tokenizer.encode("")) else {}
        size = text_config(self.model_config).get("vocab_size")
        self.vocab_size = size if isinstance(size, int) else 0
        if self.vocab_size < 1:
            raise UserError(f"{folder}/config.json has no vocab_size; fetch or export the model again")

    @cached_property
    def added(self) -> dict[str, int]:
        """Every added token, special or not: text -> id."""
        special = [token for token in self.tokenizer.all_special_tokens if isinstance(token, str)]
        return dict(self.tokenizer.get_added_vocab()) | {token: int(self.tokenizer.convert_tokens_to_ids(token)) for token in special}

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Token ids at which the server ends an answer: of generation_config.json, config.json and the tokenizer."""
        found: set[int] = set()
        try:
            with open(f"{self.folder}/generation_config.json", encoding="utf-8") as file:
                generation = json.load(file)
        except FileNotFoundError:
            generation = {}
        except ValueError as exc:
            raise UserError(f"{self.folder}/generation_config.json is not valid JSON ({exc}); fetch or export the model again") from None
        if not isinstance(generation, dict):
            raise UserError(f"{self.folder}/generation_config.json holds no JSON object; fetch or export the model again")
        for source in (generation, self.model_config, text_config(self.model_config)):
            value = source.get("eos_token_id")
            found.update(value if isinstance(value, list) else [value] if value is not None else [])
        if self.tokenizer.eos_token_id is not None:
            found.add(self.tokenizer.eos_token_id)
        if any(not isinstance(value, int) for value in found):
            raise UserError(f"{self.folder}: eos_token_id of generation_config.json or config.json is no token id; fetch or export the model again")
        return frozenset(found)

    @cached_property
    def forced_ids(self) -> list[int]:
        """Ids that a draft vocabulary must hold: ends of turn, and the markers of tools, reasoning and channels."""
        markers = {number for text, number in self.added.items() if MARKER.search(text) and not NOT_MARKER.search(text)}
        return sorted(number for number in markers | self.end_ids if number < self.vocab_size)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that the tokenizer itself calls special."""
        return frozenset(int(number) for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text, special tokens recognised, nothing added; what guard() marked stays text. Raises ValueError where it cannot."""
        if GUARD not in text:
            return list(self.tokenizer.encode(text, **self._encode_kwargs))
        ids: list[int] = []
        pieces = self._any_added.split(text)
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self.added[piece])
                continue
            before = self._added_flags.get(pieces[place - 1], (False, False))[1] if place else False
            after = self._added_flags.get(pieces[place + 1], (False, False))[0] if place + 1 < len(pieces) else False
            piece = piece.lstrip() if before else piece
            ids += self._encode_text((piece.rstrip() if after else piece).replace(GUARD, ""))
        return ids

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens visible, nothing tidied up."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def guard(self, text: str, inline_markers: bool) -> str:
        """Mark every piece of `text` that looks like an added token; `inline_markers` leaves those of thinking, tools and channels (recorded answers)."""
        pattern = self._any_added_but_inline if inline_markers else self._any_added
        return pattern.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)

    @cached_property
    def _any_added(self) -> re.Pattern[str]:
        return _any_of(self.added)

    @cached_property
    def _any_added_but_inline(self) -> re.Pattern[str]:
        return _any_of(token for token in self.added if not INLINE.search(token))

    @cached_property
    def _added_flags(self) -> dict[str, tuple[bool, bool]]:
        """Added token -> (takes the spaces before it, takes the spaces after it)."""
        return {str(token.content): (bool(token.lstrip), bool(token.rstrip)) for token in self.tokenizer.added_tokens_decoder.values()}

    @cached_property
    def _plain(self) -> Any:
        """The fast tokenizer without its added tokens; None where there is no fast one."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)  # slow tokenizers have none: that is the question
        if backend is None:
            return None
        from tokenizers import Tokenizer

        return Tokenizer.from_str(json.dumps(json.loads(backend.to_str()) | {"added_tokens": [], "post_processor": None}))

    def _encode_text(self, text: str) -> list[int]:
        if not text:
            return []
        if self._plain is not None:
            return self._plain.encode(text, add_special_tokens=False).ids
        model = getattr(self.tokenizer, "model", None)  # a tiktoken.Encoding behind Python code
        if hasattr(model, "encode_ordinary"):
            return list(model.encode_ordinary(text))
        ids = list(self.tokenizer.encode(text, split_special_tokens=True, **self._encode_kwargs))
        if set(ids) & set(self.added.values()):
            raise ValueError(f"{text[:60]!r} looks like a special token, and this tokenizer cannot keep it as text")
        return ids


def _any_of(tokens: Any) -> re.Pattern[str]:
    """One group that matches any of these texts, the longest first; nothing where there are none."""
    ordered = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, ordered)) + ")" if ordered else r"((?!))")
