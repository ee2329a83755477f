"""show_sample.py: what a reader sees is what stands in the file."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from aerie.paths import ROOT
from aerie.render import ChatTokenizer
from aerie.samples import SampleFile
from data_tools import make_fast
from test_answers import prepare, write_config

EMOJI = "👩‍👩‍👧‍👦 東京 🎉"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, SampleFile, ChatTokenizer]:
    folder = tmp_path_factory.mktemp("show")
    model = make_fast(folder / "chatml", "chatml")
    chats = [{"prompt": f"Question {i} <b>?", "response": f"Answer {EMOJI} & <i> {i}\n"} for i in range(30)]
    with pytest.MonkeyPatch.context() as patch:
        config = write_config(folder, model, chats, heldout=0, regenerate=False)
        prepare(patch, config, "shown")
    data = Path(os.environ["AERIE_RUNS_DIR"]) / "shown/data"
    return config, data, SampleFile(data / "train.safetensors"), ChatTokenizer(str(model))


def show(config: Path, *args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "scripts/show_sample.py"), "shown", "--config", str(config), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_terminal_and_page(shown: tuple[Path, Path, SampleFile, ChatTokenizer]) -> None:
    config, data, samples, tokenizer = shown
    ids = samples[7].input_ids.tolist()
    done = show(config, "--sample", "7", "--color", "always")
    assert done.returncode == 0, done.stderr
    text = done.stdout.split("\n", 1)[1].rstrip("\n")
    assert re.sub(r"\x1b\[\d+m", "", text) == tokenizer.decode(ids)
    green = "".join(re.findall(r"\x1b\[32m(?:\x1b\[7m)?(.*?)\x1b\[0m", text, re.DOTALL))
    on = [token for token, mask in zip(ids, samples[7].loss_mask, strict=True) if mask]
    assert green == tokenizer.decode(on) and EMOJI in green and green.endswith("<|im_end|>")

    done = show(config, "--html")
    assert done.returncode == 0, done.stderr
    page = (data / "samples.html").read_text()
    paragraphs = re.findall(r"<p><span.*?</p>", page, re.DOTALL)
    assert len(paragraphs) == 20
    first = html.unescape(re.sub(r"<[^>]+>", "", paragraphs[0]).replace("↵", ""))
    assert first == tokenizer.decode(samples[0].input_ids.tolist()) and "<b>?" not in paragraphs[0]
    titles = [int(number) for title in re.findall(r'title="([\d ]+)"', paragraphs[0]) for number in title.split()]
    assert titles == samples[0].input_ids.tolist()


def test_a_number_that_is_not_there(shown: tuple[Path, Path, SampleFile, ChatTokenizer]) -> None:
    done = show(shown[0], "--sample", "30")
    assert done.returncode == 2 and "holds samples 0 to 29" in done.stderr and "Traceback" not in done.stderr
