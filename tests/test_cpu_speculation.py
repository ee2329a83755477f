"""EAGLE-3 on the CPU platform is lossless: in float32 the same tokens as transformers without any drafter, chains and trees, alone and in a batch."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from aerie.generate import next_token_distance
from aerie.lossless import NEAR_TIE, compare
from aerie.servers import command_line, server_args, server_env
from cpu_tools import AUX_LAYER_IDS, generate, repeating_drafter
from test_tiny_models import distance_error, transformers_greedy

TOKENS = 40
PROMPTS = [[7, 40, 99, 310], list(range(20, 90)), [1, 250, 3, 8, 400, 77, 13], [300], [5, 6] * 20, [11, 480, 33, 90, 121, 9, 9, 250, 64]]


@pytest.fixture(scope="module")
def speculate(make_config, tiny_model, start_server):
    """speculate(family, topk, steps, nodes, dtype) -> (server, target folder, texts without a drafter by transformers): an untrained drafter that is right now and then."""

    def start(family, topk, steps, nodes, dtype="float32", **sections):
        target = tiny_model(family, dtype)
        plain = [transformers_greedy(tiny_model(family), prompt, TOKENS) for prompt in PROMPTS]
        frequent = [token for token, _ in Counter(token for text in plain for token in text).most_common(100)]
        serve = {"num_steps": steps, "topk": topk, "num_draft_tokens": nodes}
        config = make_config(family, f"spec-{family}-{steps}-{topk}-{nodes}-{dtype}", target={"model_path": str(target), "dtype": dtype}, serve=serve, **sections)
        repeating_drafter(config.run.drafter, target, AUX_LAYER_IDS[family], frequent, dtype=getattr(torch, dtype))
        return start_server(config, "serving"), target, plain

    return start


def check_lossless(server, plain, steps=3):
    """All prompts alone, then two of each at once: equal texts, and some drafts accepted, at several depths where there are several steps."""
    alone = [generate(server.url, prompt, TOKENS) for prompt in PROMPTS]
    assert [answer["output_ids"] for answer in alone] == plain
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda prompt: generate(server.url, prompt, TOKENS), PROMPTS * 2))
    assert [answer["output_ids"] for answer in together] == plain * 2
    meta = [answer["meta_info"] for answer in alone + together]
    accepted = Counter()
    for one in meta:
        assert one["spec_verify_ct"] <= TOKENS - 1
        accepted.update({depth: count for depth, count in enumerate(one["spec_correct_drafts_histogram"])})
    assert sum(accepted.values()) == sum(one["spec_verify_ct"] for one in meta)
    assert sum(count for depth, count in accepted.items() if depth > 0) > 0, accepted
    assert max(accepted) <= steps and (steps == 1 or sum(count for depth, count in accepted.items() if depth > 1) > 0), accepted


def check_sampled_neighbours(server, plain):
    """Sampled requests in the same batches: greedy ones stay as they were, sampled ones come back whole and follow top_k = 1 exactly."""
    sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "max_new_tokens": TOKENS, "ignore_eos": True}
    one_choice = sampled | {"top_k": 1}
    with ThreadPoolExecutor(12) as pool:
        greedy = [pool.submit(generate, server.url, prompt, TOKENS) for prompt in PROMPTS]
        warm = [pool.submit(generate, server.url, prompt, TOKENS, sampling_params=sampled) for prompt in PROMPTS[:3]]
        cold = [pool.submit(generate, server.url, prompt, TOKENS, sampling_params=one_choice) for prompt in PROMPTS[:3]]
    assert [answer.result()["output_ids"] for answer in greedy] == plain
    assert [answer.result()["output_ids"] for answer in cold] == plain[:3]
    for answer in warm:
        assert len(answer.result()["output_ids"]) == TOKENS and all(0 <= token < 512 for token in answer.result()["output_ids"])


@pytest.mark.server
@pytest.mark.slow  # the memorised drafter serves a Llama chain in `make test`
def test_llama_chain(speculate):
    server, _, plain = speculate("llama", 1, 3, 4)
    try:
        check_lossless(server, plain)
        check_sampled_neighbours(server, plain)
    finally:
        server.stop()


@pytest.mark.server
def test_deepseek_v3_tree(speculate):
    server, target, plain = speculate("deepseek_v3", 2, 3, 6)
    try:
        check_lossless(server, plain)
        assert distance_error(server.url, target, PROMPTS) < NEAR_TIE["float32"]
    finally:
        server.stop()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "topk", "steps", "nodes"), [("llama", 4, 3, 10), ("deepseek_v3", 1, 3, 4), ("deepseek_v3", 3, 2, 7), ("qwen3", 2, 4, 8), ("qwen3_moe", 1, 2, 3), ("llama", 1, 1, 2)]
)
def test_other_families_and_shapes(speculate, family, topk, steps, nodes):
    server, _, plain = speculate(family, topk, steps, nodes)
    try:
        check_lossless(server, plain, steps)
    finally:
        server.stop()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(("topk", "nodes"), [(1, 4), (2, 6)])
def test_kimi_k25_as_without_a_drafter(speculate, start_server, topk, nodes, make_config, tiny_model):
    config = make_config("kimi_k25", f"plain-kimi-{topk}")
    baseline = start_server(config, "baseline")
    try:
        plain = [generate(baseline.url, prompt, TOKENS)["output_ids"] for prompt in PROMPTS]
    finally:
        baseline.stop()
    frequent = [token for token, _ in Counter(token for text in plain for token in text).most_common(100)]
    config = make_config("kimi_k25", f"spec-kimi-{topk}", serve={"num_steps": 3, "topk": topk, "num_draft_tokens": nodes})
    repeating_drafter(config.run.drafter, tiny_model("kimi_k25"), AUX_LAYER_IDS["kimi_k25"], frequent)
    server = start_server(config, "serving")
    try:
        check_lossless(server, plain)
    finally:
        server.stop()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(("family", "topk", "nodes"), [("llama", 1, 4), ("deepseek_v3", 2, 6)])
def test_bf16_differs_only_at_near_ties(speculate, make_config, tiny_model, start_server, family, topk, nodes):
    """Within the bound of bf16 alone, whatever the control (alone, then all at once) finds: a random mixture of experts makes a noise of 1.7 at times."""
    folder = tiny_model(family, "bfloat16")
    server, _, _ = speculate(family, topk, 3, nodes, "bfloat16")
    try:
        drafted = [generate(server.url, prompt, TOKENS)["output_ids"] for prompt in PROMPTS]
    finally:
        server.stop()
    baseline = start_server(make_config(family, f"bf16-{family}", target={"model_path": str(folder), "dtype": "bfloat16"}), "baseline")
    try:
        without = [generate(baseline.url, prompt, TOKENS)["output_ids"] for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: generate(baseline.url, prompt, TOKENS)["output_ids"], PROMPTS))
        distance, names = partial(next_token_distance, baseline.url), [str(i) for i in range(len(PROMPTS))]
        result = compare(names, PROMPTS, without, drafted, "bfloat16", distance)
        controlled = compare(names, PROMPTS, without, drafted, "bfloat16", distance, [together])
        error = distance_error(baseline.url, folder, PROMPTS)
    finally:
        baseline.stop()
    assert result.compared == len(PROMPTS) and result.different == [] and result.equal > 0 and result.allowed == NEAR_TIE["bfloat16"]
    assert controlled.control.compared == len(PROMPTS) and controlled.different == [] and controlled.near_ties == result.near_ties
    assert error < NEAR_TIE["bfloat16"]


def test_a_cpu_server_runs_this_checkouts_plugin(make_config, pytestconfig):
    config = make_config("llama", "plugin")
    environment = server_env(config, "serving")
    if "AERIE_CPU_PLATFORM" not in environment:
        pytest.skip("this machine serves on a GPU")
    assert environment["PYTHONPATH"].split(":")[0] == str(pytestconfig.rootpath / "patches" / "cpu_platform")
    assert environment["AERIE_ROOT"] == str(pytestconfig.rootpath)
    assert server_args(config, "serving")["speculative-num-draft-tokens"] == 4
    assert "--mem-fraction-static" in command_line(config, "serving")
