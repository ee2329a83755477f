"""Chats from files in every format; a bad row is named by file and line and the rest goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aerie.chats import BadRow, Chat, parse_row, read_rows
from aerie.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st

CALL = {"name": "weather", "arguments": {"city": "Köln"}}
HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]

GOOD: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "openai": ({"messages": HELLO, "id": 7}, HELLO),
    "openai parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, [{"role": "user", "content": "a b"}]),
    "openai null content, reasoning, calls": (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps({"city": "Köln"})}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "12"}]},
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [
            {"id": "c1", "type": "function", "function": CALL}]}, {"role": "tool", "content": "12", "tool_call_id": "c1"}],
    ),
    "role in capitals, function is tool": (
        {"messages": [{"role": "User", "content": "x"}, {"role": "function", "name": "f", "content": "1"}]},
        [{"role": "user", "content": "x"}, {"role": "tool", "content": "1", "name": "f"}],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be short."},
        [{"role": "system", "content": "Be short."}, *HELLO],
    ),
    "sharegpt call": (
        {"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "12"}]},
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": CALL}]},
         {"role": "tool", "content": "12"}],
    ),
    "sharegpt with roles": ({"conversations": HELLO}, HELLO),
    "prompt": ({"prompt": "Hi"}, HELLO[:1]),
    "prompt and answer": ({"prompt": "Hi", "response": "Hello"}, HELLO),
    "text": ("Hi", HELLO[:1]),
}  # fmt: skip

BAD = {
    "no user": ({"messages": [{"role": "system", "content": "x"}]}, "no user message"),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\]: role 'robot' is none of"),
    "picture": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "a part that is not text"),
    "number as content": ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content is int, not text"),
    "half a surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
    "arguments": ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "arguments are not JSON"),
    "from": ({"conversations": [{"from": "alien", "value": "x"}]}, r"conversations\[0\]: from 'alien'"),
    "nothing": ({"text": "x"}, "none of messages, conversations, prompt, input_ids"),
    "a list": ([1], "the row is list, not an object"),
    "tools": ({"messages": HELLO, "tools": [{"function": {}}]}, r"tools\[0\] has no function with a name"),
    "ids without mask": ({"input_ids": [1, 2]}, "without a loss_mask"),
    "ids of two lengths": ({"input_ids": [1, 2], "loss_mask": [1]}, "of one length"),
    "ids that are none": ({"input_ids": [1, -2], "loss_mask": [0, 1]}, "something else than token ids"),
    "bool ids": ({"input_ids": [True, 2], "loss_mask": [0, 1]}, "something else than token ids"),
    "mask of two": ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "something else than 0 and 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_formats(name: str) -> None:
    row, messages = GOOD[name]
    assert parse_row(row).messages == messages


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_say_why(name: str) -> None:
    row, reason = BAD[name]
    with pytest.raises(BadRow, match=reason):
        parse_row(row)


def test_ready_rows() -> None:
    chat = parse_row({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]})
    assert chat.input_ids.dtype == np.int32 and chat.input_ids.tolist() == [5, 6, 7] and chat.loss_mask.tolist() == [0, 1, 1]


def lines_of(path: Path) -> list[tuple[int, str]]:
    return [(line, str(chat) if isinstance(chat, BadRow) else "chat") for line, _, chat in read_rows(path)]


def test_a_bad_line_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": \n{"prompt": "\xff"}\n{"messages": []}\n{"prompt": "z"}')
    found = lines_of(path)
    assert [line for line, _ in found] == [1, 3, 4, 5, 6]
    assert found[0][1] == found[4][1] == "chat" and "not JSON" in found[1][1] and "not JSON" in found[2][1] and "no user message" in found[3][1]


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_item_by_item(tmp_path: Path, indent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import aerie.chats

    monkeypatch.setattr(aerie.chats, "CHUNK", 16)  # items, strings and numbers cut at every place
    rows = [{"prompt": f"ä] , {i}\n\"", "n": 12345.5} for i in range(20)] + [{"messages": 3}, {"prompt": "last"}]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(rows, indent=indent), encoding="utf-8")
    found = list(read_rows(path))
    assert len(found) == 22 and isinstance(found[20][2], BadRow)
    assert [chat.messages[0]["content"] for _, _, chat in found[:20]] == [row["prompt"] for row in rows[:20]]
    if indent:
        text = path.read_text().splitlines()
        assert all(text[line - 1].strip() == "{" for line, _, _ in found)


def test_a_json_array_that_ends_early(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    for text, reason in (('[{"prompt": "a"}, {"pro', "not JSON from here on"), ('[{"prompt": "a"},', "ends inside its array")):
        path.write_text(text)
        found = lines_of(path)
        assert found[0][1] == "chat" and reason in found[1][1]


def test_json_lines_under_the_name_json(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert lines_of(path) == [(1, "chat"), (2, "chat")]


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.jsonl does not exist"):
        list(read_rows(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="cannot be read"):
        list(read_rows(tmp_path))


def test_keys() -> None:
    base = parse_row({"messages": HELLO})
    other_answer = parse_row({"messages": [HELLO[0], {"role": "assistant", "content": "Howdy"}]})
    other_prompt = parse_row({"messages": [{"role": "user", "content": "Ho"}, HELLO[1]]})
    assert base.prompt_key() == other_answer.prompt_key() != other_prompt.prompt_key()
    assert base.content_key() != other_answer.content_key()
    assert base.content_key(answers=False) == other_answer.content_key(answers=False) != other_prompt.content_key(answers=False)


@settings(max_examples=200, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
    st.sampled_from(["messages", "conversations", "role", "content", "from", "value", "prompt", "input_ids", "loss_mask", "tools", "tool_calls", "function", "name",
                     "arguments", "system", "reasoning_content"]), inner | st.sampled_from(["user", "assistant", "human", "gpt"]), max_size=5), max_leaves=20))  # fmt: skip
def test_no_row_can_break_the_reader(row: Any) -> None:
    """Whatever stands in a file: a Chat that can be named, or BadRow."""
    try:
        chat = parse_row(row)
    except BadRow:
        return
    assert isinstance(chat, Chat) and chat.prompt_key() >= 0 and chat.content_key() >= 0
