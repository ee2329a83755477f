"""Answers written by a server: the token ids are the server's own, nothing is lost or asked twice, whatever order answers come in and wherever a run is killed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from aerie.answer_log import Answer, AnswerLog, answer_key
from aerie.errors import UserError
from aerie.paths import ROOT
from aerie.render import ChatTokenizer
from aerie.samples import SampleFile
from cpu_tools import free_port
from data_fake_server import FakeServer, finished, pause_of
from data_tools import make_fast

SCRIPT = ROOT / "scripts" / "02a_prepare_data.py"


def write_config(folder: Path, model: Path, chats: list[Any], **data: Any) -> Path:
    """A config file whose chats lie beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "chats.jsonl"
    inputs.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    data = {"inputs": [str(inputs)], "heldout": 2, **data}
    lines = [f'[target]\nmodel_path = "{model}"\naux_layer_ids = [1]\n[draft]\nvocab_size = 300\n[extract]\nserver_wait_s = 20\n[data]']
    lines += [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    path = folder / "config.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def prepare(monkeypatch: pytest.MonkeyPatch, config: Path, run: str, *args: str) -> dict[str, Any]:
    """Run 02a in this process; returns its report."""
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["02a", "--config", str(config), "--run", run, *args])
    module.main()
    return json.loads((Path(os.environ["AERIE_RUNS_DIR"]) / run / "data" / "report.json").read_text())


def rows(run: str) -> list[tuple[list[int], list[int]]]:
    folder = Path(os.environ["AERIE_RUNS_DIR"]) / run / "data"
    return [(sample.input_ids.tolist(), sample.loss_mask.tolist()) for split in ("train", "heldout") for sample in SampleFile(folder / f"{split}.safetensors")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("answer_models")
    return lambda name: root / name if (root / name).is_dir() else make_fast(root / name, name)


WORDS = "the a sky blue sea is was Paris four two and not because it rains 東京 🎉 naïve\n".split(" ")


class Speaker:
    """Writes answers as the model of a family would, from the prompt alone, and remembers every (prompt, answer)."""

    def __init__(self, folder: Path, kind: str = "plain", longest_s: float = 0.02):
        self.tokenizer, self.kind, self.longest_s = ChatTokenizer(str(folder)), kind, longest_s
        self.said: list[tuple[list[int], list[int]]] = []

    def __call__(self, prompt: list[int], sampling: dict[str, Any]) -> Any:
        time.sleep(pause_of(prompt, self.longest_s))
        rng = random.Random(str(prompt))
        text = " ".join(rng.choices(WORDS, k=rng.randrange(2, 12)))
        if self.kind == "thinking":
            text = "<think>\n" + " ".join(rng.choices(WORDS, k=5)) + "\n</think>\n\n" + text
        if self.kind == "odd tokens":  # what no encoder would write: the text encoded again gives other ids
            ids = [token for letter in text for token in self.tokenizer.encode(letter)]
        else:
            ids = self.tokenizer.encode(text)
        ids = [*ids, self.tokenizer.encode("<|im_end|>")[0]]
        if self.kind == "cut off" and rng.random() < 0.5:
            ids = ids[: rng.randrange(2, len(ids))]  # anywhere, also inside an emoji
            self.said.append((prompt, ids))
            return finished(ids, "length")
        self.said.append((prompt, ids))
        return finished(ids)


def check_rows(found: list[tuple[list[int], list[int]]], said: list[tuple[list[int], list[int]]]) -> None:
    """Each row is what the server processed, and every answer is supervised exactly once, by its own tokens."""
    processed = {tuple(prompt + answer): len(prompt) for prompt, answer in said}
    supervised = []
    for ids, mask in found:
        assert tuple(ids) in processed, "a row that the server never processed"
        start = 0
        for place in np.flatnonzero(np.diff([0, *mask, 0])).reshape(-1, 2):  # runs of supervised tokens
            start, end = map(int, place)
            assert processed.get(tuple(ids[:end])) == start, "a supervised run that is not one whole answer"
            supervised.append(tuple(ids[:end]))
    assert sorted(supervised) == sorted(processed), "an answer lost, or supervised twice"


MULTI = [
    {"messages": [{"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": "recorded"}, {"role": "user", "content": f"And {i * 7} then?"}]}
    for i in range(12)
]  # fmt: skip


@pytest.mark.parametrize("family, kind, one_row", [("chatml", "plain", True), ("chatml", "odd tokens", False), ("qwen3", "thinking", False)])
def test_turn_by_turn_the_servers_own_tokens(
    family: str, kind: str, one_row: bool, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    speaker = Speaker(folders(family), kind)
    run = f"turns-{family}-{kind.replace(' ', '-')}"
    with FakeServer(speaker) as server:
        report = prepare(monkeypatch, write_config(tmp_path, folders(family), MULTI, url=server.url), run)
    assert len(speaker.said) == 24 == len({tuple(prompt) for prompt, _ in speaker.said}) and report["answers_asked"] == 24
    found = rows(run)
    check_rows(found, speaker.said)
    assert len(found) == (12 if one_row else 24)
    if family == "qwen3":  # the second question is asked without the first answer's reasoning
        second = [speaker.tokenizer.decode(prompt) for prompt, _ in speaker.said if "then?" in speaker.tokenizer.decode(prompt)]
        assert len(second) == 12 and not any("</think>" in text for text in second)


def test_a_second_run_asks_nothing_and_writes_the_same(folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_of = lambda url, chats: write_config(tmp_path, folders("chatml"), chats, url=url)  # noqa: E731
    with FakeServer(Speaker(folders("chatml"))) as server:
        first = prepare(monkeypatch, config_of(server.url, MULTI), "again")
        rows_first = rows("again")
    second = prepare(monkeypatch, config_of(server.url, MULTI[::-1]), "again")  # the server is gone, the chats stand in another order
    assert (first["answers_asked"], second["answers_asked"]) == (24, 0)
    assert sorted(rows("again")) == sorted(rows_first) and first["data_hash"] == second["data_hash"]


@pytest.mark.parametrize("policy", ["keep", "drop"])
def test_answers_that_are_cut_off(policy: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker(folders("chatml"), "cut off")
    with FakeServer(speaker) as server:
        report = prepare(monkeypatch, write_config(tmp_path, folders("chatml"), MULTI, url=server.url, truncated_answers=policy), f"cut-{policy}")
    end = speaker.tokenizer.encode("<|im_end|>")[0]
    cut = [item for item in speaker.said if item[1][-1] != end]
    assert cut and report["counts"]["truncated_answers"] == len(cut)
    check_rows(rows(f"cut-{policy}"), speaker.said if policy == "keep" else [item for item in speaker.said if item not in cut])


def test_held_out_chats_are_answered_greedily(folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker(folders("chatml"))
    with FakeServer(speaker) as server:
        prepare(monkeypatch, write_config(tmp_path, folders("chatml"), MULTI, url=server.url, temperature=0.7, top_p=0.9, max_new_tokens=50, heldout=3), "warm")
    sampling = Counter((body["sampling_params"]["temperature"], body["sampling_params"]["top_p"], body["sampling_params"]["max_new_tokens"]) for body in server.asked)
    assert sampling == {(0.7, 0.9, 50): 18, (0.0, 0.9, 50): 6}
    heldout = SampleFile(Path(os.environ["AERIE_RUNS_DIR"]) / "warm/data/heldout.safetensors")
    greedy = {tuple(body["input_ids"]) for body in server.asked if body["sampling_params"]["temperature"] == 0}
    assert all(tuple(sample.input_ids[: int(np.argmax(sample.loss_mask))]) in greedy for sample in heldout)


def test_tools_keep_their_recorded_results(folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results belong to the recorded call: it stays in the history, the target's own answer is learned beside it."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    chats = [
        {"messages": [{"role": "user", "content": f"Weather {i}?"}, {"role": "assistant", "content": "", "tool_calls": [call]},
                      {"role": "tool", "content": "12 °C", "tool_call_id": "c"}, {"role": "assistant", "content": "recorded"}],
         "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]}
        for i in range(5)
    ]  # fmt: skip
    speaker = Speaker(folders("chatml"))
    with FakeServer(speaker) as server:
        prepare(monkeypatch, write_config(tmp_path, folders("chatml"), chats, url=server.url), "tools")
    check_rows(rows("tools"), speaker.said)
    texts = [speaker.tokenizer.decode(prompt) for prompt, _ in speaker.said]
    assert sum("<tool_call>" in text and "12 °C" in text for text in texts) == 5 and len(texts) == 10
    assert not any("recorded" in text for text in texts)


def test_what_the_server_refuses_is_rejected_and_the_rest_goes_on(folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speaker = Speaker(folders("chatml"))
    flaky = {"left": 3}

    def generate(prompt: list[int], sampling: dict[str, Any]) -> Any:
        if "Question 3?" in speaker.tokenizer.decode(prompt):
            return 400
        if flaky["left"] > 0:
            flaky["left"] -= 1
            return 503  # comes back by itself
        return speaker(prompt, sampling)

    with FakeServer(generate) as server:
        report = prepare(monkeypatch, write_config(tmp_path, folders("chatml"), MULTI, url=server.url), "refused")
    assert report["counts"]["missing_answers"] == 1 and report["counts"]["rejected"] == 1
    check_rows(rows("refused"), speaker.said)


def test_nobody_there_is_one_sentence(folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no server answers at http://127.0.0.1:9 .*make server"):
        prepare(monkeypatch, write_config(tmp_path, folders("chatml"), MULTI, url="http://127.0.0.1:9"), "nobody")
    assert not (Path(os.environ["AERIE_RUNS_DIR"]) / "nobody/data/train.safetensors").exists()


@pytest.mark.parametrize("names", ["sglang", "vllm", "none"])
def test_an_openai_compatible_server(names: str, folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids under SGLang's or vLLM's names; without any, the text goes through the template like a recorded answer."""
    tokenizer = ChatTokenizer(str(folders("qwen3")))
    said = []

    def chat(body: dict[str, Any]) -> Any:
        assert body["model"] == "fake" and body["return_token_ids"]
        prompt = tokenizer.encode(tokenizer.tokenizer.apply_chat_template(body["messages"], tokenize=False, add_generation_prompt=True))
        rng = random.Random(str(prompt))
        thought, text = " ".join(rng.choices(WORDS, k=4)).strip(), " ".join(rng.choices(WORDS, k=6)).strip()
        answer = tokenizer.encode(f"<think>\n{thought}\n</think>\n\n{text}<|im_end|>")
        said.append((prompt, answer))
        choice = {"message": {"role": "assistant", "content": text, "reasoning_content": thought}, "finish_reason": "stop"}
        if names == "sglang":
            return {"choices": [choice | {"response_token_ids": answer, "prompt_token_ids": prompt}]}
        return {"choices": [choice | {"token_ids": answer}], "prompt_token_ids": prompt} if names == "vllm" else {"choices": [choice]}

    with FakeServer(chat=chat) as server:
        report = prepare(monkeypatch, write_config(tmp_path, folders("qwen3"), MULTI, url=f"{server.url}/v1"), f"openai-{names}")
    check_rows(rows(f"openai-{names}"), said)
    assert report["counts"].get("retokenised_answers", 0) == (24 if names == "none" else 0)


# -- the log -----------------------------------------------------------------------------------------------------------------------------------------------


def test_the_log_survives_a_cut_at_every_byte(tmp_path: Path) -> None:
    path, keys = tmp_path / "answers.jsonl", [hashlib.sha256(bytes([i])).hexdigest()[:32] for i in range(4)]
    log = AnswerLog(path)
    for i, key in enumerate(keys):
        log.add(key, Answer([i, 10 + i], "stop", message={"role": "assistant", "content": "ü" * i}))
    log.close()
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        log = AnswerLog(path)
        kept = sum(end <= size for end in ends)
        assert len(log) == kept and all((key in log) == (i < kept) for i, key in enumerate(keys))
        for i in range(kept, 4):
            log.add(keys[i], Answer([i, 10 + i], "stop", message={"role": "assistant", "content": "ü" * i}))
        assert [log.get(key).output_ids for key in keys] == [[i, 10 + i] for i in range(4)]
        log.close()
        assert path.read_bytes() == whole


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path / "answers.jsonl")
    with pytest.raises(UserError, match="another process"):
        AnswerLog(tmp_path / "answers.jsonl")
    log.close()


def test_the_key_is_the_prompt_and_the_settings() -> None:
    assert answer_key([1, 2, 3], "a") == answer_key([1, 2, 3], "a")
    assert len({answer_key([1, 2, 3], "a"), answer_key([1, 2, 3], "b"), answer_key([1, 2], "a"), answer_key([1, 2, 4], "a")}) == 4


def test_killed_three_times_nothing_is_lost_or_repeated(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """kill -9 while answers come in an order of their own; between the runs the chats are shuffled and stand in two files."""
    model, rng = folders("chatml"), random.Random(5)
    chats = [{"prompt": f"Question number {i}, is it {i * 37 % 101}?"} for i in range(150)]
    record, port = tmp_path / "record.jsonl", free_port()
    record.touch()
    config = write_config(tmp_path, model, chats, url=f"http://127.0.0.1:{port}", concurrency=16, heldout=10)
    server = subprocess.Popen([sys.executable, str(Path(__file__).parent / "data_fake_server.py"), str(port), str(record), "0.6"], stdout=subprocess.PIPE)
    command = [sys.executable, str(SCRIPT), "--config", str(config), "--run", "killed"]
    log = Path(os.environ["AERIE_RUNS_DIR"]) / "killed/data/answers.jsonl"
    known: list[set[str]] = []
    try:
        assert server.stdout.readline()
        for wanted in (20, 60, 110):
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            deadline = time.monotonic() + 240
            while (not log.exists() or log.read_bytes().count(b"\n") < wanted) and run.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            run.send_signal(signal.SIGKILL)
            assert run.wait() == -signal.SIGKILL, "it was killed while it worked"
            lines = [line for line in log.read_bytes().split(b"\n")[:-1]]
            known.append({json.loads(line)["key"] for line in lines})
            assert len(known[-1]) == len(lines) >= wanted
            rng.shuffle(chats)
            (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
        asked_before = len(record.read_text().splitlines())
        last = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert last.returncode == 0, last.stderr
    finally:
        server.kill()
        server.wait()
    keys = [json.loads(line)["key"] for line in log.read_text().splitlines()]
    assert len(keys) == len(set(keys)) == 150, "each answer once"
    assert known[0] < known[1] < known[2] < set(keys), "what was on the disk stays"
    report = json.loads((log.parent / "report.json").read_text())
    assert report["answers_asked"] == 150 - len(known[2])
    asked = record.read_text().splitlines()
    assert len(asked) - asked_before == report["answers_asked"], "nothing that was on the disk is asked again"
    found = rows("killed")
    assert len(found) == 150 and {tuple(json.loads(line)) for line in asked} == {tuple(ids[: mask.index(1)]) for ids, mask in found}
