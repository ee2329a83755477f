"""The capture hook on a fake text model: which rows, which layers, which files; and that nothing of it reaches the model or the server."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
import torch
from aerie import dumps, prove
from aerie.errors import UserError
from aerie.paths import ROOT
from aerie.rid import RID_PATTERN, new_rid
from capture_fakes import LAYERS, Mode, Model, Rig, TextModel, expected_state, load_hook

hook = load_hook()


def name(tokens: int, run: str = "t") -> str:
    """A rid for a prompt of `tokens` tokens."""
    return str(new_rid(run, "0123456789abcdef", tokens))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """rig(**settings) -> Rig; its writers are ended after the test."""
    made: list[Rig] = []

    def make(**kwargs: Any) -> Rig:
        made.append(Rig(tmp_path / "dumps", **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def check(rig: Rig, rid: str, ids: list[int]) -> dumps.Dump:
    """The dump of `rid` is there, whole, and holds the states that the fake must have had at each point."""
    dump = dumps.read_dump(dumps.wait_dump(rig.folder, rid, 10))
    dumps.check_dump(dump, rid, ids)
    positions = torch.arange(len(ids))
    for point, state in zip(rig.switch.points, dump.aux):
        torch.testing.assert_close(state, expected_state(torch.tensor(ids), positions, point), rtol=1e-6, atol=0)
    torch.testing.assert_close(dump.final, expected_state(torch.tensor(ids), positions, LAYERS) * 2, rtol=1e-6, atol=0)
    return dump


def error_of(rig: Rig, rid: str, timeout: float = 10.0) -> str:
    """The server's reason for dropping `rid`; there must be no dump."""
    with pytest.raises(dumps.DumpError) as caught:
        dumps.wait_dump(rig.folder, rid, timeout)
    return str(caught.value)


# ---- which layers ----


@pytest.mark.parametrize(("style", "shift"), [("list", 1), ("list", 0), ("flags", 1), ("packed", 0)])
def test_captures_the_layers_that_the_model_itself_chose(rig: Callable[..., Rig], style: str, shift: int) -> None:
    one = rig(style=style, shift=shift, layer_ids=(1, 2, 4))
    assert one.switch.points == [1 + shift, 2 + shift, 4 + shift]
    rid, ids = name(5), [3, 1, 4, 1, 5]
    one.run((rid, ids, 0))
    check(one, rid, ids)


@pytest.mark.parametrize("style", ["list", "flags", "packed"])
def test_everything_that_the_setter_changed_is_put_back(style: str) -> None:
    model = Model(style)
    before = [dict(module.__dict__) for module in model.modules()]
    switch = hook.find_layers(model, (0, 2, 4))
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert model.capture_aux_hidden_states is False and model.model.layers_to_capture == []
    switch.set(True)
    assert model.capture_aux_hidden_states is False and model.model.layers_to_capture == [1, 3, 5]
    switch.set(False)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_alias_of_the_text_model_and_a_wrapper_that_owns_the_name_too() -> None:
    class Kimi(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language_model = Model()
            self.model = self.language_model  # an alias, as in Kimi-K2.5

        def set_eagle3_layers_to_capture(self, layer_ids: list[int] | None = None) -> None:
            self.language_model.set_eagle3_layers_to_capture(layer_ids)
            self.layers_to_capture = list(layer_ids)

    model = Kimi()
    switch = hook.find_layers(model, (0, 2, 4))
    assert switch.text is model.language_model.model and switch.points == [1, 3, 5]
    assert "layers_to_capture" not in model.__dict__


def test_a_class_without_the_setter_is_refused() -> None:
    with pytest.raises(hook.HiddenStateDumpError, match=r"TextModel has no set_eagle3_layers_to_capture"):
        hook.find_layers(TextModel(), (0, 2, 4))


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(hook.HiddenStateDumpError, match="do these layer ids exist"):
        hook.find_layers(Model("flags"), (0, 2, 40))


# ---- which rows ----


def test_concurrent_requests_of_equal_length_and_a_shared_prefix(rig: Callable[..., Rig]) -> None:
    one = rig()
    requests = [(name(4), [7, 7, 7, index], 0) for index in range(5)]
    one.run(*requests)
    for rid, ids, _ in requests:
        check(one, rid, ids)


def test_three_chunks_mixed_with_other_requests_and_padding(rig: Callable[..., Rig]) -> None:
    one = rig()
    long, short, other = (name(10), list(range(10))), (name(2), [8, 9]), "0a1b2c3d"
    one.run((other, [1, 2, 3], 0), (long[0], long[1][:4], 0), padding=3)
    one.run((long[0], long[1][4:8], 4), (short[0], short[1], 0))
    one.run((other, [5], 3), (long[0], long[1][8:], 8), ("HEALTH_CHECK_77", [0], 0))
    check(one, *long)
    check(one, *short)
    assert sorted(path.name for path in one.folder.iterdir()) == sorted(f"{rid}.safetensors" for rid, _ in (long, short))


def test_decode_rows_never_appear(rig: Callable[..., Rig]) -> None:
    one = rig()
    rid, ids = name(4), [5, 6, 7, 8]
    one.run((rid, ids[:2], 0))
    one.run((name(3), [1, 2, 3], 0), (rid, ids[2:], 2), mode=Mode.MIXED)
    for step in range(3):  # a mixed batch runs decode steps as rows behind the prompt
        one.run((name(3), [1, 2, 3], 0), (rid, [99], 4 + step), mode=Mode.MIXED)
    one.run((rid, [99], 7), mode=Mode.DECODE)
    check(one, rid, ids)


def test_a_retracted_request_that_was_not_finished_starts_over(rig: Callable[..., Rig]) -> None:
    one = rig()
    rid, ids = name(6), [9, 8, 7, 6, 5, 4]
    one.run((rid, ids[:4], 0))
    one.run((rid, ids[:3], 0))
    one.run((rid, [*ids[3:], 1, 2], 3))  # re-run with answered tokens behind the prompt
    check(one, rid, ids)
    time.sleep(0.1)
    assert [path.name for path in one.folder.iterdir()] == [f"{rid}.safetensors"]
    assert one.counters.values["errors"] == 0


def test_a_repeated_rid_is_dumped_again_and_whole(rig: Callable[..., Rig]) -> None:
    one = rig()
    rid = name(3)
    one.run((rid, [1, 2, 3], 0))
    check(one, rid, [1, 2, 3])
    dumps.remove_dump(one.folder, rid)
    one.run((rid, [1, 2, 4], 0))
    check(one, rid, [1, 2, 4])


def test_a_prefix_from_the_cache_is_an_error_never_a_short_dump(rig: Callable[..., Rig]) -> None:
    one = rig()
    rid, hole = name(6), name(6)
    one.run((rid, [3, 4, 5], 3))
    assert re.search("rows 0 to 2 never passed through the model", error_of(one, rid))
    one.run((hole, [1, 2], 0))
    one.run((hole, [5, 6], 4))
    assert "rows 2 to 3 never passed" in error_of(one, hole)
    assert not list(one.folder.glob("*.safetensors")) and not list(one.folder.glob(".*tmp"))


def test_an_aborted_request_is_freed_and_named(rig: Callable[..., Rig]) -> None:
    one = rig(stale_s=0.2)
    rid = name(6)
    one.run((rid, [1, 2, 3], 0))
    one.capture.housekeep(time.monotonic())
    assert rid in one.capture.pending
    one.capture.housekeep(time.monotonic() + 1)
    assert "was aborted" in error_of(one, rid)
    assert not one.capture.pending and not list(one.folder.glob(".*tmp"))


@pytest.mark.parametrize(
    "rid",
    ["aerie.t.0123456789abcdef.00000000", "aerie.t.0123456789abcdef.00000000.3.4", "aerie.t/../../x.0123456789abcdef.00000000.3", "../aerie.t.0123456789abcdef.00000000.3",
     "aerie.t.0123456789ABCDEF.00000000.3", "aerie.t.0123456789abcdef.00000000.3\n", f"aerie.{'r' * 49}.0123456789abcdef.00000000.3", "aerie..0123456789abcdef.00000000.3",
     "aerie.t.0123456789abcdef.00000000.12345678", "aerie.t.0123456789abcdef.00000000.-3", "aerie.t.0123456789abcdef.00000000.٣", "x" * 5000, "", "health", "aerie.t.0123456789abcdef.00000000.0"],
)  # fmt: skip
def test_a_rid_that_is_not_exactly_ours_is_never_touched(rig: Callable[..., Rig], rid: str) -> None:
    one = rig()
    one.run((rid, [1, 2, 3], 0))
    assert one.model.model.calls == [False]
    assert not one.capture.pending and not list(one.folder.iterdir())


def test_the_form_of_a_rid_is_the_clients() -> None:
    assert hook.RID.pattern.replace("(", "").replace(")", "") == RID_PATTERN.pattern.strip("^$")


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.IDLE, Mode.TARGET_VERIFY])
def test_other_forward_modes_run_untouched(rig: Callable[..., Rig], mode: Mode) -> None:
    one = rig()
    one.run((name(3), [1, 2, 3], 0), mode=mode)
    assert one.model.model.calls == [False] and not one.capture.pending


def test_a_rank_that_does_not_write_captures_all_the_same(rig: Callable[..., Rig]) -> None:
    one = rig()
    one.capture.writer = None
    one.run((name(3), [1, 2, 3], 0))
    assert one.model.model.calls == [True] and not list(one.folder.iterdir())


# ---- what goes wrong ----


def test_an_exception_in_our_code_leaves_the_answer_alone(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    rid = name(3)
    monkeypatch.setattr(one.capture, "copy", lambda *_: 1 / 0)
    one.run((rid, [1, 2, 3], 0))
    assert "ZeroDivisionError" in error_of(one, rid)
    monkeypatch.undo()
    monkeypatch.setattr(one.capture, "accept", lambda *_: 1 / 0)
    other = name(3)
    one.run((other, [1, 2, 3], 0))
    assert "ZeroDivisionError" in error_of(one, other)
    monkeypatch.undo()
    again = name(3)
    one.run((again, [1, 2, 3], 0))
    check(one, again, [1, 2, 3])


def test_a_batch_that_lacks_what_we_read_runs_untouched(rig: Callable[..., Rig]) -> None:
    one = rig()
    ids, positions = torch.tensor([1]), torch.tensor([0])
    answer = one.model(ids, positions, type("Batch", (), {"forward_mode": Mode.EXTEND, "input_ids": ids})())
    assert answer.shape == (1, 8) and one.model.model.calls == [False]


def test_capture_is_off_again_when_forward_raises(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    monkeypatch.setattr(one.capture, "original", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        one.run((name(3), [1, 2, 3], 0))
    assert one.model.model.layers_to_capture == []


def test_a_shard_of_the_tokens_is_an_error(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    original = one.capture.original
    monkeypatch.setattr(one.capture, "original", lambda *args: (original(*args)[0], [state[:1] for state in original(*args)[1]]))
    rid = name(3)
    one.run((rid, [1, 2, 3], 0))
    assert "a shard of them" in error_of(one, rid)


def test_a_full_budget_drops_the_dump_and_never_waits(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    gate = threading.Event()
    put = one.writer.files._put
    monkeypatch.setattr(one.writer.files, "_put", lambda *args: (gate.wait(30), put(*args)))
    sent = []
    for index in range(40):  # 4,000 rows are 0.5 MB of the 1 MB budget; the writers stand still
        rid = name(4000)
        sent.append(rid)
        one.run((rid, [index] * 4000, 0))
    gate.set()
    dropped = [rid for rid in sent if "no room" in (dumps.read_error(one.folder, rid) or wait_error(one, rid))]
    assert 30 < len(dropped) < 40 and one.counters.values["dropped"] == len(dropped)
    for rid in set(sent) - set(dropped):
        check(one, rid, [sent.index(rid)] * 4000)
    until(lambda: not one.writer.sent)  # a block is free a moment after its file is there
    rid = name(4000)
    one.run((rid, [1] * 4000, 0))
    check(one, rid, [1] * 4000)


def test_a_batch_that_can_never_fit_says_what_to_change(rig: Callable[..., Rig]) -> None:
    one = rig()
    rid = name(9000)  # 1.2 MB; the budget is 1 MB
    one.run((rid, [1] * 9000, 0))
    assert "raise SGLANG_HS_DUMP_BUDGET_MB or lower the server's --chunked-prefill-size" in error_of(one, rid)


def until(true: Callable[[], Any], timeout: float = 20.0) -> None:
    """Wait for something; a failure after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def wait_error(one: Rig, rid: str) -> str:
    """The reason in `.error`, or '' once the dump is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if dumps.dump_path(one.folder, rid).exists():
            return ""
        if (reason := dumps.read_error(one.folder, rid)) is not None:
            return reason
        time.sleep(0.01)
    raise AssertionError(f"neither a dump nor an error of {rid}")


@pytest.mark.parametrize("process", [False, True])
def test_a_folder_that_goes_away_and_comes_back(rig: Callable[..., Rig], process: bool) -> None:
    one = rig(process=process)
    shutil.rmtree(one.folder)
    one.run((name(3), [1, 2, 3], 0))
    until(lambda: one.counters.values["errors"] == 1)
    assert not one.folder.exists()
    one.folder.mkdir()
    rid = name(3)
    one.run((rid, [1, 2, 3], 0))
    check(one, rid, [1, 2, 3])


def test_a_full_disk_is_named_and_leaves_nothing_half_written(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig()
    rid, real = name(3), os.pwrite

    def full(file: int, data: Any, offset: int) -> int:
        if offset > 700:
            raise OSError(28, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr(hook.os, "pwrite", full)
    one.run((rid, [1, 2, 3], 0))
    assert "No space left on device" in error_of(one, rid)
    assert [path.name for path in one.folder.iterdir()] == [f"{rid}.error"]


@pytest.mark.parametrize("process", [False, True])
def test_a_folder_on_a_full_file_system_of_its_own(rig: Callable[..., Rig], tmp_path: Path, mount_tmpfs: Callable[[Path, str], Path], process: bool) -> None:
    """A real one: the dump that does not fit is dropped, with its reason where that fits; the server goes on, and once there is room so do dumps."""
    mount_tmpfs(tmp_path / "dumps", "768k")
    one = rig(budget_mb=4, process=process)
    assert one.folder.stat().st_dev != tmp_path.stat().st_dev
    first, second, third, fourth = (name(4000) for _ in range(4))  # 528 KB each
    one.run((first, [1] * 4000, 0))
    check(one, first, [1] * 4000)
    one.run((second, [2] * 4000, 0))
    assert "No space left on device" in error_of(one, second)
    ballast = one.folder / "ballast"
    with pytest.raises(OSError), open(ballast, "wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096:
            pass
        raise OSError  # the last write was a short one
    one.run((third, [3] * 4000, 0))  # not even the reason fits now
    until(lambda: one.counters.values["errors"] == 2)
    assert not dumps.dump_path(one.folder, third).exists() and not list(one.folder.glob(".*"))
    ballast.unlink()
    dumps.remove_dump(one.folder, first)
    one.run((fourth, [4] * 4000, 0))
    check(one, fourth, [4] * 4000)
    dumps.remove_dump(one.folder, fourth)
    subprocess.run(["mount", "-o", "remount,ro", str(one.folder)], check=True)
    one.run((name(2), [1, 2], 0))
    until(lambda: one.counters.values["errors"] == 3)
    subprocess.run(["mount", "-o", "remount,rw", str(one.folder)], check=True)
    one.run((first, [5] * 4000, 0))
    check(one, first, [5] * 4000)


def test_what_dead_servers_left_half_written_is_removed(tmp_path: Path) -> None:
    dead, alive, foreign = tmp_path / f".{name(3)}.1.4194305.tmp", tmp_path / f".{name(3)}.1.{os.getpid()}.tmp", tmp_path / "notes.tmp"
    for path in (dead, alive, foreign):
        path.write_text("x")
    hook.open_folder(str(tmp_path))
    assert not dead.exists() and alive.exists() and foreign.exists()


def test_files_are_for_the_owner_alone(rig: Callable[..., Rig]) -> None:
    one = rig()
    rid = name(3)
    one.run((rid, [1, 2, 3], 0))
    check(one, rid, [1, 2, 3])
    assert one.folder.stat().st_mode & 0o777 == 0o700
    assert dumps.dump_path(one.folder, rid).stat().st_mode & 0o777 == 0o600


# ---- settings and refusals ----


def server_args(**changed: Any) -> Any:
    """Server arguments that capture accepts, but for `changed`."""
    accepted = {
        "speculative_algorithm": None, "disable_radix_cache": True, "enable_two_batch_overlap": False, "enable_pdmux": False, "pp_size": 1, "attn_cp_size": 1,
        "enable_prefill_cp": False, "dcp_size": 1, "disaggregation_mode": "null", "dllm_algorithm": None, "enable_attn_tp_input_scattered": False,
    }  # fmt: skip
    return type("Args", (), accepted | changed)()


@pytest.mark.parametrize(
    ("changed", "graphs", "words"),
    [({"speculative_algorithm": "EAGLE3"}, False, "speculative decoding"), ({"disable_radix_cache": False}, False, "--disable-radix-cache"), ({}, True, "--disable-prefill-cuda-graph"),
     ({"enable_two_batch_overlap": True}, False, "two-batch overlap"), ({"pp_size": 2}, False, "pipeline parallel"), ({"attn_cp_size": 2}, False, "context parallel"),
     ({"enable_prefill_cp": True}, False, "context parallel"), ({"dcp_size": 2}, False, "context parallel"), ({"disaggregation_mode": "prefill"}, False, "PD disaggregation"),
     ({"dllm_algorithm": "LowConfidence"}, False, "diffusion"), ({"enable_pdmux": True}, False, "multiplexing"), ({"enable_attn_tp_input_scattered": True}, False, "shard of the tokens"),
     ({"enable_return_aux_hidden_states": True}, False, "SGLang's own capture"), ({"enable_layernorm_sp": True}, False, "shard of the tokens")],
)  # fmt: skip
def test_refused_at_start_with_a_sentence(tmp_path: Path, changed: dict[str, Any], graphs: bool, words: str) -> None:
    environ = {"SGLANG_HS_DUMP_DIR": str(tmp_path), "SGLANG_HS_DUMP_LAYER_IDS": "1,2,3"}
    hook.refuse(server_args(), False, environ)
    with pytest.raises(hook.HiddenStateDumpError, match=words):
        hook.refuse(server_args(**changed), graphs, environ)
    hook.refuse(server_args(**changed), graphs, {})  # capture off: nothing is refused


def test_an_argument_that_this_sglang_does_not_have_is_not_taken_on_trust(tmp_path: Path) -> None:
    args = type("Args", (), {"disable_radix_cache": True})()
    with pytest.raises(hook.HiddenStateDumpError, match="pp_size: this SGLang has no such server argument"):
        hook.refuse(args, False, {"SGLANG_HS_DUMP_DIR": str(tmp_path), "SGLANG_HS_DUMP_LAYER_IDS": "1"})


def test_the_folder_is_made_or_refused(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dumps"
    hook.refuse(server_args(), False, {"SGLANG_HS_DUMP_DIR": str(folder), "SGLANG_HS_DUMP_LAYER_IDS": "1"})
    assert folder.is_dir() and not list(folder.iterdir())
    (tmp_path / "file").write_text("x")
    for bad in (str(tmp_path / "file" / "dumps"), "/proc/no-such-folder"):
        with pytest.raises(hook.HiddenStateDumpError, match="name a folder that this user can write"):
            hook.refuse(server_args(), False, {"SGLANG_HS_DUMP_DIR": bad, "SGLANG_HS_DUMP_LAYER_IDS": "1"})


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"LAYER_IDS": "3,2"}, "rising order"), ({"LAYER_IDS": ""}, "not a number"), ({"LAYER_IDS": "a"}, "not a number"), ({"DTYPE": "int8"}, "model or fp8"), ({"BUDGET_MB": "-1"}, "0 or more"),
     ({"DIR": "relative/path"}, "absolute"), ({"WRITER": "2"}, "unknown setting SGLANG_HS_DUMP_WRITER"), ({"WRITERS": "0"}, "1 to 16"), ({"STALE_S": "soon"}, "not a number")],
)  # fmt: skip
def test_settings_that_make_no_sense(changed: dict[str, str], words: str) -> None:
    environ = {"SGLANG_HS_DUMP_DIR": "/tmp/x", "SGLANG_HS_DUMP_LAYER_IDS": "1,2"} | {f"SGLANG_HS_DUMP_{key}": value for key, value in changed.items()}
    with pytest.raises(hook.HiddenStateDumpError, match=words):
        hook.read_settings(environ)
    assert hook.read_settings({key: value for key, value in environ.items() if key != "SGLANG_HS_DUMP_DIR"}) is None


# ---- the process that writes ----


def test_a_process_of_its_own_writes_the_files(rig: Callable[..., Rig]) -> None:
    one = rig(process=True)
    rids = [name(length) for length in (2, 300, 7)]
    one.run(*((rid, list(range(length)), 0) for rid, length in zip(rids, (2, 300, 7))))
    for rid, length in zip(rids, (2, 300, 7)):
        check(one, rid, list(range(length)))
    for number in (signal.SIGTERM, signal.SIGINT):  # sent to the whole group when a server is told to end: it still writes what it has
        one.writer.process.send_signal(number)
    rid = name(5)
    one.run((rid, [1, 2, 3], 0))
    one.run((rid, [4, 5], 3))
    check(one, rid, [1, 2, 3, 4, 5])
    until(lambda: one.counters.values["dumps"] == 4 and one.counters.values["rows"] == 2 + 300 + 7 + 5)


def test_what_the_writing_process_had_begun_fails_by_name_when_it_is_killed(rig: Callable[..., Rig]) -> None:
    one = rig(process=True)
    rid, whole = name(6), name(3)
    one.run((rid, [1, 2, 3], 0), (whole, [7, 8, 9], 0))
    check(one, whole, [7, 8, 9])
    first = one.writer.process
    first.kill()
    assert "ended (exit code -9)" in wait_error(one, rid)
    until(lambda: one.writer.process is not first and one.writer.link is not None)
    one.run((rid, [4, 5, 6], 3))  # its later rows go nowhere
    again = name(6)
    one.run((again, [1, 2, 3, 4, 5, 6], 0))
    check(one, again, [1, 2, 3, 4, 5, 6])
    assert sorted(path.suffix for path in one.folder.iterdir()) == [".error", ".safetensors", ".safetensors"]  # nothing half-written


def test_the_process_ends_with_the_server_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    code = (
        f"import sys, time; sys.path[:0] = {[str(ROOT / 'tests'), str(ROOT / 'scripts')]!r}\n"
        "from pathlib import Path; from capture_fakes import Rig\n"
        f"one = Rig(Path({str(tmp_path)!r}), process=True)\n"
        f"one.run(({name(9)!r}, [1, 2, 3], 0))\n"
        "print(one.writer.process.pid, flush=True); time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        writer = int(server.stdout.readline())
        until(lambda: [path.suffix for path in tmp_path.iterdir()] == [".tmp"])
    finally:
        server.kill()
        server.wait()
    until(lambda: not Path(f"/proc/{writer}").exists() or "zombie" in Path(f"/proc/{writer}/status").read_text())
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_something_else_still_talks_for_is_missed_all_the_same(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the server forks off holds copies of its sockets: the end of the line is then not seen at the line."""
    kept, pair = [], hook.socket.socketpair

    def socketpair() -> Any:
        kept.append(pair())
        kept.append(kept[-1][1].dup())
        return kept[-2]

    monkeypatch.setattr(hook.socket, "socketpair", socketpair)
    one = rig(process=True)
    monkeypatch.undo()
    rid = name(6)
    one.run((rid, [1, 2, 3], 0))
    until(lambda: one.counters.values["write_s"] > 0)
    one.writer.process.kill()
    assert "ended (exit code -9)" in wait_error(one, rid)
    again = name(2)
    one.run((again, [1, 2], 0))
    check(one, again, [1, 2])
    kept[1].close()


def test_the_process_notices_the_end_of_a_server_that_forked(tmp_path: Path) -> None:
    code = (
        f"import os, sys, time; sys.path[:0] = {[str(ROOT / 'tests'), str(ROOT / 'scripts')]!r}\n"
        "from pathlib import Path; from capture_fakes import Rig\n"
        f"one = Rig(Path({str(tmp_path)!r}), process=True)\n"
        f"one.run(({name(9)!r}, [1, 2, 3], 0))\n"
        "child = os.fork()\n"
        "if child: print(one.writer.process.pid, child, flush=True)\n"
        "time.sleep(600)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        writer, child = map(int, server.stdout.readline().split())
        until(lambda: [path.suffix for path in tmp_path.iterdir()] == [".tmp"])
        server.kill()
        server.wait()
        until(lambda: not Path(f"/proc/{writer}").exists() or "zombie" in Path(f"/proc/{writer}/status").read_text())
        assert list(tmp_path.iterdir()) == []
    finally:
        server.kill()
        server.wait()
        if child:
            os.kill(child, signal.SIGKILL)


def pause(one: Rig) -> subprocess.Popen:
    """The writing process, standing still."""
    os.kill(one.writer.process.pid, signal.SIGSTOP)
    until(lambda: "(stopped)" in Path(f"/proc/{one.writer.process.pid}/status").read_text())
    return one.writer.process


def settled(one: Rig) -> bool:
    """Nothing is on its way, every block is back."""
    writer = one.writer
    return writer.link is not None and not (writer.waiting or writer.ready or writer.unsent or writer.sent or writer.failing or writer.begun or writer.ring._blocks)


def test_a_process_that_stands_still_for_long_costs_dumps_but_no_memory_and_no_waiting(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(process=True)
    monkeypatch.setattr(hook, "MAX_FAILING", 300)
    process, sent = pause(one), []
    for _ in range(100):
        batch = [(name(50), [3] * 50, 0) for _ in range(20)]
        one.run(*batch)
        sent += [rid for rid, _, _ in batch]
    writer = one.writer
    assert len(writer.waiting) + len(writer.ready) + len(writer.failing) < 1000 and len(writer.unsent) < 1 << 19
    assert not one.capture.pending and not [path for path in one.folder.iterdir() if path.suffix != ".tmp"]
    process.send_signal(signal.SIGCONT)
    until(lambda: settled(one))
    ends = {rid: "dump" if dumps.dump_path(one.folder, rid).exists() else "error" if dumps.read_error(one.folder, rid) else "none" for rid in sent}
    assert sum(end == "error" for end in ends.values()) >= 300 and one.counters.values["errors"] == sum(end != "dump" for end in ends.values())
    for rid in [rid for rid, end in ends.items() if end == "dump"] or pytest.fail("no dump at all"):
        check(one, rid, [3] * 50)
    assert writer.process is process
    again = name(4)
    one.run((again, [1, 2, 3, 4], 0))
    check(one, again, [1, 2, 3, 4])


def test_killed_while_it_stands_still_the_reasons_that_it_never_read_are_written(rig: Callable[..., Rig]) -> None:
    one = rig(process=True)
    process = pause(one)
    batches = [[(name(900), [5] * 900, 0) for _ in range(2)] for _ in range(8)]
    for batch in batches:
        one.run(*batch)
    process.kill()
    reasons = [wait_error(one, rid) for batch in batches for rid, _, _ in batch]
    assert {reason.split(" (")[0].split(" for ")[0] for reason in reasons} == {"the process that writes the dumps ended", "no room"}
    until(lambda: settled(one))
    assert one.counters.values["errors"] == len(reasons) and not Path(f"/proc/{process.pid}").exists()  # no zombie


def test_what_the_process_said_before_it_was_killed_counts(rig: Callable[..., Rig]) -> None:
    one = rig(process=True)
    writer, process, rid = one.writer, pause(one), name(3)
    one.run((rid, [1, 2, 3], 0))
    until(lambda: writer.sent and not writer.unsent)
    with writer.lock:  # nobody listens
        process.send_signal(signal.SIGCONT)
        until(lambda: hook.select.select([writer.link], [], [], 0)[0])
        process.kill()
        process.wait()
        check(one, rid, [1, 2, 3])
        dumps.remove_dump(one.folder, rid)  # the client was quick
    until(lambda: writer.process is not process and settled(one))
    assert one.counters.values["dumps"] == 1 and one.counters.values["errors"] == 0 and not list(one.folder.iterdir())


def test_killed_again_and_again_under_load(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request ends as a whole dump or an error with its reason, every block of the ring comes back, nothing half-written stays."""
    monkeypatch.setattr(hook, "RETRY_S", 0.05)
    one, generator, sent, kills = rig(process=True, writers=4), np.random.default_rng(3), {}, 0
    next_kill, killed = time.monotonic(), None
    while kills < 20:
        process = one.writer.process
        if not one.writer.heard and kills % 4:
            next_kill = time.monotonic() + generator.random() * 0.2  # most are killed at work, some while they start
        elif time.monotonic() > next_kill and process is not killed:
            if kills % 3 == 0:
                process.send_signal(signal.SIGSTOP)
            process.kill()
            kills, killed = kills + 1, process
        batch = [(name(length), [int(generator.integers(100))] * length) for length in generator.choice([1, 2, 50, 300], 4).tolist()]
        sent.update(batch)
        one.run(*((rid, ids[:100], 0) for rid, ids in batch))
        if later := [(rid, ids[100:], 100) for rid, ids in batch if len(ids) > 100]:
            one.run(*later)
        time.sleep(generator.random() * 0.02)
    until(lambda: settled(one), 60)
    whole = [rid for rid in sent if not wait_error(one, rid)]
    for rid in whole:
        check(one, rid, sent[rid])
    assert one.counters.values["errors"] == len(sent) - len(whole) and whole
    assert {path.suffix for path in one.folder.iterdir()} <= {".error", ".safetensors"} and not one.capture.pending


def test_a_process_that_cannot_be_started(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for python, words in (("/no/such/python", "No such file"), (None, "expected str"), (shutil.which("false"), r"it ended at once \(exit code 1\)")):
        monkeypatch.setattr(sys, "executable", python)
        with pytest.raises(hook.HiddenStateDumpError, match=f"the process that writes the dumps cannot be started.*{words}"):
            rig(process=True)
    monkeypatch.undo()
    one = rig(process=True)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    rid = name(6)
    one.run((rid, [1, 2, 3], 0))
    one.writer.process.kill()
    assert "ended (exit code -9)" in wait_error(one, rid)
    until(lambda: "cannot be started again: FileNotFoundError" in caplog.text)
    event = type("Event", (), {"query": lambda _: True, "elapsed_time": lambda *_: 1.0})()
    job = hook.Job(block=one.writer.ring.take(256), rows=1, event=event, started=event, held=(torch.ones(1),))
    one.writer.put(job)
    until(lambda: not job.held)  # the memory on the GPU is let go though nobody writes
    stored, dropped = name(3), [name(3900) for _ in range(4)]
    one.run((stored, [7, 8, 9], 0))
    for each in dropped:
        one.run((each, [1] * 3900, 0))
    assert "no room" in wait_error(one, dropped[-1])  # written by the server
    monkeypatch.undo()
    check(one, stored, [7, 8, 9])
    until(lambda: settled(one))


def test_a_process_whose_server_ended_does_not_write_on_for_long(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one, gate, began = rig(writers=1), threading.Event(), threading.Event()
    put = one.writer.files._put
    monkeypatch.setattr(hook, "DRAIN_S", 0.0)
    monkeypatch.setattr(one.writer.files, "_put", lambda *args: (began.set(), gate.wait(20), put(*args)))
    first, second = name(2), name(2)
    one.run((first, [1, 2], 0))
    one.run((second, [3, 4], 0))
    until(lambda: began.is_set() and not one.writer.unsent)
    one.writer.over = True
    one.writer.link.shutdown(hook.socket.SHUT_WR)
    until(lambda: one.writer.files.until < float("inf"))
    time.sleep(0.01)
    gate.set()
    one.writer.thread.join(20)
    check(one, first, [1, 2])
    assert [path.name for path in one.folder.iterdir()] == [f"{first}.safetensors"]


# ---- the ring ----


def test_ring_never_hands_out_the_same_bytes_twice() -> None:
    generator = np.random.default_rng(0)
    ring = hook.Ring(1000, False)
    held: list[list] = []
    for _ in range(5000):
        if held and generator.random() < 0.5:
            ring.give_back(held.pop(int(generator.integers(len(held)))))
        elif (block := ring.take(int(generator.integers(1, 400)))) is not None:
            assert 0 <= block[0] < block[1] <= 1000
            assert all(block[1] <= other[0] or other[1] <= block[0] for other in held)
            held.append(block)
    for block in held:
        ring.give_back(block)
    assert ring.take(1000) is not None and ring.take(1) is None


def test_metadata_can_be_read_without_the_reader(rig: Callable[..., Rig]) -> None:
    one = rig()
    rid = name(2)
    one.run((rid, [1, 2], 0))
    check(one, rid, [1, 2])
    raw = dumps.dump_path(one.folder, rid).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert header["__metadata__"]["rid"] == rid and header["__metadata__"]["rows"] == "2"
    assert len(raw) == 8 + int.from_bytes(raw[:8], "little") + max(item["data_offsets"][1] for key, item in header.items() if key != "__metadata__")


# ---- fp8 ----


def test_fp8_rows_are_the_project_s_one_definition_bit_for_bit() -> None:
    reference = load_reference()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = (torch.randn(64, 200, generator=generator) * torch.logspace(-6, 3, 64).unsqueeze(1)).to(dtype)
        rows[3] = 0
        rows[4, 7] = float("nan")
        rows[5, 9] = float("inf")
        for mine, theirs in zip(hook.quantize_rows_fp8(rows), reference.quantize_rows_fp8(rows)):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def load_reference() -> Any:
    """cuda/reference.py of this checkout."""
    sys.path.insert(0, str(ROOT / "cuda"))
    try:
        return importlib.import_module("reference")
    finally:
        sys.path.pop(0)


def test_fp8_dump_within_half_a_step_of_the_states(rig: Callable[..., Rig]) -> None:
    one = rig(dtype="fp8", budget_mb=4)
    ids = list(range(1, 3001))  # more rows than are quantised in one go
    rid = name(len(ids))
    one.run((rid, ids[:2500], 0))
    one.run(("other", [1, 2], 0), (rid, ids[2500:], 2500))
    dump = dumps.read_dump(dumps.wait_dump(one.folder, rid, 10))
    dumps.check_dump(dump, rid, ids)
    positions = torch.arange(len(ids))
    states = [expected_state(torch.tensor(ids), positions, point) for point in one.switch.points] + [expected_state(torch.tensor(ids), positions, LAYERS) * 2]
    for found, wanted in zip([*dump.aux_float().chunk(3, dim=-1), dump.final_float()], states):
        error = (found - wanted).abs()
        assert bool((error <= wanted.abs() * 2**-4 * 1.001 + wanted.abs().amax(dim=-1, keepdim=True) * 2**-10 / 448).all())  # 3 mantissa bits; subnormals near 0
    assert dump.nbytes == len(ids) * (4 + 4 * (8 + 4))


def test_a_value_that_is_not_finite_shows_in_an_fp8_dump(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rig(dtype="fp8")
    original = one.capture.original

    def poisoned(*args: Any) -> Any:
        hidden, aux = original(*args)
        aux[1][2, 5] = float("inf")
        return hidden, aux

    monkeypatch.setattr(one.capture, "original", poisoned)
    rid = name(4)
    one.run((rid, [1, 2, 3, 4], 0))
    with pytest.raises(dumps.DumpError, match="aux_1 holds a value that is not finite in row 2 of 4"):
        dumps.check_dump(dumps.read_dump(dumps.wait_dump(one.folder, rid, 10)), rid, [1, 2, 3, 4])


def move_rows(to: int, source: int, pitch: int, nbytes: int, rows: int) -> int:
    """The driver's copy of rows that lie `pitch` bytes apart, on the host."""
    assert pitch >= nbytes
    for row in range(rows):
        ctypes.memmove(to + row * nbytes, source + row * pitch, nbytes)
    return 0


@pytest.mark.parametrize(("dtype", "style", "pitched"), [("model", "list", True), ("model", "packed", True), ("model", "packed", False), ("fp8", "list", True), ("fp8", "packed", True)])
def test_the_driver_s_copy_lands_where_torch_s_does(rig: Callable[..., Rig], dtype: str, style: str, pitched: bool) -> None:
    """On a GPU rows go into the ring by address; here memmove stands in for the driver."""
    one, copied = rig(dtype=dtype, style=style), []

    def memcpy(to: int, source: int, nbytes: int) -> int:
        ctypes.memmove(to, source, nbytes)
        copied.append("rows" if nbytes else "")
        return 0

    requests = [(name(7, run="a"), [5, 6, 7, 8, 9, 1, 2], 0), (name(3, run="b"), [3, 2, 1], 0), (name(1, run="c"), [4], 0)]
    one.run(*requests)
    files = [dumps.wait_dump(one.folder, rid, 10).read_bytes() for rid, _, _ in requests]
    for rid, _, _ in requests:
        dumps.remove_dump(one.folder, rid)
    one.capture.memcpy = memcpy
    one.capture.memcpy_rows = (lambda *where: copied.append("pitched") or move_rows(*where)) if pitched else None
    one.run(requests[0], ("health", [1, 1], 0), requests[1], ("health", [1], 0), requests[2])  # rows between them that are not ours: three stretches to copy
    assert [dumps.wait_dump(one.folder, rid, 10).read_bytes() for rid, _, _ in requests] == files
    assert len(copied) == 3 * len(one.writer.fields)
    # two stretches of three auxiliary states; one of a single row needs no pitch
    assert copied.count("pitched") == (2 * 3 if pitched and style == "packed" and dtype == "model" else 0)
    one.capture.memcpy = lambda to, source, nbytes: 700
    again = name(3, run="c")
    one.run((again, [3, 2, 1], 0))
    assert "CUDA error 700" in error_of(one, again)


class Driver:
    """libcuda.so.1 as far as the capture code calls it: copies at once, on the stream that it was made for."""

    def __init__(self, pitch_error: int = 0):
        self.calls: list[str] = []

        def copy(to: int, source: int, nbytes: int, stream: int) -> int:
            self.calls.append(f"copy on {stream}")
            ctypes.memmove(to, source, nbytes)
            return 0

        def copy_rows(where: int, stream: int) -> int:
            self.calls.append(f"rows on {stream}")
            each = hook.Memcpy2D.from_address(where)
            assert (each.srcMemoryType, each.dstMemoryType) == (2, 1) and each.dstPitch == each.WidthInBytes  # from the device, to the host, side by side
            return pitch_error or move_rows(each.dstHost, each.srcDevice, each.srcPitch, each.WidthInBytes, each.Height)

        self.cuMemcpyDtoHAsync_v2, self.cuMemcpy2DAsync_v2 = copy, copy_rows


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for torch's streams and events that note what is done with them; an event is over when device["over"] says so."""
    state: dict[str, Any] = {"log": [], "over": True, "driver": Driver(), "events": 0}

    class Event:
        def __init__(self, enable_timing: bool = False):
            state["events"] += 1

        def record(self, stream: Any) -> None:
            state["log"].append(f"record on {stream.cuda_stream}")

        def query(self) -> bool:
            return state["over"]

        def elapsed_time(self, other: Any) -> float:
            return 2.0

    class Stream:
        def __init__(self, number: int):
            self.cuda_stream, self.device = number, torch.device("cpu")

        def wait_event(self, event: Any) -> None:
            state["log"].append(f"{self.cuda_stream} waits")

        def synchronize(self) -> None:
            state["log"].append(f"synchronize {self.cuda_stream}")

        def __enter__(self) -> None:
            state["log"].append(f"torch on {self.cuda_stream}")

        def __exit__(self, *exc: Any) -> None:
            pass

    state["main"], state["stream"] = Stream(1), Stream(2)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: state["main"])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(hook.ctypes, "PyDLL", lambda name, real=ctypes.PyDLL, **how: state["driver"] if name == "libcuda.so.1" else real(name, **how))
    return state


def on_device(one: Rig, device: dict[str, Any]) -> None:
    """What Capture does at start where there is a GPU."""
    one.capture.stream, one.capture.made = device["stream"], torch.cuda.Event()
    one.capture.memcpy, one.capture.memcpy_rows = hook.device_copy(device["stream"], one.writer.ring)
    device["log"].clear()
    device["driver"].calls.clear()


@pytest.mark.parametrize("style", ["list", "packed"])
def test_on_a_device_the_copies_follow_the_forward_on_a_stream_of_their_own(rig: Callable[..., Rig], device: dict[str, Any], style: str) -> None:
    one = rig(style=style, process=True)
    on_device(one, device)
    device["over"] = False
    first, second = (name(5), [3, 1, 4, 1, 5]), (name(4), [2, 7, 1, 8])
    one.run((*first, 0))
    assert device["log"] == ["record on 1", "2 waits", "record on 2", "record on 2"]  # and no kernel of torch's on the copies' stream
    assert device["driver"].calls == ["copy on 2"] + (["copy on 2"] * 4 if style == "list" else ["rows on 2"] * 3 + ["copy on 2"])
    assert len(one.writer.waiting) == 1 and one.writer.waiting[0].held and not list(one.folder.glob("*.safetensors"))
    one.run((*second, 0))  # looks at the first one's copies, which still run
    assert one.writer.waiting[0].late and len(one.writer.waiting) == 2
    device["over"] = True
    check(one, *first)  # no forward comes: the courier hands over
    check(one, *second)
    until(lambda: settled(one))
    assert one.counters.values["waits"] >= 1 and one.counters.values["copy_s"] == pytest.approx(0.004) and one.counters.values["requests"] == 2
    made = device["events"]
    third = (name(2), [9, 9])
    one.run((*third, 0))
    check(one, *third)
    assert device["events"] == made  # events are used again


def test_on_a_device_fp8_rows_are_made_on_the_copies_stream(rig: Callable[..., Rig], device: dict[str, Any]) -> None:
    one = rig(dtype="fp8", process=True)
    on_device(one, device)
    rid, ids = name(4), [5, 6, 7, 8]
    one.run((rid, ids, 0))
    assert device["log"] == ["record on 1", "2 waits", "record on 2", "torch on 2", "record on 2"]
    dumps.check_dump(dumps.read_dump(dumps.wait_dump(one.folder, rid, 10)), rid, ids)


def test_on_a_device_a_copy_that_fails_is_over_before_its_block_is_given_back(rig: Callable[..., Rig], device: dict[str, Any]) -> None:
    one = rig(process=True)
    on_device(one, device)
    one.capture.memcpy = lambda to, source, nbytes: 700
    rid = name(3)
    one.run((rid, [3, 2, 1], 0))
    assert device["log"][-1] == "synchronize 2" and "CUDA error 700" in error_of(one, rid) and not one.writer.ring._blocks


def test_the_driver_s_copies_are_tried_before_they_are_used(device: dict[str, Any]) -> None:
    ring = hook.Ring(1 << 20, False)
    assert None not in hook.device_copy(device["stream"], ring)
    device["driver"] = Driver(pitch_error=1)
    memcpy, memcpy_rows = hook.device_copy(device["stream"], ring)
    assert memcpy is not None and memcpy_rows is None
    device["driver"].cuMemcpyDtoHAsync_v2 = lambda to, source, nbytes, stream: 0  # says that it copied
    assert hook.device_copy(device["stream"], ring) == (None, None)
    device["driver"] = object()
    assert hook.device_copy(device["stream"], ring) == (None, None)


def test_the_driver_s_struct_is_that_of_cuda_h() -> None:
    """CUDA_MEMCPY2D of cuda.h on a 64-bit machine: offsets by hand."""
    offsets = {name: getattr(hook.Memcpy2D, name).offset for name, _ in hook.Memcpy2D._fields_}
    assert ctypes.sizeof(hook.Memcpy2D) == 128
    assert {name: offsets[name] for name in ("srcMemoryType", "srcDevice", "srcPitch")} == {"srcMemoryType": 16, "srcDevice": 32, "srcPitch": 48}
    assert {name: offsets[name] for name in ("dstMemoryType", "dstHost", "dstPitch")} == {"dstMemoryType": 72, "dstHost": 80, "dstPitch": 104}
    assert (offsets["WidthInBytes"], offsets["Height"]) == (112, 120)


def test_an_alarm_that_is_put_off_goes_off_later() -> None:
    alarm = hook.Alarm()
    alarm.set(0.05)
    alarm.set(1000.0)
    assert not select.select([alarm.file], [], [], 0.2)[0]
    alarm.set(0.01)
    assert select.select([alarm.file], [], [], 20.0)[0]
    alarm.wait()
    assert not select.select([alarm.file], [], [], 0.1)[0]  # once
    alarm.close()
    alarm.set(0.01)  # harms nothing


def test_requests_of_a_batch_are_written_side_by_side(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    one, together = rig(writers=2), threading.Barrier(2, timeout=10)
    put = one.writer.files._put

    def meeting(*args: Any) -> None:
        together.wait()  # breaks, and the dump fails, unless both requests are written at the same time
        put(*args)

    monkeypatch.setattr(one.writer.files, "_put", meeting)
    requests = [(name(4, run=run), [1, 2, 3, 4], 0) for run in "ab"]
    one.run(*requests)
    for rid, ids, _ in requests:
        check(one, rid, ids)
    until(lambda: settled(one))
    assert one.counters.values["dumps"] == 2 and one.counters.values["rows"] == 8


def test_what_a_server_says_of_itself(rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    one = rig(log_s=0.01)
    rid = name(3)
    one.run((rid, [1, 2, 3], 0))
    check(one, rid, [1, 2, 3])
    one.close()  # the counters follow the file
    monkeypatch.setattr(hook.time, "sleep", lambda _: (_ for _ in ()).throw(SystemExit))  # one turn of the loop
    with caplog.at_level("INFO"), pytest.raises(SystemExit):
        hook.watch(one.capture, one.writer)
    (info,) = dumps.capture_info(one.folder)
    assert info["counters"]["requests"] == info["counters"]["dumps"] == 1 and info["counters"]["rows"] == 3 and info["pid"] == os.getpid()
    (one.folder / f"capture.{os.getpid()}.json").rename(one.folder / "capture.4194305.json")
    (one.folder / "capture.4194305.json").write_text(json.dumps({**info, "pid": 4194305}))
    assert dumps.capture_info(one.folder) == []
    hook.open_folder(str(one.folder))
    assert not (one.folder / "capture.4194305.json").exists()


# ---- the comparison of prove.py ----


def test_the_proof_tells_right_layers_from_wrong_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(50, 24, generator=generator) for _ in range(3)]

    def dump(aux: list[torch.Tensor]) -> dumps.Dump:
        return dumps.Dump(Path("x"), {}, torch.arange(50), aux, states[0], [], None, None)

    wanted = [torch.cat(states, dim=-1)]
    exact = prove.compare([dump(states)], wanted, [1, 2, 3], "float32")
    assert exact.passed and exact.equal_rows == exact.rows == 50 and exact.relative_error == [0, 0, 0]
    near = prove.compare([dump([state * (1 + 1e-6) for state in states])], wanted, [1, 2, 3], "float32")
    assert near.passed and near.equal_rows < 50
    assert not prove.compare([dump([states[1], states[0], states[2]])], wanted, [1, 2, 3], "bfloat16").passed  # two layers swapped
    shifted = [state.roll(1, dims=0) for state in states]
    assert not prove.compare([dump(shifted)], wanted, [1, 2, 3], "bfloat16").passed  # rows off by one
    assert "FAILED" in prove.compare([dump(shifted)], wanted, [1, 2, 3], "bfloat16").line()
    close = [states[0], states[0] * 1.001, states[0] * 1.002]  # layers so alike that the proof could not tell them apart
    assert not prove.compare([dump(close)], [torch.cat([close[0] * 1.001, *close[1:]], dim=-1)], [1, 2, 3], "bfloat16").passed
    with pytest.raises(UserError, match="another number of layers"):
        prove.compare([dump(states[:2])], wanted, [1, 2], "float32")
