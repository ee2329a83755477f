"""Prompt sets of the benchmark: the run's held-out chats, the built-in ones of six kinds, or a file of the user's. The target's chat template is always applied."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Iterable

from .chats import BadRow, Chat, read_rows
from .check import context_length
from .config import Config
from .config_rules import option_number
from .errors import UserError
from .other_runs import hint
from .generate import Answer, Prompt, prompts_of
from .identity import read_model_config, text_config
from .paths import CONFIGS, resolve_input
from .render import ChatTokenizer
from .samples import SampleFile
from .servers import server_args

BUILTIN = CONFIGS / "bench_prompts"
CATEGORIES = ("chat", "code", "maths", "extraction", "translation", "long_context")


@dataclass
class Item:
    """One chat of a set, before it is rendered. `followups` are user turns that come after the target's own answer (MT-Bench)."""

    name: str
    category: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    followups: list[str] = field(default_factory=list)


@dataclass
class PromptSet:
    """Rendered prompts of one set, and what could not be used."""

    name: str
    prompts: list[Prompt]
    items: dict[str, Item] = field(default_factory=dict)  # by prompt id, those with followups
    skipped: int = 0  # too long for the server's context, or a later turn that the template refuses


def item_of(name: str, row: Any, chat: Chat | BadRow) -> Item:
    """One row of a prompt file: MT-Bench (`turns`), GSM8K (`question` and `answer`), HumanEval (`entry_point`), or any format of chats. Raises BadRow."""
    if isinstance(row, dict):
        category = str(row.get("category") or "")
        if isinstance(row.get("turns"), list) and row["turns"] and all(isinstance(turn, str) for turn in row["turns"]):
            return Item(name, category or "mt-bench", [{"role": "user", "content": row["turns"][0]}], followups=row["turns"][1:])
        if isinstance(row.get("question"), str) and "answer" in row:
            return Item(name, category or "gsm8k", [{"role": "user", "content": row["question"]}])
        if isinstance(row.get("prompt"), str) and "entry_point" in row:
            text = f"Complete this Python function.\n\n```python\n{row['prompt'].rstrip()}\n```"
            return Item(name, category or "humaneval", [{"role": "user", "content": text}])
    else:
        category = ""
    if isinstance(chat, BadRow):
        raise chat
    if chat.input_ids is not None:
        raise BadRow("ready token ids are no prompt for a benchmark; give chats")
    messages = chat.messages
    while messages and messages[-1]["role"] == "assistant":  # the answer is what the servers are asked for
        messages = messages[:-1]
    return Item(name, category or "chat", messages, chat.tools)


def read_items(path: Path, category: str = "") -> list[Item]:
    """All rows of a file; raises UserError naming the first row that is no prompt."""
    items = []
    for number, row, chat in read_rows(path):
        try:
            item = item_of(f"{path.stem}:{number}", row, chat)
        except BadRow as exc:
            raise UserError(f"{path} line {number} is no prompt: {exc}; give chats (messages, conversations, prompt), MT-Bench, GSM8K or "
                f"HumanEval rows") from None
        item.category = category or item.category
        items.append(item)
    if not items:
        raise UserError(f"{path} holds no prompts")
    return items


def in_turn(groups: Iterable[list[Item]], count: int) -> list[Item]:
    """The first of each group, then the second of each, ... until there are `count`."""
    lists = [list(group) for group in groups]
    mixed = [group[index] for index in range(max(map(len, lists))) for group in lists if index < len(group)]
    return mixed[:count]


def longest_context(config: Config, mode: str = "serving") -> int:
    """Tokens a request may have on this config's servers, prompt and answer together."""
    return option_number(server_args(config, mode), "context-length", default=0) or context_length(text_config(read_model_config(config.model_path)))


def render_set(config: Config, name: str, items: list[Item]) -> PromptSet:
    """Through the target's template; prompts that leave no room for the answer are skipped and counted."""
    tokenizer, limit = ChatTokenizer.of(config), longest_context(config)
    result = PromptSet(name, [])
    for item in items:
        try:
            ids = tokenizer.prompt(Chat(item.messages, item.tools), len(item.messages))
        except BadRow as exc:
            raise UserError(f"prompt {item.name}: {exc}") from None
        if len(ids) + config.bench.max_new_tokens + 1 > limit:
            result.skipped += 1
            continue
        result.prompts.append(Prompt(item.name, ids, config.bench.max_new_tokens, item.category))
        if item.followups:
            result.items[item.name] = item
    if not result.prompts:
        raise UserError(f"no prompt of {name} leaves room for bench.max_new_tokens = {config.bench.max_new_tokens} in a context of {limit} tokens")
    return result


def with_followups(config: Config, prompts: PromptSet, ask: Callable[[list[Prompt]], list[Answer]]) -> PromptSet:
    """Add the later turns of the set's chats, behind the target's own answers to the earlier ones."""
    waiting, tokenizer, limit = dict(prompts.items), None, longest_context(config)
    turn = 1
    while waiting:
        tokenizer = tokenizer or ChatTokenizer.of(config)
        asked = [prompt for prompt in prompts.prompts if prompt.id in waiting]
        for answer in ask(asked):
            item = waiting.pop(answer.prompt.id)
            message = tokenizer.message_of(answer.output_ids)
            message.pop("tool_calls", None)
            messages = [*item.messages, message, {"role": "user", "content": item.followups[0]}]
            try:
                ids = tokenizer.prompt(Chat(messages, item.tools), len(messages))
            except BadRow:  # of the target's own answer: the turns up to here count
                ids = None
            if ids is None or len(ids) + config.bench.max_new_tokens + 1 > limit:
                prompts.skipped += len(item.followups)
                continue
            name = f"{item.name.split('/')[0]}/{turn + 1}"
            prompts.prompts.append(Prompt(name, ids, config.bench.max_new_tokens, item.category))
            if item.followups[1:]:
                waiting[name] = Item(name, item.category, messages, item.tools, item.followups[1:])
        turn += 1
    prompts.items = {}
    return prompts


def heldout_set(config: Config) -> PromptSet:
    """The prompts of the run's held-out chats: training's walk drafts on the same answers, so that its number and this one can be compared."""
    path = config.run.data / "heldout.safetensors"
    if not path.exists():
        raise UserError(f"{path} does not exist; make it with `make data`{hint(config, 'data/heldout.safetensors')}")
    file = SampleFile(path)
    prompts = [prompt for index in range(min(config.bench.samples, len(file))) for prompt in prompts_of(file[index], config.bench.max_new_tokens)]
    if not prompts:
        raise UserError(f"{file.path} holds no sample with a prompt and an answer; set data.heldout and make it again with `make data`")
    return PromptSet("heldout", prompts)


def load_set(config: Config, name: str) -> PromptSet:
    """`heldout`, `builtin`, one of its six categories, or a file."""
    if name == "heldout":
        return heldout_set(config)
    if name == "builtin":
        groups = [read_items(BUILTIN / f"{category}.jsonl", category) for category in CATEGORIES]
        return render_set(config, name, in_turn(groups, config.bench.samples))
    if name in CATEGORIES:
        return render_set(config, name, read_items(BUILTIN / f"{name}.jsonl", name)[: config.bench.samples])
    path = resolve_input(name)
    if not path.is_file():
        raise UserError(f"prompts {name!r} is neither heldout, builtin, one of {', '.join(CATEGORIES)}, nor a file that exists")
    name_of_set = path.name if path.stem in ("heldout", "builtin", *CATEGORIES) else path.stem  # a file of that name is not what training walked
    return render_set(config, name_of_set, read_items(path)[: config.bench.samples])
