"""With and without the drafter: the same prompts to both servers, tokens a second, accept length, equal texts."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Sequence

import requests

from .bench_prompts import PromptSet, with_followups
from .bench_stats import acceptance_by_position, by_category, by_context, drafting_share, drafting_share_of_sweep, latency, merged
from .check import served_dtype
from .config import Config
from .errors import UserError
from .generate import Answer, Prompt, accept_length, accept_length_mean, ask_server, generate, generate_streamed, next_token_distance
from .identity import read_model_config, text_config
from .lossless import Lossless, compare, in_words
from .predicted import Prediction
from .progress import Progress
from .report import read_report
from .servers import Server

FLUSH_PATIENCE_S = 30.0  # requests of the pass before leave the scheduler within moments


@dataclass
class Pass:
    """One server, one concurrency, one list of prompts."""

    concurrency: int
    answers: list[Answer]
    seconds: float
    latency: dict[str, Any] = field(default_factory=dict)  # of a shorter streamed pass; empty where bench.latency is off
    rounds_tok_s: list[float] = field(default_factory=list)  # of the passes of which this is the median one; empty where it is the only one

    @property
    def tokens(self) -> int:
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def tok_s(self) -> float:
        """Output tokens a second, all requests together."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {"tok_s": round(self.tok_s, 2), "tokens": self.tokens, "seconds": round(self.seconds, 3)}
        if self.rounds_tok_s:
            numbers["rounds_tok_s"] = [round(each, 2) for each in self.rounds_tok_s]
        verifications = sum(answer.verifications for answer in self.answers)
        if verifications:
            numbers |= {
                "accept_length": accept_length(self.answers), "accept_length_request_mean": accept_length_mean(self.answers), "verifications": verifications,
                "verifications_by_accepted": merged([answer.histogram for answer in self.answers]),
            }  # fmt: skip
        return numbers | self.latency


def prompts_at(prompts: list[Prompt], concurrency: int, levels: list[int], requests_per_slot: int) -> list[Prompt]:
    """What one concurrency runs: the highest all prompts, a lower one as many as keep its slots busy `requests_per_slot` times."""
    return prompts if concurrency == max(levels) else prompts[: concurrency * requests_per_slot]


def empty_cache(server: Server) -> None:
    """Empty the prefix cache, or a pass finds the prompts of the one before in it. SGLang refuses while requests run. Raises UserError when it still does."""
    deadline = time.monotonic() + FLUSH_PATIENCE_S
    while (status := requests.post(f"{server.url}/flush_cache", timeout=60).status_code) != 200:
        if time.monotonic() > deadline:
            raise UserError(f"the {server.mode} server on {server.url} did not empty its cache within {FLUSH_PATIENCE_S:g} s (status {status}): other requests run on it, "
                "and numbers measured beside them would mean nothing; end them, then run the same command again")
        time.sleep(0.1)


def measure(server: Server, prompts: list[Prompt], concurrency: int, timeout_s: float, streamed: bool = False, which: str = "") -> Pass:
    """One pass over the prompts with an empty prefix cache; `which` one it is goes into the progress line. Raises UserError that names the server when it dies on the way."""
    name = f"answered {'with' if server.mode == 'serving' else 'without'} the drafter, {concurrency} at a time{', streamed' if streamed else ''}{f', {which}' if which else ''}"
    progress = Progress(len(prompts), name, unit="requests")
    try:
        empty_cache(server)
        done = lambda answer: progress.update(1, len(answer.output_ids), request_seconds=answer.seconds)  # noqa: E731
        answers, seconds = ask_server(server, prompts, concurrency, timeout_s, done, generate_streamed if streamed else generate)
    except requests.RequestException as exc:
        raise UserError(f"the {server.mode} server does not take requests ({type(exc).__name__}); it {server.state()} (log: {server.log})") from None
    finally:
        progress.close()
    if server.mode == "serving" and not any(answer.verifications for answer in answers):
        if not any(answer.drafted_tokens for answer in answers):
            raise UserError(f"each of the {len(answers)} answers at {concurrency} at a time is one token, which prefill gives, so there is nothing to speculate on; raise "
                "bench.max_new_tokens or bench.requests_per_slot, or choose other prompts")
        raise UserError(f"the serving server on {server.url} counted no verification: it does not speculate; see {server.log}")
    return Pass(concurrency, answers, seconds)


def measure_in_turn(servers: Sequence[Server], prompts: list[Prompt], concurrency: int, rounds: int, timeout_s: float) -> list[list[Pass]]:
    """`rounds` passes of each server, one after the other, after one pass each that warms up: a server compiles kernels when a batch of that size first comes."""
    passes: list[list[Pass]] = [[] for _ in servers]
    for turn in range(rounds + 1):
        for server, done in zip(servers, passes):
            result = measure(server, prompts, concurrency, timeout_s, which=f"round {turn} of {rounds}" if turn else "to warm up")
            if turn:
                done.append(result)
    return passes


def compare_passes(config: Config, prompts: list[Prompt], plain: Pass, fast: Pass, others: Sequence[Pass], url: str) -> Lossless:
    """Texts of two passes over all the prompts. The server on `url` gave `plain` and (over the first prompts, or all) `others`; it is asked about differences."""
    inner = text_config(model := read_model_config(config.model_path))
    dtype = served_dtype(inner if "dtype" in inner or "torch_dtype" in inner else model, config.target.dtype)
    without, drafted, *own = ([answer.output_ids for answer in each.answers] for each in (plain, fast, *others))
    return compare([prompt.id for prompt in prompts], [prompt.input_ids for prompt in prompts], without, drafted, dtype, partial(next_token_distance, url), own)


@dataclass
class SetBenchmark:
    """One prompt set: passes by mode, in the order of the concurrencies."""

    config: Config
    prompts: PromptSet
    passes: dict[str, list[Pass]] = field(default_factory=lambda: {"baseline": [], "serving": []})
    lossless: Lossless | None = None

    def run(self, servers: Sequence[Server], concurrency: int) -> None:
        """Measure the servers at one concurrency and keep a pass of each: the only one, or the median of bench.rounds."""
        bench, timeout_s = self.config.bench, self.config.data.request_timeout_s
        if self.prompts.items:
            with_followups(self.config, self.prompts, lambda asked: ask_server(servers[0], asked, max(bench.concurrency), timeout_s)[0])
        chosen = prompts_at(self.prompts.prompts, concurrency, bench.concurrency, bench.requests_per_slot)
        results = []
        if bench.rounds > 1:
            for done in measure_in_turn(servers, chosen, concurrency, bench.rounds, timeout_s):
                done.sort(key=lambda each: each.tok_s)
                results.append(done[len(done) // 2])
                results[-1].rounds_tok_s = [each.tok_s for each in done]
        else:
            for server in servers:
                if not self.passes[server.mode]:  # the first requests of a server also pay for its warm-up
                    measure(server, chosen[: max(bench.concurrency)], max(bench.concurrency), timeout_s, which="to warm up")
                results.append(measure(server, chosen, concurrency, timeout_s))
        for server, result in zip(servers, results):
            if bench.latency:
                result.latency = latency(measure(server, chosen[: 2 * concurrency], concurrency, timeout_s, streamed=True).answers)
            self.passes[server.mode].append(result)

    def fullest(self, mode: str) -> Pass:
        """The pass with all prompts."""
        return max(self.passes[mode], key=lambda each: len(each.answers))

    def compare_texts(self, baseline_url: str) -> Lossless:
        """Texts of the fullest passes with and without the drafter; the plain server's other passes are the control. Asks it about near ties."""
        plain = self.fullest("baseline")
        others = [each for each in self.passes["baseline"] if each is not plain]
        self.lossless = compare_passes(self.config, self.prompts.prompts, plain, self.fullest("serving"), others, baseline_url)
        return self.lossless

    def content(self) -> dict[str, Any]:
        """What the report says of this set."""
        served = self.fullest("serving")
        prediction = Prediction.load(self.config) if self.prompts.name == "heldout" else None
        levels = []
        for plain, fast in zip(self.passes["baseline"], self.passes["serving"], strict=True):
            one, other = plain.as_dict(), fast.as_dict()
            levels.append(
                {"concurrency": plain.concurrency, "requests": len(plain.answers), "baseline": one, "speculative": other,
                 "speedup": fast.tok_s / plain.tok_s, "drafting_share": drafting_share(one, other), "same_prompts": compared(prediction, fast)}
            )  # fmt: skip
        return {
            "same_prompts": compared(prediction, served),
            "prompts": len(self.prompts.prompts), "skipped": self.prompts.skipped, "accept_length": accept_length(served.answers),
            "accept_length_request_mean": accept_length_mean(served.answers),
            "acceptance_by_position": acceptance_by_position(merged([answer.histogram for answer in served.answers]), self.config.serve.num_steps),
            "by_category": by_category(served.answers), "by_context": by_context(served.answers),
            "lossless": self.lossless.as_dict() if self.lossless else None, "levels": levels,
        }  # fmt: skip


def compared(prediction: Prediction | None, served: Pass) -> dict[str, Any] | None:
    """Predicted and served accept length over those prompts of a pass that training walked."""
    same = prediction.compare(served.answers) if prediction else None
    return same._asdict() if same else None


def report_content(config: Config, sets: list[SetBenchmark], sweep: list[dict[str, Any]]) -> dict[str, Any]:
    """What report.json says: the first set's numbers on top, then every set."""
    contents = {each.prompts.name: each.content() for each in sets}
    first = contents[sets[0].prompts.name]
    # Training's walk is over held-out chats drafted num_steps deep; another set or another depth is not what it predicted.
    prediction = Prediction.load(config)
    predicted, served = prediction.accept_length, first["accept_length"]
    if same := first["same_prompts"]:
        predicted, served = same["predicted"], same["served"]
    comparable = sets[0].prompts.name == "heldout" and prediction.comparable
    lowest = min(first["levels"], key=lambda level: level["concurrency"])
    return {
        "accept_length": first["accept_length"],
        "accept_length_request_mean": first["accept_length_request_mean"],
        "predicted_accept_length": prediction.accept_length,
        "same_prompts": same,
        "gap": served / predicted - 1 if predicted and comparable else None,
        "lossless": first["lossless"],
        "baseline_tok_s": lowest["baseline"]["tok_s"],
        "speculative_tok_s": lowest["speculative"]["tok_s"],
        "speedup": lowest["speedup"],
        "concurrency": lowest["concurrency"],
        **steps_before(config),
        "num_steps": config.serve.num_steps,
        "topk": config.serve.topk,
        "chat_template": True,
        "sets": contents,
        "sweep": sweep,
        "drafting_share_of_sweep": drafting_share_of_sweep(sweep),
    }


def steps_before(config: Config) -> dict[str, Any]:
    """What the run's earlier steps reported: samples, tokens, extract_tok_s of the store, train_tok_s of the trainer; None where a report is missing."""
    found: dict[str, Any] = {}
    for path, keys in ((config.run.store / "report.json", ("samples", "tokens", "extract_tok_s")), (config.run.drafter / "report.json", ("train_tok_s",))):
        report = read_report(path)
        found |= {key: report.get(key) for key in keys}
    return found


def table(content: dict[str, Any]) -> str:
    """The levels of every set as a table, then predicted against served, equality, and the sweep."""
    lines = []
    for name, one in content["sets"].items():
        skipped = f", {one['skipped']} skipped as too long" if one["skipped"] else ""
        walked = any(level["same_prompts"] for level in one["levels"])
        lines += [f"  {name}: {one['prompts']} prompts{skipped}", f"  concurrency  requests  without tok/s  with tok/s  speed-up  {'predicted  ' if walked else ''}accept length (pooled)  "
            "per-request mean"]
        for level in one["levels"]:
            fast, same = level["speculative"], level["same_prompts"]
            predicted = f"  {same['predicted'] if same and same['prompts'] == level['requests'] else float('nan'):>9.3f}" if walked else ""
            lines.append(
                f"  {level['concurrency']:>11}  {level['requests']:>8}  {level['baseline']['tok_s']:>13.1f}  {fast['tok_s']:>10.1f}  {level['speedup']:>7.2f}x{predicted}"
                f"  {fast['accept_length']:>22.3f}  {fast['accept_length_request_mean']:>16.3f}"
            )
        rounds = []
        for level in one["levels"]:
            plain, fast = (level[side].get("rounds_tok_s") for side in ("baseline", "speculative"))
            if plain and fast:
                rounds.append(f"{level['concurrency']}: {min(plain):.1f} to {max(plain):.1f} without, {min(fast):.1f} to {max(fast):.1f} with")
        if rounds:
            lines.append(f"  rounds, of which the table has the median, tok/s at {'; '.join(rounds)}")
        if len(one["by_category"]) > 1:
            lines.append("  accept length by kind: " + ", ".join(f"{kind} {numbers['accept_length']:.2f}" for kind, numbers in one["by_category"].items() if numbers["accept_length"] is not None))
        if lossless := one["lossless"]:
            *lower, last = (str(level["concurrency"]) for level in one["levels"])
            between = f"between {', '.join(lower)} and {last} at a time"
            lines.append(f"  texts: {in_words(lossless, 'the plain server', between, 'only one concurrency')}")
            lines += [f"    {text}" for text in lossless["different"][:5]]
        else:
            lines.append("  texts: not compared")
    if content["gap"] is not None:
        same, pooled = content["same_prompts"], content["predicted_accept_length"]
        predicted, served = (same["predicted"], same["served"]) if same else (pooled, content["accept_length"])
        over = f" ({same['prompts']} prompts; over all held-out chats of training {pooled:.3f})" if same and pooled and abs(predicted - pooled) > 5e-4 else ""
        lines.append(f"  predicted accept length {predicted:.3f}, served {served:.3f}: gap {content['gap']:+.1%}{over}")
    if content["sweep"]:
        lines.append("  steps  topk  draft tokens  tok/s  speed-up  accept length")
        lines += [
            f"  {row['num_steps']:>5}  {row['topk']:>4}  {row['num_draft_tokens']:>12}  {row['tok_s']:>5.1f}  {row['speedup']:>7.2f}x  "
                f"{row['accept_length']:>13.3f}"
            for row in content["sweep"]
        ]
    return "\n".join(lines)


def keep_earlier(folder: Path) -> None:
    """Move an earlier report and its page to earlier/<its date>/: a benchmark with other options must not cost the first one's numbers."""
    try:
        date = read_report(folder / "report.json").get("date")
    except UserError:
        return  # damaged: nothing to keep
    if not isinstance(date, str):
        return
    name = "".join(char for char in date if char.isalnum() or char in "-+")
    kept = next(path for count in itertools.count(1) if not (path := folder / "earlier" / (name if count == 1 else f"{name}-{count}")).exists())
    kept.mkdir(parents=True)
    for name in ("report.json", "report.html", "report.png"):
        if (folder / name).is_file():
            (folder / name).replace(kept / name)
