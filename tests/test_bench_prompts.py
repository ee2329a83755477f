"""Prompt sets, the numbers of bench_stats by hand, sweep settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Callable

import pytest
from aerie.bench_prompts import BUILTIN, CATEGORIES, in_turn, load_set, read_items, with_followups
from aerie.bench_servers import parse_sweep
from aerie.bench_stats import acceptance_by_position, by_category, by_context, drafting_share, drafting_share_of_sweep, latency, merged
from aerie.config import Config
from aerie.errors import UserError
from aerie.generate import Answer, Prompt
from aerie.render import ChatTokenizer


@pytest.fixture(scope="module")
def config(make_config: Callable[..., Config]) -> Config:
    return make_config("llama", "bench-prompts", bench={"max_new_tokens": 16, "samples": 12})


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_formats(tmp_path: Path, config: Config) -> None:
    bench = jsonl(tmp_path / "question.jsonl", {"question_id": 81, "category": "writing", "turns": ["Write about the sea.", "Now shorter."]})
    gsm8k = jsonl(tmp_path / "gsm8k.jsonl", {"question": "How many eggs?", "answer": "9 * 2 = 18\n#### 18"})
    human = jsonl(tmp_path / "HumanEval.jsonl", {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n", "entry_point": "add", "canonical_solution": "    return a + b", "test": ""})
    chats = jsonl(tmp_path / "chats.jsonl", {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}, {"prompt": "bye", "category": "end"})
    assert [(item.category, item.followups) for item in read_items(Path(bench))] == [("writing", ["Now shorter."])]
    assert read_items(Path(gsm8k))[0].messages == [{"role": "user", "content": "How many eggs?"}] and read_items(Path(gsm8k))[0].category == "gsm8k"
    assert "def add(a, b):" in read_items(Path(human))[0].messages[0]["content"] and "return" not in read_items(Path(human))[0].messages[0]["content"]
    assert [(item.category, len(item.messages)) for item in read_items(Path(chats))] == [("chat", 1), ("end", 1)]
    tokenizer = ChatTokenizer.of(config)
    assert tokenizer.decode(load_set(config, chats).prompts[0].input_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"  # the template, and the recorded answer left out


def test_later_turns_follow_the_targets_own_answer(tmp_path: Path, config: Config) -> None:
    path = jsonl(tmp_path / "question.jsonl", {"category": "a", "turns": ["one", "two", "three"]}, {"category": "b", "turns": ["four"]})
    prompts, tokenizer = load_set(config, path), ChatTokenizer.of(config)
    asked: list[list[str]] = []

    def ask(waiting: list[Prompt]) -> list[Answer]:
        asked.append([prompt.id for prompt in waiting])
        return [Answer(prompt, tokenizer.encode(f"answer {len(asked)}<|im_end|>"), 0, [], 0.0) for prompt in waiting]

    done = with_followups(config, prompts, ask)
    assert asked == [["question:1"], ["question:1/2"]] and [prompt.id for prompt in done.prompts] == ["question:1", "question:2", "question:1/2", "question:1/3"]
    last = tokenizer.decode(done.prompts[-1].input_ids)
    assert [last.index(word) for word in ("one", "answer 1", "two", "answer 2", "three")] == sorted(last.index(word) for word in ("one", "answer 1", "two", "answer 2", "three"))


def test_builtin_has_six_kinds_and_long_ones_are_skipped(config: Config) -> None:
    assert sorted(path.stem for path in BUILTIN.glob("*.jsonl")) == sorted(CATEGORIES)
    prompts = load_set(config, "builtin")
    assert prompts.skipped == 2 and [prompt.category for prompt in prompts.prompts[:5]] == list(CATEGORIES[:5])  # the tiny tokenizer makes over 2,048 tokens of the long ones
    assert len(load_set(config, "code").prompts) == 12
    assert in_turn([[1, 2, 3], [4]], 10) == [1, 4, 2, 3]  # type: ignore[list-item]


def test_bad_prompt_files(tmp_path: Path, config: Config) -> None:
    for name, word in (("nowhere.jsonl", "nor a file"), (jsonl(tmp_path / "bad.jsonl", {"prompt": "a"}, {"text": "b"}), "line 2"), (jsonl(tmp_path / "empty.jsonl"), "no prompts")):
        with pytest.raises(UserError, match=word):
            load_set(config, name)


def answer(category: str, prompt_tokens: int, output: int, verifications: int, chunks: list[tuple[float, int]] | None = None) -> Answer:
    return Answer(Prompt("x", [1] * prompt_tokens, output, category), [1] * output, verifications, [], 1.0, chunks or [])


def test_stats_by_hand() -> None:
    assert merged([[1, 2], [3], [0, 0, 5]]) == [4, 2, 5]
    rows = acceptance_by_position([4, 3, 2, 1], 3)
    assert [row["accepted"] for row in rows] == [0.6, 0.3, 0.1] and [row["given_the_one_before"] for row in rows] == [0.6, 0.5, pytest.approx(1 / 3)]
    answers = [answer("a", 100, 11, 5), answer("a", 10, 3, 2), answer("b", 300, 5, 4)]
    assert by_category(answers) == {"a": {"requests": 2, "accept_length": 12 / 7}, "b": {"requests": 1, "accept_length": 1.0}}
    assert [(row["from"], row["requests"], row["accept_length"]) for row in by_context(answers)] == [(0, 2, 12 / 7), (256, 1, 1.0)]
    streamed = answer("a", 5, 7, 2, [(0.1, 1), (0.4, 4), (0.4, 4), (1.0, 7)])  # 3 tokens in 0.3 s, 3 in 0.6 s; two verifications in 0.9 s
    found = latency([streamed])
    assert found["time_to_first_token_ms"]["p50"] == 100 and found["inter_token_latency_ms"]["p50"] == pytest.approx(150) and found["step_ms"] == pytest.approx(450)
    assert drafting_share({"step_ms": 270.0}, {"step_ms": 450.0}) == pytest.approx(0.4) and drafting_share({}, {"step_ms": 1.0}) is None
    sweep = [{"num_steps": steps, "topk": 1, "step_ms": 10.0 + 2.0 * steps} for steps in (1, 3, 5)] + [{"num_steps": 3, "topk": 4, "step_ms": 99.0}]
    assert drafting_share_of_sweep(sweep) == pytest.approx(0.5) and drafting_share_of_sweep(sweep[:1]) is None


def test_sweep_settings() -> None:
    assert parse_sweep("3,4,16") == (3, 4, 16) and parse_sweep("5,1,6") == (5, 1, 6)
    for text in ("3,4", "3,1,5", "a,b,c", "0,1,1", "1,2,9"):
        with pytest.raises(UserError, match="--sweep"):
            parse_sweep(text)
