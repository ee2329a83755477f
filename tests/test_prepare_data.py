"""02a on recorded answers: what is counted, cut, dropped and held out; and the vocabulary map of the whole."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
from aerie.errors import UserError
from aerie.paths import CONFIGS
from aerie.prepare import last_turn_border
from aerie.render import ChatTokenizer
from aerie.rid import sample_id
from aerie.samples import Sample, SampleFile, SampleWriter, write_samples
from aerie.vocab import load_vocab_map
from data_tools import make_fast
from test_answers import prepare, write_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fast(tmp_path_factory.mktemp("prepare") / "chatml", "chatml")


def chat(number: int, turns: int = 1, words: int = 3) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages += [{"role": "user", "content": f"Question {number}.{turn}"}, {"role": "assistant", "content": " ".join(["Paris", "is", "blue"] * words) + f" {number}.{turn}"}]
    return {"messages": messages}


def run_folder(run: str) -> Path:
    return Path(os.environ["AERIE_RUNS_DIR"]) / run / "data"


def split(run: str, name: str) -> list[Sample]:
    return list(SampleFile(run_folder(run) / f"{name}.safetensors"))


def questions(model: Path, samples: list[Sample]) -> set[str]:
    tokenizer = ChatTokenizer(str(model))
    return {tokenizer.decode(sample.input_ids.tolist()).split("Question ")[1].split(".")[0] for sample in samples}


def test_the_split_is_by_content(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [chat(i) for i in range(60)]
    prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=10, regenerate=False), "split1")
    report = prepare(monkeypatch, write_config(tmp_path, model, chats[::-1], heldout=10, regenerate=False, limit=20), "split2")
    heldout = questions(model, split("split1", "heldout"))
    assert len(heldout) == 10 and heldout == questions(model, split("split2", "heldout")), "the same chats, in any order"
    all_train, some_train = questions(model, split("split1", "train")), questions(model, split("split2", "train"))
    assert len(all_train) == 50 and len(some_train) == 20 and some_train < all_train and not all_train & heldout
    assert report["counts"]["unused_chats"] == 30
    prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=10, regenerate=False, limit=35), "split3")
    assert some_train < questions(model, split("split3", "train")), "fewer chats are a part of more chats"


def test_chats_with_one_beginning_stay_on_one_side(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [{"prompt": f"Question {i}.", "response": f"answer {j} for {i}"} for i in range(10) for j in range(3)]
    prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=7, regenerate=False), "sides")
    assert not questions(model, split("sides", "heldout")) & questions(model, split("sides", "train"))
    assert len(split("sides", "heldout")) == 9, "7 held out would cut a prompt's three chats in two"


def test_everything_is_counted(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chats: list[Any] = [chat(i) for i in range(20)] + [chat(3), chat(4)]  # two duplicates
    chats += [{"messages": [{"role": "user", "content": "Question 77. only"}]}]  # no answer: nothing to supervise (and no row)
    chats += [{"messages": [{"role": "user", "content": "Question 78."}, {"role": "assistant", "content": ""}]}]  # its end of turn alone: no prediction to learn
    chats += [5, {"messages": [{"role": "user", "content": {"a": 1}}]}, {"input_ids": [1, 2, 10**6], "loss_mask": [0, 1, 1]}]
    chats += [{"input_ids": list(range(1, 40)), "loss_mask": [0] * 10 + [1] * 29}]
    report = prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=0, regenerate=False), "counted")
    counts = report["counts"]
    assert counts["duplicate_chats"] == 2 and counts["rejected"] == 3 and counts["rows_nothing_to_supervise"] == 1 and counts["chats_without_answer"] == 1
    assert counts["chats"] == 24 == counts["train_chats"] and report["splits"]["train"]["rows"] == 21
    rejected = [json.loads(line) for line in (run_folder("counted") / "rejected.jsonl").read_text().splitlines()]
    assert [item["source"] for item in rejected] == ["chats.jsonl:25", "chats.jsonl:26", "chats.jsonl:27"]
    assert "vocabulary" in rejected[2]["reason"] and "{'a': 1}" not in rejected[1]["reason"]
    assert any(sample.input_ids.tolist() == list(range(1, 40)) for sample in split("counted", "train")), "ready ids pass as they are"
    assert "rejected chats.jsonl:25" in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["cut", "drop"])
def test_too_long(policy: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_report = prepare(monkeypatch, write_config(tmp_path, model, [chat(i, turns=4) for i in range(6)], heldout=0, regenerate=False), f"whole-{policy}")
    whole = split(f"whole-{policy}", "train")
    limit = max(len(sample.input_ids) for sample in whole) - 1  # the last answer does not fit any more
    chats = [chat(i, turns=4) for i in range(6)] + [chat(100, words=200), chat(101)]
    report = prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=0, regenerate=False, max_tokens=limit, too_long=policy), f"long-{policy}")
    found = split(f"long-{policy}", "train")
    assert whole_report["counts"].get("rows_cut", 0) == 0 and all(len(sample.input_ids) <= limit for sample in found)
    longer = [sample for sample in whole if len(sample.input_ids) > limit]
    if policy == "drop":
        assert len(found) == len(whole) - len(longer) + 1 and report["counts"]["rows_too_long"] == len(longer) + 1
        return
    assert report["counts"]["rows_cut"] == len(longer) and report["counts"]["rows_too_long"] == 1 and len(found) == 7
    end = ChatTokenizer(str(model)).encode("<|im_end|>")[0]
    for sample in longer:
        ends = [i for i in range(limit) if sample.loss_mask[i] and sample.input_ids[i] == end]  # where an answer ends, by hand
        short = [item for item in found if item.input_ids.tolist() == sample.input_ids[: ends[-1] + 1].tolist()]
        assert len(short) == 1 and short[0].loss_mask.tolist() == sample.loss_mask[: ends[-1] + 1].tolist()


def test_several_files_of_several_kinds(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "array.json").write_text(json.dumps([chat(1), {"conversations": [{"from": "human", "value": "Question 2."}, {"from": "gpt", "value": "yes"}]}]))
    (tmp_path / "lines.jsonl").write_text(json.dumps(chat(1)) + "\n" + json.dumps({"prompt": "Question 3.", "response": "no"}) + "\n{\n")
    inputs = [str(tmp_path / "array.json"), str(tmp_path / "lines.jsonl")]
    report = prepare(monkeypatch, write_config(tmp_path, model, [], heldout=0, regenerate=False, inputs=inputs), "files")
    assert questions(model, split("files", "train")) == {"1", "2", "3"} and report["counts"]["duplicate_chats"] == 1
    assert json.loads((run_folder("files") / "rejected.jsonl").read_text())["source"] == "lines.jsonl:3"


def test_last_turn_border() -> None:
    mask = np.array([0, 0, 1, 1, 0, 0, 1, 1, 1], np.uint8)
    assert [last_turn_border(mask, limit) for limit in range(1, 11)] == [0, 0, 0, 4, 4, 4, 4, 4, 9, 9]


def test_the_map_counts_the_supervised_tokens_of_training(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = prepare(monkeypatch, write_config(tmp_path, model, [chat(i) for i in range(40)], heldout=5, regenerate=False), "map", "--set", "draft.vocab_size=24")
    tokenizer = ChatTokenizer(str(model))
    counts = Counter(int(token) for sample in split("map", "train") for token, on in zip(sample.input_ids, sample.loss_mask, strict=True) if on)
    found = load_vocab_map(run_folder("map") / "vocab_map.safetensors", tokenizer.hash, tokenizer.vocab_size, 24)
    chosen = set(np.flatnonzero(found.t2d).tolist())
    assert set(tokenizer.forced_ids) <= chosen
    wanted = [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if token not in tokenizer.forced_ids]
    assert set(wanted[: 24 - len(tokenizer.forced_ids)]) <= chosen
    assert report["coverage"]["24"] == pytest.approx(sum(counts[token] for token in chosen) / sum(counts.values()))
    assert found.metadata["data_hash"] == report["data_hash"]


def test_few_supervised_tokens_are_warned_about(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [{"prompt": f"Question {i}. " + "blah " * 200, "response": "yes"} for i in range(5)]
    prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=0, regenerate=False), "few")
    assert "of the tokens are supervised (under 5%)" in capsys.readouterr().err


def test_what_the_user_can_mend_is_one_sentence(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        ({"inputs": []}, [], "data.inputs names no file"),
        ({"inputs": ["/nowhere/x.jsonl"]}, [], "/nowhere/x.jsonl does not exist"),
        ({"heldout": 3}, [chat(1), chat(2)], "data.heldout = 3 of 2 chats"),
        ({"heldout": 0}, [1, 2], "no usable chat"),
        ({"heldout": 0}, [{"prompt": "a"}, {"prompt": "b"}], "no row to train on"),
    ]
    for data, chats, reason in cases:
        with pytest.raises(UserError, match=reason):
            prepare(monkeypatch, write_config(tmp_path, model, chats, **{"regenerate": False, **data}), "mend")
    with pytest.raises(UserError, match="no room for the"):
        prepare(monkeypatch, write_config(tmp_path, model, [chat(1)], heldout=0, regenerate=False), "mend", "--set", "draft.vocab_size=2")
    assert not [path for path in run_folder("mend").iterdir() if path.name.endswith((".tmp", ".safetensors"))], "nothing half-written is left"


def test_the_streaming_writer_writes_the_same_file(tmp_path: Path) -> None:
    rng, samples = np.random.default_rng(1), []
    for length in (5, 1, 300):
        ids, mask = rng.integers(0, 50000, length).astype(np.int32), rng.integers(0, 2, length).astype(np.uint8)
        samples.append(Sample(sample_id(ids, mask), ids, mask))
    for name, kept in (("some", samples), ("none", [])):
        writer = SampleWriter(tmp_path / f"{name}.stream", {"a": "ü"})
        for sample in kept:
            writer.add(sample)
        writer.close()
        write_samples(tmp_path / f"{name}.whole", kept, {"a": "ü"})
        streamed, whole = SampleFile(tmp_path / f"{name}.stream"), SampleFile(tmp_path / f"{name}.whole")
        assert streamed.metadata == whole.metadata and len(streamed) == len(whole) == len(kept)
        for one, other in zip(streamed, whole, strict=True):
            assert one.id == other.id and np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.loss_mask, other.loss_mask)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["none.stream", "none.whole", "some.stream", "some.whole"]


@pytest.mark.parametrize("shuffled", [False, True])
def test_an_interrupted_run_goes_on(shuffled: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes as a run in one go; the chats in another order cannot go on, they start anew and still give the same rows."""
    import aerie.row_writer
    from aerie.prepare import Preparation

    chats: list[Any] = [chat(i, turns=1 + i % 3) for i in range(40)] + [chat(3), {"messages": 1}]
    chats.insert(5, {"input_ids": [1, 10**6], "loss_mask": [0, 1]})
    data = {"heldout": 8, "regenerate": False}
    prepare(monkeypatch, write_config(tmp_path, model, chats, **data), f"one-go-{shuffled}")
    rendered: list[str] = []
    rows = Preparation.rows

    def interrupted(self: Preparation, item: Any, heldout: bool, log: Any) -> Any:
        rendered.append(item.source)
        if len(rendered) == 26:
            raise KeyboardInterrupt
        return rows(self, item, heldout, log)

    run = f"halves-{shuffled}"
    monkeypatch.setattr(aerie.row_writer, "CHECKPOINT_S", 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Preparation, "rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(monkeypatch, write_config(tmp_path, model, chats, **data), run)
        if shuffled:
            chats.reverse()
        rendered += [""] * 2  # past 26
        before = len(rendered)
        report = prepare(monkeypatch, write_config(tmp_path, model, chats, **data), run)
    whole = json.loads((run_folder(f"one-go-{shuffled}") / "report.json").read_text())
    assert len(rendered) - before == (41 if shuffled else 41 - 25)
    for key in ("counts", "splits", "data_hash", "coverage", "rejected_reasons"):
        assert report[key] == whole[key]
    files = ["train.safetensors", "heldout.safetensors", "vocab_map.safetensors", "rejected.jsonl"]
    if not shuffled:
        for name in files:
            if name != "vocab_map.safetensors":  # its metadata has no fixed order; the hash of the data and the coverage are compared above
                assert (run_folder(run) / name).read_bytes() == (run_folder(f"one-go-{shuffled}") / name).read_bytes(), name
    assert {sample.id for sample in split(run, "train")} == {sample.id for sample in split(f"one-go-{shuffled}", "train")}
    assert sorted(path.name for path in run_folder(run).iterdir()) == sorted([*files, "report.json"])


def test_the_demo_prompts() -> None:
    rows = [json.loads(line) for line in (CONFIGS / "demo_prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    prompts = [row["messages"][0]["content"] for row in rows]
    assert len(rows) >= 440 and len(set(prompts)) == len(prompts) and all(len(row["messages"]) == 1 for row in rows)
    assert min(Counter(row["category"] for row in rows).values()) >= 70 and len({row["category"] for row in rows}) == 6
