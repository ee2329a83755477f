"""Ask the servers for samples, check each dump, move it into the store. Everything that happens to a sample is decided here.

Threads: `max_in_flight` lanes a server send requests; one collector finds the dumps of answered requests (and removes those nobody waits for) and hands them to
worker processes, which check them and write them into the store (dump_worker.py); a thread waits for each. The window is bounded in requests by the lanes and in bytes by
the dump budget, which a dump gives back when it is deleted.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .config import Config
from .dump_pool import DumpWorker, Hands, WorkerDied, default_workers
from .dumps import DumpError, check_dump, read_dump, read_error, remove_dump
from .errors import UserError
from .extract_plan import Job, Plan
from .final_proof import FinalProof, logprob_request
from .generate_client import Client, RequestTimeout, ServerGone, error_text, read_answer
from .progress import Progress
from .rid import new_rid, parse_rid
from .store import StoreWriter
from .store_writer import Lane

POLL_S = 0.004  # how often the dump folder is looked at while a dump is due
LOOK_S = 0.1  # how often disk, trainer and proof are
DEAD_S = 2.0  # how long a dump may still be due whose server has died since it answered: what was written is there by then
SWEEP_S = 2.0  # how often late dumps are removed
DISK_MARGIN = 64 << 20
SICK = 3  # a server that has refused (5xx) more different samples than this since its last good answer is at fault, not the samples
PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # how long such a server is left alone: doubled each time, until it gives a good answer
LOST_FACTOR = 3  # a sample that was in flight when the server died attempts * this often is given up: it may be what kills it


@dataclass
class Task:
    """A job on its way."""

    job: Job
    nbytes: int
    prove: bool = False
    attempts: int = 0
    lost: int = 0
    sent: float = 0.0
    answered: float = 0.0
    url: str = ""  # who answered
    answer: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """What the run came to."""

    failed: dict[str, tuple[str, int]] = field(default_factory=dict)  # sample: (reason, attempts)
    extracted: int = 0
    tokens: int = 0
    retries: int = 0
    late: int = 0
    server_losses: int = 0
    seconds: float = 0.0
    peak_in_flight: int = 0
    peak_dump_bytes: int = 0
    workers: int = 0  # processes that were needed
    workers_peak_bytes: int = 0  # their highest resident sizes together
    stopped: str = ""  # why not everything was asked for


def default_budget(folder: Path) -> int:
    """Bytes of dumps in flight when the config says nothing: half of what is free in the dump folder now."""
    return shutil.disk_usage(folder).free // 2


class Extraction:
    """One run over `jobs`. `identity` is what every dump must say of its states."""

    def __init__(
        self, config: Config, plan: Plan, jobs: list[Job], writer: StoreWriter, urls: list[str], folder: Path, identity: dict[str, Any], workers: int = 0
    ):
        self.config, self.plan, self.writer, self.urls, self.folder, self.identity = config, plan, writer, urls, folder, identity
        self.options = config.extract
        item = {"float32": 4, "fp8": 1}.get(identity["dtype"], 2)
        self.token_bytes = (len(identity["aux_layer_ids"]) + 1) * identity["hidden_size"] * item + 4
        self.budget = int(self.options.dump_budget_gb * 1e9) or default_budget(folder)
        self.keep_bytes = int(self.options.keep_gb * 1e9)
        self.pending = deque(Task(job, job.tokens * self.token_bytes, prove=place < self.options.proof_samples) for place, job in enumerate(jobs))
        self.unsettled = len(jobs)  # neither in the store nor failed for good
        self.heldout_left = sum(job.heldout for job in jobs)
        self.live: dict[str, Task] = {}  # rid -> task: sent, and not yet in the store
        self.answered: dict[str, Task] = {}  # of these: whose dump is due
        self.in_flight_bytes = 0
        self.outcome = Outcome()
        self.proof = FinalProof(config.model_path)
        lock = threading.RLock()  # of all that the threads share
        self.changed = threading.Condition(lock)  # the end, or a server that is back
        self.room = threading.Condition(lock)  # for lanes: a task, and room for it; told to one of them, who tells the next (to tell all costs 1 ms a sample)
        self.ready = Hands()  # (rid, task); None: the end
        self.fatal: BaseException | None = None
        self.stopping = False
        self.down_since: dict[str, float] = {}
        self.last_down: dict[str, float] = {}  # the same, kept when the server is back
        self.refused: dict[str, set[str]] = {}  # url -> samples that it has refused since its last good answer
        self.pauses: dict[str, tuple[float, float]] = {}  # url -> (seconds, when they are over)
        self.waiting_for_trainer = False
        self.workers = [DumpWorker(folder, identity, writer.spec, writer.shard_bytes) for _ in range(workers or default_workers())]
        self.progress = Progress(len(plan.jobs), "extracted", already=sum(job.id in writer.done for job in plan.jobs))

    # ---- from start to end

    def run(self) -> Outcome:
        """Until every job is in the store or failed for good. Raises UserError when it must stop early; the store is whole either way."""
        self.sweep(set())
        start = time.monotonic()
        threads = [threading.Thread(target=self._guard, args=(self._lane, url), daemon=True) for url in self.urls for _ in range(self.options.max_in_flight)]
        collector = threading.Thread(target=self._guard, args=(self._collect,), daemon=True)
        workers = [threading.Thread(target=self._guard, args=(self._work, number, worker), daemon=True) for number, worker in enumerate(self.workers)]
        for thread in (*threads, collector, *workers):
            thread.start()
        try:
            while not self._finished():
                self._look_after()
                with self.changed:
                    self.changed.wait(LOOK_S)
        except KeyboardInterrupt:
            self.outcome.stopped = "interrupted"
        except Exception as exc:  # raised again below, once no thread writes any more
            self.fatal = self.fatal or exc
        self._stop()
        collector.join()
        for _ in workers:
            self.ready.put(None)
        for thread in workers:
            thread.join()
        self.progress.close()
        self.outcome.late += self.sweep(set())
        self._end_store()
        self.outcome.seconds = time.monotonic() - start
        self._end_workers()
        if self.fatal is not None:
            raise self.fatal
        return self.outcome

    def _guard(self, function: Any, *args: Any) -> None:
        """Run a thread's function; what it raises ends the run."""
        try:
            function(*args)
        except BaseException as exc:
            with self.changed:
                self.fatal = self.fatal or exc
                self._stop()

    def _finished(self) -> bool:
        with self.changed:
            return self.stopping or bool(self.outcome.stopped) or not self.unsettled

    def _stop(self) -> None:
        with self.changed:
            self.stopping = True
            self._wake_all()

    def _wake_all(self) -> None:
        self.changed.notify_all()
        self.room.notify_all()

    def _end_store(self) -> None:
        """Keep what is whole; after a write error the shards in the making are dropped, and their samples asked for again next time."""
        if isinstance(self.fatal, OSError):
            self.writer.abandon()
            return
        try:
            self.writer.close(complete=self.fatal is None and not self.outcome.stopped and not self.outcome.failed)
        except (OSError, WorkerDied) as exc:
            self.writer.abandon()
            self.fatal = self.fatal or exc

    def start_workers(self) -> None:
        """Start all worker processes with their memory and wait until they are up, for measurements; without this each starts when it is first needed."""
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            worker.call("touch")

    def _end_workers(self) -> None:
        for worker in self.workers:
            worker.stop()
        peaks = [worker.peak_bytes for worker in self.workers if worker.peak_bytes]
        self.outcome.workers, self.outcome.workers_peak_bytes = len(peaks), sum(peaks)

    def _look_after(self) -> None:
        """The main thread's rounds: disk, trainer, servers, proof."""
        total, _, free = shutil.disk_usage(self.writer.path)
        with self.changed:
            needed = self.in_flight_bytes + min(DISK_MARGIN, total // 50)
            if free < needed:
                self.outcome.stopped = f"the disk of {self.writer.path} runs short: {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB needed for what is in flight"
            tally = self.proof.tally  # one moment's numbers: workers go on comparing
            if tally.refuted():
                self.outcome.stopped = f"`final` is not what the LM head reads: {tally.sentence()}, and at least 99% must be equal; were the states made by this target?"
            now = time.monotonic()
            if len(self.down_since) == len(self.urls) and now - max(self.down_since.values()) > self.options.server_wait_s:
                self.outcome.stopped = f"no server at {', '.join(self.urls)} for {self.options.server_wait_s:.0f} s (extract.server_wait_s)"
        self.writer.roll(only_old=True)
        if self.keep_bytes:
            if not self.heldout_left:
                self.writer.roll_heldout()  # the trainer evaluates on these from the start
            if self.waiting_for_trainer and not self.in_flight_bytes:
                self.writer.roll()  # the trainer can only make room by consuming whole shards
            if self.writer.delete_consumed():
                with self.changed:
                    self.room.notify_all()

    # ---- lanes: one request at a time each

    def _lane(self, url: str) -> None:
        client = Client(url, self.options.request_timeout_s)
        while (task := self._next(url)) is not None:
            self._send(client, task)
        client.close()

    def _next(self, url: str) -> Task | None:
        """The next task for this server once the window has room; None at the end."""
        while True:
            with self.changed:
                if self.stopping or not self.unsettled:
                    return None
                if url not in self.down_since and self.pending and self._room(self.pending[0]):
                    task = self.pending.popleft()
                    self.in_flight_bytes += task.nbytes
                    self.outcome.peak_dump_bytes = max(self.outcome.peak_dump_bytes, self.in_flight_bytes)
                    self.room.notify()
                    return task
                if url not in self.down_since:
                    self.room.wait(0.5)
                    continue
                self.room.notify()  # a lane of another server may use what this one was told
            self._wait_for(url)

    def _room(self, task: Task) -> bool:
        if not self.in_flight_bytes:
            return not self.keep_bytes or self._room_in_store(task)  # a dump larger than the whole budget goes alone
        return self.in_flight_bytes + task.nbytes <= self.budget and (not self.keep_bytes or self._room_in_store(task))

    def _room_in_store(self, task: Task) -> bool:
        """Streaming: whether the store has room for everything in flight and this."""
        self.waiting_for_trainer = self.writer.bytes + self.in_flight_bytes + task.nbytes > self.keep_bytes
        return not self.waiting_for_trainer

    def _wait_for(self, url: str) -> None:
        """A server went away: look once a second; the lane that sees it again wakes the others."""
        with self.changed:
            since, pause = self.down_since.get(url), self.pauses.get(url, (0.0, 0.0))[1] - time.monotonic()
        if pause <= 0 and Client(url, 5.0).healthy():
            with self.changed:
                if since is not None and self.down_since.get(url) == since:  # else another lane saw it first, and it may have gone away again since
                    del self.down_since[url]
                    print(f"{url} is back", flush=True)
                self._wake_all()
            return
        with self.changed:
            self.changed.wait(min(1.0, pause) if pause > 0 else 1.0)

    def _send(self, client: Client, task: Task) -> None:
        rid = str(new_rid(self.config.run.name, task.job.id, task.job.tokens))
        body: dict[str, Any] = {
            "rid": rid, "input_ids": self.plan.sample(task.job).input_ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        }  # fmt: skip
        if task.prove:
            body |= logprob_request(task.job.tokens)
        task.sent = time.monotonic()
        with self.changed:
            self.live[rid] = task
            self.outcome.peak_in_flight = max(self.outcome.peak_in_flight, len(self.live))
        try:
            status, data = client.request("POST", "/generate", body)
            answer = read_answer(data) if status == 200 else {}
        except RequestTimeout as exc:
            self._abort(client, rid)
            self._retry(rid, str(exc))
            return
        except ServerGone as exc:
            self._lost(client.url, rid, str(exc))
            return
        except ValueError as exc:
            self._retry(rid, f"{client.url} {exc}")
            return
        if status >= 500:
            self._refused(client.url, rid, f"{client.url} answered {status}: {error_text(data)}", not_ready=status == 503)
        elif status != 200:
            self._retry(rid, f"{client.url} answered {status}: {error_text(data)}")
        else:
            with self.changed:
                task.answer, task.answered, task.url = answer, time.monotonic(), client.url
                self.answered[rid] = task
                self.refused.pop(client.url, None)
                if task.sent > self.pauses.get(client.url, (0.0, 0.0))[1]:  # an answer from before the pause does not say that the server is well again
                    self.pauses.pop(client.url, None)

    def _refused(self, url: str, rid: str, reason: str, not_ready: bool) -> None:
        """An answer of 5xx. One sample may be what the server cannot do; when it refuses all of them they wait until it is well, or a bad minute would fail them all."""
        with self.changed:
            refused = self.refused.setdefault(url, set())
            refused.add(self.live[rid].job.id)
            sick = not_ready or len(refused) > SICK
            if sick and url not in self.down_since:
                seconds = min(LONGEST_PAUSE_S, 2 * self.pauses.get(url, (PAUSE_S / 2, 0.0))[0])
                self.pauses[url] = seconds, time.monotonic() + seconds
            if sick:
                self._lost(url, rid, reason, why=reason)
        if not sick:
            self._retry(rid, reason)

    def _abort(self, client: Client, rid: str) -> None:
        """Tell the server to forget a request that timed out; whether it can does not matter."""
        try:
            client.request("POST", "/abort_request", {"rid": rid}, timeout_s=5.0)
        except (ServerGone, RequestTimeout):
            pass

    # ---- what becomes of a request

    def _forget(self, rid: str) -> Task:
        """The dump is deleted or will never be waited for: its bytes are free again."""
        task = self.live.pop(rid)
        self.answered.pop(rid, None)
        self.in_flight_bytes -= task.nbytes
        if self.pending:
            self.room.notify()
        return task

    def _retry(self, rid: str, reason: str) -> None:
        remove_dump(self.folder, rid)
        with self.changed:
            task = self._forget(rid)
            task.attempts += 1
            self.outcome.retries += 1
            given_up = task.attempts >= self.options.attempts
            self._again(task, reason, given_up, task.attempts)

    def _lost(self, url: str, rid: str, reason: str, late: bool = False, why: str = "the server died while it had this sample") -> None:
        """The server went away with this request: not the sample's fault, as long as it does not happen each time. `late`: its death is known already."""
        with self.changed:
            task = self._forget(rid)
            task.lost += 1
            if not late:
                self._down(url, reason)
            self._again(task, f"{why} ({task.lost} times)", task.lost >= self.options.attempts * LOST_FACTOR, task.lost)

    def _down(self, url: str, reason: str) -> None:
        """Nothing is sent there until it answers again."""
        if url not in self.down_since:
            self.outcome.server_losses += 1
            self.down_since[url] = self.last_down[url] = time.monotonic()
            print(f"{reason}; waiting for it", flush=True)

    def _look_for_the_dead(self, urls: set[str]) -> None:
        """A server whose dumps are late may have died while nothing was being sent to it."""
        for url in urls - set(self.down_since):
            client = Client(url, 1.0)
            try:
                client.request("GET", "/health")
                client.close()
            except ServerGone as exc:
                with self.changed:
                    self._down(url, str(exc))
            except RequestTimeout:
                pass  # busy, not dead

    def _again(self, task: Task, reason: str, given_up: bool, attempts: int) -> None:
        if not given_up:
            self.pending.append(task)
            self.room.notify()
            return
        self.outcome.failed[task.job.id] = (reason, attempts)
        self._settle(task.job)
        self.progress.update(0, errors=1)
        if len(self.outcome.failed) > self.options.max_failed:
            self.outcome.stopped = f"{len(self.outcome.failed)} samples failed for good, more than extract.max_failed = {self.options.max_failed}; the last reason: {reason}"
            self._wake_all()
        print(f"sample {task.job.id} ({task.job.tokens} tokens) failed for good: {reason}", flush=True)

    def _settle(self, job: Job) -> None:
        self.unsettled -= 1
        self.heldout_left -= job.heldout
        if not self.unsettled:
            self._wake_all()

    # ---- dumps

    def _collect(self) -> None:
        """Hand the dumps of answered requests to the workers; give up on those that do not come; remove what nobody waits for."""
        next_sweep = time.monotonic() + SWEEP_S
        while True:
            with self.changed:
                if self.stopping:
                    return
                due = list(self.answered.items())
                if not due:
                    self.changed.wait(POLL_S)
            begin = time.monotonic()
            present = set(os.listdir(self.folder)) if due else set()  # one call, however many are due
            spent = time.monotonic() - begin  # long where ten thousand small dumps lie
            for rid, task in due:
                if f"{rid}.safetensors" in present:
                    with self.changed:
                        del self.answered[rid]
                    self.ready.put((rid, task))
                elif f"{rid}.error" in present:
                    self._retry(rid, f"the server wrote no dump: {read_error(self.folder, rid)}")
                elif task.sent < self.last_down.get(task.url, 0.0) < time.monotonic() - DEAD_S:
                    self._lost(task.url, rid, f"{task.url} died before it wrote its dump", late=True)
                elif time.monotonic() - task.answered > self.options.request_timeout_s:
                    self._retry(rid, f"answered, but no dump in {self.folder} after {self.options.request_timeout_s:g} s (is capture on, and is this the server's folder?)")
            if due:
                time.sleep(max(POLL_S, min(0.1, 4 * spent)))
            if time.monotonic() > next_sweep:
                next_sweep = time.monotonic() + SWEEP_S
                self._look_for_the_dead({task.url for _, task in due if time.monotonic() - task.answered > DEAD_S})
                with self.changed:
                    live = set(self.live)
                self.outcome.late += self.sweep(live)

    def sweep(self, live: set[str]) -> int:
        """Remove dumps of this run that nobody waits for: late ones, and those of an earlier process."""
        removed = 0
        for entry in os.scandir(self.folder):
            stem, _, ending = entry.name.rpartition(".")
            if ending not in ("safetensors", "error") or stem in live:
                continue
            parts = parse_rid(stem)
            if parts is None or parts.run != self.config.run.name:
                continue
            with self.changed:
                wanted = stem in self.live
            if not wanted:
                Path(entry.path).unlink(missing_ok=True)
                removed += 1
        return removed

    def _work(self, number: int, worker: DumpWorker) -> None:
        lane = self.writer.new_lane(worker.begin)
        while (item := self.ready.get(number)) is not None:
            if not self.stopping:
                self._take(lane, *item)

    def _take(self, lane: Lane, rid: str, task: Task) -> None:
        """Have one dump checked and moved into the store."""
        job, sample = task.job, self.plan.sample(task.job)
        kept = self.writer.rows_to_keep(sample.loss_mask)
        try:
            if task.prove:
                self._prove(rid, sample.input_ids, task.answer)
            if not self.writer.put(
                lane, job.id, job.tokens, len(kept), job.heldout, lambda shard: shard.take(rid, job.id, sample.input_ids, sample.loss_mask, kept)
            ):
                remove_dump(self.folder, rid)  # the same sample under another name was first
        except DumpError as exc:
            self._retry(rid, str(exc))
            return
        with self.changed:
            self._forget(rid)
            self._settle(job)
            self.outcome.extracted += 1
            self.outcome.tokens += job.tokens
            self.progress.update(1, job.tokens, task.nbytes, task.answered - task.sent)

    def _prove(self, rid: str, input_ids: np.ndarray, answer: dict[str, Any]) -> None:
        """Compare `final` with the server's own choices. Raises DumpError."""
        dump = read_dump(self.folder / f"{rid}.safetensors")
        check_dump(dump, rid, input_ids)
        try:
            self.proof.compare(dump.final_float(), answer, dump.file.dtype)
        except (KeyError, ValueError, IndexError, TypeError) as exc:
            raise DumpError(f"the server's answer has no log-probabilities of the known form ({exc!r})") from None
