"""The files of chats before anything is made of them: there, readable, not empty. Standard library alone, for doctor too."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import UserError
from .paths import resolve_input

if TYPE_CHECKING:
    from .config import Config

START = 4096  # bytes that tell JSON from JSONL, and text from other encodings


def first_bytes(path: Path) -> bytes:
    """The first 4,096 bytes of a file of chats. Raises UserError for what is no file that can be read as text twice."""
    try:
        if not (stat.S_ISREG(kind := path.stat().st_mode) or stat.S_ISDIR(kind)):
            raise UserError(f"{path} is no regular file, and chats are read twice; write them to a file first")
        with open(path, "rb") as file:
            start = file.read(START)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; name your chats in data.inputs (JSONL or JSON); for a trial `scripts/make_prompts.py 15550 {path}` writes prompts") from None
    except (OSError, ValueError) as exc:  # a folder, no permission, a name too long or with a null byte
        raise UserError(f"{path} cannot be read ({getattr(exc, 'strerror', None) or exc}); name files of chats in data.inputs") from None
    if b"\0" in start:
        raise UserError(f"{path} is UTF-16, UTF-32 or no text at all (null bytes at its beginning); convert it to UTF-8 first")
    return start


def input_files(config: Config) -> list[Path]:
    """The files of data.inputs, looked at before a server is started for them. Raises UserError where there are none, or one is not there, not readable or empty."""
    files = [resolve_input(name) for name in config.data.inputs]
    if not files:
        raise UserError(f"{config.path}: data.inputs names no file; name files of chats (JSONL or JSON)")
    for path in files:
        start = first_bytes(path)
        if not start.strip() and path.stat().st_size <= START:
            raise UserError(f"{path} is empty; put chats into it, or take it out of data.inputs")
    return files
