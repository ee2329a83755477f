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
from .tokenizer import GUARD, TargetTokenizer

MASK_RULE = "answer-and-end-of-turn/1"
PROBE = "aerieprobeanswer"  # stands for an answer where only its place in the template matters
THINK = r"<think>|◁think▷|<seed:think>"
END_THINK = r"</think>|◁/think▷|</seed:think>"
OPENED_THINK = re.compile(rf"^\s*(?:{THINK})\s*")
ENDED_THINK = re.compile(END_THINK)
THINK_TAIL = re.compile(rf"(?:(?P<open>{THINK})(?P<space>\s*))?(?P<close>(?:{END_THINK})\s*)?$")  # a thinking block, or half of one, at a prompt's end
EMPTY_THINK = re.compile(rf"^(\s*(?:{THINK})\n?)(\n?(?:{END_THINK}))")
TOOL_CALL = re.compile(r"<tool_call|<\|tool_call|<｜tool▁call|<\|python_tag\|>|\[TOOL_CALLS\]|<minimax:tool_call|<seed:tool_call")
INLINE_THINK = re.compile(rf"^\s*(?:{THINK})?(.*?)(?:{END_THINK})", re.DOTALL)
UNKNOWN_BEGINNING = "the template begins a finished turn otherwise than its generation prompt does, in a way that is not known here"


class Turn(NamedTuple):
    """One assistant turn: what the server is sent and what it answers."""

    prompt: list[int]
    answer: list[int]  # with its end-of-turn token, unless it was cut off


class ChatTokenizer(TargetTokenizer):
    """The target's tokenizer and template, used as SGLang's chat endpoint uses them (entrypoints/openai/serving_chat.py)."""

    def __init__(self, folder: str, trust_remote_code: bool = False, template_kwargs: dict[str, Any] | None = None):
        super().__init__(folder, trust_remote_code)
        self.kwargs = template_kwargs or {}
        if not self.tokenizer.chat_template and "apply_chat_template" not in type(self.tokenizer).__dict__:
            raise UserError(f"the tokenizer in {folder} has no chat template (chat_template.jinja); a drafter needs the template the target is served with")

    @classmethod
    def of(cls, config: Config) -> ChatTokenizer:
        """The tokenizer of a config's target."""
        return cls(config.model_path, config.target.trust_remote_code, config.data.chat_template_kwargs)

    @cached_property
    def template_hash(self) -> str:
        """sha256 (hex) of the template and the arguments it is given."""
        return hashlib.sha256(json.dumps([self.tokenizer.chat_template, self.kwargs], sort_keys=True).encode()).hexdigest()

    def guarded(self, chat: Chat) -> Chat:
        """The chat with text that looks like a special token marked, so that it stays text. Raises BadRow for text that holds the mark itself."""

        def mark(value: Any, inline: bool) -> Any:
            if isinstance(value, str):
                if GUARD in value:
                    raise BadRow(f"the text holds the private-use character U+{ord(GUARD):04X}")
                return self.guard(value, inline)
            if isinstance(value, dict):
                return {key: mark(item, inline) for key, item in value.items()}
            return [mark(item, inline) for item in value] if isinstance(value, list) else value

        messages = [{key: value if key == "role" else mark(value, message["role"] == "assistant") for key, value in message.items()} for message in chat.messages]
        return Chat(messages, mark(chat.tools, False), chat.source)

    def render(self, chat: Chat, count: int, generation_prompt: bool, last: dict[str, Any] | None = None) -> str:
        """The template over the first `count` messages (and `last` after them). Raises BadRow when the template refuses them."""
        messages = chat.messages[:count] + ([last] if last else [])
        try:
            return self._apply(messages, chat.tools, generation_prompt)
        except Exception as exc:  # noqa: BLE001  a template can raise anything; the row is reported and the rest goes on
            problem = f"{type(exc).__name__}: {exc}"
        if any(message.get("tool_calls") for message in messages):  # some templates join arguments as text; SGLang gives objects
            try:
                return self._apply([_arguments_as_text(message) for message in messages], chat.tools, generation_prompt)
            except Exception as exc:  # noqa: BLE001
                problem = f"{type(exc).__name__}: {exc}"
        raise BadRow(f"the chat template refuses it: {problem}")

    @cached_property
    def _reads_thinking(self) -> bool:
        """Whether the template calls a turn's reasoning `thinking` (gpt-oss), not `reasoning_content`."""
        template = str(self.tokenizer.chat_template)
        return "reasoning_content" not in template and re.search(r"message\.thinking|['\"]thinking['\"]", template) is not None

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation_prompt: bool) -> str:
        if self._reads_thinking:
            messages = [{"thinking" if key == "reasoning_content" else key: value for key, value in message.items()} for message in messages]
        return self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation_prompt, **self.kwargs)

    def prompt(self, chat: Chat, index: int) -> list[int]:
        """Token ids that the server is sent for the assistant turn at `index`. Raises BadRow."""
        return self._ids(self.render(chat, index, generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        try:
            return self.encode(text)
        except ValueError as exc:
            raise BadRow(str(exc)) from None

    def turn(self, chat: Chat, index: int) -> Turn:
        """The recorded assistant turn at `index` as the server would have processed it. Raises BadRow."""
        prompt_text = self.render(chat, index, generation_prompt=True)
        whole_text = self.render(chat, index + 1, generation_prompt=False)
        if whole_text.startswith(prompt_text):
            answer_text = _with_reasoning(chat.messages[index], prompt_text, whole_text[len(prompt_text) :])
        else:
            answer_text = self._answer_behind_other_prompt(chat, index, prompt_text, whole_text)
        prompt, whole = self._ids(prompt_text), self._ids(prompt_text + answer_text)
        answer = whole[len(prompt) :] if whole[: len(prompt)] == prompt else self._ids(answer_text)
        ends = [place for place, token in enumerate(answer) if token in self.end_ids]
        if not ends and (end := self._end_in_next_turn(chat, index, whole_text)) is not None:
            return Turn(prompt, [*answer, end])
        ends = ends or [place for place, token in enumerate(answer) if token in self.special_ids]
        return Turn(prompt, answer[: ends[-1] + 1] if ends else answer)

    def _end_in_next_turn(self, chat: Chat, index: int, whole_text: str) -> int | None:
        """The end-of-turn token of a template that writes none: the model ends with the token that begins the next turn (GLM's '<|user|>')."""
        role = "tool" if chat.messages[index].get("tool_calls") else "user"
        try:
            follow = self.render(chat, index + 1, generation_prompt=False, last={"role": role, "content": PROBE, "tool_call_id": "call_0"})
        except BadRow:
            return None
        start = _end_of_history(whole_text, follow[: max(follow.rfind(PROBE), 0)])
        first = self._ids(follow[start:])[:1] if start is not None else []
        return first[0] if first and first[0] in self.end_ids else None

    def message_of(self, answer: list[int]) -> dict[str, Any]:
        """An answer's tokens as the message that a client would send back: reasoning apart from content; `tool_calls` is true where it calls a tool."""
        ids = answer[:-1] if answer and answer[-1] in self.end_ids else answer
        text = self.decode(ids).replace(GUARD, "")
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if "<|channel|>" in text:  # harmony: the last channel is what the user reads
            channels = re.findall(r"<\|channel\|>(.*?)<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|<\|call\|>|<\|return\|>|$)", text, re.DOTALL)
            message["content"] = next((body for name, body in reversed(channels) if name.startswith("final")), "")
            thoughts = "\n".join(body for name, body in channels if name.startswith("analysis"))
            calls = self.decode(answer[-1:]) == "<|call|>" or any(" to=" in name for name, _ in channels)
        else:
            closed = ENDED_THINK.search(text)
            thoughts = OPENED_THINK.sub("", text[: closed.start()]).strip() if closed else ""
            if closed:
                message["content"] = text[closed.end() :].lstrip("\n")
            calls = bool(TOOL_CALL.search(text))
        message["content"] = self.guard(message["content"], inline_markers=True)
        if thoughts:
            message["reasoning_content"] = self.guard(thoughts, inline_markers=True)
        if calls:
            message["tool_calls"] = True
        return message

    def _answer_behind_other_prompt(self, chat: Chat, index: int, prompt_text: str, whole_text: str) -> str:
        """The answer's text where the rendering of the finished turn does not go on from the prompt.

        Either the template rewrites the history once the turn is finished (harmony drops analysis then), or its generation prompt ends with another thinking
        block than the finished turn begins with. The server goes on from the prompt: behind a closed block comes the content alone, behind an open one the
        reasoning and the block's end as the finished turn has it, or written as the beginning is: '<think>' -> '</think>', '<think>\\n' -> '\\n</think>\\n\\n'.
        """
        message = chat.messages[index]
        before = self.render(chat, index, generation_prompt=False)
        probed = self.render(chat, index, generation_prompt=False, last={"role": "assistant", "content": PROBE})
        start, probe = _end_of_history(before, probed[: max(probed.rfind(PROBE), 0)]), probed.rfind(PROBE)
        if not prompt_text.startswith(before) or start is None or whole_text[:start] != probed[:start]:
            raise BadRow(UNKNOWN_BEGINNING)
        supplied, header, body = prompt_text[len(before) :], probed[start:probe], whole_text[start:]
        if body.startswith(supplied):
            return _with_reasoning(message, prompt_text, body[len(supplied) :])
        if not body.startswith(header):  # reasoning that this prompt leaves no room for, or that the rule puts in its place
            body = self.render(chat, index, generation_prompt=False, last={key: value for key, value in message.items() if key != "reasoning_content"})[start:]
            if body.startswith(supplied):
                return body[len(supplied) :]
        given, finished = THINK_TAIL.search(supplied), THINK_TAIL.search(header)
        if not body.startswith(header) or supplied[: given.start()].rstrip() != header[: finished.start()].rstrip():
            raise BadRow(UNKNOWN_BEGINNING)
        rest = body[len(header) :]
        if not given["open"] or given["close"]:
            return rest
        reasoning = message.get("reasoning_content", "")
        if not reasoning and (inline := INLINE_THINK.match(message["content"])):
            reasoning, rest = inline[1], rest.lstrip("\n")
        tag, space = given["open"], given["space"]
        close = finished["close"] or f"{space}{tag[0]}/{tag[1:]}{space * 2}"
        return f"{reasoning.strip()}{close}{rest}"


def _with_reasoning(message: dict[str, Any], prompt_text: str, body: str) -> str:
    """The answer with its reasoning in the thinking block that the template left empty, as it does for history (Kimi-K2-Thinking, Kimi-K2.5)."""
    reasoning = message.get("reasoning_content", "").strip()
    given = THINK_TAIL.search(prompt_text)
    if not reasoning or reasoning in body or given["close"]:
        return body
    if given["open"]:
        return reasoning + body if re.match(rf"\s*(?:{END_THINK})", body) else body
    return EMPTY_THINK.sub(lambda block: f"{block[1]}{reasoning}{block[2]}", body)


def _end_of_history(before: str, header: str) -> int | None:
    """Where in `header` (history + the beginning of a finished turn) the history ends; `before` is the history as it was before the turn was finished."""
    if header.startswith(before):
        return len(before)
    for size in (256, 64, 16, 8):
        place = header.rfind(before[-size:])
        if place >= 0:
            return place + len(before[-size:])
    return None


def _arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its tool calls' arguments as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}} for call in message["tool_calls"]
    ]  # fmt: skip
    return message | {"tool_calls": calls}


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
