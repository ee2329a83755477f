"""The target's answers on disk: data/answers.jsonl, appended and flushed one by one, found again by key.

A line: {"key", "output_ids", "finish", ...}. The key names the prompt's token ids and the settings, so a resumed run asks only for what is not there, in whatever
order answers came and whatever order the chats are in now. A line counts once it is on the disk; a torn last line is cut off.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .errors import UserError


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
