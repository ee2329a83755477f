"""Answers from a real SGLang server: its prompts are ours token by token, and its tokens are the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
from aerie.chats import parse_row
from aerie.render import ChatTokenizer
from aerie.servers import Server
from cpu_tools import generate
from test_answers import check_rows, prepare, rows, write_config

pytestmark = pytest.mark.server

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]
CALL = {"id": "c0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
    {"messages": [{"role": "system", "content": "Be short.\n"}, {"role": "user", "content": "Hi 👩‍👩‍👧‍👦 東京"}, {"role": "assistant", "content": "Hello.\n\n"}, {"role": "user", "content": "And?"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "parts"}]}]},
    {"messages": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c0", "content": "12 °C"}],
     "tools": TOOLS},
]  # fmt: skip


def test_the_servers_prompts_are_ours(capture_server: Server) -> None:
    tokenizer = ChatTokenizer(capture_server.config.model_path)
    for row in CHATS:
        body = {"model": "x", **row, "max_tokens": 1, "temperature": 0, "return_token_ids": True}
        reply = requests.post(f"{capture_server.url}/v1/chat/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        chat = parse_row(row)
        assert tokenizer.prompt(tokenizer.guarded(chat), len(chat.messages)) == reply.json()["choices"][0]["prompt_token_ids"]


def test_rows_are_what_the_server_said(capture_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through /generate and through the chat endpoint: the same rows, and each answer is what the server says to that prompt alone."""
    chats = [{"prompt": f"Tell me about {word} and {i}."} for i, word in enumerate("rivers stars code bread paint chess glass wool tea wind".split())]
    chats += [{"messages": [{"role": "user", "content": f"First {i}"}, {"role": "assistant", "content": "old"}, {"role": "user", "content": "Go on"}]} for i in range(3)]
    found = {}
    for name, url in (("sglang", capture_server.url), ("openai", f"{capture_server.url}/v1")):
        config = write_config(tmp_path, Path(capture_server.config.model_path), chats, url=url, max_new_tokens=12, concurrency=8)
        report = prepare(monkeypatch, config, f"said-{name}")
        found[name] = rows(f"said-{name}")
        assert report["answers_asked"] >= len(chats) and not report["counts"]["rejected"]
    assert sorted(found["sglang"]) == sorted(found["openai"])
    said = []
    for ids, mask in found["sglang"]:
        starts = [i for i in range(1, len(mask)) if mask[i] and not mask[i - 1]]
        for start in starts:
            end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
            answer = generate(capture_server.url, ids[:start], max_new_tokens=12)["output_ids"]
            assert answer[: end - start] == ids[start:end]
            said.append((ids[:start], ids[start:end]))
    check_rows(found["sglang"], said)
    first = json.loads((tmp_path / "chats.jsonl").read_text().splitlines()[0])
    assert any(first["prompt"] in ChatTokenizer(capture_server.config.model_path).decode(ids) for ids, _ in found["sglang"])
