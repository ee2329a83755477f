"""05_benchmark.py against servers with known answers: what is counted, compared and reported; and what happens when a server goes away."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
from aerie import bench
from aerie.config import Config, load_config
from aerie.errors import UserError
from aerie.generate import Answer, Prompt, accept_length, accept_length_mean, next_token_distance, prompts_of
from aerie.pipeline import Pipeline
from aerie.lossless import CONTROL_QUESTIONS, Control, compare, first_difference, run_control
from aerie.predicted import Prediction, read_walks
from aerie.report import write_json
from aerie.rid import sample_id
from aerie.samples import Sample, SampleFile, write_samples
from aerie.walk import answer_runs
from cpu_tools import gpu_benchmark_table, write_config
from serve_fake import FakeServer, accepted_counts, continuation
from serve_folders import LLAMA_TARGET, llama_drafter, write_drafter, write_target

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def sample(prompt: list[int], answer_tokens: int) -> Sample:
    ids = np.array(prompt + continuation(prompt, answer_tokens), dtype=np.int32)
    mask = np.array([0] * len(prompt) + [1] * answer_tokens, dtype=np.uint8)
    return Sample(sample_id(ids, mask), ids, mask)


@pytest.fixture
def config(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """A run with a drafter, held-out samples and the reports of the steps before; its servers are fakes."""
    target = write_target(tmp_path / "target", LLAMA_TARGET | {"torch_dtype": "float32"})
    path = write_config(tmp_path / "c.toml", target, [1, 2, 4], bench={"concurrency": [1, 4], "max_new_tokens": 24, "samples": 10, "requests_per_slot": 3, "rounds": 1, "side_by_side": True})
    config = load_config(str(path), "bench-" + str(abs(hash(request.node.name)))[:8])
    import torch

    write_drafter(config.run.drafter, *llama_drafter(torch.float32), {"predicted_accept_length": 2.5})
    samples = [sample([index + 1, 5, 9], 6 + index) for index in range(12)]
    write_samples(config.run.data / "heldout.safetensors", samples, {})
    write_json(config.run.store / "report.json", {"samples": 30, "tokens": 900, "extract_tok_s": 111.0})
    write_json(config.run.drafter / "report.json", {"train_tok_s": 222.0})
    return config


@pytest.fixture
def fakes(config: Config) -> Iterator[Callable[..., dict[str, FakeServer]]]:
    started: dict[str, FakeServer] = {}

    def start(**serving: Any) -> dict[str, FakeServer]:
        started["baseline"] = FakeServer(config, "baseline", wobble=serving.pop("wobble", 0.0))
        started["serving"] = FakeServer(config, "serving", **serving)
        return started

    yield start
    for server in started.values():
        server.close()


def run_benchmark(monkeypatch: pytest.MonkeyPatch, config: Config, *more: str) -> int:
    monkeypatch.setattr(sys, "argv", ["05_benchmark.py", "--config", str(config.path), "--run", config.run.name, *more])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPTS / "05_benchmark.py"), run_name="__main__")
    return int(ended.value.code or 0)


def test_report(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    servers = fakes()
    assert run_benchmark(monkeypatch, config) == 0
    report = json.loads((config.run.bench / "report.json").read_text())
    # by hand: ten held-out samples with answers of 6 .. 15 tokens; the first token is prefill's, the fake accepts 0, 1, 2, 3, 0, ... of 3 drafts
    tokens = [6 + index - 1 for index in range(10)]
    verifications = [len(accepted_counts(count, 3)) for count in tokens]
    assert report["accept_length"] == pytest.approx(sum(tokens) / sum(verifications))
    assert report["accept_length_request_mean"] == pytest.approx(sum(t / v for t, v in zip(tokens, verifications)) / 10)
    assert report["predicted_accept_length"] == 2.5 and report["gap"] == pytest.approx(report["accept_length"] / 2.5 - 1)
    assert report["lossless"] == {
        "compared": 10, "equal": 10, "near_ties": 0, "different": [], "allowed": 1e-3, "unexplained": 0,
        "control": {"compared": 3, "different": 0, "far": 0, "noise": 0.0},
    }  # fmt: skip
    assert (report["samples"], report["tokens"], report["extract_tok_s"], report["train_tok_s"]) == (30, 900, 111.0, 222.0)
    one = report["sets"]["heldout"]
    assert [(level["concurrency"], level["requests"]) for level in one["levels"]] == [(1, 3), (4, 10)]
    histogram = one["levels"][1]["speculative"]["verifications_by_accepted"]
    assert sum(histogram) == sum(verifications)
    assert [row["accepted"] for row in one["acceptance_by_position"]] == [pytest.approx(sum(histogram[n:]) / sum(histogram)) for n in (1, 2, 3)]
    assert one["by_category"]["heldout"]["requests"] == 10 and one["by_context"] == [{"from": 0, "below": 128, "requests": 10, "accept_length": report["accept_length"]}]
    level = one["levels"][1]
    assert level["speculative"]["time_to_first_token_ms"]["p50"] > 0 and level["baseline"]["inter_token_latency_ms"]["p99"] > 0 and 0 <= level["drafting_share"] <= 1
    assert report["baseline_tok_s"] > 0 and report["speculative_tok_s"] > 0 and report["concurrency"] == 1
    # what was sent: the prompt part alone, greedy, as many tokens as the held-out answer has
    sent = [body for body in servers["serving"].bodies if not body.get("stream")][-10:]
    assert sorted(body["sampling_params"]["max_new_tokens"] for body in sent) == list(range(6, 16)) and all(len(body["input_ids"]) == 3 for body in sent)
    assert all(body["sampling_params"]["temperature"] == 0 for body in sent)
    said, page = capsys.readouterr().out, (config.run.bench / "report.html").read_text()
    assert "gap" in said
    for text in (said, page):
        assert "texts: 10 compared, 10 equal, 0 near ties, 0 different (the plain server alone changes 0 of 3 texts between 1 and 4 at a time)" in text
    assert "data:image/png;base64," in page and "heldout" in page and (config.run.bench / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_predicted_and_served_are_of_the_same_prompts(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Training walked four of the ten held-out samples, whose answers of 6 .. 9 tokens took it verifications of 2 tokens; then answers are cut at 8 tokens."""
    file = SampleFile(config.run.data / "heldout.safetensors")
    walks = {file.sample_id(index): [" ".join(["2"] * (tokens // 2) + ["1"] * (tokens % 2))] for index, tokens in enumerate((5, 6, 7, 8))}
    (config.run.drafter / "walk.json").write_text(json.dumps({"num_steps": 3, "walks": walks}))
    fakes()
    assert run_benchmark(monkeypatch, config) == 0
    report = json.loads((config.run.bench / "report.json").read_text())
    served = (5 + 6 + 7 + 8) / sum(len(accepted_counts(count, 3)) for count in (5, 6, 7, 8))
    assert report["same_prompts"] == {"predicted": pytest.approx(26 / 14), "served": pytest.approx(served), "prompts": 4}
    assert report["gap"] == pytest.approx(served / (26 / 14) - 1) and report["predicted_accept_length"] == 2.5
    assert report["sets"]["heldout"]["levels"][0]["same_prompts"]["prompts"] == 3
    said = capsys.readouterr().out
    assert f"predicted accept length {26 / 14:.3f}, served {served:.3f}: gap" in said and "(4 prompts; over all held-out chats of training 2.500)" in said
    assert "speed-up  predicted  accept length" in said and f"{18 / 10:.3f}" in said  # the first three prompts: all of the lowest concurrency
    assert run_benchmark(monkeypatch, config, "--set", "bench.max_new_tokens=8") == 0
    same = json.loads((config.run.bench / "report.json").read_text())["same_prompts"]
    assert same["predicted"] == pytest.approx((5 + 6 + 7 + 7) / (3 + 3 + 4 + 4))


def test_the_median_of_rounds_that_take_turns_counts(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Clocks by hand: each server's passes take 90 (which warms up and must not count), 1, 3, 2 seconds a time."""
    real, order = bench.measure, []

    def measured(server: Any, prompts: list[Prompt], concurrency: int, timeout_s: float, streamed: bool = False, which: str = "") -> bench.Pass:
        found = real(server, prompts, concurrency, timeout_s, streamed, which)
        order.append((server.mode, concurrency, streamed))
        turn = sum(each == order[-1] for each in order)
        return bench.Pass(found.concurrency, found.answers, {1: 90.0, 2: 1.0, 3: 3.0, 4: 2.0}[turn] * (1 if server.mode == "serving" else 5))

    monkeypatch.setattr(bench, "measure", measured)
    fakes()
    assert run_benchmark(monkeypatch, config, "--set", "bench.rounds=3") == 0
    levels = json.loads((config.run.bench / "report.json").read_text())["sets"]["heldout"]["levels"]
    assert [level["speculative"]["seconds"] for level in levels] == [2.0, 2.0] and [level["baseline"]["seconds"] for level in levels] == [10.0, 10.0]
    assert all(level["speedup"] == pytest.approx(5) for level in levels)
    tokens = levels[1]["speculative"]["tokens"]
    assert levels[1]["speculative"]["rounds_tok_s"] == pytest.approx([tokens / 3, tokens / 2, tokens], abs=0.01)
    assert [mode for mode, concurrency, streamed in order if concurrency == 4 and not streamed] == ["baseline", "serving"] * 4
    said = capsys.readouterr()
    assert f"tok/s at 1: {21 / 15:.1f} to {21 / 5:.1f} without, {21 / 3:.1f} to {21:.1f} with; 4: " in said.out  # three prompts of 7 + 8 + 9 tokens, the first of prefill
    assert "4 at a time, to warm up" in said.err and "4 at a time, round 3 of 3" in said.err


def test_another_benchmark_of_the_run_keeps_the_first_and_is_not_taken_for_it(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make all` (and the demo) must not show the numbers of a `make bench` with other options as the run's own."""
    fakes()
    pipeline = Pipeline(config, [])
    for name in ("data", "drafter"):
        write_json(config.run.root / name / "report.json", {})
    bench_step = pipeline.steps[-1]
    write_json(pipeline.marker, {"bench": pipeline.fingerprint(bench_step)})
    assert not pipeline.is_done(bench_step)
    assert run_benchmark(monkeypatch, config) == 0 and pipeline.is_done(bench_step)
    first = (config.run.bench / "report.json").read_bytes()
    for other in (["--set", "bench.samples=4"], ["--set", "bench.concurrency=[1,2]"]):
        assert run_benchmark(monkeypatch, config, *other) == 0 and not pipeline.is_done(bench_step)
    kept = sorted((config.run.bench / "earlier").glob("*/report.json"))
    assert first in [path.read_bytes() for path in kept] and all((path.parent / "report.html").is_file() for path in kept)
    for text in ("{", json.dumps(json.loads(first) | {"prompt_sets": ["heldout", "maths"]}), json.dumps(json.loads(first) | {"sweep": [{}]})):
        (config.run.bench / "report.json").write_text(text)
        assert not pipeline.is_done(bench_step)
    assert run_benchmark(monkeypatch, config) == 0 and pipeline.is_done(bench_step)


def test_the_table_of_the_gpu_benchmark(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes(changes_text=True)
    assert run_benchmark(monkeypatch, config) == 1
    (config.run.bench / "report.json").rename(config.run.bench / "gpu-bench.json")
    first, texts, *levels = gpu_benchmark_table(config.run.bench).splitlines()
    assert first.startswith("gpu-bench steps 3 topk 1: accept length ") and "predicted 2.5" in first
    assert "'unexplained': 10" in texts and texts.endswith("different 10") and len(levels) == 2 and all("tok/s" in line for line in levels)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"walks": 3}', '{"walks": {"0123456789abcdef": 3}}', '{"walks": {"0123456789abcdef": ["2 x"]}}'])
def test_a_walk_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "walk.json").write_text(text)
    assert read_walks(tmp_path / "walk.json") == {} == read_walks(tmp_path / "missing.json")
    answer = Answer(Prompt("warm-up", [1], 8), list(range(8)), 7, [7], 1.0)
    assert Prediction(2.0, True, {}).compare([answer]) is None and Prediction(2.0, True, {"a": ["7"]}).compare([answer]) is None


def test_a_changed_text_fails_and_a_near_tie_is_counted(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    servers = fakes(changes_text=True)
    assert run_benchmark(monkeypatch, config) == 1
    assert "10 texts differ" in capsys.readouterr().err
    servers["baseline"].margin = 1e-5
    assert run_benchmark(monkeypatch, config) == 0
    lossless = json.loads((config.run.bench / "report.json").read_text())["lossless"]
    assert (lossless["equal"], lossless["near_ties"], lossless["different"]) == (0, 10, [])


def test_the_plain_servers_own_near_ties_are_said(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """In bf16 the plain server's own texts differ by 0.3 from pass to pass, and the drafted ones from them."""
    fakes(wobble=0.3)
    with monkeypatch.context() as patch:
        patch.setattr("aerie.bench.served_dtype", lambda *_: "bfloat16")
        assert run_benchmark(monkeypatch, config) == 0
    lossless = json.loads((config.run.bench / "report.json").read_text())["lossless"]
    assert (lossless["compared"], lossless["equal"], lossless["near_ties"], lossless["different"]) == (10, 0, 10, [])
    assert lossless["control"] == {"compared": 3, "different": 3, "far": 0, "noise": pytest.approx(0.3)} and lossless["allowed"] == 0.5
    line = "texts: 10 compared, 0 equal, 10 near ties, 0 different (the plain server alone changes 3 of 3 texts between 1 and 4 at a time, "
    line += "by up to 0.3 in log-probability, 0 of them by more than a near tie)"
    assert line in capsys.readouterr().out and line in (config.run.bench / "report.html").read_text()
    assert run_benchmark(monkeypatch, config) == 1  # in float32 that is too far


def test_a_changed_text_fails_beside_a_noisy_server(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    servers = fakes(wobble=0.3, changes_text=True)
    monkeypatch.setattr("aerie.bench.served_dtype", lambda *_: "bfloat16")
    assert run_benchmark(monkeypatch, config) == 1
    said = capsys.readouterr()
    assert "10 texts differ" in said.err and "below the likeliest token in log-probability, a near tie is within 0.5" in said.out
    lossless = json.loads((config.run.bench / "report.json").read_text())["lossless"]
    assert (lossless["near_ties"], len(lossless["different"]), lossless["control"]["different"], lossless["unexplained"]) == (0, 10, 3, 10)
    servers["baseline"].margin = 0.49
    assert run_benchmark(monkeypatch, config) == 0


def test_one_concurrency_has_no_control(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fakes(wobble=0.3)
    assert run_benchmark(monkeypatch, config, "--set", "bench.concurrency=[4]") == 1  # 0.3 is no near tie in float32
    said = capsys.readouterr()
    assert "10 texts differ" in said.err and "(no control: only one concurrency)" in said.out


def test_next_token_distance(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    baseline = fakes()["baseline"]
    url = f"http://127.0.0.1:{config.bench.baseline_port}"
    first = continuation([3, 4], 1)[0]
    assert next_token_distance(url, [3, 4], first, first + 1) == next_token_distance(url, [3, 4], first + 1, first) == 2.0
    assert baseline.bodies[-1]["top_logprobs_num"] == 128 and baseline.bodies[-1]["sampling_params"] == {"temperature": 0.0, "max_new_tokens": 1}
    assert next_token_distance(url, [3, 4], first, first + 200) == math.inf  # not among the likeliest
    for no_number in (None, math.nan, math.inf):  # -inf below, too, is no rounding
        baseline.margin = no_number
        assert next_token_distance(url, [3, 4], first, first + 1) == next_token_distance(url, [3, 4], first + 1, first) == math.inf
    with pytest.raises(UserError, match="did not say how likely tokens 5 and 6 are after 2 others: 400 .*out-of-vocabulary"):
        next_token_distance(url, [3, 320], 5, 6)
    baseline.close()
    with pytest.raises(UserError, match="stopped answering when asked how likely tokens 5 and 6 are"):
        next_token_distance(url, [3, 4], 5, 6)


def test_a_server_that_goes_away(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fakes(dies_after=3)
    assert run_benchmark(monkeypatch, config) == 2
    err = capsys.readouterr().err
    assert "the serving server stopped answering after" in err and "Traceback" not in err
    assert not (config.run.bench / "report.json").exists()


def test_a_server_of_other_options(config: Config, fakes: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    fakes()
    assert run_benchmark(monkeypatch, config, "--set", "serve.num_steps=5") == 2
    assert "other options" in capsys.readouterr().err


def test_no_heldout(config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (config.run.data / "heldout.safetensors").unlink()
    assert run_benchmark(monkeypatch, config) == 2 and "make data" in capsys.readouterr().err


def test_spans_and_prompts() -> None:
    mask = np.array([0, 0, 1, 1, 0, 1, 0, 1], dtype=np.uint8)
    assert answer_runs(mask) == [(2, 4), (5, 6), (7, 8)]
    prompts = prompts_of(Sample("0" * 16, np.arange(8, dtype=np.int32), mask), 1)
    assert [(prompt.input_ids, prompt.max_new_tokens) for prompt in prompts] == [([0, 1], 1), ([0, 1, 2, 3, 4], 1), ([0, 1, 2, 3, 4, 5, 6], 1)]
    assert prompts_of(Sample("0" * 16, np.arange(2, dtype=np.int32), np.ones(2, dtype=np.uint8)), 4) == []  # no prompt: nothing to send


def test_accept_length_counts_no_token_of_prefill() -> None:
    prompt = Prompt("a", [1], 8)
    nothing = Answer(prompt, list(range(8)), 7, [7], 1.0)  # 8 tokens in 7 verifications: nothing was accepted
    assert accept_length([nothing]) == 1.0
    everything = Answer(prompt, list(range(9)), 2, [0, 0, 0, 2], 1.0)
    assert accept_length([nothing, everything]) == 15 / 9 and accept_length_mean([nothing, everything]) == (1.0 + 4.0) / 2
    assert accept_length([Answer(prompt, [1], 0, [], 1.0)]) is None


def test_lossless_counts() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None and first_difference([1, 2], [1, 3]) == 1 and first_difference([1, 2], [1]) == 1
    asked: list[tuple[list[int], int, int]] = []

    def distance(ids: list[int], left: int, right: int) -> float:
        asked.append((ids, left, right))
        return 1e-4 if right == 6 else 0.2

    result = compare(["a", "b", "c", "d"], [[1], [1], [1], [1]], [[2, 5], [2, 5], [2, 5], [2]], [[2, 5], [2, 6], [2, 7], [2, 5]], "float32", distance)
    assert (result.compared, result.equal, result.near_ties, len(result.different)) == (4, 1, 1, 2) and asked == [([1, 2], 5, 6), ([1, 2], 5, 7)]
    assert "0.2 below the likeliest token in log-probability, a near tie is within 0.001" in result.different[0] and "equal so far" in result.different[1]
    assert result.control == Control() and result.allowed == 1e-3 and result.unexplained == 2
    for dtype, near in (("float32", 0), ("float16", 0), ("bfloat16", 1)):
        assert compare(["a"], [[1]], [[5]], [[7]], dtype, distance).near_ties == near
    # two log-probabilities that lie four steps of a bf16 logit apart, as float32 gives them; and one step more
    four = float(np.float32(-1.3418735) - np.float32(-1.8418738))
    assert four > 0.5 and [compare(["a"], [[1]], [[5]], [[7]], "bfloat16", lambda *_: far).near_ties for far in (four, four + 0.125)] == [1, 0]


def test_lossless_control() -> None:
    """By hand: five texts of two other passes; one is equal, one ends early, one has an infinite distance; the largest of the rest is 0.4."""
    distances = {6: 0.1, 7: 0.4, 8: math.inf, 9: 0.79}
    prompts, plain, others = [[1], [1], [1]], [[2, 5], [2, 5], [2, 5]], [[[2, 5], [2, 6]], [[2, 7], [2], [2, 8]]]
    asked: list[int] = []

    def distance(ids: list[int], left: int, right: int) -> float:
        assert (ids, left) == ([1, 2], 5)
        asked.append(right)
        return distances[right]

    assert run_control(prompts, plain, others, 0.5, distance) == Control(5, 4, 2, 0.4) and asked == [6, 7, 8]
    assert run_control(prompts, plain, others, 0.2, distance) == Control(5, 4, 3, 0.4)
    # two of five are far: of five drafted texts twice two and one more are explained, of three twice 1.2
    for count, unexplained in ((5, 0), (3, 0)):
        result = compare(list("abcde")[:count], [[1]] * count, [[2, 5]] * count, [[2, 9]] * count, "bfloat16", distance, others)
        assert (len(result.different), result.unexplained) == (count, unexplained)
    twenty = [[2, 6]] * 15 + [[2, 8]] + [[2, 5]] * 4  # one of twenty is far
    for count, unexplained in ((3, 0), (4, 1), (20, 17)):
        drafted = [[2, 9]] * count + [[2, 5]] * (20 - count)
        result = compare(list("abcdefghijklmnopqrst"), [[1]] * 20, [[2, 5]] * 20, drafted, "bfloat16", distance, [twenty])
        assert (len(result.different), result.unexplained) == (count, unexplained)
        assert compare(list("abcdefghijklmnopqrst"), [[1]] * 20, [[2, 5]] * 20, drafted, "float32", distance, [twenty]).unexplained == count
    early = compare(["a"], [[1]], [[2, 5]], [[2]], "bfloat16", distance, [[[2, 6]]])
    assert early.unexplained == 1 and "a: 2 tokens without the drafter, 1 with it" in early.different[0] and early.allowed == 0.5


def test_control_asks_no_more_than_it_may() -> None:
    asked: list[list[int]] = []

    def distance(ids: list[int], left: int, right: int) -> float:
        asked.append(ids)
        return float(ids[0])

    count = 3 * CONTROL_QUESTIONS
    prompts, plain, other = [[index] for index in range(count)], [[1]] * count, [[2]] * count
    assert run_control(prompts, plain, [other], 0.5, distance) == Control(count, count, count - 3.0, count - 3.0)  # all asked but the first are far
    assert [ids[0] for ids in asked] == list(range(0, count, 3))
    for size in (CONTROL_QUESTIONS - 1, CONTROL_QUESTIONS, CONTROL_QUESTIONS + 1):
        asked.clear()
        assert run_control(prompts, plain, [other[:size]], 0.5, distance).different == size and len(asked) <= CONTROL_QUESTIONS
