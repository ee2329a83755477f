"""Chats from files: JSONL or JSON; OpenAI messages, ShareGPT conversations, plain prompts, or ready token ids. A bad row is reported with file and line."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

import numpy as np

from .errors import UserError
from .inputs import START, first_bytes

ROLES = {"system": "system", "developer": "developer", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool", "function_call": "function_call",
}  # fmt: skip
ANSWER_KEYS = ("response", "completion", "answer")  # beside a plain prompt
MAX_DEPTH = 100  # tools and arguments nested deeper than this are refused
CHUNK = 1 << 20  # bytes read at once from a JSON array


class BadRow(ValueError):
    """Why a row cannot be used; goes to rejected.jsonl. text: of a row that could not be read."""

    def __init__(self, reason: str, text: bytes | None = None):
        super().__init__(reason)
        self.text = text


@dataclass
class Chat:
    """One chat as templates take it, or ready token ids with their mask."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    source: str = ""  # file:line
    input_ids: np.ndarray | None = None  # [T] int32
    loss_mask: np.ndarray | None = None  # [T] uint8

    def prompt_key(self) -> int:
        """64 bits of sha256 over what stands before the first answer (ready rows: before the first supervised token): decides the split.

        Chats that start the same fall on the same side, so a held-out prompt is never trained on.
        """
        if self.input_ids is not None:
            return _digest([self.input_ids[: int(np.argmax(self.loss_mask))].tolist()])
        asked = next((i for i, message in enumerate(self.messages) if message["role"] == "user"), 0)  # a greeting before it is no answer
        first = next((i for i, message in enumerate(self.messages) if message["role"] == "assistant" and i > asked), len(self.messages))
        return _digest([self.messages[:first], self.tools])

    def content_key(self, answers: bool = True) -> int:
        """64 bits of sha256 over the whole chat: equal chats are duplicates. `answers` false: the assistant's last words do not count (they are written anew)."""
        if self.input_ids is not None:
            return _digest([self.input_ids.tolist(), self.loss_mask.tolist()])
        if answers:
            return _digest([self.messages, self.tools])
        return _digest([[message if keeps_recorded(self.messages, i) else message["role"] for i, message in enumerate(self.messages)], self.tools])


def keeps_recorded(messages: list[dict[str, Any]], index: int) -> bool:
    """Whether message `index` stays as recorded when answers are written anew: all but the assistant's, and calls whose recorded results follow."""
    if messages[index]["role"] != "assistant" or not any(message["role"] == "user" for message in messages[:index]):
        return True  # also a greeting before the first user message: nobody asks for it
    return index + 1 < len(messages) and messages[index + 1]["role"] == "tool"


def _digest(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _check_nested(value: Any, where: str) -> None:
    """Tools and arguments must be shallow enough for templates, and text that can be encoded."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for part in level if isinstance(part, (dict, list)) for item in (part.values() if isinstance(part, dict) else part)]
        if not level:
            break
    else:
        raise BadRow(f"{where} nested more than {MAX_DEPTH} deep")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRow(f"{where} with half a surrogate pair") from None


def _text(value: Any, where: str) -> str:
    """A message's content as text: a string, null, or a list of text parts."""
    if value is None:
        return ""
    if isinstance(value, list):
        parts = [part if isinstance(part, str) else part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in value]
        if any(not isinstance(part, str) for part in parts):
            raise BadRow(f"{where} holds a part that is not text")
        value = " ".join(parts)  # as SGLang does
    if not isinstance(value, str):
        raise BadRow(f"{where} is {type(value).__name__}, not text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise BadRow(f"{where} holds half a surrogate pair") from None
    return value


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI tool calls with their arguments as an object, the form in which SGLang hands them to a template."""
    if not isinstance(value, list):
        raise BadRow(f"{where} is not a list")
    calls = []
    for number, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"{where}[{number}] has no function with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                raise BadRow(f"{where}[{number}]: the arguments are not JSON") from None
        if not isinstance(arguments, dict):
            raise BadRow(f"{where}[{number}]: the arguments are {type(arguments).__name__}, not an object")
        call_id = call.get("id")
        if call_id is not None and not isinstance(call_id, str):
            raise BadRow(f"{where}[{number}]: the id is not text")
        calls.append({"id": call_id or f"call_{number}", "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Tool schemas exactly as SGLang 0.5.23 hands them to a template (protocol.py, Tool and Function): keys in their order, absent ones null."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow("tools is text that is not JSON") from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadRow("tools is not a list of objects")
    clean = []
    for number, tool in enumerate(value):
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(f"tools[{number}] has no function with a name")
        schema = {key: item for key, item in function.items() if key in ("description", "name", "parameters") or key == "strict" and item is not None}
        schema |= {key: None for key in ("description", "parameters") if key not in schema}
        clean.append({"type": "function", "function": schema, "defer_loading": None})
    return clean


def _openai_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise BadRow(f"{where} is {type(message).__name__}, not an object")
    role = message.get("role")
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRow(f"{where}: role {role!r} is none of {', '.join(ROLES)}")
    clean: dict[str, Any] = {"role": ROLES[role.lower()], "content": _text(message.get("content"), f"{where}.content")}
    if clean["role"] == "assistant":
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        if reasoning:
            clean["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
        if message.get("tool_calls"):
            clean["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    elif clean["role"] == "tool":
        clean |= {key: _text(message[key], f"{where}.{key}") for key in ("tool_call_id", "name") if message.get(key) is not None}
    return clean


def _sharegpt_message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise BadRow(f"{where} is {type(turn).__name__}, not an object")
    if "from" not in turn and "role" in turn:
        return _openai_message(turn, where)
    name = turn.get("from")
    if not isinstance(name, str) or name.lower() not in SHAREGPT_ROLES:
        raise BadRow(f"{where}: from {name!r} is none of {', '.join(SHAREGPT_ROLES)}")
    role, value = SHAREGPT_ROLES[name.lower()], _text(turn.get("value"), f"{where}.value")
    if role != "function_call":
        return {"role": role, "content": value}
    try:
        calls = json.loads(value)
    except (ValueError, RecursionError):
        raise BadRow(f"{where}.value is not JSON, though it is a function call") from None
    return {"role": "assistant", "content": "", "tool_calls": _tool_calls(calls if isinstance(calls, list) else [calls], f"{where}.value")}


def _ready(row: dict[str, Any]) -> Chat:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if mask is None:
        raise BadRow("input_ids without a loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask) or not ids:
        raise BadRow("input_ids and loss_mask must be lists of one length, not empty")
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise BadRow("input_ids holds something else than token ids")
    if not all(value in (0, 1) for value in mask):
        raise BadRow("loss_mask holds something else than 0 and 1")
    return Chat(input_ids=np.array(ids, np.int32), loss_mask=np.array(mask, np.uint8))


def parse_row(row: Any) -> Chat:
    """One row in any of the formats as a Chat. Raises BadRow with the reason."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise BadRow(f"the row is {type(row).__name__}, not an object")
    if "input_ids" in row:
        return _ready(row)
    if isinstance(row.get("messages"), list):
        messages = [_openai_message(message, f"messages[{i}]") for i, message in enumerate(row["messages"])]
    elif isinstance(row.get("conversations"), list):
        messages = [_sharegpt_message(turn, f"conversations[{i}]") for i, turn in enumerate(row["conversations"])]
    elif isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": _text(row["prompt"], "prompt")}]
        answer = next((row[key] for key in ANSWER_KEYS if row.get(key) is not None), None)
        if answer is not None:
            messages.append({"role": "assistant", "content": _text(answer, "the answer")})
    else:
        raise BadRow("the row has none of messages, conversations, prompt, input_ids (as a list or as text)")
    if row.get("system") and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("the chat has no user message")
    tools = _tools(row.get("tools"))
    _check_nested(tools, "tools")
    for i, message in enumerate(messages):
        if "tool_calls" in message:
            _check_nested(message["tool_calls"], f"tool calls of message {i}")
    return Chat(messages, tools)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as exc:  # also a number of more digits than Python reads
                yield number, BadRow(f"not JSON: {exc}", line[:START].strip())


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    """The items of a JSON array (or objects one after the other), without holding the whole file."""
    decoder = json.JSONDecoder()
    with open(path, encoding="utf-8-sig") as file:
        buffer, line, begun, end = file.read(CHUNK), 1, False, False
        while True:
            stripped = buffer.lstrip(" \t\r\n," if begun else " \t\r\n")
            line += buffer[: len(buffer) - len(stripped)].count("\n")
            buffer = stripped
            if not begun and buffer[:1] == "[":
                begun, buffer = True, buffer[1:]
                continue
            if begun and buffer[:1] == "]":
                return
            try:
                if not buffer and not end:
                    raise json.JSONDecodeError("more", "", 0)
                if not buffer:
                    if begun:
                        yield line, BadRow("the file ends inside its array")
                    return
                item, used = decoder.raw_decode(buffer)
                if used == len(buffer) and not end:
                    raise json.JSONDecodeError("more", "", 0)  # a number may go on in the next chunk
            except json.JSONDecodeError as exc:
                more = file.read(max(CHUNK, len(buffer)))
                if more:
                    buffer += more
                    continue
                if not end:
                    end = True
                    continue
                yield line, BadRow(f"not JSON from here on: {exc}", buffer[:START].encode())
                return
            except (ValueError, RecursionError) as exc:  # a number too long, nested too deep: its end is not known
                yield line, BadRow(f"cannot be read from here on: {exc}", buffer[:START].encode())
                return
            yield line, item
            line += buffer[:used].count("\n")
            buffer = buffer[used:]


def _is_json(path: Path, start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[" or path.suffix == ".json"


def count_rows(path: Path) -> int | None:
    """How many rows a file of chats has, good and bad ones, without parsing JSONL; None when it is no file that can be read."""
    try:
        if not path.is_file():
            return None
        with open(path, "rb") as file:
            if not _is_json(path, file.read(START)):
                file.seek(0)
                return sum(1 for line in file if line.strip())
        return sum(1 for _, row in _json_rows(path) if not isinstance(row, BadRow))
    except (OSError, ValueError):  # no permission, a name too long, not UTF-8
        return None


def read_rows(path: Path) -> Iterator[tuple[int, Any, Chat | BadRow]]:
    """(line, raw row, Chat or why it is none) for each row of a file; of a row that is not JSON its first bytes. Raises UserError when the file cannot be read.

    A file is JSON when its first character is [ or its name ends in .json, else JSONL: one JSON value a line.
    """
    start = first_bytes(path)
    rows = _json_rows(path) if _is_json(path, start) else _jsonl_rows(path)
    try:
        for number, row in rows:
            if isinstance(row, BadRow):
                yield number, row.text, row
                continue
            try:
                chat = parse_row(row)
                chat.source = f"{path.name}:{number}"
                yield number, row, chat
            except BadRow as exc:
                yield number, row, exc
    except UnicodeDecodeError as exc:
        raise UserError(f"{path} is not UTF-8 ({exc.reason} at byte {exc.start}); convert it first") from None
