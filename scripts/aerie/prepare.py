"""02a's way from files of chats to train and held-out rows: select by content, ask for answers, render and mask, write in a stream.

Twice over the input: first to see which chats there are (64 bits each), then to render them. Nothing depends on the order of files or rows but the rows' order.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from array import array
from collections import Counter
from functools import partial
from typing import Any, Iterator, NamedTuple

import numpy as np

from .answer_log import Answer, AnswerLog, answer_key
from .answer_server import AnswerServer, NoAnswer
from .answers import recorded, run_many, walk
from .chats import BadRow, Chat, read_rows
from .config import Config
from .config_rules import check_against_model_config
from .errors import UserError
from .identity import model_hash
from .inputs import input_files
from .progress import Progress
from .render import MASK_RULE, ChatTokenizer, Turn, rows_of, supervised_predictions
from .rid import sample_id
from .row_writer import Rejected, RowWriter
from .samples import Sample
from .vocab import COVERAGE_SIZES, coverage, rank_ids, write_vocab_map

MIN_SUPERVISED = 0.05  # below this share of supervised tokens something is probably wrong with the mask


class Selection(NamedTuple):
    """Which chats are used: by the 64-bit hash of their prompt, so the same chats in any order and any file."""

    heldout_below: int  # prompt_key <= this: held out
    train_below: int  # else prompt_key <= this: trained on
    heldout: int
    train: int
    content: str  # names the chats and their order


class Preparation:
    """One run of 02a."""

    def __init__(self, config: Config, regenerate: bool):
        self.config, self.regenerate = config, regenerate
        self.inputs = input_files(config)
        self.folder = config.run.data
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.asked: Counter[str] = Counter()
        check_against_model_config(config)
        self.tokenizer = ChatTokenizer.of(config)
        forced, room = len(self.tokenizer.forced_ids), config.draft.vocab_size
        if forced > room:
            raise UserError(f"draft.vocab_size = {room} has no room for the {forced} end-of-turn, tool and reasoning markers of this tokenizer; set it higher")

    def chats(self, rejected: Rejected | None) -> Iterator[Chat]:
        """Every usable chat once, in the order of files and lines; bad rows go to `rejected` on the pass that counts."""
        seen: set[int] = set()
        for path in self.inputs:
            for number, row, chat in read_rows(path):
                if isinstance(chat, BadRow):
                    if rejected is not None:
                        rejected.add(f"{path.name}:{number}", row, str(chat))
                    continue
                key = chat.content_key(answers=not self.regenerate)
                if key in seen:
                    self.counts["duplicate_chats"] += rejected is not None
                    continue
                seen.add(key)
                yield chat

    def select(self, rejected: Rejected) -> Selection:
        """Read everything once; the chats with the smallest prompt hashes are held out, the next ones are trained on."""
        data = self.config.data
        keys, digest = array("Q"), hashlib.sha256()
        for chat in self.chats(rejected):
            keys.append(chat.prompt_key())
            digest.update(chat.content_key().to_bytes(8, "big"))
        if not keys:
            raise UserError(f"no usable chat in {', '.join(map(str, self.inputs))}; see {rejected.path}")
        if data.heldout >= len(keys):
            raise UserError(f"data.heldout = {data.heldout} of {len(keys)} chats leaves nothing to train on; set data.heldout lower or give more chats")
        # each prompt's chats stay on one side, so a few more than data.heldout may be held out
        ranked = np.sort(np.frombuffer(keys, np.uint64))
        heldout_below = int(ranked[data.heldout - 1]) if data.heldout else -1
        heldout = int(np.searchsorted(ranked, heldout_below, "right")) if data.heldout else 0
        last = len(keys) - 1 if not data.limit else min(heldout + data.limit, len(keys)) - 1
        train_below = int(ranked[last])
        train = int(np.searchsorted(ranked, train_below, "right")) - heldout
        if not train:
            raise UserError(f"data.heldout = {data.heldout} takes all {len(keys)} chats, because they begin the same; set data.heldout lower or give more chats")
        self.counts |= {"chats": len(keys), "heldout_chats": heldout, "train_chats": train, "unused_chats": len(keys) - heldout - train}
        return Selection(heldout_below, train_below, heldout, train, digest.hexdigest())

    def selected(self, selection: Selection) -> Iterator[tuple[Chat, bool]]:
        """(chat, held out) for the chosen chats, in input order."""
        for chat in self.chats(None):
            key = chat.prompt_key()
            if key <= max(selection.heldout_below, selection.train_below):
                yield chat, key <= selection.heldout_below

    # -- answers ---------------------------------------------------------------------------------------------------------------------------------------

    def write_answers(self, selection: Selection, log: AnswerLog, rejected: Rejected) -> None:
        """Ask the target for every answer that the log does not hold, many chats at once. Held-out chats are answered greedily whatever data.temperature is:

        the predicted accept length is a walk over the target's own greedy text.
        """
        server = AnswerServer(self.config)
        self.answer_settings = {greedy: server.settings(model_hash(self.config.model_path), greedy) for greedy in (False, True)}
        progress = Progress(selection.heldout + selection.train, "answered", "chats")
        locked, lock, checked = LockedTokenizer(self.tokenizer), threading.Lock(), threading.Event()

        def answer_of(greedy: bool, prompt: list[int], history: Chat) -> Answer | None:
            key = answer_key(prompt, self.answer_settings[greedy])
            if key in log:
                return log.get(key)
            with lock:  # the server need not be there when the log holds every answer
                if not checked.is_set():
                    server.check()
                    checked.set()
            start = time.monotonic()
            try:
                answer = server.ask(prompt, history, greedy)
            except NoAnswer as exc:
                with lock:
                    rejected.add(history.source, history.messages, str(exc))
                return None
            log.add(key, answer)
            with lock:
                self.asked.update(answers=1, tokens=len(answer.output_ids))
                progress.update(0, tokens=len(answer.output_ids), request_seconds=time.monotonic() - start)
            return answer

        def one(item: tuple[Chat, bool]) -> None:
            chat, heldout = item
            if chat.input_ids is None:
                walk(locked, locked.guarded(chat), partial(answer_of, heldout), keep_truncated=True)

        start = time.monotonic()
        try:
            for problem in run_many(self.selected(selection), one, self.config.data.concurrency):
                if problem is not None and not isinstance(problem, BadRow):  # a bad row is rejected, and counted, when rows are written
                    raise problem
                with lock:
                    progress.update(errors=rejected.count - progress.errors)
        finally:
            server.stopped.set()
        progress.close()
        self.seconds["answers"] = time.monotonic() - start

    # -- rows ------------------------------------------------------------------------------------------------------------------------------------------

    def turns(self, chat: Chat, heldout: bool, log: AnswerLog | None) -> list[Turn]:
        """The chat's turns: its own answers, or those of the log."""
        chat = self.tokenizer.guarded(chat)
        if log is None:
            return recorded(self.tokenizer, chat)
        settings = self.answer_settings[heldout]
        found = walk(self.tokenizer, chat, lambda prompt, _: log.get(answer_key(prompt, settings)), self.config.data.truncated_answers == "keep")
        self.counts["truncated_answers"] += found.truncated
        self.counts["missing_answers"] += found.missing
        self.counts["retokenised_answers"] += found.retokenised
        self.counts["chats_ended_by_tool_call"] += found.ended_by_tool_call
        return found.turns

    def rows(self, chat: Chat, heldout: bool, log: AnswerLog | None) -> Iterator[Sample]:
        """The chat's rows as they will be trained on, cut to data.max_tokens; what is dropped is counted. Raises BadRow."""
        if chat.input_ids is not None:
            pairs = [(chat.input_ids, chat.loss_mask)]
        else:
            pairs = rows_of(self.turns(chat, heldout, log))
            self.counts["chats_without_answer"] += not pairs
        self.counts["chats_one_row_a_turn"] += len(pairs) > 1
        if (largest := max((int(ids.max()) for ids, _ in pairs), default=0)) >= self.tokenizer.vocab_size:
            raise BadRow(f"input_ids holds {largest}, the target's vocabulary has {self.tokenizer.vocab_size}")
        limit = self.config.data.max_tokens
        for ids, mask in pairs:
            if len(ids) > limit:
                border = last_turn_border(mask, limit) if self.config.data.too_long == "cut" else 0
                self.counts["rows_cut" if border else "rows_too_long"] += 1
                if not border:
                    continue
                ids, mask = ids[:border], mask[:border]
            if not supervised_predictions(mask):
                self.counts["rows_nothing_to_supervise"] += 1
                continue
            yield Sample(sample_id(ids, mask), ids, mask)

    def write_rows(self, selection: Selection, log: AnswerLog | None, rejected: Rejected) -> dict[str, Any]:
        """Render, mask and write both splits and the vocabulary map; returns what the report says of them. An interrupted run goes on at its last checkpoint."""
        metadata = self.metadata()
        settings = [selection, metadata, self.config.data.max_tokens, self.config.data.too_long, self.config.data.truncated_answers, len(log) if log is not None else -1]
        settings += [sorted(self.tokenizer.end_ids), sorted(self.answer_settings.items()) if log is not None else None]
        writer = RowWriter(self.folder, metadata, json.dumps(settings), self.counts, rejected)
        progress = Progress(selection.heldout + selection.train, "rendered", "chats", already=writer.chats)
        start = time.monotonic()
        try:
            for chat, heldout in itertools.islice(self.selected(selection), writer.chats, None):
                tokens = 0
                try:
                    for sample in self.rows(chat, heldout, log):
                        tokens += writer.add(sample, heldout)
                except BadRow as exc:
                    rejected.add(chat.source, chat.messages, str(exc))
                writer.end_of_chat()
                progress.update(1, tokens=tokens, errors=rejected.count - progress.errors)
            progress.close()
            self.seconds["rows"] = time.monotonic() - start
            self.rendered = progress.items
            if not writer.writers["train"].rows:
                writer.abandon()
                unanswered = self.counts["chats_without_answer"]
                if unanswered and not self.regenerate:
                    raise UserError(
                        f"no row to train on came out of {selection.train} chats: {unanswered} of all chats have no answer, and the target is not to write them; "
                        "leave --no-regenerate out (data.regenerate = true), or bring chats with answers"
                    )
                raise UserError(f"no row to train on came out of {selection.train} chats; see {rejected.path} and the counts: {dict(self.counts)}")
            supervised, others, data_hash = writer.token_counts(self.tokenizer.vocab_size)
            table = self.write_vocab(supervised, others, metadata | {"data_hash": data_hash})
            return {"splits": writer.close(), **table}
        except BaseException:
            writer.release()
            raise

    def write_vocab(self, supervised: np.ndarray, others: np.ndarray, metadata: dict[str, str]) -> dict[str, Any]:
        """Choose the draft vocabulary and write its map."""
        forced, size = self.tokenizer.forced_ids, min(self.config.draft.vocab_size, len(supervised))
        ranked = rank_ids(supervised, forced, others)
        table = coverage(supervised, ranked, [size, *COVERAGE_SIZES])
        write_vocab_map(self.folder / "vocab_map.safetensors", ranked[:size], len(supervised), metadata | {"coverage": f"{table[size]:.6f}"})
        return {
            "draft_vocab_size": size, "coverage": {str(key): value for key, value in sorted(table.items())},
            "distinct_supervised_ids": int(np.count_nonzero(supervised)), "forced_ids": forced, "data_hash": metadata["data_hash"],
        }  # fmt: skip

    def rates(self) -> dict[str, float]:
        """Chats and tokens a second of the two slow parts."""
        found = {"rendered_chats_s": self.rendered / max(self.seconds["rows"], 1e-9)}
        if self.regenerate:
            found |= {"answers_asked": self.asked["answers"], "answer_tok_s": self.asked["tokens"] / max(self.seconds["answers"], 1e-9)}
        return found

    def metadata(self) -> dict[str, str]:
        """What both splits and the map say about where they came from."""
        return {
            "tokenizer_hash": self.tokenizer.hash, "template_hash": self.tokenizer.template_hash, "mask_rule": MASK_RULE,
            "model_path": self.config.model_path, "model_hash": model_hash(self.config.model_path),
            "answers": "target" if self.regenerate else "recorded",
        }  # fmt: skip


class LockedTokenizer:
    """The calls that answering makes, one thread at a time: tokenizers and templates are not promised to be safe for threads."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer, self._lock = tokenizer, threading.Lock()

    def guarded(self, chat: Chat) -> Chat:
        with self._lock:
            return self._tokenizer.guarded(chat)

    def prompt(self, chat: Chat, index: int) -> list[int]:
        with self._lock:
            return self._tokenizer.prompt(chat, index)

    def turn(self, chat: Chat, index: int) -> Turn:
        with self._lock:
            return self._tokenizer.turn(chat, index)

    def message_of(self, answer: list[int]) -> dict[str, Any]:
        with self._lock:
            return self._tokenizer.message_of(answer)


def last_turn_border(mask: np.ndarray, limit: int) -> int:
    """The largest length up to `limit` at which an answer has just ended (mask 1, then 0 or the row's end); 0 when no answer ends by then."""
    ends = np.flatnonzero((mask == 1) & (np.append(mask[1:], 0) == 0)) + 1
    ends = ends[ends <= limit]
    return int(ends[-1]) if len(ends) else 0
