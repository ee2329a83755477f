"""With and without the drafter: the same prompts to both servers, tokens a second, accept length, equal texts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests

from .check import served_dtype
from .config import Config
from .errors import UserError
from .generate import Answer, Prompt, accept_length, accept_length_mean, generate_all, next_token_margin, prompts_of
from .identity import read_model_config, text_config
from .lossless import Lossless, compare
from .progress import Progress
from .samples import SampleFile
from .servers import Server
from .serving import predicted_accept_length


def heldout_prompts(config: Config) -> list[Prompt]:
    """The prompts of the run's held-out chats: training's walk drafts on the same answers, so that its number and this one can be compared."""
    file = SampleFile(config.run.data / "heldout.safetensors")
    prompts = [prompt for index in range(min(config.bench.samples, len(file))) for prompt in prompts_of(file[index], config.bench.max_new_tokens)]
    if not prompts:
        raise UserError(f"{file.path} holds no sample with a prompt and an answer; set data.heldout and make it again with `make data`")
    return prompts


@dataclass
class Pass:
    """One server, one concurrency, one list of prompts."""

    concurrency: int
    answers: list[Answer]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def tok_s(self) -> float:
        """Output tokens a second, all requests together."""
        return self.tokens / self.seconds

    def as_dict(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {"tok_s": round(self.tok_s, 2), "tokens": self.tokens, "seconds": round(self.seconds, 3)}
        verifications = sum(answer.verifications for answer in self.answers)
        if verifications:
            numbers |= {
                "accept_length": accept_length(self.answers), "accept_length_request_mean": accept_length_mean(self.answers), "verifications": verifications,
                "verifications_by_accepted": merged([answer.histogram for answer in self.answers]),
            }  # fmt: skip
        return numbers


def merged(histograms: list[list[int]]) -> list[int]:
    """Histograms of different lengths, added."""
    width = max((len(histogram) for histogram in histograms), default=0)
    return [sum(histogram[index] for histogram in histograms if index < len(histogram)) for index in range(width)]


def prompts_at(prompts: list[Prompt], concurrency: int, levels: list[int], requests_per_slot: int) -> list[Prompt]:
    """What one concurrency runs: the highest all prompts, a lower one as many as keep its slots busy `requests_per_slot` times."""
    return prompts if concurrency == max(levels) else prompts[: concurrency * requests_per_slot]


def measure(server: Server, prompts: list[Prompt], concurrency: int, timeout_s: float) -> Pass:
    """One pass over the prompts with an empty prefix cache. Raises UserError that names the server when it dies on the way."""
    name = "with" if server.mode == "serving" else "without"
    progress = Progress(len(prompts), f"answered {name} the drafter, {concurrency} at a time", unit="requests")
    try:
        requests.post(f"{server.url}/flush_cache", timeout=60)
        done = lambda answer: progress.update(1, len(answer.output_ids), request_seconds=answer.seconds)  # noqa: E731
        answers, seconds = generate_all(server.url, prompts, concurrency, timeout_s, done)
    except requests.RequestException as exc:
        state = "is alive" if server.alive() else f"died: {server.last_error()}"
        raise UserError(f"the {server.mode} server stopped answering after {progress.items} of {len(prompts)} requests ({type(exc).__name__}); it {state} (log: {server.log})") from None
    finally:
        progress.close()
    if server.mode == "serving" and not any(answer.verifications for answer in answers):
        raise UserError(f"the serving server on {server.url} counted no verification: it does not speculate; see {server.log}")
    return Pass(concurrency, answers, seconds)


@dataclass
class Benchmark:
    """Passes by mode, in the order of the concurrencies."""

    config: Config
    prompts: list[Prompt]
    passes: dict[str, list[Pass]] = field(default_factory=lambda: {"baseline": [], "serving": []})
    lossless: Lossless | None = None

    def run(self, server: Server, concurrency: int) -> Pass:
        """Measure one server at one concurrency and keep it."""
        bench = self.config.bench
        chosen = prompts_at(self.prompts, concurrency, bench.concurrency, bench.requests_per_slot)
        if not self.passes[server.mode]:  # the first requests of a server also pay for its warm-up
            generate_all(server.url, chosen[:1], 1, self.config.data.request_timeout_s)
        result = measure(server, chosen, concurrency, self.config.data.request_timeout_s)
        self.passes[server.mode].append(result)
        return result

    def compare_texts(self, baseline_url: str) -> Lossless:
        """Texts of the fullest pass with and without the drafter; asks the baseline server about near ties."""
        without, with_drafter = (max(self.passes[mode], key=lambda each: len(each.answers)) for mode in ("baseline", "serving"))
        model = read_model_config(self.config.model_path)
        self.lossless = compare(
            [prompt.id for prompt in self.prompts], [prompt.input_ids for prompt in self.prompts],
            [answer.output_ids for answer in without.answers], [answer.output_ids for answer in with_drafter.answers],
            served_dtype(text_config(model) if "dtype" in text_config(model) or "torch_dtype" in text_config(model) else model, self.config.target.dtype),
            lambda ids: next_token_margin(baseline_url, ids),
        )  # fmt: skip
        return self.lossless

    def content(self) -> dict[str, Any]:
        """What report.json says, issue's keys first."""
        fullest = max(self.passes["serving"], key=lambda each: len(each.answers))
        served, predicted = accept_length(fullest.answers), predicted_accept_length(self.config)
        levels = [
            {"concurrency": plain.concurrency, "requests": len(plain.answers), "baseline": plain.as_dict(), "speculative": fast.as_dict(), "speedup": fast.tok_s / plain.tok_s}
            for plain, fast in zip(self.passes["baseline"], self.passes["serving"], strict=True)
        ]
        first = levels[0]
        earlier = steps_before(self.config)
        return {
            "accept_length": served,
            "accept_length_request_mean": accept_length_mean(fullest.answers),
            "predicted_accept_length": predicted,
            "gap": None if predicted is None or served is None else served / predicted - 1,
            "lossless": self.lossless.as_dict() if self.lossless else None,
            "baseline_tok_s": first["baseline"]["tok_s"],
            "speculative_tok_s": first["speculative"]["tok_s"],
            "speedup": first["speedup"],
            "concurrency": first["concurrency"],
            **earlier,
            "num_steps": self.config.serve.num_steps,
            "topk": self.config.serve.topk,
            "prompt_set": self.config.bench.prompts,
            "chat_template": True,
            "levels": levels,
        }


def steps_before(config: Config) -> dict[str, Any]:
    """What the run's earlier steps reported: samples, tokens, extract_tok_s of the store, train_tok_s of the trainer; None where a report is missing."""
    found: dict[str, Any] = {}
    for path, keys in ((config.run.store / "report.json", ("samples", "tokens", "extract_tok_s")), (config.run.drafter / "report.json", ("train_tok_s",))):
        report = read_report(path)
        found |= {key: report.get(key) for key in keys}
    return found


def read_report(path: Path) -> dict[str, Any]:
    """A step's report, {} when the step has not run here."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except json.JSONDecodeError as exc:
        raise UserError(f"{path} is not valid JSON ({exc}); run its step again") from None


def table(content: dict[str, Any]) -> str:
    """The levels as a table, then accept length and equality."""
    lines = ["  concurrency  requests  without tok/s  with tok/s  speed-up  accept length (pooled)  per-request mean"]
    for level in content["levels"]:
        fast = level["speculative"]
        lines.append(
            f"  {level['concurrency']:>11}  {level['requests']:>8}  {level['baseline']['tok_s']:>13.1f}  {fast['tok_s']:>10.1f}  {level['speedup']:>7.2f}x"
            f"  {fast['accept_length']:>22.3f}  {fast['accept_length_request_mean']:>16.3f}"
        )
    if content["predicted_accept_length"] is not None:
        lines.append(f"  predicted accept length {content['predicted_accept_length']:.3f}, served {content['accept_length']:.3f}: gap {content['gap']:+.1%}")
    lossless = content["lossless"]
    lines.append(f"  texts: {lossless['compared']} compared, {lossless['equal']} equal, {lossless['near_ties']} near ties, {len(lossless['different'])} different")
    lines += [f"    {text}" for text in lossless["different"][:5]]
    return "\n".join(lines)
