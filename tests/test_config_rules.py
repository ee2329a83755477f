"""Values that each key takes alone and that do not go together, or not with the target: one sentence, before anything is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
from aerie.bench_servers import parse_sweep
from aerie.config import Config, load_config
from aerie.config_rules import check_against_model_config, draft_tokens_problem
from aerie.errors import UserError
from aerie.paths import CONFIGS, ROOT
from aerie.plan import shape_of
from aerie.servers import Server, refuse_bad_target, refuse_busy_ports
from data_tools import make_fast
from serve_fake import FakeServer
from test_answers import prepare, write_config
from test_doctor import doctor, line


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.toml")))
def test_the_configs_keep_the_rules(name: str) -> None:
    load_config(name)


@pytest.mark.parametrize(("overrides", "says"), [
    (["serve.num_draft_tokens=1"], "--set serve.num_draft_tokens=1: serve.num_draft_tokens = 1, but a chain of 3 steps has 4 draft tokens; set it right, or to 0"),
    (["serve.num_steps=2", "serve.num_draft_tokens=4"], "serve.num_draft_tokens = 4, but a chain of 2 steps has 3"),
    (["serve.topk=2", "serve.num_draft_tokens=12"], "3 steps with topk 2 give 2 to 11 draft tokens"),
    (["serve.topk=2", "serve.num_draft_tokens=1"], "3 steps with topk 2 give 2 to 11 draft tokens"),
    (["server.args.mem-fraction-static=\"x\""], "mem-fraction-static = 'x' must be a number, 0 to 1; set it right in server.args or serve.args"),
    (["server.cpu_args.max-total-tokens=0"], "max-total-tokens = 0 must be a whole number, 1 or more"),
    (["serve.args.context-length=\"8k\""], "context-length = '8k' must be a whole number"),
    (["serve.port=30002"], "--set serve.port=30002: serve.port = 30002 is bench.baseline_port too, and with bench.side_by_side = true both servers run at once; set one"),
    (["serve.port=30000", "train.stop_server=false"], "serve.port = 30000 is server.port too, and with train.stop_server = false both"),
])  # fmt: skip
def test_what_does_not_go_together(overrides: list[str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        load_config(overrides=overrides)
    assert says in str(refused.value)


@pytest.mark.parametrize("overrides", [
    ["serve.port=30000"],  # extraction ends before serving starts
    ["serve.port=30002", "bench.side_by_side=false"], ["serve.num_draft_tokens=4"], ["serve.topk=2", "serve.num_draft_tokens=11"], ["serve.num_steps=1", "serve.topk=3", "serve.num_draft_tokens=4"],
    ["server.args.max-total-tokens=false"], ["server.args.chunked-prefill-size=-1"], ['server.args.context-length="4096"'],
])  # fmt: skip
def test_what_does(overrides: list[str]) -> None:
    load_config(overrides=overrides)


def test_the_sweep_has_the_same_rule() -> None:
    assert parse_sweep("3,1,4") == (3, 1, 4) and not draft_tokens_problem(3, 4, 16)
    with pytest.raises(UserError, match="--sweep '3,1,5': a chain of 3 steps has 4 draft tokens"):
        parse_sweep("3,1,5")


@pytest.mark.parametrize(("override", "says"), [
    ("target.aux_layer_ids=[1,3,99]", r"target.aux_layer_ids = \[1, 3, 99\]: .* has 6 decoder layers, so no layer 99; set ids below 6"),
    ("draft.vocab_size=99999999", "draft.vocab_size = 99999999: the vocabulary of .* has .* ids; set it to .* or less"),
])  # fmt: skip
def test_what_the_target_has_not(override: str, says: str, make_config: Callable[..., Config]) -> None:
    path = str(make_config("llama", "has-not").path)
    check_against_model_config(load_config(path))  # the default draft.vocab_size is cut to a small target's vocabulary
    config = load_config(path, overrides=[override])
    for check in (shape_of, refuse_bad_target, check_against_model_config):  # plan; server and serve; data and doctor
        with pytest.raises(UserError, match=says):
            check(config)
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "plan_run.py"), "--config", path, "--set", override], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "does not fit" not in done.stderr and override.split("=")[0] in done.stderr, done.stderr
    code, text = doctor("--config", path, "--set", override)
    assert code == 1 and line(text, "config and target").startswith("✗") and override.split("=")[0] in line(text, "config and target") and line(text, "model folder").startswith("✓")


def test_data_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path, make_fast(tmp_path / "chatml", "chatml"), [{"prompt": "a", "response": "b"}], heldout=0, regenerate=False)
    with pytest.raises(UserError, match="draft.vocab_size = 99999999"):
        prepare(monkeypatch, config, "too-many", "--set", "draft.vocab_size=99999999")


def test_doctor_names_an_option_that_is_no_number() -> None:
    code, text = doctor("--set", 'server.args.mem-fraction-static="x"')
    assert code == 1 and "mem-fraction-static = 'x' must be a number" in line(text, "config")


def test_a_shared_port_held_by_the_run_s_own_server_is_free_for_the_other(make_config: Callable[..., Config]) -> None:
    config = make_config("llama", "shared-port")
    config.serve.port = config.server.port
    server = FakeServer(config, "extraction")
    try:
        refuse_busy_ports(config)
        other = make_config("llama", "shared-port-other")
        other.server.port = config.server.port
        with pytest.raises(UserError, match=r"in use.* \(the extraction server of run shared-port has it: `make stop RUN=shared-port` ends that\)"):
            refuse_busy_ports(other)
        Server.record_path(config, "extraction").unlink()
        with pytest.raises(UserError, match="in use; end what listens there, or choose another: SET"):
            refuse_busy_ports(config)
    finally:
        server.close()


def test_ports_of_servers_that_run_at_once_differ(make_config: Callable[..., Config]) -> None:
    path, apart = str(make_config("llama", "ports-at-once").path), "train.stop_server=false"
    for words in (["serve.port=30500", "server.port=30500"], ["bench.baseline_port=30500", "server.port=30500"], ["serve.port=30500", "bench.baseline_port=30500", "bench.side_by_side=true"]):
        with pytest.raises(UserError, match="both servers run at once"):
            load_config(path, overrides=[apart, *words])
        if "bench.side_by_side=true" not in words:
            load_config(path, overrides=words)
            load_config(path, overrides=[apart, *words, 'server.urls=["http://127.0.0.1:9"]'])
