"""From a chat to exactly the tokens that serving will see: the target's own chat template and tokenizer, and the loss mask from rendering prefixes.

The mask's rule (MASK_RULE): for each assistant turn, the prompt is the rendering of what stands before it with the generation prompt, as the server makes it;
what follows up to and including the end-of-turn token is the assistant's and is supervised. Nothing that the prompt supplies is.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .chats import BadRow, Chat
from .config import Config
from .errors import UserError
from .identity import read_model_config, text_config, tokenizer_hash

MASK_RULE = "answer-and-end-of-turn/1"
PROBE = "aerieprobeanswer"  # stands for an answer where only its place in the template matters
OPEN_THINK = re.compile(r"(<think>|◁think▷|<seed:think>)(\s*)$")
OPENED_THINK = re.compile(r"^\s*(<think>|◁think▷|<seed:think>)\s*")
TOOL_CALL = re.compile(r"<tool_call|<\|tool_call|<｜tool▁call|<\|python_tag\|>|\[TOOL_CALLS\]|<minimax:tool_call|<seed:tool_call")
MARKER = re.compile(r"think|tool|function|reason|call|channel|message|constrain|return|section|argument|answer|response|im_end|eot|eom", re.IGNORECASE)
NOT_OPENED_THINK = re.compile(r"^\s*(<think>|◁think▷|<seed:think>)\s*")
TOOL_CALL = re.compile(r"<tool_call|<\|tool_call|<｜tool▁call|<\|python_tag\|>|\[TOOL_CALLS\]|<minimax:tool_call|<seed:tool_call")
MARKER = re.compile(r"reserved|unused|image|audio|vision|video|fim|media|pad|mask|placeholder", re.IGNORECASE)


class Turn(NamedTuple):
    """One assistant turn: what the server is sent and what it answers."""

    prompt: list[int]
    answer: list[int]  # with its end-of-turn token, unless it was cut off


class ChatTokenizer:
    """The target's tokenizer and template, used as SGLang's chat endpoint uses them (entrypoints/openai/serving_chat.py)."""

    def __init__(self, folder: str, trust_remote_code: bool = False, template_kwargs: dict[str, Any] | None = None):
        from transformers import AutoTokenizer  # seconds to import; only those who render pay

        self.folder, self.kwargs = folder, template_kwargs or {}
        self.hash = tokenizer_hash(folder)
        self.model_config = read_model_config(folder)
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, ImportError, KeyError) as exc:
            reason = str(exc).strip().splitlines()[0][:200]
            hint = "set target.trust_remote_code = true if you trust its code" if "trust_remote_code" in str(exc) else "fetch or export the model again"
            raise UserError(f"the tokenizer in {folder} cannot be loaded ({reason}); {hint}") from None
        if not self.tokenizer.chat_template and "apply_chat_template" not in type(self.tokenizer).__dict__:
            raise UserError(f"the tokenizer in {folder} has no chat template (chat_template.jinja); a drafter needs the template the target is served with")
        # As the server does: add_special_tokens=False only where the tokenizer would add any (Kimi's encode() takes no such argument well).
        self._encode_kwargs = {"add_special_tokens": False} if len(self.tokenizer.encode("")) else {}
        self.vocab_size = int(text_config(self.model_config).get("vocab_size") or 0)
        if self.vocab_size < 1:
            raise UserError(f"{folder}/config.json has no vocab_size; fetch or export the model again")

    @classmethod
    def of(cls, config: Config) -> ChatTokenizer:
        """The tokenizer of a config's target."""
        return cls(config.model_path, config.target.trust_remote_code, config.data.chat_template_kwargs)

    @cached_property
    def template_hash(self) -> str:
        """sha256 (hex) of the template and the arguments it is given."""
        return hashlib.sha256(json.dumps([self.tokenizer.chat_template, self.kwargs], sort_keys=True).encode()).hexdigest()

    @cached_property
    def added(self) -> dict[str, int]:
        """Every added token, special or not: text -> id."""
        return dict(self.tokenizer.get_added_vocab()) | {
            token: int(self.tokenizer.convert_tokens_to_ids(token)) for token in self.tokenizer.all_special_tokens if isinstance(token, str)
        }

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Token ids at which the server ends an answer: of generation_config.json, config.json and the tokenizer."""
        found: set[int] = set()
        try:
            with open(f"{self.folder}/generation_config.json", encoding="utf-8") as file:
                generation = json.load(file)
        except FileNotFoundError:
            generation = {}
        for source in (generation, self.model_config, text_config(self.model_config)):
            value = source.get("eos_token_id")
            found.update(value if isinstance(value, list) else [value] if value is not None else [])
        if self.tokenizer.eos_token_id is not None:
            found.add(self.tokenizer.eos_token_id)
        return frozenset(int(value) for value in found)

    @cached_property
    def forced_ids(self) -> list[int]:
        """Ids that a draft vocabulary must hold: ends of turn, and the markers of tools, reasoning and channels."""
        markers = {number for text, number in self.added.items() if MARKER.search(text) and not NOT_MARKER.search(text)}
        return sorted(number for number in markers | self.end_ids if number < self.vocab_size)

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text, special tokens recognised, nothing added."""
        return list(self.tokenizer.encode(text, **self._encode_kwargs))

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens visible, nothing tidied up."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def render(self, chat: Chat, count: int, generation_prompt: bool, probe: dict[str, Any] | None = None) -> str:
        """The template over the first `count` messages (and `probe` after them). Raises BadRow when the template refuses them."""
        messages = chat.messages[:count] + ([probe] if probe else [])
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=chat.tools, tokenize=False, add_generation_prompt=generation_prompt, **self.kwargs
            )
        except Exception as exc:  # noqa: BLE001  a template can raise anything; the row is reported and the rest goes on
            raise BadRow(f"the chat template refuses it: {type(exc).__name__}: {exc}") from None

    def prompt(self, chat: Chat, index: int) -> list[int]:
        """Token ids that the server is sent for the assistant turn at `index`."""
        return self.encode(self.render(chat, index, generation_prompt=True))

    def turn(self, chat: Chat, index: int) -> Turn:
        """The recorded assistant turn at `index` as the server would have processed it. Raises BadRow."""
        prompt_text = self.render(chat, index, generation_prompt=True)
        whole_text = self.render(chat, index + 1, generation_prompt=False)
        prompt = self.encode(prompt_text)
        if whole_text.startswith(prompt_text):
            whole = self.encode(whole_text)
            answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.encode(whole_text[len(prompt_text) :])
        else:
            answer = self.encode(self._answer_behind_other_prompt(chat, index, prompt_text, whole_text))
        ends = [place for place, token in enumerate(answer) if token in self.end_ids]
        return Turn(prompt, answer[: ends[-1] + 1] if ends else answer)

    def message_of(self, answer: list[int]) -> dict[str, Any]:
        """An answer's tokens as the message that a client would send back: reasoning apart from content; `tool_calls` is true where it calls a tool."""
        ids = answer[:-1] if answer and answer[-1] in self.end_ids else answer
        text = self.decode(ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if "<|channel|>" in text:  # harmony: the last channel is what the user reads
            channels = re.findall(r"<\|channel\|>(.*?)<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|<\|call\|>|<\|return\|>|$)", text, re.DOTALL)
            message["content"] = next((body for name, body in reversed(channels) if name.startswith("final")), "")
            thoughts = "\n".join(body for name, body in channels if name.startswith("analysis"))
            calls = any("to=" in name for name, _ in channels)
        else:
            closed = re.search(r"</think>|◁/think▷|</seed:think>", text)
            thoughts = OPENED_THINK.sub("", text[: closed.start()]).strip() if closed else ""
            if closed:
                message["content"] = text[closed.end() :].lstrip("\n")
            calls = bool(TOOL_CALL.search(text))
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = True
        return message

    def _answer_behind_other_prompt(self, chat: Chat, index: int, prompt_text: str, whole_text: str) -> str:
        """The answer's text where the generation prompt says more than the rendering of a finished turn does.

        So it is with templates that open (or open and close) a thinking block in the generation prompt only. The block's end is written as its beginning was:
        '<think>' -> '</think>', '<think>\\n' -> '\\n</think>\\n\\n'.
        """
        probe_text = self.render(chat, index, generation_prompt=False, probe={"role": "assistant", "content": PROBE})
        header = probe_text[: probe_text.rfind(PROBE)] if PROBE in probe_text else None
        if header is None or not prompt_text.startswith(header) or not whole_text.startswith(header):
            raise BadRow("the template begins a finished turn otherwise than its generation prompt does, in a way that is not known here")
        supplied, rest = prompt_text[len(header) :], whole_text[len(header) :]
        opened = OPEN_THINK.search(supplied)
        if not opened:
            return rest
        tag, space = opened.groups()
        close = tag.replace("<", "</", 1) if tag.startswith("<") else tag.replace("◁", "◁/", 1)
        if rest.startswith(tag):
            return rest[len(tag) :].lstrip()  # the rendering has the block itself, with other space after its beginning
        reasoning = chat.messages[index].get("reasoning_content", "").strip()
        return f"{reasoning}{space}{close}{space * 2}{rest}"


def rows_of(turns: list[Turn]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Turns of one chat as rows (input_ids [T] int32, loss_mask [T] uint8).

    One row when each prompt goes on from the turn before it; else (the template rewrites history, or an answer was tokenised otherwise) one row a turn.
    """
    joined, mask = [], []
    for turn in turns:
        if turn.prompt[: len(joined)] != joined:
            return [_row(turn.prompt + turn.answer, [0] * len(turn.prompt) + [1] * len(turn.answer)) for turn in turns]
        mask += [0] * (len(turn.prompt) - len(joined)) + [1] * len(turn.answer)
        joined = turn.prompt + turn.answer
    return [_row(joined, mask)] if turns else []


def _row(ids: list[int], mask: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.array(ids, np.int32), np.array(mask, np.uint8)


def supervised_predictions(mask: np.ndarray) -> int:
    """How many rows t have token[t+1] and token[t+2] both the assistant's: what training learns from."""
    return int(np.count_nonzero(mask[1:-1] & mask[2:])) if len(mask) > 2 else 0
