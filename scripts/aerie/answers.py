"""A chat's turns: with its recorded answers, or walked anew with the target's own; and many chats at once in threads."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Iterator, Protocol, TypeVar

from .answer_log import Answer
from .chats import Chat, keeps_recorded
from .render import ChatTokenizer, Turn

Item = TypeVar("Item")


class Renders(Protocol):
    """What walk() needs of a ChatTokenizer."""

    def guarded(self, chat: Chat) -> Chat: ...

    def prompt(self, chat: Chat, index: int) -> list[int]: ...

    def turn(self, chat: Chat, index: int) -> Turn: ...

    def message_of(self, answer: list[int]) -> dict[str, Any]: ...


@dataclass
class Walked:
    """One chat with its answers: the turns, and what happened on the way."""

    turns: list[Turn] = field(default_factory=list)
    truncated: int = 0
    ended_by_tool_call: bool = False
    retokenised: int = 0
    missing: int = 0  # answers that were not to be had


def walk(tokenizer: Renders, chat: Chat, answer_of: Callable[[list[int], Chat], Answer | None], keep_truncated: bool) -> Walked:
    """Replay a chat with the target's own answers in place of the recorded ones, turn by turn.

    Where recorded tool results follow, they belong to the recorded calls: the target's own answer becomes a turn, the recorded one stays in the history.
    The chat ends at an answer that is cut off or that calls a tool nobody answers.
    """
    out = Walked()
    history = Chat([], chat.tools, chat.source)
    for index, message in enumerate([*chat.messages, None]):
        if message is not None and message["role"] != "assistant":
            history.messages.append(message)
            continue
        if not any(item["role"] == "user" for item in history.messages) or history.messages[-1]["role"] == "assistant":
            if message is not None and not out.turns:
                history.messages.append(message)
            continue
        count = len(history.messages)
        prompt = tokenizer.prompt(history, count)
        answer = answer_of(prompt, history)
        if answer is None:
            out.missing += 1
            return out
        out.truncated += answer.finish == "length"
        if answer.finish != "length" or keep_truncated:
            if answer.retokenised:
                out.retokenised += 1
                whole = Chat([*history.messages, *tokenizer.guarded(Chat([answer.message])).messages], history.tools)
                turn = tokenizer.turn(whole, count)
                out.turns.append(turn if answer.finish != "length" else Turn(turn.prompt, turn.answer[:-1]))
            else:
                out.turns.append(Turn(answer.prompt_ids or prompt, answer.output_ids))
        if answer.finish == "length":
            return out
        if message is not None and keeps_recorded(chat.messages, index):
            history.messages.append(message)
            continue
        said = tokenizer.guarded(Chat([answer.message])).messages[0] if answer.message else tokenizer.message_of(answer.output_ids)
        if said.get("tool_calls"):
            out.ended_by_tool_call = True
            return out
        history.messages.append(said)
    return out


def recorded(tokenizer: ChatTokenizer, chat: Chat) -> list[Turn]:
    """The chat's own answers as turns: every assistant turn after the first user message. Raises BadRow when the template refuses."""
    turns, asked = [], False
    for index, message in enumerate(chat.messages):
        asked = asked or message["role"] == "user"
        if message["role"] == "assistant" and asked:
            turns.append(tokenizer.turn(chat, index))
    return turns


def run_many(items: Iterable[Item], function: Callable[[Item], None], workers: int) -> Iterator[BaseException | None]:
    """function(item) in `workers` threads; yields None or its exception as each ends, in any order, reading few items ahead.

    The threads are daemons: an interrupted run ends at once and waits for no request.
    """
    todo: queue.Queue[Any] = queue.Queue()
    done: queue.Queue[BaseException | None] = queue.Queue()
    stop = object()

    def work() -> None:
        while (item := todo.get()) is not stop:
            try:
                function(item)
                done.put(None)
            except BaseException as exc:  # noqa: BLE001  handed to the caller, who raises it
                done.put(exc)

    for _ in range(workers):
        threading.Thread(target=work, daemon=True).start()
    running = 0
    try:
        for item in items:
            while running >= 2 * workers:
                yield done.get()
                running -= 1
            todo.put(item)
            running += 1
        for _ in range(running):
            yield done.get()
    finally:
        while not todo.empty():
            todo.get()
        for _ in range(workers):
            todo.put(stop)
