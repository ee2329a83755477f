"""Requests to a running SGLang server: token ids in, token ids out, with what speculation says of each answer."""

from __future__ import annotations

import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import requests

from .errors import UserError
from .samples import Sample
from .servers import Server
from .walk import answer_runs


@dataclass(frozen=True)
class Prompt:
    """One request: the ids that the target's chat template made, and how many tokens to ask for."""

    id: str
    input_ids: list[int]
    max_new_tokens: int
    category: str = ""


@dataclass
class Answer:
    """What came back for one prompt."""

    prompt: Prompt
    output_ids: list[int]
    verifications: int  # target forward passes after prefill; 0 without a drafter
    histogram: list[int]  # verifications by the number of draft tokens they accepted
    seconds: float
    chunks: list[tuple[float, int]] = field(default_factory=list)  # streamed answers: seconds since the request, tokens so far

    @property
    def drafted_tokens(self) -> int:
        """Tokens that came out of verifications: all but the one that prefill gave."""
        return max(len(self.output_ids) - 1, 0)


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Tokens a verification, pooled over answers; prefill's own token is not counted. None without a verification.

    SGLang's own spec_accept_length counts prefill's token too: 8 tokens in 7 verifications read 1.14 there with nothing accepted.
    """
    verifications = sum(answer.verifications for answer in answers)
    return sum(answer.drafted_tokens for answer in answers) / verifications if verifications else None


def accept_length_mean(answers: Sequence[Answer]) -> float | None:
    """The mean over requests of their own accept lengths: weighs short answers as much as long ones."""
    values = [answer.drafted_tokens / answer.verifications for answer in answers if answer.verifications]
    return sum(values) / len(values) if values else None


def prompts_of(sample: Sample, max_new_tokens: int) -> list[Prompt]:
    """The requests that give a sample's answers again: everything before a supervised span, and as many tokens as the span has.

    So serving decodes exactly the spans that training's walk drafts on.
    """
    return [
        Prompt(f"{sample.id}.{number}", sample.input_ids[:start].tolist(), min(end - start, max_new_tokens), "heldout")
        for number, (start, end) in enumerate(answer_runs(sample.loss_mask)) if start > 0
    ]  # fmt: skip


def answer_of(url: str, prompt: Prompt, data: Any, seconds: float, chunks: Sequence[tuple[float, int]] = ()) -> Answer:
    """What /generate gave. Raises UserError for what SGLang does not say: another program has the port."""
    try:
        meta = data["meta_info"]
        return Answer(prompt, list(data["output_ids"]), meta.get("spec_verify_ct", 0), meta.get("spec_correct_drafts_histogram") or [], seconds, list(chunks))
    except (TypeError, KeyError, AttributeError):
        raise UserError(f"{url} gave no answer of SGLang to prompt {prompt.id}: {str(data)[:200]}; see which program has that port") from None


def generate(url: str, prompt: Prompt, timeout_s: float = 600.0, session: requests.Session | None = None) -> Answer:
    """One greedy answer from /generate. Raises requests' errors when the server is gone, UserError when it refuses the prompt."""
    body = {"input_ids": prompt.input_ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": prompt.max_new_tokens}}
    start = time.monotonic()
    reply = (session or requests).post(f"{url}/generate", json=body, timeout=timeout_s)
    seconds = time.monotonic() - start
    if reply.status_code != 200:
        raise UserError(f"{url} refused prompt {prompt.id} ({len(prompt.input_ids)} tokens, {prompt.max_new_tokens} to come): {reply.status_code} "
            f"{reply.text[:200]}")
    return answer_of(url, prompt, reply.json(), seconds)


def chunk_of(url: str, prompt: Prompt, line: bytes) -> tuple[dict[str, Any], int]:
    """One `data:` line of a stream, and the tokens up to it. Raises UserError for an error in place of an answer."""
    try:
        data = json.loads(line[5:])
        return data, data["meta_info"]["completion_tokens"]
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{url} broke off the answer to prompt {prompt.id}: {line[5:205].decode(errors='replace').strip()}") from None


def generate_streamed(url: str, prompt: Prompt, timeout_s: float = 600.0, session: requests.Session | None = None) -> Answer:
    """The same, streamed: the answer's `chunks` say when its tokens came."""
    body = {"input_ids": prompt.input_ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": prompt.max_new_tokens}, "stream": True}
    start = time.monotonic()
    chunks: list[tuple[float, int]] = []
    last: dict = {}
    with (session or requests).post(f"{url}/generate", json=body, timeout=timeout_s, stream=True) as reply:
        if reply.status_code != 200:
            raise UserError(f"{url} refused prompt {prompt.id} ({len(prompt.input_ids)} tokens, {prompt.max_new_tokens} to come): {reply.status_code} "
                f"{reply.text[:200]}")
        for line in reply.iter_lines(chunk_size=None):
            if not line.startswith(b"data:") or line == b"data: [DONE]":
                continue
            last, tokens = chunk_of(url, prompt, line)
            chunks.append((time.monotonic() - start, tokens))
    if not chunks:
        raise requests.ConnectionError(f"{url} ended the stream without an answer")
    return answer_of(url, prompt, last, time.monotonic() - start, chunks)


def generate_all(
    url: str, prompts: Sequence[Prompt], concurrency: int, timeout_s: float = 600.0, done: Callable[[Answer], None] | None = None,
    one: Callable[..., Answer] = generate,
) -> tuple[list[Answer], float]:  # fmt: skip
    """Answers in the order of `prompts`, `concurrency` requests in flight; and the seconds it took. The first error ends it."""
    local = threading.local()

    def ask(prompt: Prompt) -> Answer:
        if not hasattr(local, "session"):
            local.session = requests.Session()
        answer = one(url, prompt, timeout_s, local.session)
        if done:
            done(answer)
        return answer

    start = time.monotonic()
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        futures = [pool.submit(ask, prompt) for prompt in prompts]
        try:
            answers = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return answers, time.monotonic() - start


def ask_server(
    server: Server, prompts: Sequence[Prompt], concurrency: int, timeout_s: float, done: Callable[[Answer], None] | None = None, one: Callable[..., Answer] = generate
) -> tuple[list[Answer], float]:
    """generate_all() of one of our servers. Raises UserError that names it when it stops answering, and when it is gone and another program answered in its place."""
    answered = 0

    def count(answer: Answer) -> None:
        nonlocal answered
        answered += 1
        if done:
            done(answer)

    try:
        answers, seconds = generate_all(server.url, prompts, concurrency, timeout_s, count, one)
    except requests.RequestException as exc:
        raise UserError(f"the {server.mode} server stopped answering after {answered} of {len(prompts)} requests ({type(exc).__name__}); it {server.state()} "
            f"(log: {server.log})") from None
    if not server.alive():
        raise UserError(f"the {server.mode} server died while {len(prompts)} requests were under way, and another one answers on {server.url}: {server.last_error()} "
            f"(log: {server.log}); run the same command again")
    return answers, seconds


def next_token_distance(url: str, input_ids: list[int], left: int, right: int, timeout_s: float = 600.0) -> float:
    """How far the less likely of two next tokens lies below the likeliest of all, in log-probability; inf where it is not among the 128 likeliest or the server computed NaN.

    Tells a near tie from a wrong text. (`token_ids_logprob` would ask for the two alone, but SGLang 0.5.17 dies of a batch in which only some requests do.)
    Raises UserError when the server is gone or refuses.
    """
    body = {"input_ids": input_ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": 1}, "return_logprob": True, "top_logprobs_num": 128}
    asked = f"how likely tokens {left} and {right} are after {len(input_ids)} others"
    try:
        reply = requests.post(f"{url}/generate", json=body, timeout=timeout_s)
    except requests.RequestException as exc:
        raise UserError(f"{url} stopped answering when asked {asked} ({type(exc).__name__}); see the server's log") from None
    if reply.status_code != 200:
        raise UserError(f"{url} did not say {asked}: {reply.status_code} {reply.text[:200]}")
    try:
        likeliest = reply.json()["meta_info"]["output_top_logprobs"][0]
        values = {token: value for value, token, *_ in likeliest}
        numbers = (likeliest[0][0], values.get(left), values.get(right))
    except (ValueError, TypeError, LookupError):
        raise UserError(f"{url} did not say {asked}: {reply.text[:200]}") from None
    if any(value is None or not math.isfinite(value) for value in numbers):  # NaN is null in JSON
        return math.inf
    return numbers[0] - min(numbers)
