"""Every config's every server command line is accepted by SGLang's own argument parser, with a GPU and without."""

import os
import subprocess
import sys

import pytest
from aerie import servers
from aerie.config import load_config
from aerie.paths import CONFIGS, ROOT
from kimi_sglang_parser import parse_lines

NAMES = sorted(path.stem for path in CONFIGS.glob("*.toml"))
CASES = [(name, mode, gpu) for name in NAMES for mode in servers.MODES for gpu in (True, False)]


@pytest.fixture(scope="module")
def answers():
    """(config, mode, gpu) -> the parser's answer, all asked at once; last a line that must be refused."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        for name, mode, gpu in CASES:
            patch.setattr(servers, "has_gpu", lambda gpu=gpu: gpu)
            line = servers.command_line(load_config(name), mode)
            assert line[1:3] == ["-m", "sglang.launch_server"]
            lines.append(line[3:])
    wrong = [["--model-path", "x", "--no-such-option"], ["--model-path", "x", "--mem-fraction", "0.9"], ["--model-path", "x", "--attention-backend", "magic"]]
    found = parse_lines(lines + wrong)
    return dict(zip(CASES, found, strict=False)), found[-len(wrong) :], lines


def test_every_command_line_is_accepted(answers):
    found, _, lines = answers
    refused = {case: (answer["error"], lines[number]) for number, (case, answer) in enumerate(found.items()) if answer["error"]}
    assert not refused
    assert len(found) == len(NAMES) * 2 * len(servers.MODES)


def test_the_parser_refuses_what_is_wrong(answers):
    _, wrong, _ = answers
    for answer, word in zip(wrong, ("--no-such-option", "--mem-fraction", "magic"), strict=True):
        assert word in answer["error"]


@pytest.mark.parametrize("name", NAMES)
def test_modes_differ_where_they_must(answers, name):
    found, _, _ = answers
    config = load_config(name)
    for gpu in (True, False):
        extraction, serving, baseline, oracle = (found[name, mode, gpu]["values"] for mode in servers.MODES)
        assert extraction["disable_radix_cache"] is True and extraction["speculative_algorithm"] is None
        assert serving["speculative_algorithm"] == "EAGLE3" and serving["speculative_num_steps"] == config.serve.num_steps
        assert baseline["speculative_algorithm"] is None and baseline["disable_radix_cache"] is False
        assert len({extraction["port"], serving["port"], baseline["port"]}) == 3
        assert oracle["return_aux_hidden_state_layer_ids"] == config.target.aux_layer_ids and oracle["disable_radix_cache"] is True
        for values in (extraction, serving, baseline, oracle):  # the same numerics in training and in serving
            assert (values["dtype"], values["tp_size"], values["kv_cache_dtype"]) == (extraction["dtype"], extraction["tp_size"], extraction["kv_cache_dtype"])


def test_gpu_lines_keep_the_configs_own_backend(answers):
    found, _, _ = answers
    assert found["kimi-k2.5", "extraction", True]["values"]["attention_backend"] == "flashinfer"
    assert found["kimi-k2.5", "serving", True]["values"]["speculative_draft_attention_backend"] == "triton"
    assert found["kimi-k2.5", "extraction", False]["values"]["attention_backend"] == "torch_native"


def test_the_command_of_a_gpu_box_can_be_read_before_there_is_one():
    """sglang_args.py says on stderr that its options are a CPU's, and --paper prints those of a machine with GPUs."""
    words = [sys.executable, str(ROOT / "scripts" / "sglang_args.py"), "kimi-k2.5", "serving", "--shell"]
    here, paper = (subprocess.run([*words, *more], capture_output=True, text=True, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}) for more in ([], ["--paper"]))
    assert "torch_native" in here.stdout and "CPU" in here.stderr and "--paper" in here.stderr
    assert "--mem-fraction-static 0.92" in paper.stdout and "--attention-backend flashinfer" in paper.stdout and "AERIE_CPU_PLATFORM" not in paper.stdout
    assert "max-total-tokens" not in paper.stdout and not paper.stderr
