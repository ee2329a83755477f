"""The config loader knows every key; each error names file, key, value and what to write instead."""

import io
import json
import os
import shlex
import socket
import subprocess
import sys

import pytest
from aerie.config import load_config
from aerie.errors import UserError, run_main
from aerie.paths import CONFIGS, ROOT, RunPaths
from aerie.report import read_report, write_json
from aerie.ports import port_problem
from aerie.servers import start_ticks

MINIMAL = '[target]\nmodel_path = "runs/models/x"\naux_layer_ids = [1, 2, 3]\n'


def write(tmp_path, text):
    path = tmp_path / "c.toml"
    path.write_text(text)
    return str(path)


def test_every_config_in_the_repository_loads():
    names = [path.stem for path in CONFIGS.glob("*.toml")]
    assert "smollm2-135m" in names
    for name in names:
        assert load_config(name).run.name == name.replace(".", "_")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL + "[trian]\nlr = 1.0\n", ["trian", "'train'"]),
        (MINIMAL + "[train]\nlearning_rate = 1.0\n", ["train.learning_rate", "1.0"]),
        (MINIMAL + "[train]\nepoch = 2\n", ["train.epoch", "'epochs'"]),
        (MINIMAL + '[train]\nlr = "fast"\n', ["train.lr", "'fast'", "float", "str"]),
        (MINIMAL + "[train]\nepochs = 1.5\n", ["train.epochs", "1.5", "int"]),
        (MINIMAL + "[train]\nepochs = true\n", ["train.epochs", "int", "bool"]),
        (MINIMAL + "[train]\nepochs = 0\n", ["train.epochs", "greater than 0"]),
        (MINIMAL + "[train]\nlr = nan\n", ["train.lr", "nan"]),
        (MINIMAL + "[train]\nlr = inf\n", ["train.lr", "inf"]),
        (MINIMAL + "[server]\nport = 70000\n", ["server.port", "70000"]),
        (MINIMAL + "[train]\nseed = 18446744073709551616\n", ["train.seed", "at most 2147483647"]),
        (MINIMAL + "[train]\nepochs = 1000000000\n", ["train.epochs", "at most 10000"]),
        (MINIMAL + "[train]\nthreads = 100000\n", ["train.threads", "at most 1024"]),
        (MINIMAL + "[train]\ncheckpoint_every = 0\n", ["train.checkpoint_every", "greater than 0"]),
        (MINIMAL + "[train]\nwarmup_ratio = 7.0\n", ["train.warmup_ratio", "at most 1"]),
        (MINIMAL + "[train]\nbetas = [0.9]\n", ["train.betas", "two numbers"]),
        (MINIMAL + "[train]\nbetas = [0.9, 1.0]\n", ["train.betas", "below 1"]),
        (MINIMAL + '[train]\ndevice = "banana"\n', ["train.device", "banana", "cuda:N"]),
        (MINIMAL + "[data]\ntop_p = 1.5\n", ["data.top_p", "at most 1"]),
        (MINIMAL + "[serve]\nnum_steps = 1000\n", ["serve.num_steps", "at most 64"]),
        (MINIMAL + '[data]\ninputs = ["a\\u0000b"]\n', ["data.inputs", "null character"]),
        ('[target]\nmodel_path = " "\naux_layer_ids = [1]\n', ["target.model_path", "empty"]),
        (MINIMAL + '[extract]\ndtype = "fp4"\n', ["extract.dtype", "fp4", "fp8"]),
        (MINIMAL + "[server]\nurls = [1]\n", ["server.urls", "list[str]"]),
        ('[target]\nmodel_path = "x"\n', ["target.aux_layer_ids", "missing"]),
        ('[target]\nmodel_path = "x"\naux_layer_ids = [3, 2, 1]\n', ["aux_layer_ids", "rising"]),
        ("[train]\nlr = 1.0\n", ["[target]", "missing"]),
        ("train = 3\n" + MINIMAL, ["[train]", "table"]),
        ("[target\n", ["TOML"]),
    ],
)
def test_errors_name_file_key_and_value(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        load_config(path)
    for word in [path, *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_overrides(tmp_path):
    path = write(tmp_path, MINIMAL)
    config = load_config(path, "r1", ["train.lr=5e-5", "server.args.tp-size=8", "draft.init=random", 'server.urls=["http://a"]'])
    assert config.train.lr == 5e-5 and config.server.args == {"tp-size": 8} and config.draft.init == "random" and config.server.urls == ["http://a"]
    assert config.run.name == "r1" and config.name == "c"
    for bad in ("train.lr", "lr=3", "train.lrr=3", "train.lr=abc", "nosection.x=1"):
        with pytest.raises(UserError):
            load_config(path, overrides=[bad])


def test_missing_files_and_names(tmp_path):
    with pytest.raises(UserError, match="smollm2-135m"):
        load_config("smollm2-135")
    with pytest.raises(UserError, match="does not exist"):
        load_config(str(tmp_path / "none.toml"))
    with pytest.raises(UserError, match="run name"):
        load_config("smollm2-135m", "../x")


@pytest.mark.parametrize("name", ["", "..", "../x", "/", "a/b", "a.b", "ä", "a b", "x" * 49, "x\n", "models"])
def test_run_names_that_cannot_be(name):
    with pytest.raises(UserError, match="run name"):
        RunPaths(name)


def clean(runs, name):
    """`make clean RUN=name`: exit code and what it says."""
    command = ["make", "-s", "clean", f"PY={sys.executable}", f"RUN={name}"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"AERIE_RUNS_DIR": str(runs)}, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_clean_removes_one_run_and_nothing_else(tmp_path):
    for name in ("one", "two", "models"):
        (tmp_path / "runs" / name / "data").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "outside")
    for name in ("/", ".", "..", "../outside", "models", "linked", "one two", ""):
        code, said = clean(tmp_path / "runs", name)
        assert code == 2 and "error: " in said and "Traceback" not in said, name
    assert clean(tmp_path / "runs", "one")[0] == 0 and "nothing to remove" in clean(tmp_path / "runs", "one")[1]
    me = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
    (tmp_path / "runs" / "two" / "serving.json").write_text(json.dumps(me))
    code, said = clean(tmp_path / "runs", "two")
    assert code == 2 and "make stop RUN=two" in said
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["linked", "models", "two"] and (tmp_path / "outside").is_dir()


def test_make_hands_on_spaces_and_quotes():
    command = ["make", "-n", "--no-print-directory", "plan", f"PY={sys.executable}", "CONFIG=/a dir/x y.toml", "RUN=-r", 'SET=data.inputs=["a","b"] train.lr=1e-4']
    line = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.strip().splitlines()[-1]
    assert shlex.split(line)[2:] == ["--config", "/a dir/x y.toml", "--run=-r", "--set", 'data.inputs=["a","b"]', "--set", "train.lr=1e-4"]


def test_a_locale_without_our_characters_ends_nothing(tmp_path, monkeypatch):
    """Output and reports, also with a path that is no UTF-8."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", printed)
    with pytest.raises(SystemExit) as ended:
        run_main(lambda: print("⟦ \udcff"))
    assert ended.value.code == 0 and printed.buffer.getvalue() == b"\\u27e6 \\udcff\n"
    write_json(tmp_path / "report.json", {"path": "a\udcffb", "mark": "⟦"})
    assert read_report(tmp_path / "report.json") == {"path": "a\udcffb", "mark": "⟦"}


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": ', b"\xd3\x00\xff", b"[" * 100000])
def test_a_damaged_report_is_named(tmp_path, content):
    (tmp_path / "report.json").write_bytes(content)
    with pytest.raises(UserError, match="report.json.*run `make train` again"):
        read_report(tmp_path / "report.json", "`make train`")
    assert read_report(tmp_path / "none.json") == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "make it with `make data`, or"),
        (["--config", "kimi-k2.5", "--run", "kimi-k2_5"], "`make data CONFIG=kimi-k2.5`, or"),
        (["--run", "demo"], "`make data RUN=demo`, or"),
        (["--config", "{own}", "--run", "demo"], "`make data CONFIG='{own}' RUN=demo`, or"),
    ],
)
def test_advice_names_config_and_run_where_they_are_not_makes_own(tmp_path, words, said):
    own = tmp_path / "my own.toml"
    own.write_text(MINIMAL)
    code = (f"import argparse, sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); from aerie.errors import UserError, run_main; from aerie.config import *\n"
            "def main():\n parser = argparse.ArgumentParser(); add_config_arguments(parser); config_from_args(parser.parse_args())\n"
            " raise UserError('make it with `make data`, or not')\nrun_main(main)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code, *(word.format(own=own) for word in words)], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and said.format(own=own) in done.stderr, done.stderr


def test_why_no_server_can_listen():
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert "is in use" in port_problem("127.0.0.1", busy.getsockname()[1])
    assert "no address of this machine" in port_problem("no host by this name", 30000)
    assert "set server.host to an address of this machine" in port_problem("192.0.2.1", 30000)


def test_output_that_nobody_reads(tmp_path):
    """`| head` ends a script without a word but not as if it were done; a closed stdout or stderr is no error."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); from aerie.errors import run_main; run_main(lambda: print('x' * 200000))"
    piped = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    piped.stdout.close()
    assert piped.stderr.read() == b"" and piped.wait(60) == 141
    closed = subprocess.run(["bash", "-c", 'exec "$@" >&- 2>&-', "-", sys.executable, "-c", code], timeout=60, check=False)
    assert closed.returncode == 0
