"""Whoever writes the answers: SGLang's /generate by token ids, or the chat endpoint of any OpenAI-compatible server."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from typing import Any

import requests

from .answer_log import Answer
from .chats import BadRow, Chat, parse_row
from .config import Config
from .errors import UserError
from .servers import url_of
from .tokenizer import GUARD

REFUSED = (400, 404, 413, 422)  # asking again would not help


class NoAnswer(Exception):
    """The server refuses this request for good (too long, not understood)."""


class AnswerServer:
    """The target, served: by this run's extraction server, or at data.url. A URL that ends in /v1 is an OpenAI-compatible one."""

    def __init__(self, config: Config):
        self.config, self.data = config, config.data
        self.urls = [self.data.url.rstrip("/")] if self.data.url else config.server.urls or [url_of(config, "extraction")]
        self.openai = self.urls[0].endswith("/v1")
        self.model = self.data.model
        self.stopped = threading.Event()
        self._turn = itertools.count()
        self._local = threading.local()

    def settings(self, model_hash: str, greedy: bool) -> str:
        """What an answer depends on besides its prompt; a part of its key."""
        data = self.data
        return json.dumps(["chat" if self.openai else "generate", model_hash, 0.0 if greedy else data.temperature, data.top_p, data.max_new_tokens])

    def check(self) -> None:
        """Raises UserError when nobody answers there; asks for the model's name where the config has none."""
        for url in self.urls:
            try:
                reply = self._session().get(f"{url}/models" if self.openai else f"{url}/health", timeout=30)
                ready, problem = reply.status_code == 200, f"status {reply.status_code}"
                if ready and self.openai and not self.model:
                    self.model = reply.json()["data"][0]["id"]
            except (requests.RequestException, ValueError, KeyError, IndexError) as exc:
                ready, problem = False, type(exc).__name__
            if not ready:
                raise UserError(f"no server answers at {url} ({problem}); start it with `make server`, or name another with --set data.url=http://HOST:PORT")

    def ask(self, prompt: list[int], chat: Chat, greedy: bool) -> Answer:
        """The answer to a chat whose rendering is `prompt`; `greedy` sets data.temperature aside. Raises NoAnswer; waits while the server is away."""
        temperature = 0.0 if greedy else self.data.temperature
        try:
            return self._chat(prompt, chat, temperature) if self.openai else self._generate(prompt, temperature)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as exc:
            raise NoAnswer(f"the server's reply is not what was asked for ({type(exc).__name__}: {exc})") from None

    def _generate(self, prompt: list[int], temperature: float) -> Answer:
        sampling = {"temperature": temperature, "top_p": self.data.top_p, "max_new_tokens": self.data.max_new_tokens, "skip_special_tokens": False}
        reply = self._post("/generate", {"input_ids": prompt, "sampling_params": sampling})
        finish = reply["meta_info"]["finish_reason"] or {}
        output = _token_ids(reply["output_ids"])
        if finish.get("type") == "length":
            return Answer(output, "length")
        if finish.get("type") != "stop":
            raise NoAnswer(f"the server ended the answer with {finish}")
        matched = finish.get("matched")
        if isinstance(matched, int) and output[-1:] != [matched]:
            output.append(matched)
        return Answer(output, "stop")

    def _chat(self, prompt: list[int], chat: Chat, temperature: float) -> Answer:
        body: dict[str, Any] = {
            "model": self.model, "messages": [_as_sent(message) for message in chat.messages], "temperature": temperature,
            "top_p": self.data.top_p, "max_tokens": self.data.max_new_tokens, "return_token_ids": True,
        }  # fmt: skip
        if chat.tools:
            body["tools"] = _as_sent([{"type": "function", "function": {key: item for key, item in tool["function"].items() if item is not None}} for tool in chat.tools])
        if self.data.chat_template_kwargs:
            body["chat_template_kwargs"] = self.data.chat_template_kwargs
        reply = self._post("/chat/completions", body)
        choice = reply["choices"][0]
        finish = "length" if choice.get("finish_reason") == "length" else "stop"
        try:
            message = parse_row({"messages": [{"role": "user", "content": ""}, {**choice["message"], "role": "assistant"}]}).messages[1]
        except BadRow as exc:
            raise NoAnswer(f"the server's message cannot be used: {exc}") from None
        output = choice.get("response_token_ids") or choice.get("token_ids")  # SGLang's name, vLLM's name
        own_prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        if not output:
            return Answer([], finish, message=message, retokenised=True)
        output, own_prompt = _token_ids(output), _token_ids(own_prompt or [])
        return Answer(output, finish, prompt_ids=own_prompt if own_prompt and own_prompt != prompt else None, message=message)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST to the servers in turn until one answers; one that is away is waited for, up to extract.server_wait_s."""
        wait_s = self.config.extract.server_wait_s
        deadline, pause = time.monotonic() + wait_s, 0.5
        while not self.stopped.is_set():
            url = self.urls[next(self._turn) % len(self.urls)]
            try:
                reply = self._session().post(f"{url}{path}", json=body, timeout=self.data.request_timeout_s)
                if reply.status_code == 200:
                    return reply.json()
                if reply.status_code in REFUSED:
                    raise NoAnswer(f"the server answers {reply.status_code}: {reply.text[:300]}")
                problem = f"{reply.status_code}: {reply.text[:200]}"
            except (requests.RequestException, ValueError) as exc:
                problem = type(exc).__name__
            if time.monotonic() > deadline:
                raise UserError(f"the server at {url} gave no answer for {wait_s:.0f} s ({problem}); start it again and run the same command, it goes on from there")
            self.stopped.wait(pause)
            pause = min(pause * 2, 10.0)
        raise NoAnswer("the run was stopped")

    def _session(self) -> requests.Session:
        """One connection a thread."""
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            if self.data.api_key_env:
                self._local.session.headers["Authorization"] = f"Bearer {os.environ.get(self.data.api_key_env, '')}"
        return self._local.session


def _token_ids(value: Any) -> list[int]:
    """A list of token ids. Raises ValueError for anything else: the log must hold nothing that cannot be used."""
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ValueError("no list of token ids")
    return value


def _as_sent(value: Any) -> Any:
    """Messages and tools as a client sends them: the mark of special-looking text taken out, arguments as JSON text."""
    if isinstance(value, str):
        return value.replace(GUARD, "")
    if isinstance(value, list):
        return [_as_sent(item) for item in value]
    if isinstance(value, dict):
        clean = {key: _as_sent(item) for key, item in value.items()}
        return clean | {"arguments": json.dumps(clean["arguments"], ensure_ascii=False)} if set(clean) == {"name", "arguments"} else clean
    return value
