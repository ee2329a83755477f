"""Requests without a break at one server or two, in blocks with our names and without them in turns, and what each block's tokens took: the load of bench_capture.py."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, Sequence

import numpy as np

from .dump_file import remove_dump
from .dumps import read_error
from .errors import UserError
from .generate_client import Client, error_text, read_answer
from .processor_time import group_folders, processor_time
from .rid import new_rid, sample_id
from .servers import Server

POLL_S = 0.004  # how often the dump folder is looked at while a dump is due, as the extraction does
DUMP_TIMEOUT_S = 60.0
IDLE_S = 2.0  # a connection that was idle so long is opened anew: the server closes it after five
TOO_MANY = 20  # failed requests; then the loop ends


class Mark(NamedTuple):
    """The loop at the end of a request."""

    time: float  # seconds
    tokens: int  # of all requests that have ended
    cpu: dict[str, float]  # processor time so far, see processor_time.py


@dataclass
class Block:
    """Some requests of one kind, which the server gets one after the other.

    It answers them in order as good as, so they are told apart by number: the block's are those that end after the ones of all blocks before it. What it
    measures begins when the first `guard` of them have ended: a batch may hold requests of two blocks, and dumps of the block before are still written.
    """

    capture: bool
    prompts: Sequence[int]  # places in the loop's list
    guard: int = 0
    first: int = 0  # requests sent before this block's
    marks: dict[str, Mark] = field(default_factory=dict)  # by START, BEGIN and END

    @property
    def ended(self) -> bool:
        return END in self.marks

    @property
    def begin(self) -> Mark:
        return self.marks[BEGIN if self.guard else START]

    @property
    def tokens(self) -> int:
        return self.marks[END].tokens - self.begin.tokens

    @property
    def seconds(self) -> float:
        return self.marks[END].time - self.begin.time

    @property
    def whole_seconds(self) -> float:
        """With its first `guard` requests."""
        return self.marks[END].time - self.marks[START].time

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds

    def cpu(self, name: str) -> float:
        """Processor seconds, as processor_time() names them."""
        return self.marks[END].cpu[name] - self.begin.cpu[name]


START, BEGIN, END = "start", "begin", "end"


class Loop:
    """`concurrency` requests are under way all the time, one token each, from the first to the last of its blocks.

    As in an extraction, who sends does not wait for the dump: one thread looks for those that are due and deletes them. When 2 * concurrency requests with
    our names are under way or wait for their dump, the next one waits (`held_back` counts that: then the writing decides the rate).
    """

    def __init__(self, plain: Server, capture: Server, prompts: Sequence[np.ndarray], concurrency: int, folder: Path, run_name: str = "bench", timeout_s: float = 300.0):
        self.servers, self.concurrency, self.folder, self.run_name, self.timeout_s = {False: plain, True: capture}, concurrency, folder, run_name, timeout_s
        self.ids = [ids.tolist() for ids in prompts]
        self.samples = [sample_id(ids, np.zeros(len(ids), np.uint8)) for ids in prompts]
        self.clock: Callable[[], float] = time.perf_counter
        self.lock, self.room = threading.Lock(), threading.Semaphore(2 * concurrency)
        self.groups = {kind: (server.record["pid"], group_folders(server.record["pid"])) for kind, server in self.servers.items()}
        self.blocks: list[Block] = []
        self.ended = self.tokens = self.held_back = self.strangers = 0
        self.due: dict[str, float] = {}  # answered requests whose dump has not been seen, and when they were answered
        self.lags: list[float] = []  # seconds from an answer to its dump
        self.problems: list[str] = []
        self.fatal: BaseException | None = None  # what a thread raised: the end

    def run(self, plan: Iterator[Block]) -> list[Block]:
        """Send what `plan` yields, which is asked for the next block when all of the last one is sent; returns the blocks that ended.

        Raises what `plan` raises, and UserError where the dump folder cannot be read.
        """
        self.todo = self._requests(plan)
        self.senders = self.concurrency
        threads = [threading.Thread(target=self._guard, args=(work,), daemon=True) for work in (*[self._send] * self.concurrency, self._collect)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.fatal is not None:
            raise self.fatal
        return [block for block in self.blocks if block.ended]

    def _guard(self, work: Callable[[], None]) -> None:
        """A thread's life: what it raises ends the others too."""
        try:
            work()
        except BaseException as exc:
            self.fatal = self.fatal or exc

    def _requests(self, plan: Iterator[Block]) -> Iterator[tuple[Block, int]]:
        sent = 0
        for block in plan:
            block.first = sent
            sent += len(block.prompts)
            self.blocks.append(block)
            if self.ended == block.first:  # nothing is under way
                block.marks[START] = Mark(self.clock(), self.tokens, processor_time(*self.groups[block.capture]))
            yield from ((block, place) for place in block.prompts)

    def _next(self) -> tuple[Block, int] | None:
        with self.lock:
            return next(self.todo, None) if len(self.problems) < TOO_MANY and self.fatal is None else None

    def _send(self) -> None:
        clients = {server.url: Client(server.url, self.timeout_s) for server in self.servers.values()}
        used = dict.fromkeys(clients, 0.0)
        try:
            while (item := self._next()) is not None:
                url = self.servers[item[0].capture].url
                self._ask(clients[url], time.monotonic() - used[url] > IDLE_S, *item)
                used[url] = time.monotonic()
        finally:
            with self.lock:
                self.senders -= 1
            for client in clients.values():
                client.close()

    def _ask(self, client: Client, idle: bool, block: Block, place: int) -> None:
        rid = str(new_rid(self.run_name, self.samples[place], len(self.ids[place])))
        if block.capture and not self.room.acquire(blocking=False):
            self.held_back += 1
            while not self.room.acquire(timeout=1.0):
                if self.fatal is not None:
                    return
            idle = True
        body = {"rid": rid if block.capture else f"plain-{rid[-20:]}", "input_ids": self.ids[place], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        if idle:
            client.close()
        try:
            status, data = client.request("POST", "/generate", body)
            problem = "" if status == 200 else f"status {status}: {error_text(data)}"
            if not problem:
                read_answer(data)  # an aborted request gets no dump
        except ValueError as exc:
            problem = f"the server {exc}"
        except Exception as exc:
            problem = str(exc)
        self._over(block, place, rid, problem)

    def _over(self, block: Block, place: int, rid: str, problem: str) -> None:
        with self.lock:
            now = self.clock()
            self.ended += 1
            self.tokens += len(self.ids[place])
            if problem:
                self.problems.append(f"{len(self.ids[place])} tokens: {problem}")
            elif block.capture:
                self.due[rid] = now
            at = next(index for index in range(len(self.blocks) - 1, -1, -1) if self.blocks[index].first < self.ended)  # the block of this number
            mine, number = self.blocks[at], self.ended - self.blocks[at].first
            self.strangers += mine is not block and number > mine.guard
            marks = [(mine, BEGIN)] if number == mine.guard else []
            if number == len(mine.prompts):
                marks += [(mine, END), *((block, START) for block in self.blocks[at + 1 : at + 2])]
            tokens = self.tokens
        if problem and block.capture:
            self.room.release()
        for marked, name in marks:
            marked.marks[name] = Mark(now, tokens, processor_time(*self.groups[marked.capture]))

    def _collect(self) -> None:
        """See which dumps that are due have come, and delete them."""
        while True:
            with self.lock:
                due, senders = dict(self.due), self.senders
            if not due and not senders or self.fatal is not None:
                return
            try:
                present = set(os.listdir(self.folder)) if due else set()
            except OSError as exc:
                raise UserError(f"the folder {self.folder}, into which the server writes its dumps, can no longer be read: {exc.strerror}; run again, and leave it alone meanwhile") from None
            now = self.clock()
            for rid, answered in due.items():
                if f"{rid}.safetensors" in present:
                    problem = ""
                elif f"{rid}.error" in present:
                    problem = str(read_error(self.folder, rid))
                elif now - answered > DUMP_TIMEOUT_S:
                    problem = f"no dump after {DUMP_TIMEOUT_S:g} s in {self.folder} (is capture on, and is this the folder of the server that answered?)"
                else:
                    continue
                remove_dump(self.folder, rid)
                with self.lock:
                    del self.due[rid]
                    self.lags.append(now - answered)
                    if problem:
                        self.problems.append(problem)
                self.room.release()
            time.sleep(POLL_S)
