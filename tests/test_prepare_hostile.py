"""02a against what a tester with bad intentions gives it: rows, files, folders and servers that are broken in ways that once ended in a traceback or in wrong counts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aerie.chats import BadRow, keeps_recorded, parse_row, read_rows
from aerie.config import load_config
from aerie.errors import UserError, run_main
from aerie.extract_plan import make_plan
from aerie.row_writer import Rejected, one_writer
from aerie.samples import save_atomic
from data_fake_server import FakeServer, finished
from data_tools import make_fast
from safetensors.numpy import load_file
from test_answers import SCRIPT, prepare, write_config
from test_prepare_data import chat, run_folder, split


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_fast(tmp_path_factory.mktemp("hostile") / "chatml", "chatml")


def with_call(arguments: str) -> dict[str, Any]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}


def test_rows_that_cannot_be_handled_are_rejected_and_the_rest_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = {depth: '{"a":' * depth + "1" + "}" * depth for depth in (500, 5000)}
    rows = [chat(1), *(with_call(text) for text in (*deep.values(), '{"a":' + "9" * 5000 + "}", '{"a": "\\udc00"}'))]
    rows += [{**chat(2), "tools": [{"name": "f", "description": "\ud800"}]}, {**chat(3), "tools": f'[{{"name": "f", "parameters": {deep[500]}}}]'}, chat(4)]
    config = write_config(tmp_path, model, rows, heldout=0, regenerate=False)
    with open(tmp_path / "chats.jsonl", "a") as file:
        file.write('{"prompt": "x", "n": ' + "9" * 5000 + "}\n" + "[" * 100000 + "]" * 100000 + "\n" + json.dumps(chat(5)) + "\n")
    report = prepare(monkeypatch, config, "hostile-rows")
    assert report["counts"]["rejected"] == 8 and report["counts"]["chats"] == 3 == report["splits"]["train"]["rows"]


@pytest.mark.parametrize("item", ["[" * 100000 + "]" * 100000, "9" * 5000])
def test_an_array_that_cannot_be_read_on(item: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f"[{json.dumps(chat(1))}, {item}, {json.dumps(chat(2))}]")
    found = [row for _, _, row in read_rows(tmp_path / "a.json")]
    assert len(found) == 2 and isinstance(found[1], BadRow) and "from here on" in str(found[1])


@pytest.mark.parametrize("name", ["/etc/passwd/x", "/" + "a" * 5000, "a\0b"])
def test_files_that_cannot_be_opened_are_one_sentence(name: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        list(read_rows(Path(name)))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_named_and_not_half_read(encoding: str, tmp_path: Path) -> None:
    """JSON's reader guesses such lines one by one, and gets some."""
    path = tmp_path / "chats.jsonl"
    path.write_bytes("".join(json.dumps(chat(i)) + "\n" for i in range(5)).encode(encoding))
    with pytest.raises(UserError, match="convert it to UTF-8"):
        list(read_rows(path))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    """As `<(zcat chats.gz)` gives one."""
    os.mkfifo(tmp_path / "chats.jsonl")
    with pytest.raises(UserError, match="write them to a file first"):
        list(read_rows(tmp_path / "chats.jsonl"))


def test_a_greeting_is_no_answer() -> None:
    """A first assistant message does not put all such chats on one side of the split, and is kept when answers are written anew."""
    greeted = [parse_row({"messages": [{"role": "assistant", "content": hello}, *chat(i)["messages"]]}) for i, hello in ((1, "Hi"), (2, "Hi"), (1, "Hello"))]
    assert len({item.prompt_key() for item in greeted}) == 3 == len({item.content_key(answers=False) for item in greeted})
    assert [keeps_recorded(greeted[0].messages, i) for i in range(3)] == [True, True, False]


def test_chats_that_begin_the_same_cannot_all_be_held_out(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = [{"prompt": "Question 1.", "response": f"answer {i}"} for i in range(3)]
    with pytest.raises(UserError, match="because they begin the same"):
        prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=1, regenerate=False), "hostile-ties")


@pytest.mark.parametrize("name, text, reason", [
    ("generation_config.json", "{", "is not valid JSON"), ("generation_config.json", "[]", "holds no JSON object"), ("generation_config.json", '{"eos_token_id": "x"}', "is no token id"),
    ("config.json", "[" * 100000, "is not valid JSON"), ("config.json", '{"model_type": "llama", "vocab_size": "abc"}', "config.json has no vocab_size|cannot be loaded"), ("tokenizer.json", "{}", "cannot be loaded"),
])  # fmt: skip
def test_broken_model_folders(name: str, text: str, reason: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "model"
    shutil.copytree(model, broken)
    (broken / name).write_text(text)
    with pytest.raises(UserError, match=reason):
        prepare(monkeypatch, write_config(tmp_path, broken, [chat(1)], heldout=0, regenerate=False), "hostile-model")


def test_a_config_smaller_than_its_tokenizer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = tmp_path / "model"
    shutil.copytree(model, small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(UserError, match="no row to train on"):
        prepare(monkeypatch, write_config(tmp_path, small, [chat(1)], heldout=0, regenerate=False), "hostile-small", "--set", "draft.vocab_size=100")
    assert "the target's vocabulary has 300" in (run_folder("hostile-small") / "rejected.jsonl").read_text()


@pytest.mark.parametrize("reply", [{}, [1], {"output_ids": None, "meta_info": {"finish_reason": {"type": "stop"}}}, finished([-5, 7]), finished([10**12, 7]), finished([10**6, 10**6])])
def test_replies_that_make_no_sense_are_rejected(reply: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of three gets such a reply; nothing of it stays to break the next run."""
    with FakeServer(lambda prompt, _: reply if len(prompt) % 2 else finished([5, 6, 7])) as server:
        odd = [{"prompt": "q" * i} for i in range(1, 9)]
        report = prepare(monkeypatch, write_config(tmp_path, model, odd, heldout=0, url=server.url), f"hostile-reply-{abs(hash(str(reply)))}")
    assert report["counts"]["rejected"] >= 1 and report["splits"]["train"]["rows"] + report["counts"]["rejected"] == 8


@pytest.mark.parametrize("choice", [None, {"finish_reason": "stop"}, {"finish_reason": "stop", "message": {"content": "yes"}, "token_ids": ["a"]}])
def test_chat_replies_that_make_no_sense(choice: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(chat=lambda _: {"choices": [choice] if choice else []}) as server, pytest.raises(UserError, match="no row to train on"):
        prepare(monkeypatch, write_config(tmp_path, model, [{"prompt": "q"}], heldout=0, url=f"{server.url}/v1"), "hostile-chat")
    assert "not what was asked for" in (run_folder("hostile-chat") / "rejected.jsonl").read_text()


def test_a_second_instance_is_refused_and_harms_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with recorded answers, where there is no log of answers to lock."""
    config = write_config(tmp_path, model, [chat(1), 5], heldout=0, regenerate=False)
    prepare(monkeypatch, config, "hostile-two")
    before = {path.name: path.read_bytes() for path in run_folder("hostile-two").iterdir()}
    with one_writer(run_folder("hostile-two")):
        second = subprocess.run([sys.executable, str(SCRIPT), "--config", str(config), "--run", "hostile-two"], capture_output=True, text=True, check=False)
    assert second.returncode == 2 and "is being written by another process" in second.stderr and len(second.stderr.strip().splitlines()) == 1
    assert before == {path.name: path.read_bytes() for path in run_folder("hostile-two").iterdir()}


def test_what_a_killed_run_left_is_removed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder("hostile-left")
    folder.mkdir(parents=True)
    for name in (".train.safetensors.99.tmp", ".vocab_map.safetensors.99.tmp", "..rows.json.99.tmp", ".rejected.jsonl.99.tmp"):
        (folder / name).write_text("half")
    prepare(monkeypatch, write_config(tmp_path, model, [chat(1)], heldout=0, regenerate=False), "hostile-left")
    assert not [path for path in folder.iterdir() if path.name.startswith(".")] and len(split("hostile-left", "train")) == 1


def killed(at: str, prepare_again: Any) -> int:
    """02a in a process of its own that is gone at this point, as under kill -9; its exit code."""
    import aerie.prepare
    import aerie.report
    import aerie.samples
    from aerie.samples import SampleWriter

    def gone(*args: Any, **kwargs: Any) -> None:
        os._exit(9)

    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        close, closed = SampleWriter.close, []
        if at == "in the vocabulary map":
            aerie.prepare.write_vocab_map = gone
        elif at == "while a file is put together":
            aerie.samples.shutil.copyfileobj = gone
        elif at == "between the two files":
            SampleWriter.close = lambda self: gone() if closed else closed.append(close(self))
        else:
            aerie.report.write_json = gone
        prepare_again()
    finally:
        os._exit(1)


@pytest.mark.parametrize("at", ["in the vocabulary map", "while a file is put together", "between the two files", "before the report"])
def test_killed_at_the_end(at: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over an earlier run with other chats: the old pair or the new one is read, never one file of each; the next run is as one that was never killed."""
    run = f"hostile-end-{len(at)}"
    prepare(monkeypatch, write_config(tmp_path / "old", model, [chat(i) for i in range(100, 112)], heldout=3, regenerate=False), run)
    old = make_plan(run_folder(run)).data_hash
    config = write_config(tmp_path / "new", model, [chat(i) for i in range(12)], heldout=4, regenerate=False)
    prepare(monkeypatch, config, f"{run}-whole")
    new = make_plan(run_folder(f"{run}-whole")).data_hash
    assert killed(at, lambda: prepare(monkeypatch, config, run)) == 9
    if at == "between the two files":
        with pytest.raises(UserError, match="two runs of the data step"):
            make_plan(run_folder(run))
    else:
        assert make_plan(run_folder(run)).data_hash == (new if at == "before the report" else old)
    prepare(monkeypatch, config, run)
    for name in ("train.safetensors", "heldout.safetensors"):
        assert (run_folder(run) / name).read_bytes() == (run_folder(f"{run}-whole") / name).read_bytes(), name
    maps = [load_file(run_folder(name) / "vocab_map.safetensors") for name in (run, f"{run}-whole")]  # its header's keys have no order
    assert all(np.array_equal(maps[0][name], maps[1][name]) for name in ("d2t", "t2d"))
    assert not [path.name for path in run_folder(run).iterdir() if path.name.startswith(".")]


def test_a_lost_heldout_file_is_missed(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(monkeypatch, write_config(tmp_path, model, [chat(i) for i in range(6)], heldout=2, regenerate=False), "hostile-lost")
    (run_folder("hostile-lost") / "heldout.safetensors").unlink()
    with pytest.raises(UserError, match="beside 2 held-out rows"):
        make_plan(run_folder("hostile-lost"))


@pytest.mark.parametrize("kind", ["killed while selecting", "rejected.jsonl lost"])
def test_killed_again_before_the_next_checkpoint(kind: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rejected rows that the checkpoint counts are still there, or rendering starts anew: the counts are those of one run."""
    import aerie.row_writer
    from aerie.prepare import Preparation

    chats: list[Any] = [{"input_ids": [1, 10**6], "loss_mask": [0, 1]}, {"messages": 1}, *(chat(i) for i in range(20))]
    config = write_config(tmp_path, model, chats, heldout=4, regenerate=False)
    run, seen, rows = f"hostile-again-{kind.split()[0].replace('.', '-')}", [], Preparation.rows
    whole = prepare(monkeypatch, config, f"{run}-whole")
    monkeypatch.setattr(aerie.row_writer, "CHECKPOINT_S", 0.0)

    def interrupted(self: Preparation, item: Any, heldout: bool, log: Any) -> Any:
        seen.append(item)
        if len(seen) == 12:
            raise KeyboardInterrupt
        return rows(self, item, heldout, log)

    with monkeypatch.context() as patch:
        patch.setattr(Preparation, "rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare(monkeypatch, config, run)
    if kind == "killed while selecting":
        Rejected(run_folder(run) / "rejected.jsonl").add("chats.jsonl:2", {}, "and then kill -9")  # never closed
    else:
        (run_folder(run) / "rejected.jsonl").write_bytes(b"")
    report = prepare(monkeypatch, config, run)
    for key in ("counts", "splits", "data_hash", "rejected_reasons"):
        assert report[key] == whole[key], key
    assert (run_folder(run) / "rejected.jsonl").read_bytes() == (run_folder(f"{run}-whole") / "rejected.jsonl").read_bytes()


def test_a_full_disk_under_safetensors_is_said_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors import SafetensorError

    def full(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("aerie.samples.save_file", full)
    with pytest.raises(OSError) as caught:
        save_atomic(tmp_path / "map", {}, {})
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_a_path_that_cannot_be_used_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit) as caught:
        run_main(lambda: (tmp_path / "file" / "data").mkdir(parents=True))
    assert caught.value.code == 2 and "cannot be used (Not a directory)" in capsys.readouterr().err


def test_configs_that_no_parser_reads(tmp_path: Path) -> None:
    path, good = tmp_path / "a.toml", '[target]\nmodel_path = "x"\naux_layer_ids = [1]\n'
    for text in ("a = " + "[" * 3000, "a = " + "9" * 5000):
        path.write_text(text)
        with pytest.raises(UserError, match="not valid TOML"):
            load_config(str(path))
    path.write_text(good, encoding="utf-8-sig")  # as Windows writes it
    assert load_config(str(path)).target.aux_layer_ids == [1]
    for text in ("data.limit=" + "9" * 5000, "data.inputs=" + "[" * 3000):
        with pytest.raises(UserError, match="must be"):
            load_config(str(path), overrides=[text])
    for name in ("~nobody-by-this-name/a.toml",):
        with pytest.raises(UserError, match="names the home of a user"):
            load_config(name)


def test_a_full_disk_leaves_nothing_and_the_next_run_succeeds(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount_tmpfs: Any) -> None:
    """No checkpoint was made, so the parts would help nobody."""
    config = write_config(tmp_path, model, [chat(i) for i in range(300)], heldout=2, regenerate=False)
    folder = mount_tmpfs(tmp_path / "small", "60k")
    with monkeypatch.context() as patch:
        patch.setenv("AERIE_RUNS_DIR", str(folder))
        with pytest.raises(OSError) as caught:
            prepare(monkeypatch, config, "hostile-full")
    assert caught.value.errno == errno.ENOSPC
    assert not [path.name for path in folder.rglob("*") if path.name.endswith(".part") or "safetensors" in path.name]
    subprocess.run(["mount", "-o", "remount,size=4m", str(folder)], check=True)
    monkeypatch.setenv("AERIE_RUNS_DIR", str(folder))
    assert prepare(monkeypatch, config, "hostile-full")["counts"]["train_chats"] == 298


@pytest.mark.parametrize("number, words", [(errno.EFBIG, "ulimit -f"), (errno.EIO, "reports an error"), (errno.ENOSPC, "no space left")])
def test_errors_while_writing_are_one_sentence(number: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise OSError(number, os.strerror(number), b"/a/file")

    with pytest.raises(SystemExit) as caught:
        run_main(fails)
    said = capsys.readouterr().err
    assert caught.value.code == 2 and words in said and " /a/file" in said and len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(("name", "text", "kept"), [
    ("chats.jsonl", "{'prompt': \"Käse\"}  \n", "{'prompt': \"Käse\"}"), ("chats.json", "[{\"prompt\": \"a\", \"response\": \"b\"}, {\"x\" 1}]", "{\"x\" 1}]"),
])  # fmt: skip
def test_the_text_of_a_row_that_is_no_json_is_kept(name: str, text: str, kept: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    rejected = Rejected(tmp_path / "rejected.jsonl")
    for number, row, chat in read_rows(path):
        if isinstance(chat, BadRow):
            rejected.add(f"{name}:{number}", row, str(chat))
    rejected.close()
    assert [json.loads(line)["row"] for line in (tmp_path / "rejected.jsonl").read_text().splitlines()] == [kept]


def test_chats_without_answers_that_nobody_is_to_write(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, model, [{"prompt": f"Question {i}"} for i in range(5)], heldout=1, regenerate=True)
    with pytest.raises(UserError, match="came out of 4 chats: 5 of all chats have no answer, .* leave --no-regenerate out"):
        prepare(monkeypatch, config, "no-answers", "--no-regenerate")


def test_no_held_out_row_is_warned_about(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    chats: list[Any] = [chat(i) for i in range(5)]
    for heldout in (1, 0):
        prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=heldout, regenerate=False), f"heldout-{heldout}")
        assert ("data.heldout = 0; set data.heldout higher" in capsys.readouterr().err) == (heldout == 0)
    first = min(range(40), key=lambda i: parse_row({"prompt": f"Question {i}"}).prompt_key())  # the chat that is held out
    chats = [{"prompt": f"Question {i}"} | ({} if i == first else {"response": "yes"}) for i in range(40)]
    report = prepare(monkeypatch, write_config(tmp_path, model, chats, heldout=1, regenerate=False), "heldout-none")
    assert report["splits"]["heldout"]["rows"] == 0 and "no accept length can be predicted: none of the 1 held-out chats gave one" in capsys.readouterr().err
