"""train.gpus: a machine without GPUs refuses it, and several processes say one plain error once, end together, and end when they are asked to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aerie.errors import UserError, complain
from aerie.gpus import refuse_missing
from aerie.servers import process_is, start_ticks
from test_train_script import make
from train_runs import train, write_run

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
PREFACE = f"import os, signal, sys, time; sys.path.insert(0, {str(SCRIPTS)!r}); from aerie.errors import UserError, run_main\nrank, told = int(os.environ['RANK']), os.path.dirname(sys.argv[0]) + '/logs/train-error.txt'\n"


def start(tmp_path: Path, body: str, count: int = 2) -> subprocess.Popen:
    """run_together() on a script whose main() is `body`."""
    script = tmp_path / "work.py"
    script.write_text(PREFACE + "def main():\n" + "".join(f"    {line}\n" for line in body.splitlines()) + "run_main(main)\n")
    code = f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from aerie.errors import run_main; from aerie.together import run_together; from pathlib import Path\n"
    code += f"run_main(lambda: run_together({count}, [{str(script)!r}], Path({str(tmp_path / 'logs')!r})))"
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_gpus_that_are_not_there_are_refused():
    refuse_missing([], "auto", 0)
    refuse_missing([0, 1], "cpu", 0)  # so many CPU processes
    refuse_missing([4, 5], "cuda", 2)
    with pytest.raises(UserError, match=r"train.gpus = \[0, 1\], but PyTorch sees no GPU here"):
        refuse_missing([0, 1], "auto", 0)
    with pytest.raises(UserError, match=r"train.gpus = \[5\], but PyTorch sees no GPU"):
        refuse_missing([5], "cuda", 0)
    with pytest.raises(UserError, match=r"train.gpus = \[0, 5\], but PyTorch sees 1 of them"):
        refuse_missing([0, 5], "auto", 1)


def test_a_refusal_under_train_gpus_is_one_line(make_config):
    config = make(make_config, "together")
    write_run(config, samples=8)
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    done = train(config, "--set", "train.gpus=[0,1]", "--set", "train.device=auto", env=hidden)
    assert done.returncode == 2 and done.stderr.startswith("error: train.gpus = [0, 1], but PyTorch sees no GPU") and done.stderr.count("\n") == 1, done.stderr
    for words, said in (
        (("--set", "target.aux_layer_ids=[0, 2, 4]"), "holds states of layers"),  # told before processes start
        (("--resume",), "nothing to resume"), (("--set", "draft.vocab_size=64"), "draft.vocab_size is 64"),  # told by both of them
    ):  # fmt: skip
        done = train(config, "--set", "train.gpus=[0,1]", *words)
        assert done.returncode == 2 and said in done.stderr and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "OMP_NUM_THREADS" not in done.stdout + done.stderr


@pytest.mark.parametrize("body", [
    "raise UserError(f'no {rank}')",
    "if rank:\n    raise UserError('no 1')\ntime.sleep(60)",
    "if rank:\n    raise UserError('no 1')\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile not os.path.exists(told):\n    time.sleep(0.01)\nraise RuntimeError('connection closed by peer')",
    "if not rank:\n    raise UserError('no 0')\ntime.sleep(60)",
])  # fmt: skip
def test_one_sentence_whoever_says_it(tmp_path, body):
    out, err = start(tmp_path, body).communicate(timeout=120)
    assert err in ("error: no 0\n", "error: no 1\n"), err


def test_a_process_that_breaks_is_told_with_the_end_of_its_log_and_the_others_end(tmp_path):
    process = start(tmp_path, "if rank == 1:\n    raise ValueError('broken here')\nprint('first', flush=True)\ntime.sleep(60)")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1 and "ValueError: broken here" in err and "process 1 of the training ended with exit code 1" in err and out in ("", "first\n")
    process = start(tmp_path, "if rank == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(60)")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 137 and err.count("\n") == 1 and "process 1 of the training was ended by signal 9" in err


@pytest.mark.parametrize("sign, code, said", [(signal.SIGTERM, -signal.SIGTERM, ""), (signal.SIGINT, 130, "interrupted\n"), (signal.SIGKILL, -signal.SIGKILL, "")])
def test_all_end_when_the_training_is_asked_to(tmp_path, sign, code, said):
    process = start(tmp_path, f"open({str(tmp_path)!r} + f'/pid-{{rank}}', 'w').write(str(os.getpid()))\ntime.sleep(120)")
    deadline = time.monotonic() + 60
    paths = [tmp_path / f"pid-{rank}" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in paths):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    pids = [(pid, start_ticks(pid)) for pid in (int(path.read_text()) for path in paths)]
    process.send_signal(sign)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, said)
    while any(process_is(pid, ticks) and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" for pid, ticks in pids):
        assert time.monotonic() < deadline, "a process of the training goes on alone"
        time.sleep(0.05)


def test_a_sentence_that_cannot_be_left_for_the_others_is_said(tmp_path, capsys):
    complain("error: full", str(tmp_path / "nowhere" / "said.txt"))
    assert capsys.readouterr().err == "error: full\n"
