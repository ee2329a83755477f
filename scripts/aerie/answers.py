"""Answers written by the served target: asked turn by turn, many chats at once, kept in data/answers.jsonl as they come.

A line of the log: {"key", "output_ids", "finish", ...}. The key names the prompt's token ids and the settings, so a resumed run asks only for what is not there,
in whatever order answers came and whatever order the chats are in now. A line is flushed to the disk before it counts; a torn last line is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Callable, Protocol

import numpy as np
import requests

from .chats import Chat, keeps_recorded
from .config import Config
from .errors import UserError
from .render import ChatTokenizer, Turn


class NoAnswer(Exception):
    """The server refuses this request for good (too long, not understood)."""


@dataclass
class Answer:
    """What the server said to one prompt."""

    output_ids: list[int]
    finish: str  # stop or length
    prompt_ids: list[int] | None = None  # where the server's own prompt differs from ours
    message: dict[str, Any] | None = None  # from a chat endpoint, which parses reasoning and tool calls itself
    retokenised: bool = False  # the server gave no token ids

    def as_line(self, key: str) -> bytes:
        fields = {"key": key, "output_ids": self.output_ids, "finish": self.finish, "prompt_ids": self.prompt_ids, "message": self.message}
        fields = {name: value for name, value in fields.items() if value is not None}
        if self.retokenised:
            fields["retokenised"] = True
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Answer:
        fields = json.loads(line)
        fields.pop("key")
        return cls(**fields)


class AnswerLog:
    """Append-only file of answers, indexed by key; only the index is in memory. Safe for threads of one process; a second process is refused."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115  closed by close()
        self._refuse_second_writer()
        self._places: dict[bytes, int] = {}
        self._index()

    def _refuse_second_writer(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path} is being written by another process; wait for it, or end it first") from None

    def _index(self) -> None:
        self._file.seek(0)
        place = 0
        for line in self._file:
            try:
                if not line.endswith(b"\n"):
                    break
                self._places[bytes.fromhex(json.loads(line)["key"])] = place
            except (ValueError, KeyError, TypeError):
                break  # torn by a crash; whatever stands after it is asked again
            place += len(line)
        self._file.truncate(place)
        self._file.seek(0, os.SEEK_END)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        return bytes.fromhex(key) in self._places

    def get(self, key: str) -> Answer | None:
        """The answer under `key`, read from the file."""
        with self._lock:
            place = self._places.get(bytes.fromhex(key))
            if place is None:
                return None
            self._file.seek(place)
            return Answer.from_line(self._file.readline())

    def add(self, key: str, answer: Answer) -> None:
        """Append and flush to the disk; then it counts."""
        line = answer.as_line(key)
        with self._lock:
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._places[bytes.fromhex(key)] = place

    def close(self) -> None:
        self._file.close()


def answer_key(prompt: list[int], settings: str) -> str:
    """32 hex digits naming a prompt's token ids and the settings under which it is asked."""
    digest = hashlib.sha256(settings.encode())
    digest.update(np.array(prompt, "<i4").tobytes())
    return digest.hexdigest()[:32]


class AnswerServer:
    """The served target: SGLang's /generate by token ids."""

    def __init__(self, config: Config, urls: list[str], tokenizer: ChatTokenizer):
        self.urls, self.tokenizer, self.config = urls, tokenizer, config
        self._local = threading.local()
        self._next = 0

    def settings(self, model_hash: str) -> str:
        """What an answer depends on besides its prompt."""
        data = self.config.data
        return json.dumps(["generate", model_hash, data.temperature, data.top_p, data.max_new_tokens])

    def check(self) -> None:
        """Raises UserError when nobody answers there."""
        for url in self.urls:
            try:
                ready = requests.get(f"{url}/health", timeout=10).status_code == 200
            except requests.RequestException:
                ready = False
            if not ready:
                raise UserError(f"no server answers at {url}; start it with `make server`, or name another with --set data.url=http://HOST:PORT")

    def ask(self, prompt: list[int], chat: Chat, count: int) -> Answer:
        """The answer to `prompt` (the rendering of the chat's first `count` messages). Raises NoAnswer; waits while the server is away."""
        data = self.config.data
        body = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": data.temperature, "top_p": data.top_p, "max_new_tokens": data.max_new_tokens, "skip_special_tokens": False,
            },
        }  # fmt: skip
        reply = self.post("/generate", body)
        finish = reply["meta_info"]["finish_reason"] or {}
        output = [int(token) for token in reply["output_ids"]]
        if finish.get("type") == "stop":
            matched = finish.get("matched")
            if isinstance(matched, int) and output[-1:] != [matched]:
                output.append(matched)
            return Answer(output, "stop")
        if finish.get("type") == "length":
            return Answer(output, "length")
        raise NoAnswer(f"the server ended the answer with {finish}")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST to the next server until one answers; a server that is away is waited for, up to extract.server_wait_s."""
        deadline = time.monotonic() + self.config.extract.server_wait_s
        pause = 0.5
        while True:
            url = self.urls[self._next % len(self.urls)]
            self._next += 1
            try:
                reply = self._session().post(f"{url}{path}", json=body, timeout=self.config.data.request_timeout_s)
                if reply.status_code == 200:
                    return reply.json()
                if reply.status_code in (400, 404, 413, 422):
                    raise NoAnswer(f"the server answers {reply.status_code}: {reply.text[:300]}")
                problem = f"{reply.status_code}: {reply.text[:200]}"
            except (requests.RequestException, json.JSONDecodeError) as exc:
                problem = f"{type(exc).__name__}: {exc}"
            if time.monotonic() > deadline:
                raise UserError(f"the server at {url} gave no answer for {self.config.extract.server_wait_s:.0f} s ({problem}); start it again and run the same command")
            time.sleep(pause)
            pause = min(pause * 2, 10.0)

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
        return self._local.session


class Renders(Protocol):
    """What walk() needs of a ChatTokenizer."""

    def prompt(self, chat: Chat, index: int) -> list[int]: ...

    def turn(self, chat: Chat, index: int) -> Turn: ...

    def message_of(self, answer: list[int]) -> dict[str, Any]: ...


@dataclass
class Walked:
    """One chat with its answers: the turns, and what happened on the way."""

    turns: list[Turn] = field(default_factory=list)
    truncated: int = 0
    ended_by_tool_call: bool = False
    retokenised: int = 0
    missing: int = 0  # answers that were not to be had


def walk(tokenizer: Renders, chat: Chat, answer_of: Callable[[list[int], Chat, int], Answer | None], keep_truncated: bool) -> Walked:
    """Replay a chat with the target's own answers in place of the recorded ones, turn by turn.

    Where recorded tool results follow, they belong to the recorded calls: the target's own answer becomes a turn, the recorded one stays in the history.
    The chat ends at an answer that is cut off or that calls a tool nobody answers.
    """
    out = Walked()
    history = Chat([], chat.tools, chat.source)
    for index, message in enumerate([*chat.messages, None]):
        if message is not None and message["role"] != "assistant":
            history.messages.append(message)
            continue
        if not any(item["role"] == "user" for item in history.messages) or history.messages[-1]["role"] == "assistant":
            if message is not None and not out.turns:
                history.messages.append(message)
            continue
        count = len(history.messages)
        prompt = tokenizer.prompt(history, count)
        answer = answer_of(prompt, history, count)
        if answer is None:
            out.missing += 1
            return out
        out.truncated += answer.finish == "length"
        if answer.finish != "length" or keep_truncated:
            if answer.retokenised:
                out.retokenised += 1
                history.messages.append(answer.message)
                out.turns.append(tokenizer.turn(history, count))
                history.messages.pop()
            else:
                out.turns.append(Turn(answer.prompt_ids or prompt, answer.output_ids))
        if answer.finish == "length":
            return out
        if message is not None and keeps_recorded(chat.messages, index):
            history.messages.append(message)
            continue
        said = answer.message or tokenizer.message_of(answer.output_ids)
        if said.get("tool_calls"):
            out.ended_by_tool_call = True
            return out
        history.messages.append(said)
    return out


def recorded(tokenizer: ChatTokenizer, chat: Chat) -> list[Turn]:
    """The chat's own answers as turns: every assistant turn after the first user message. Raises BadRow when the template refuses."""
    turns, asked = [], False
    for index, message in enumerate(chat.messages):
        asked = asked or message["role"] == "user"
        if message["role"] == "assistant" and asked:
            turns.append(tokenizer.turn(chat, index))
    return turns
