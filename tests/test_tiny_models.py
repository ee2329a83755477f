"""The tiny models are real checkpoints: small, deterministic, loadable; served they answer as transformers does."""

import json
import math

import pytest
import torch
from aerie.errors import UserError
from aerie.generate import next_token_distance
from aerie.target import problem_with
from aerie.tiny import CHAT_TEMPLATE, FAMILIES, make_tiny, tiny_tokenizer
from cpu_tools import generate
from safetensors.torch import load_file


@pytest.mark.parametrize("family", FAMILIES)
def test_small_whole_and_the_same_every_time(family, tiny_model, tmp_path):
    folder = tiny_model(family)
    assert problem_with(folder) == ""
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20_000_000
    again = make_tiny(family, tmp_path / "again")
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in folder.iterdir())
    first, second = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    other = load_file(make_tiny(family, tmp_path / "other", seed=1) / "model.safetensors")
    assert not all(torch.equal(first[name], other[name]) for name in first)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    from transformers import AutoTokenizer

    assert len(AutoTokenizer.from_pretrained(folder)) <= text["vocab_size"]


def test_the_tokenizer_is_lossless_and_its_specials_are_single_ids():
    tokenizer = tiny_tokenizer()
    text = "The capital of France is Paris. Ünïcode 你好 🙂\n\tx = {1: 'a'}"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert ids[0] == 1 and tokenizer.eos_token_id == 2


def test_unknown_family_and_existing_folder_are_errors(tmp_path):
    with pytest.raises(UserError, match="gpt9"):
        make_tiny("gpt9", tmp_path / "x")
    with pytest.raises(UserError, match="already there"):
        make_tiny("llama", tmp_path)
    assert not list(tmp_path.iterdir())


PROMPTS = [[7, 40, 99, 310], list(range(20, 90)), [1, 250, 3, 8, 400, 77, 13]]


def transformers_greedy(folder, prompt: list[int], steps: int) -> list[int]:
    """Greedy tokens of transformers in float32, the whole prefix computed anew at each step (no cache to go wrong)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def distance_error(url: str, folder, prompts: list[list[int]]) -> float:
    """The largest error of next_token_distance against transformers in float32: for each prompt the likeliest token with its runner-up, and less likely ones."""
    from transformers import AutoModelForCausalLM

    model, worst = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), 0.0
    for prompt in prompts:
        with torch.inference_mode():
            below = -model(torch.tensor([prompt]), use_cache=False).logits[0, -1].double().log_softmax(-1)
        below = below - below.min()
        order = below.argsort().tolist()
        for left, right in ((order[a], order[b]) for a, b in ((0, 1), (1, 0), (1, 80), (60, 30))):
            worst = max(worst, abs(next_token_distance(url, prompt, left, right) - max(below[left].item(), below[right].item())))
        assert next_token_distance(url, prompt, order[0], order[-1]) == math.inf  # far from the likeliest, however they round
    return worst


@pytest.mark.server
@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name == "deepseek_v3" else pytest.mark.slow) for name in FAMILIES if name != "kimi_k25"])
def test_served_greedy_tokens_equal_transformers(family, request, make_config, tiny_model, start_server):
    """deepseek_v3 asks the shared capture server; the others start their own (slow)."""
    server = request.getfixturevalue("capture_server") if family == "deepseek_v3" else start_server(make_config(family, f"greedy-{family}"), "baseline")
    try:
        for prompt in PROMPTS:
            assert generate(server.url, prompt, 12)["output_ids"] == transformers_greedy(tiny_model(family), prompt, 12)
    finally:
        if family != "deepseek_v3":
            server.stop()


@pytest.mark.server
@pytest.mark.slow
def test_kimi_k25_serves_as_its_text_model_does(make_config, tiny_model, start_server, tmp_path):
    """The text model inside the tiny Kimi-K2.5 is a DeepSeek-V3: its weights alone, in transformers, give the same tokens."""
    folder = tiny_model("kimi_k25")
    text = tmp_path / "text"
    text.mkdir()
    from safetensors.torch import save_file

    weights = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("language_model."): tensor for name, tensor in weights.items() if name.startswith("language_model.")}, text / "model.safetensors", metadata={"format": "pt"})
    (text / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())["text_config"]))
    server = start_server(make_config("kimi_k25", "greedy-kimi"), "baseline")
    try:
        for prompt in PROMPTS:
            assert generate(server.url, prompt, 12)["output_ids"] == transformers_greedy(text, prompt, 12)
    finally:
        server.stop()
