"""The rows we train on are the rows the server would process, token by token, for every kind of template.

The other side of the comparison is written down here by hand: the prompt as a server makes it (the template with its generation prompt, encoded), then the tokens
of the answer as the model itself would write it (ANSWERS: what each family puts between the generation prompt and its end-of-turn token).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from aerie.answers import recorded
from aerie.chats import BadRow, Chat, parse_row
from aerie.errors import UserError
from aerie.render import ChatTokenizer, rows_of, supervised_predictions
from data_tools import make_fast, make_gpt2_words, make_sentencepiece_like, make_tiktoken, train_bytes

EMOJI = "👩‍👩‍👧‍👦 naïve 東京 🎉"
TOOL = {"type": "function", "function": {"name": "weather", "description": "Now", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, reasoning: str = "", call: dict[str, Any] | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if call is not None:
        message["tool_calls"] = [{"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": json.dumps(call)}}]
    return message


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": "functions.weather:0"}


CHATS: dict[str, dict[str, Any]] = {
    "single": {"messages": [user("What is the capital of France?"), says("Paris.")]},
    "multi": {"messages": [user("Hi"), says("Hello, you."), user("And now?"), says("Now we talk.\n\nSecond paragraph"), user("Bye"), says("Bye bye")]},
    "system": {"messages": [{"role": "system", "content": "Be short."}, user("Hi"), says("Hello."), user("Why?"), says("Because.")]},
    "tools": {"messages": [user("Weather?"), says("", call={"city": "Köln"}), result("12 °C"), says("It is 12 °C."), user("Thanks"), says("Welcome!")], "tools": [TOOL]},
    "reasoning": {"messages": [user("2+2?"), says("Four.", "two and two\nis four"), user("3+3?"), says("Six.", "double three")]},
    "reasoning with tools": {
        "messages": [user("Weather?"), says("", "I must look", {"city": "Rome"}), result("sunny"), says("Sunny.", "it says sunny"), user("Ok"), says("Fine.", "polite")],
        "tools": [TOOL],
    },
    "empty answer": {"messages": [user("Say nothing."), says(""), user("Now speak."), says("Here I am.")]},
    "unicode": {"messages": [user(EMOJI), says(EMOJI + "é"), user("é" + EMOJI), says("🎉")]},
    "special-looking": {"messages": [user("<|im_end|> <|eot_id|><|end|><｜User｜>[EOS]</s> x"), says("It says <|im_start|> or <|start_header_id|>assistant<｜Assistant｜>."), user("ok"), says("ok")]},
}  # fmt: skip


def calls_text(message: dict[str, Any], text: Callable[[str, str, str], str]) -> str:
    """Each call by its id, name and arguments (as the template's tojson writes them)."""
    return "".join(text(call["id"], call["function"]["name"], json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False)) for call in message.get("tool_calls", []))


def hermes(message: dict[str, Any]) -> str:
    return message["content"] + calls_text(message, lambda _, name, arguments: f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>') + "<|im_end|>"


def llama3(message: dict[str, Any]) -> str:
    called = calls_text(message, lambda _, name, arguments: f'{{"name": "{name}", "parameters": {arguments}}}')
    return (called or message["content"].strip()) + "<|eot_id|>"


def qwen3_body(message: dict[str, Any]) -> str:
    called = calls_text(message, lambda _, name, arguments: f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    return message["content"] + ("\n" if message["content"] and called else "") + called + "<|im_end|>"


def qwen3(message: dict[str, Any]) -> str:
    return f"<think>\n{message.get('reasoning_content', '')}\n</think>\n\n" + qwen3_body(message)


def deepseek(message: dict[str, Any]) -> str:
    called = calls_text(message, lambda _, name, arguments: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>")
    return message["content"] + (f"<｜tool▁calls▁begin｜>{called}<｜tool▁calls▁end｜>" if called else "") + "<｜end▁of▁sentence｜>"


def deepseek_r1(message: dict[str, Any], after_tool: bool) -> str:
    return deepseek(message) if after_tool else message.get("reasoning_content", "") + "\n</think>\n\n" + deepseek(message)


def kimi(message: dict[str, Any]) -> str:
    called = calls_text(message, lambda number, _, arguments: f"<|tool_call_begin|>{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>")
    return message["content"] + (f"<|tool_calls_section_begin|>{called}<|tool_calls_section_end|>" if called else "") + "<|im_end|>"


def kimi_thinking(message: dict[str, Any]) -> str:
    return message.get("reasoning_content", "") + "</think>" + kimi(message)


def kimi_opens_itself(message: dict[str, Any]) -> str:
    return "<think>" + kimi_thinking(message)


def deepseek_v31(message: dict[str, Any]) -> str:
    called = calls_text(message, lambda _, name, arguments: f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
    return message["content"] + (f"<｜tool▁calls▁begin｜>{called}<｜tool▁calls▁end｜>" if called else "") + "<｜end▁of▁sentence｜>"


def deepseek_v31_thinking(message: dict[str, Any], after_tool: bool) -> str:
    return ("" if after_tool else message.get("reasoning_content", "") + "</think>") + deepseek_v31(message)


def glm_body(message: dict[str, Any]) -> str:
    arguments = "".join(
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for call in message.get("tool_calls", []) for key, value in json.loads(call["function"]["arguments"]).items()
    )  # fmt: skip
    called = calls_text(message, lambda _, name, __: f"\n<tool_call>{name}{arguments}\n</tool_call>")
    return ("\n" + message["content"] if message["content"] else "") + called + ("<|observation|>" if called else "<|user|>")


def glm(message: dict[str, Any]) -> str:
    return f"\n<think>{message.get('reasoning_content', '')}</think>" + glm_body(message)


def harmony(message: dict[str, Any]) -> str:
    thought = f"<|channel|>analysis<|message|>{message['reasoning_content']}<|end|><|start|>assistant" if message.get("reasoning_content") else ""
    called = calls_text(message, lambda _, name, arguments: f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>")
    return thought + (called or f"<|channel|>final<|message|>{message['content']}<|return|>")


# Case: family, how its tokenizer is made, template arguments, the answer's text, chats whose history the template rewrites (one row a turn).
ALL = set(CHATS)
WITH_THOUGHTS = {"reasoning", "reasoning with tools"}
SEVERAL_TURNS = ALL - {"single"}
CASES: dict[str, tuple[str, Callable, dict[str, Any], Callable, set[str]]] = {
    "chatml": ("chatml", make_fast, {}, hermes, set()),
    "llama3": ("llama3", make_fast, {}, llama3, set()),
    "llama3 gpt2 words": ("llama3", make_gpt2_words, {}, llama3, SEVERAL_TURNS - {"empty answer"}),
    "qwen3": ("qwen3", make_fast, {}, qwen3, SEVERAL_TURNS),
    "qwen3 no thinking": ("qwen3", make_fast, {"enable_thinking": False}, qwen3_body, SEVERAL_TURNS),
    "deepseek_v3": ("deepseek_v3", make_fast, {}, deepseek, set()),
    "deepseek_r1": ("deepseek_r1", make_fast, {}, deepseek_r1, SEVERAL_TURNS),
    "kimi_k2": ("kimi_k2", make_tiktoken, {}, kimi, set()),
    "kimi_k2 fast": ("kimi_k2", make_fast, {}, kimi, set()),
    "kimi_k2_thinking": ("kimi_k2_thinking", make_tiktoken, {}, kimi_opens_itself, WITH_THOUGHTS),
    "deepseek_v31": ("deepseek_v31", make_fast, {}, deepseek_v31, set()),
    "deepseek_v31 thinking": ("deepseek_v31", make_fast, {"thinking": True}, deepseek_v31_thinking, SEVERAL_TURNS),
    "glm46": ("glm46", make_fast, {}, glm, WITH_THOUGHTS),
    "glm46 no thinking": ("glm46", make_fast, {"enable_thinking": False}, glm_body, {"reasoning with tools"}),
    "kimi_k25": ("kimi_k25", make_tiktoken, {}, kimi_thinking, WITH_THOUGHTS),
    "kimi_k25 no thinking": ("kimi_k25", make_tiktoken, {"thinking": False}, kimi, {"reasoning with tools"}),
    "gpt_oss": ("gpt_oss", make_fast, {}, harmony, SEVERAL_TURNS),
    "no generation prompt": ("no_generation_prompt", make_fast, {}, lambda message: f" {message['content'].strip()}</s>", set()),
    "sentencepiece": ("no_generation_prompt", make_sentencepiece_like, {}, lambda message: f" {message['content'].strip()}</s>", set()),
}  # fmt: skip
NO_TOOLS = {"no generation prompt", "sentencepiece"}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ChatTokenizer]:
    root, made = tmp_path_factory.mktemp("tokenizers"), {}

    def get(case: str) -> ChatTokenizer:
        if case not in made:
            name, make, kwargs, _, _ = CASES[case]
            made[case] = ChatTokenizer(str(make(root / case.replace(" ", "_"), name)), trust_remote_code=make is make_tiktoken, template_kwargs=kwargs)
        return made[case]

    return get


def parsed(name: str) -> Chat:
    return parse_row(CHATS[name])


def server_prompt(tokenizer: ChatTokenizer, chat: Chat, index: int) -> list[int]:
    """As SGLang's chat endpoint does it: render with the generation prompt, encode the text. DeepSeek-V3's template wants arguments as text."""
    messages = json.loads(json.dumps(chat.messages[:index]))
    if "deepseek" in tokenizer.folder:
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if "gpt_oss" in tokenizer.folder:  # whose template reads the reasoning as `thinking`
        messages = [{key.replace("reasoning_content", "thinking"): value for key, value in message.items()} for message in messages]
    text = tokenizer.tokenizer.apply_chat_template(messages, tools=chat.tools, tokenize=False, add_generation_prompt=True, **tokenizer.kwargs)
    return plain_encode(tokenizer, text)


def plain_encode(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return tokenizer.tokenizer.encode(text) if "SmallTikToken" in type(tokenizer.tokenizer).__name__ else tokenizer.tokenizer.encode(text, add_special_tokens=False)


def expected_rows(case: str, tokenizer: ChatTokenizer, name: str) -> list[tuple[list[int], list[int]]]:
    """Rows by hand: prompt ids, then the answer's ids; joined where the family keeps its history as it was."""
    _, _, _, answer_text, rewritten = CASES[case]
    chat, raw = parsed(name), CHATS[name]["messages"]
    rows: list[tuple[list[int], list[int]]] = []
    for index, message in enumerate(raw):
        if message["role"] != "assistant":
            continue
        text = answer_text(message, raw[index - 1]["role"] == "tool") if answer_text in (deepseek_r1, deepseek_v31_thinking) else answer_text(message)
        prompt = server_prompt(tokenizer, chat, index)
        answer = plain_encode(tokenizer, text)
        if case == "sentencepiece":
            answer = sentencepiece_answer(tokenizer, text)
        mask = [0] * len(prompt) + [1] * len(answer)
        if rows and name not in rewritten:
            assert prompt[: len(rows[-1][0])] == rows[-1][0], "the family was said to keep its history"
            mask[: len(rows[-1][1])] = rows[-1][1]
            rows.pop()
        rows.append((prompt + answer, mask))
    return rows


def sentencepiece_answer(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """' Paris.</s>' behind '[/INST]': the tokens that stand there when the whole is encoded."""
    ids = tokenizer.tokenizer.encode("[/INST]" + text, add_special_tokens=False)
    head = tokenizer.tokenizer.encode("[/INST]", add_special_tokens=False)
    assert ids[: len(head)] == head
    return ids[len(head) :]


@pytest.mark.parametrize("name", [name for name in CHATS if name != "special-looking"])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_the_server(case: str, name: str, tokenizers: Callable[[str], ChatTokenizer]) -> None:
    tokenizer = tokenizers(case)
    chat = tokenizer.guarded(parsed(name))
    if case in NO_TOOLS and chat.tools:
        with pytest.raises(BadRow, match="refuses"):
            recorded(tokenizer, chat)
        return
    found = rows_of(recorded(tokenizer, chat))
    expected = expected_rows(case, tokenizer, name)
    if name == "unicode" and case != "sentencepiece":  # which has these characters whole
        assert any("\ufffd" in tokenizer.decode([token]) for token in found[0][0].tolist()), "characters are cut inside"
    assert [(ids.tolist(), mask.tolist()) for ids, mask in found] == expected
    for ids, mask in found:
        assert ids.dtype == np.int32 and mask.dtype == np.uint8
        assert int(ids[np.flatnonzero(mask)[-1]]) in tokenizer.end_ids, "the end of the turn is supervised"


def special_looking_by_hand(case: str, tokenizer: ChatTokenizer) -> list[int]:
    """The whole chat put together from special ids and text encoded by a tokenizer that knows no special token."""
    ids = tokenizer.added
    raw = tokenizer.tokenizer.model.encode_ordinary if case == "kimi_k2" else lambda text: train_bytes().encode(text).ids
    asked, said, again, ok = (message["content"] for message in CHATS["special-looking"]["messages"])
    if case == "chatml":
        turn = lambda role, text: [ids["<|im_start|>"], *raw(f"{role}\n{text}"), ids["<|im_end|>"], *raw("\n")]  # noqa: E731
        return [*turn("user", asked), *turn("assistant", said), *turn("user", again), *turn("assistant", ok)][: -len(raw("\n"))]
    if case == "deepseek_v3":
        user_id, assistant_id, end = ids["<｜User｜>"], ids["<｜Assistant｜>"], ids["<｜end▁of▁sentence｜>"]
        return [ids["<｜begin▁of▁sentence｜>"], user_id, *raw(asked), assistant_id, *raw(said), end, user_id, *raw(again), assistant_id, *raw(ok), end]
    turn = lambda role, text, name: [ids[f"<|im_{name}|>"], *raw(role), ids["<|im_middle|>"], *raw(text), ids["<|im_end|>"]]  # noqa: E731
    rows = turn("system", "You are Kimi.", "system") + turn("user", asked, "user") + turn("assistant", said, "assistant")
    return rows + turn("user", again, "user") + turn("assistant", ok, "assistant")


@pytest.mark.parametrize("case", ["chatml", "deepseek_v3", "kimi_k2"])
def test_text_that_looks_like_a_special_token_stays_text(case: str, tokenizers: Callable[[str], ChatTokenizer]) -> None:
    tokenizer = tokenizers(case)
    chat = tokenizer.guarded(parsed("special-looking"))
    [(ids, mask)] = rows_of(recorded(tokenizer, chat))
    assert ids.tolist() == special_looking_by_hand(case, tokenizer)
    ends = [place for place, token in enumerate(ids.tolist()) if token in tokenizer.end_ids and mask[place]]
    assert len(ends) == 2, "two answers, two ends of turn: the message's own text ends nothing"


@pytest.mark.parametrize("case", CASES)
def test_nothing_that_the_prompt_supplies_is_supervised(case: str, tokenizers: Callable[[str], ChatTokenizer]) -> None:
    tokenizer = tokenizers(case)
    for name in CHATS:
        if case in NO_TOOLS and "tools" in CHATS[name]:
            continue
        chat = tokenizer.guarded(parsed(name))
        for turn in recorded(tokenizer, chat):
            [(ids, mask)] = rows_of([turn])
            assert not mask[: len(turn.prompt)].any() and mask[len(turn.prompt) :].all()


def test_reasoning_inside_the_content_is_kept_where_the_template_drops_it(tokenizers: Callable[[str], ChatTokenizer]) -> None:
    """R1 answers in ShareGPT form carry their reasoning in the text; the template cuts it off, the server's answer has it."""
    tokenizer = tokenizers("deepseek_r1")
    chat = Chat([user("2+2?"), says("<think>\ntwo and two\n</think>\n\nFour.")])
    [turn] = recorded(tokenizer, tokenizer.guarded(chat))
    assert tokenizer.decode(turn.prompt).endswith("<｜Assistant｜><think>\n")
    assert tokenizer.decode(turn.answer) == "two and two\n</think>\n\nFour.<｜end▁of▁sentence｜>"


def test_code_of_a_model_folder_runs_only_when_the_config_says_so(tmp_path: Path) -> None:
    folder = make_tiktoken(tmp_path / "kimi", "kimi_k2")
    with pytest.raises(UserError, match="trust_remote_code = true"):
        ChatTokenizer(str(folder))
    assert ChatTokenizer(str(folder), trust_remote_code=True).vocab_size > 256


def test_a_tokenizer_without_template_is_refused(tmp_path: Path) -> None:
    folder = make_fast(tmp_path / "bare", "chatml")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template"):
        ChatTokenizer(str(folder))


@pytest.mark.parametrize("case, wanted", [
    ("qwen3", ["<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]),
    ("kimi_k25", ["<|im_end|>", "<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                  "<|tool_call_argument_begin|>", "<|tool_call_end|>"]),
    ("gpt_oss", ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"]),
    ("llama3", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"]),
    ("deepseek_r1", ["<｜end▁of▁sentence｜>", "<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"]),
])  # fmt: skip
def test_markers_are_forced_into_the_draft_vocabulary(case: str, wanted: list[str], tokenizers: Callable[[str], ChatTokenizer]) -> None:
    tokenizer = tokenizers(case)
    forced = {token for token, number in tokenizer.added.items() if number in tokenizer.forced_ids}
    assert set(wanted) <= forced
    assert not any("reserved" in token or "image" in token for token in forced)


def test_tools_are_given_to_the_template_as_sglang_gives_them() -> None:
    from sglang.srt.entrypoints.openai.protocol import Tool

    for function in ({"name": "f"}, {"parameters": {"b": 1, "a": 2}, "name": "f", "description": "d", "strict": True}, {"name": "f", "other": 1, "strict": None}):
        tool = {"type": "function", "function": function}
        [found] = parse_row({"messages": [user("x")], "tools": [tool]}).tools
        assert json.dumps(found) == json.dumps(Tool(**tool).model_dump())


def test_supervised_predictions_need_two_supervised_tokens_in_a_row() -> None:
    mask = np.array([0, 1, 0, 1, 1, 1, 0, 0, 1], np.uint8)
    assert supervised_predictions(mask) == sum(bool(mask[t + 1] and mask[t + 2]) for t in range(len(mask) - 2)) == 2
    assert supervised_predictions(np.array([1, 1], np.uint8)) == 0


@pytest.mark.parametrize("case, text, content, reasoning, calls", [
    ("qwen3", "<think>\nhm\n</think>\n\nFour.<|im_end|>", "Four.", "hm", False),
    ("qwen3", "<think>\n\n</think>\n\nFour.<|im_end|>", "Four.", "", False),
    ("qwen3", 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call><|im_end|>', 'I look.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", True),
    ("deepseek_r1", "hm\n</think>\n\nFour.<｜end▁of▁sentence｜>", "Four.", "hm", False),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f<｜end▁of▁sentence｜>", None, "", True),
    ("kimi_k25", "hm</think>Four.<|im_end|>", "Four.", "hm", False),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>f:0<|im_end|>", None, "", True),
    ("gpt_oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>", "Four.", "hm", False),
    ("gpt_oss", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", "hm", True),
    ("gpt_oss", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", "", "", True),
    ("chatml", "Two to=three.<|im_end|>", "Two to=three.", "", False),
])  # fmt: skip
def test_an_answer_as_the_message_a_client_sends_back(
    case: str, text: str, content: str | None, reasoning: str, calls: bool, tokenizers: Callable[[str], ChatTokenizer]
) -> None:  # fmt: skip
    tokenizer = tokenizers(case)
    message = tokenizer.message_of(plain_encode(tokenizer, text))
    assert message.get("reasoning_content", "") == reasoning and bool(message.get("tool_calls")) == calls
    assert content is None or message["content"] == content
