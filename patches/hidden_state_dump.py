"""Hidden-state dumps of a running SGLang server: one file for every SGLang version, installed as sglang/srt/hidden_state_dump.py.

Off unless SGLANG_HS_DUMP_DIR is set. A request whose rid reads `aerie.<run>.<sample>.<attempt>.<tokens>` gets one file, `<rid>.safetensors`:
input_ids [T] int32, aux_0 aux_1 ... [T, H] (what SGLang would feed an EAGLE-3 drafter) and final [T, H] (after the final norm: what the LM head reads),
in the model's dtype or as fp8 rows (e4m3) with a float32 scale each. Nothing else in the server's traffic is touched.

How: the text model's forward is wrapped. For EXTEND and MIXED batches that hold such requests it captures the layers that the model's own
set_eagle3_layers_to_capture() chose, takes the auxiliary states out of what forward returns, and hands back what the caller expects. Rows go to a ring of
pinned host memory on a CUDA stream of their own. A process of its own writes the files out of that memory (this same file, run as a script: no torch, no
CUDA), so that the server's interpreter is not shared with the writing. The forward thread never waits for a copy, a file, that process or a lock held
during either: when the ring is full the dump is dropped and `<rid>.error` says so. Settings: patches/README.md. This file imports nothing of Aerie.
"""

from __future__ import annotations

import ctypes
import errno
import inspect
import json
import logging
import mmap
import os
import pickle
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

import numpy as np

if __name__ != "__main__":  # run as a script it is the process that writes, which needs no torch
    import torch

logger = logging.getLogger(__name__)

VERSION = 2  # of the dump's format; 2: with checksums
PREFIX = "SGLANG_HS_DUMP_"
RID = re.compile(r"aerie\.[A-Za-z0-9_-]{1,48}\.[0-9a-f]{16}\.[0-9a-f]{8}\.([0-9]{1,7})", re.ASCII)
SAFETENSORS_DTYPE = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "int32": "I32"}  # by torch's names
FP8_MAX = 448.0  # the largest finite e4m3 value
FP8_TINY = 1e-30  # a row of zeros gets a scale that can still be divided by
FP8_ROWS = 2048  # quantised in one go where torch does it
OPS_ABI = 6  # of the library of the drafter ops: AERIE_ABI of cuda/src/aerie_drafter.h
BLOCK_BYTES = 1 << 20  # summed, and written while it is in the core's cache
ALIGN = 256  # bytes; every tensor in the ring starts at a multiple
IDLE_S = 0.02  # how often finished copies are looked for while no forward does it
BUSY_S = 0.035  # a forward that looked so short a time ago is left alone with it: a second thread takes Python's lock from it each time
LOOK_S = 1.0  # but so often the second thread looks in any case
PAUSE_S = 0.003  # so often the writing process looks for messages while they come
ALERT_S = 0.1  # and for so long after the last one; then it sleeps until there is one, which costs the forward thread the waking
READY_S = 120.0  # a server that starts waits so long for its writing process
RETRY_S = 30.0  # the longest pause before a writing process that could not start is tried again
DRAIN_S = 10.0  # a writing process whose server ended begins no further rows after so long
MAX_FAILING = 10_000  # dumps that failed and whose `.error` is not written yet; past that they are only counted


class HiddenStateDumpError(RuntimeError):
    """Raised at start only: what this server was started with does not fit capture."""


# ---- settings and refusals, at start ----------------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    """The SGLANG_HS_DUMP_* variables."""

    dir: str
    layer_ids: tuple[int, ...]
    dtype: str = "model"  # model, fp8
    budget_mb: int = 0  # host memory for rows on their way to the files; 0: four of the largest batches, at least 256 MB
    stale_s: float = 300.0  # a request without new rows for so long was aborted
    log_s: float = 60.0  # how often the counters are logged
    writers: int = 4  # threads of the writing process
    ops: str = ""  # the library of the drafter ops (cuda/): on a GPU its kernel makes fp8 rows out of bf16 ones


def read_settings(environ: dict[str, str] | os._Environ = os.environ) -> Settings | None:
    """Settings from the environment; None when capture is off. Raises HiddenStateDumpError naming variable and value."""
    if not environ.get(PREFIX + "DIR"):
        return None
    known = {PREFIX + name.upper(): name for name in Settings._fields}
    values: dict[str, Any] = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        if variable not in known:
            raise HiddenStateDumpError(f"unknown setting {variable}; known: {', '.join(sorted(known))}")
        name, text = known[variable], environ[variable].strip()
        try:
            if name == "layer_ids":
                values[name] = tuple(int(item) for item in text.split(","))
            elif name in ("dir", "dtype", "ops"):
                values[name] = text
            else:
                values[name] = (float if name.endswith("_s") else int)(text)
        except ValueError:
            raise HiddenStateDumpError(f"{variable}={text!r} is not a number (or for LAYER_IDS numbers with commas between)") from None
    ids = values.get("layer_ids", ())
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise HiddenStateDumpError(f"{PREFIX}LAYER_IDS={','.join(map(str, ids))!r}: give the drafter's auxiliary layer ids in rising order, for example 1,14,26")
    settings = Settings(**values)
    if settings.dtype not in ("model", "fp8"):
        raise HiddenStateDumpError(f"{PREFIX}DTYPE={settings.dtype!r} must be model or fp8")
    if not os.path.isabs(settings.dir):
        raise HiddenStateDumpError(f"{PREFIX}DIR={settings.dir!r} must be an absolute path")
    if settings.budget_mb < 0 or settings.stale_s <= 0 or settings.log_s <= 0 or not 1 <= settings.writers <= 16:
        raise HiddenStateDumpError(f"{settings}: budget_mb must be 0 or more, stale_s and log_s more than 0, writers 1 to 16")
    return settings


# server argument, is it refused?, why and what to do, may this SGLang version lack it?
REFUSED: tuple[tuple[str, Callable[[Any], bool], str, bool], ...] = (
    ("speculative_algorithm", bool, "speculative decoding drops states; start the extraction server without a drafter", False),
    ("disable_radix_cache", lambda off: not off, "the radix cache would leave holes in the states; add --disable-radix-cache", False),
    ("enable_two_batch_overlap", bool, "two-batch overlap returns no auxiliary states; drop --enable-two-batch-overlap", False),
    ("enable_pdmux", bool, "PD multiplexing splits a prefill by layers; drop --enable-pdmux", False),
    ("pp_size", lambda size: size != 1, "with pipeline parallel no stage sees all layers; use tensor parallel instead (--tp-size)", False),
    ("attn_cp_size", lambda size: size > 1, "context parallel runs the model on shards of the tokens; drop it", False),
    ("enable_prefill_cp", bool, "context parallel runs the model on shards of the tokens; drop it", False),
    ("dcp_size", lambda size: size > 1, "decode context parallel is untested with capture; drop it", False),
    ("disaggregation_mode", lambda mode: mode != "null", "with PD disaggregation prefill and decode are two servers; start a plain one", False),
    ("dllm_algorithm", bool, "a diffusion language model has no prefill to capture", False),
    ("enable_attn_tp_input_scattered", bool, "scattered attention inputs leave each rank a shard of the tokens; drop --enable-attn-tp-input-scattered", False),
    ("enable_layernorm_sp", bool, "LayerNorm sequence parallel leaves each rank a shard of the tokens; drop --enable-layernorm-sp", True),
    ("enable_return_aux_hidden_states", bool, "it switches SGLang's own capture on; drop --enable-return-aux-hidden-states", True),
)  # fmt: skip


def refuse(server_args: Any, prefill_graphs: bool | None = None, environ: dict[str, str] | os._Environ = os.environ) -> None:
    """Called before the weights are loaded: raise HiddenStateDumpError with a sentence for each option that capture cannot live with."""
    settings = read_settings(environ)
    if settings is None:
        return
    reasons = []
    for name, refused, why, may_lack in REFUSED:
        if not hasattr(server_args, name):
            if not may_lack:
                reasons.append(f"{name}: this SGLang has no such server argument, so it cannot be checked (see 'Adding a version' in patches/README.md)")
        elif refused(getattr(server_args, name)):
            reasons.append(f"{name}={getattr(server_args, name)!r}: {why}")
    if prefill_graphs if prefill_graphs is not None else _prefill_graphs():
        reasons.append("prefill CUDA graphs are on: no Python runs when one is replayed, so dumps would be empty; add --disable-prefill-cuda-graph")
    try:
        open_folder(settings.dir)
    except OSError as exc:
        reasons.append(f"{PREFIX}DIR={settings.dir}: {exc.strerror}; name a folder that this user can write")
    if reasons:
        raise HiddenStateDumpError("hidden-state capture cannot run on this server: " + " | ".join(reasons))


def _prefill_graphs() -> bool:
    """Whether SGLang would replay CUDA graphs in prefill (it has none without a CUDA device)."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

    return torch.cuda.is_available() and not check_cuda_graph_backend(Phase.PREFILL, Backend.DISABLED)


def open_folder(path: str) -> None:
    """Make the folder (0700), prove that a file can be made and renamed in it, and remove what dead writers left half-written. Raises OSError."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    probe = os.path.join(path, f".probe.{os.getpid()}")
    with open(probe, "wb"):
        os.rename(probe, probe + ".tmp")
    os.unlink(probe + ".tmp")
    for name in os.listdir(path):
        parts = name.split(".")
        ours = name.startswith(".aerie.") and name.endswith(".tmp") or name.startswith("capture.") and name.endswith(".json") and len(parts) == 3
        if ours and parts[-2].isdigit() and not os.path.exists(f"/proc/{parts[-2]}"):
            try:
                os.unlink(os.path.join(path, name))
            except FileNotFoundError:
                pass  # another rank was faster


# ---- which module, which layers ---------------------------------------------------------------------------------------------------------------


class LayerSwitch(NamedTuple):
    """The text model, where it captures, and the attribute changes that switch its capture on."""

    text: torch.nn.Module
    points: list[int]  # entry N: the state after N decoder layers
    changes: list[tuple[torch.nn.Module, str, Any, Any]]  # module, attribute, value when off (_ABSENT: none), value when on

    def set(self, on: bool) -> None:
        """Switch the text model's capture on or off; nothing but attribute writes."""
        for module, name, off_value, on_value in self.changes:
            value = on_value if on else off_value
            if value is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = list(value) if isinstance(value, list) else value


_ABSENT = object()


def _plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, list) else value for name, value in module.__dict__.items() if not name.startswith("_parameters")}


def find_layers(model: torch.nn.Module, layer_ids: tuple[int, ...]) -> LayerSwitch:
    """Let the model's own set_eagle3_layers_to_capture(ids) choose, note everything that it changed, and put all of it back.

    Families differ: some read the list `layers_to_capture`, some a flag on each layer; some capture at id, some at id + 1. What belongs to the text model
    (the innermost module that owns layers_to_capture) is switched on during its forward; what lies outside (capture_aux_hidden_states) stays as it was.
    """
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise HiddenStateDumpError(f"{type(model).__name__} has no set_eagle3_layers_to_capture(): SGLang cannot serve an EAGLE-3 drafter for it, so there is nothing to capture")
    modules = list(model.modules())
    before = [_plain_attributes(module) for module in modules]
    try:
        model.set_eagle3_layers_to_capture(list(layer_ids))
    except Exception as exc:
        raise HiddenStateDumpError(f"{type(model).__name__}.set_eagle3_layers_to_capture({list(layer_ids)}) failed: {exc!r}; do these layer ids exist?") from exc
    changes = []
    for module, old in zip(modules, before):
        for name, value in _plain_attributes(module).items():
            previous = old.get(name, _ABSENT)
            if previous is not value and (isinstance(value, torch.Tensor) or previous != value):
                changes.append((module, name, previous, value))
    LayerSwitch(model, [], changes).set(False)
    owners = [module for module, name, _, value in changes if name == "layers_to_capture" and value]
    inner = [module for module in owners if not any(other is not module and other in owners for other in module.modules())]
    if len(inner) != 1:
        raise HiddenStateDumpError(f"{type(model).__name__}.set_eagle3_layers_to_capture() set layers_to_capture on {len(inner)} modules, not on one text model; this class is not supported")
    text = inner[0]
    inside = {id(module) for module in text.modules()}
    changes = [change for change in changes if id(change[0]) in inside]
    points = [int(point) for module, name, _, value in changes if module is text and name == "layers_to_capture" for point in value]
    if points != sorted(set(points)) or len(points) != len(layer_ids):
        raise HiddenStateDumpError(f"layer ids {list(layer_ids)} became capture points {points} in {type(model).__name__}: they must be distinct and rising")
    return LayerSwitch(text, points, changes)


# ---- rows on their way: ring, dumps -----------------------------------------------------------------------------------------------------------


def quantize_rows_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] -> e4m3 [T, H] and float32 scale [T]; row = q * scale, scale = the row's largest magnitude / 448. A row that is not finite gets scale NaN."""
    wide = rows.float()
    amax = wide.abs().amax(-1, keepdim=True)
    finite = torch.isfinite(amax)
    floored = amax.clamp_min(FP8_TINY)
    largest = torch.full_like(floored, FP8_MAX)
    q = torch.where(finite, wide * (largest / floored), 0.0).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return q, torch.where(finite, floored / largest, torch.nan).squeeze(-1)


class Ring:
    """A fixed piece of host memory that another process can map (by `file`), handed out in order and given back in any order. No call ever waits for memory."""

    def __init__(self, nbytes: int, pinned: bool):
        self.file = os.memfd_create("aerie-hidden-states", os.MFD_CLOEXEC)
        os.ftruncate(self.file, nbytes)
        self.memory = torch.from_numpy(np.frombuffer(mmap.mmap(self.file, nbytes), dtype=np.uint8))
        if pinned and (code := int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), nbytes, 0))):
            raise HiddenStateDumpError(f"{nbytes} bytes of host memory cannot be page-locked (CUDA error {code}); lower {PREFIX}BUDGET_MB, or raise `ulimit -l`")
        self.size, self.address = nbytes, self.memory.data_ptr()
        self._lock = threading.Lock()
        self._blocks: list[list] = []  # [start, end, free], oldest first

    def close(self) -> None:
        """No further process can map it."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def take(self, nbytes: int) -> list | None:
        """A block of `nbytes`, or None when there is no room now."""
        with self._lock:
            if not self._blocks:
                start = 0
            else:
                head, tail = self._blocks[-1][1], self._blocks[0][0]
                start = head
                if head > tail:  # used space does not wrap: room behind it, or else at the beginning
                    if head + nbytes > self.size:
                        start = 0
                        if nbytes >= tail:
                            return None
                elif head + nbytes >= tail:
                    return None
            if start + nbytes > self.size:
                return None
            block = [start, start + nbytes, False]
            self._blocks.append(block)
            return block

    def give_back(self, block: list) -> None:
        with self._lock:
            block[2] = True
            while self._blocks and self._blocks[0][2]:
                self._blocks.pop(0)


class Field(NamedTuple):
    """One tensor of a dump: name, dtype by torch's name, bytes of a value, columns (0: one value a row)."""

    name: str
    dtype: str
    itemsize: int
    columns: int

    @property
    def row_bytes(self) -> int:
        return self.itemsize * max(self.columns, 1)


class Alarm:
    """A timer of the kernel's that one thread waits for and another puts off without waking it. Raises OSError where there is none."""

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None, use_errno=True)  # PyDLL: keeps Python's lock, for a microsecond
        self.file = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)
        if self.file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._settime = libc.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._times: dict[float, Any] = {}

    def set(self, seconds: float) -> None:
        """It goes off after so long, counted from now, whatever was set before."""
        times = self._times.get(seconds)
        if times is None:  # struct itimerspec: no repetition, then seconds and nanoseconds
            times = self._times[seconds] = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
        self._settime(self.file, 0, times, None)

    def wait(self) -> None:
        """Until it goes off; at once when it has since the last wait()."""
        os.read(self.file, 8)

    def close(self) -> None:
        """By the thread that waits: nothing goes off any more."""
        os.close(self.file)
        self.file = -1


def fields_of(states: list[torch.Tensor], fp8: bool) -> list[Field]:
    """The tensors of a dump in the order in which they lie in the file (4-byte ones first, so that all are aligned): states are aux_0, aux_1, ..., final."""
    names = [*(f"aux_{index}" for index in range(len(states) - 1)), "final"]
    scales = [Field(f"{name}_scale", "float32", 4, 0) for name in names] if fp8 else []
    kinds = [torch.float8_e4m3fn if fp8 else state.dtype for state in states]
    return [Field("input_ids", "int32", 4, 0), *scales, *(Field(name, str(kind)[6:], kind.itemsize, state.shape[-1]) for name, kind, state in zip(names, kinds, states))]


def row_words(rows: np.ndarray) -> np.ndarray:
    """[R, bytes] uint8 -> [R, W]: the same memory as 32-bit words, or narrower ones where a row is no multiple of 4 bytes."""
    width = rows.shape[1]
    return rows.view(np.uint32 if width % 4 == 0 else np.uint16 if width % 2 == 0 else np.uint8)


def add_words(words: np.ndarray, sums: np.ndarray) -> None:
    """[R, W] words -> sums [R] uint32: each row's words added mod 2^32. One call of numpy, which lets go of the GIL while it adds."""
    np.add.reduce(words, axis=1, dtype=np.uint32, out=sums)


def rows_sum(sums: np.ndarray, first: int) -> int:
    """The checksum of rows `first`, `first` + 1, ... of a tensor from their word sums [R]: sum over rows of (2 row + 1) * word sum, mod 2^64.

    The checksums of pieces add up, in any order. Any changed byte, and in all likelihood any row in another's place, changes it: the weights are odd. The
    client's twin is scripts/aerie/dumps.py. On an AMD EPYC with AVX-512 the words add up at 26 GB/s a core (rows of 576 bf16 values), where writing into a
    tmpfs ran at 3.0 GB/s a core, and summing and writing in blocks at 2.9.
    """
    weights = np.arange(first, first + len(sums), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    return int((sums * weights).sum(dtype=np.uint64))


class Dump:
    """One request's rows as the forward thread sees them; the process that writes knows it by its `key`."""

    _keys = iter(range(1 << 62))

    def __init__(self, rid: str, tokens: int):
        self.rid, self.tokens, self.key = rid, tokens, next(Dump._keys)
        self.next_row = self.pieces = 0
        self.dead = False  # its file was given up
        self.touched = 0.0  # when its latest rows came


class Piece(NamedTuple):
    """Rows of one request in one batch."""

    rid: str
    tokens: int
    batch_row: int  # its first row in the batch
    first: int  # its first row in the request
    rows: int


@dataclass(slots=True)
class Job:
    """A batch's rows in the ring, or a dump that failed."""

    block: list | None = None
    rows: int = 0
    pieces: list[tuple[Dump, Piece, int]] = field(default_factory=list)  # dump, piece, its first row in the block
    event: Any = None  # CUDA event behind the copy
    started: Any = None
    held: tuple[Any, ...] = ()  # what is copied from
    late: bool = False  # its copies were still running when they were first looked for
    failed: Dump | None = None
    reason: str = ""


class Counters:
    """What the server says once a minute."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.values = dict.fromkeys(("requests", "dumps", "rows", "bytes", "waits", "dropped", "errors"), 0) | dict.fromkeys(("hook_s", "copy_s", "write_s"), 0.0)

    def add(self, **amounts: float) -> None:
        with self.lock:
            for name, amount in amounts.items():
                self.values[name] += amount

    def line(self) -> str:
        with self.lock:
            return ", ".join(f"{name} {value:.2f}" if isinstance(value, float) else f"{name} {value}" for name, value in self.values.items())


class Writer:
    """The server's end of writing: what is on its way through the ring, and the process that makes files of it.

    put() and pump() wait for nothing, so the forward thread may call them. What the process answers (blocks that are free again, counts, dumps that failed) is
    read there too; a thread, the courier, looks while no forward does, every IDLE_S seconds as long as something is under way. When the process ends, what it had begun fails with its reason and
    another one starts, at most one a second; while they cannot even start, after pauses that grow to RETRY_S. Raises HiddenStateDumpError when the first one cannot start.
    """

    def __init__(self, settings: Settings, metadata: dict[str, str], ring: Ring, counters: Counters, process: bool = True):
        self.settings, self.metadata, self.ring, self.counters = settings, metadata, ring, counters
        self.fields: list[Field] = []  # set by the first batch, the same ever after
        self.waiting: deque[Job] = deque()  # their copies may still run
        self.ready: deque[Job] = deque()  # copied, but not handed over
        self.sent: dict[int, list] = {}  # job's number -> its block, until it is written
        self.begun: dict[int, Dump] = {}  # by key: the process has rows of these
        self.failing: dict[int, tuple[Dump, str]] = {}  # by key: failed, and the process has not answered that it wrote so
        self.serial = 0
        self.lock = threading.Lock()  # who talks to the process; the forward thread passes by when it is taken; never held while a file is touched
        self.over = False
        self.alarm = Alarm()  # when the courier looks
        self.next_look = 0.0  # past this time forwards put it off no longer
        self.events: deque[tuple[Any, Any]] = deque()  # pairs of CUDA events to be used again: making one costs more than recording it
        self.link: socket.socket | None = None
        self.unsent, self.received = bytearray(), bytearray()
        self.own_process = process
        self.process: subprocess.Popen | None = None
        self.told, self.heard = False, False  # the process was told the fields; it has said something
        self.buried = False  # it ended, and that was logged
        self.futile, self.next_start = 0, 0.0  # processes in a row that never said a word; no other one is started before
        self.files: FileWriter | None = None  # without a process, for tests: it runs in a thread here
        self.thread: threading.Thread | None = None
        try:
            self._start()
            self._await_ready()
        except (OSError, TypeError, ValueError, subprocess.SubprocessError) as exc:
            raise HiddenStateDumpError(f"the process that writes the dumps cannot be started with the Python {sys.executable!r}: {exc}") from exc
        self.alarm.set(IDLE_S)
        threading.Thread(target=self._idle, name="hidden-state-courier", daemon=True).start()

    def put(self, job: Job) -> None:
        """Queue a job; its copies may still run."""
        self.waiting.append(job)
        if job.event is None:  # else they have only just begun
            self.pump()
        if self.link is not None and time.monotonic() < self.next_look:
            self.alarm.set(BUSY_S)

    def fail(self, dump: Dump, reason: str) -> None:
        """Drop a dump and say why in `<rid>.error` (an empty reason: without one). Never raises.

        While the process stands still these pile up. Past MAX_FAILING, one that the process has no rows of is counted and gets no file: its client's wait ends by time.
        """
        if not dump.pieces and len(self.failing) + len(self.waiting) >= MAX_FAILING:
            dump.dead = True
            self.counters.add(errors=1 if reason else 0)
            return
        self.put(Job(failed=dump, reason=reason))

    def pump(self, wait: bool = False) -> None:
        """Hand over the jobs whose copies are done, read the answers. With `wait` another thread that does so is waited for."""
        if not self.lock.acquire(blocking=wait):
            return
        try:
            self._collect()
            if self.link is not None:
                self._send()
                self._receive()
        except (OSError, EOFError):
            self._hang_up()
        except Exception:
            logger.exception("hidden-state dump: writer")
        finally:
            self.lock.release()

    def close(self) -> None:
        """Write what is queued, end the process (for tests; a server's ends with it)."""
        deadline = time.monotonic() + 20
        while (self.waiting or self.ready or self.unsent or self.sent) and time.monotonic() < deadline:
            self.pump(wait=True)
            time.sleep(0.002)
        self.over = True
        self.alarm.set(1e-6)
        if self.link is not None:
            self.link.shutdown(socket.SHUT_WR)
        if self.process is not None:
            self.process.wait(20)
        if self.thread is not None:
            self.thread.join(20)
        self.pump(wait=True)
        self.ring.close()

    def _start(self) -> None:
        self.next_start = time.monotonic() + min(RETRY_S, 2.0 ** min(self.futile, 10))
        self.futile += 1
        mine, theirs = socket.socketpair()
        if self.own_process:
            handles = (theirs.fileno(), self.ring.file)
            command = [sys.executable, "-P", os.path.abspath(__file__), *map(str, (*handles, os.getpid()))]
            single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
            with theirs:
                self.process = subprocess.Popen(command, pass_fds=handles, stdin=subprocess.DEVNULL, env=os.environ | single)
        else:
            self.files = FileWriter(self.settings, self.metadata, self.ring.memory.numpy(), theirs)
            self.thread = threading.Thread(target=self.files.run, name="hidden-state-files", daemon=True)
            self.thread.start()
        mine.setblocking(False)
        with self.lock:
            self.unsent[:] = frame(("start", tuple(self.settings), self.metadata))
            self.received.clear()
            self.told = self.heard = self.buried = False
            self.link = mine

    def _await_ready(self) -> None:
        """At the server's start alone: until the process says something, or else OSError."""
        deadline = time.monotonic() + READY_S
        while self.link is not None and not self.heard:
            self.pump(wait=True)
            time.sleep(0.005)
            if time.monotonic() > deadline:
                self.process.kill()
                raise OSError(f"it said nothing for {READY_S:.0f} s")
        if self.link is None:
            raise OSError(f"it ended at once (exit code {self.process.wait(5)}); what it said stands above")

    def _collect(self) -> None:
        """Let go of what is copied."""
        while self.waiting:
            job = self.waiting[0]
            if job.event is not None:
                if not job.event.query():
                    job.late = True
                    break
                self.counters.add(copy_s=job.started.elapsed_time(job.event) / 1e3, waits=int(job.late))
                job.held = ()  # GPU memory, which must not wait for the process
                self.events.append((job.started, job.event))
                job.started = job.event = None
            self.waiting.popleft()
            if job.failed is not None:
                if job.failed.dead:
                    continue  # a reason stands there already
                job.failed.dead = True
                self.begun.pop(job.failed.key, None)
                self.failing[job.failed.key] = (job.failed, job.reason)
            self.ready.append(job)

    def _send(self) -> None:
        while self.ready and len(self.unsent) < 1 << 18:  # more is not pickled in one go
            self._hand_over(self.ready.popleft())
        if self.unsent:
            try:
                del self.unsent[: self.link.send(self.unsent)]
            except BlockingIOError:
                pass  # the process is behind; the ring and MAX_FAILING bound by how much

    def _hand_over(self, job: Job) -> None:
        if job.failed is not None:
            self.unsent += frame(("fail", job.failed.key, job.failed.rid, job.reason, job.failed.next_row))
            return
        if not self.told:
            self.unsent += frame(("fields", [tuple(item) for item in self.fields]))
            self.told = True
        pieces = []
        for dump, piece, row in job.pieces:
            if not dump.dead:
                last = piece.first + piece.rows >= dump.tokens
                pieces.append((dump.key, dump.rid, dump.tokens, piece.first, piece.rows, row, dump.pieces if last else 0))
                self.begun[dump.key] = dump
        self.serial += 1
        self.sent[self.serial] = job.block
        self.unsent += frame(("job", self.serial, job.block[0], job.rows, pieces))

    def _receive(self, last: bool = False) -> None:
        """What the process says: what lies there, with `last` to the end of it. Raises EOFError at its end."""
        size = 1 << 16
        try:
            while data := self.link.recv(size):
                self.received += data
                if len(data) < size and not last:
                    return  # saves a call that finds nothing; an end is seen the next time
            raise EOFError
        except BlockingIOError:
            pass
        finally:  # what it said before it ended counts too
            self._heed()

    def _heed(self) -> None:
        for number, counts, done, failed in frames(self.received):
            self.heard, self.futile = True, 0
            if number is not None:
                self.ring.give_back(self.sent.pop(number))
            self.counters.add(**counts)
            for key in done:
                self.begun.pop(key, None)
            for key in failed:
                self.failing.pop(key, None)
                dump = self.begun.pop(key, None)
                if dump is not None:
                    dump.dead = True

    def _hang_up(self) -> None:
        """The process is gone (with the lock): hear its last words; the courier sees to the rest."""
        try:
            self._receive(last=True)
        except (OSError, EOFError):
            pass
        except Exception:
            logger.exception("hidden-state dump: writer")
        self.link.close()
        self.link = None

    def _idle(self) -> None:
        """The courier's life."""
        while True:
            self.alarm.wait()
            if self.over:
                self.alarm.close()
                return
            self.next_look = time.monotonic() + LOOK_S
            self.alarm.set(LOOK_S)  # before anything is looked at: what a forward sets meanwhile stays
            try:
                ended = self.process is not None and self.process.poll() is not None  # noticed also while nothing is written
                self.pump(wait=True)
                if ended:
                    with self.lock:
                        if self.link is not None:  # a process that something forked off while this one started keeps its end of the link open
                            self._hang_up()
                if self.link is None:
                    self._bury()
                    if time.monotonic() >= self.next_start:
                        self._start()
                if self.waiting or self.ready or self.unsent or self.sent:
                    self.alarm.set(IDLE_S)
            except Exception as exc:
                logger.error("hidden-state dump: the process that writes the dumps cannot be started again: %r", exc, exc_info=not isinstance(exc, (OSError, subprocess.SubprocessError)))
                time.sleep(1.0)

    def _bury(self) -> None:
        """The process is gone: what it had rows of fails, its blocks are free, failures that it was told of are written here."""
        code = None
        if self.process is not None:
            try:
                code = self.process.wait(1)
            except subprocess.TimeoutExpired:  # it hung up but lives, and reads blocks that are to be free
                self.process.kill()
                code = self.process.wait(10)
        reason = f"the process that writes the dumps ended (exit code {code})"
        with self.lock:
            lost = [(dump, reason) for dump in self.begun.values()]
            for dump in self.begun.values():
                dump.dead = True
            failed = [*lost, *self.failing.values()]
            self.begun.clear()
            self.failing.clear()
            self.ready = deque(job for job in self.ready if job.failed is None)
            for block in self.sent.values():
                self.ring.give_back(block)
            self.sent.clear()
        if not self.buried:
            logger.error("hidden-state dump: %s; %d dumps are lost, another one starts", reason, len(lost))
            try:
                open_folder(self.settings.dir)  # removes its half-written files
            except OSError as exc:
                logger.error("hidden-state dump: %s: %s", self.settings.dir, exc)
            self.buried = True
        for dump, why in failed:
            if not why or why is reason and os.path.exists(os.path.join(self.settings.dir, f"{dump.rid}.safetensors")):
                continue  # or it was finished, and the process ended before it could say so
            self.counters.add(errors=1)
            try:
                write_error(self.settings.dir, dump.rid, why, dump.next_row)
            except OSError as exc:
                logger.error("hidden-state dump: %s: no .error could be written: %s", dump.rid, exc)


# ---- the process that writes ------------------------------------------------------------------------------------------------------------------


def frame(message: Any) -> bytes:
    """A message as bytes: length, then pickle. Both ends are this file."""
    data = pickle.dumps(message, protocol=5)
    return len(data).to_bytes(4, "little") + data


def frames(received: bytearray) -> list[Any]:
    """The whole messages at the start of `received`, taken out of it."""
    messages, at = [], 0
    while len(received) - at >= 4 and len(received) - at - 4 >= (length := int.from_bytes(received[at : at + 4], "little")):
        messages.append(pickle.loads(received[at + 4 : at + 4 + length]))
        at += 4 + length
    del received[:at]
    return messages


class OpenFile:
    """One request's file while it grows."""

    def __init__(self, key: int, rid: str, tokens: int):
        self.key, self.rid, self.tokens = key, rid, tokens
        self.written = 0  # pieces
        self.total = 0  # pieces, once the last one came
        self.dead = False
        self.lock = threading.Lock()
        self.file = -1
        self.temporary = ""
        self.header = b""  # all of it but the checksums
        self.offsets: list[int] = []
        self.sums: list[int] = []  # of the rows written so far, one a field


class Task:
    """A batch's block while its pieces are written."""

    def __init__(self, number: int, base: int, columns: list[int], pieces: int):
        self.number, self.base, self.columns = number, base, columns
        self.left, self.rows, self.seconds = pieces, 0, 0.0  # pieces to come, rows of finished files, of all threads together
        self.done: list[int] = []
        self.failed: list[int] = []
        self.lock = threading.Lock()

    def over(self, key: int, tokens: int, outcome: str, seconds: float) -> bool:
        """A piece is written, or given up; whether it was the last one."""
        with self.lock:
            if outcome == "done":
                self.done.append(key)
                self.rows += tokens
            elif outcome == "failed":
                self.failed.append(key)
            self.seconds += seconds
            self.left -= 1
            return self.left == 0


class FileWriter:
    """Threads that turn the rows of a ring into files, told over `link` what lies where."""

    def __init__(self, settings: Settings, metadata: dict[str, str], memory: np.ndarray, link: socket.socket, server: int = 0):
        self.settings, self.metadata, self.memory, self.link = settings, metadata, memory, link
        self.server = server  # process id of the server, whose child this is; 0: the same process
        self.until = float("inf")  # no rows are written after this time
        self.alert = 0.0  # until then messages are looked for, not waited for
        self.fields: list[Field] = []
        self.jobs: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()  # ("fail", ...) or (Task, one of its pieces)
        self.open: dict[int, OpenFile] = {}
        self.failed: dict[int, None] = {}  # keys whose later rows are dropped, the newest last
        self.lock = threading.Lock()  # of open, failed, serial and the link's sending side
        self.serial = 0

    def run(self) -> None:
        """Read messages until the server's end is closed, write what is queued (but no longer than DRAIN_S), leave nothing half-written."""
        threads: list[threading.Thread] = []
        received = bytearray()
        try:
            for index in range(self.settings.writers):
                thread = threading.Thread(target=self._work, name=f"hidden-state-writer-{index}")
                thread.start()
                threads.append(thread)
            self._answer(None, {}, [], [])  # ready
            while data := self._read():
                received += data
                for message in frames(received):
                    if message[0] == "fields":
                        self.fields = [Field(*item) for item in message[1]]
                    elif message[0] == "fail":
                        self.jobs.put(message)
                    elif message[0] == "job":
                        self._share_out(*message[1:])
        finally:
            self.until = time.monotonic() + DRAIN_S
            for _ in threads:
                self.jobs.put(None)
            for thread in threads:
                thread.join()
            for one in list(self.open.values()):
                self._drop(one)
            self.link.close()

    def _read(self) -> bytes:
        """What the server says; nothing once it is gone, even if a process that it forked off keeps its end of the link open."""
        poller = select.poll()
        poller.register(self.link, select.POLLIN)
        try:
            while time.monotonic() < self.alert:
                time.sleep(PAUSE_S)
                if poller.poll(0):
                    break
            else:
                while not poller.poll(1000):
                    if self.server and os.getppid() != self.server:
                        return b""
            data = self.link.recv(1 << 20)
        except OSError:
            return b""
        self.alert = time.monotonic() + ALERT_S
        return data

    def _answer(self, number: int | None, counts: dict[str, float], done: list[int], failed: list[int]) -> None:
        with self.lock:
            try:
                self.link.sendall(frame((number, counts, done, failed)))
            except OSError:
                pass  # the server is gone

    def _share_out(self, number: int, base: int, rows: int, pieces: list[tuple]) -> None:
        """The requests of a batch go to the threads one by one: a file is finished the sooner."""
        if not pieces:  # all were given up since
            self._answer(number, {}, [], [])
            return
        task = Task(number, base, layout(self.fields, rows)[0], len(pieces))
        for piece in pieces:
            self.jobs.put((task, piece))

    def _work(self) -> None:
        while (item := self.jobs.get()) is not None:
            if item[0] == "fail":
                _, key, rid, reason, rows = item
                self._fail(key, rid, reason, rows)
                self._answer(None, {"errors": 1 if reason else 0}, [], [key])
                continue
            task, piece = item
            begin = time.perf_counter()
            outcome = self._write_piece(task, *piece)
            if task.over(piece[0], piece[2], outcome, time.perf_counter() - begin):
                counts = {"dumps": len(task.done), "rows": task.rows, "bytes": task.rows * sum(item.row_bytes for item in self.fields)}
                self._answer(task.number, {**counts, "errors": len(task.failed), "write_s": task.seconds}, task.done, task.failed)

    def _write_piece(self, task: Task, key: int, rid: str, tokens: int, first: int, count: int, row: int, total: int) -> str:
        """Write a request's rows of this batch: "done" when its file is finished with them, "failed" when it was given up over them, else ""."""
        one = self._file_of(key, rid, tokens)
        if one is None or time.monotonic() > self.until:
            return ""
        try:
            with one.lock:
                if not one.dead:
                    self._put(one, first, count, row, task.base, task.columns)
                    one.total = one.total or total
                    if one.written == one.total:
                        self._finish(one)
                        return "done"
            return ""
        except Exception as exc:
            if not isinstance(exc, OSError):
                logger.exception("hidden-state dump: writer")
            reason = f"writing failed: {exc.strerror} ({self.settings.dir})" if isinstance(exc, OSError) else f"the writer failed: {exc!r}"
            self._fail(key, rid, reason, first)
            return "failed"

    def _file_of(self, key: int, rid: str, tokens: int) -> OpenFile | None:
        """The file these rows belong to; None when it was given up."""
        with self.lock:
            if key in self.failed:
                return None
            if key not in self.open:
                self.open[key] = OpenFile(key, rid, tokens)
            return self.open[key]

    def _put(self, one: OpenFile, first: int, count: int, row: int, base: int, columns: list[int]) -> None:
        """Write rows `first`, `first` + 1, ... of a request, which lie from row `row` on in a block at `base`, and add them to the checksums."""
        if one.file < 0:
            self._open(one)
        for index, (item, column, offset) in enumerate(zip(self.fields, columns, one.offsets)):
            start = base + column + row * item.row_bytes
            rows = self.memory[start : start + count * item.row_bytes].reshape(count, item.row_bytes)
            words, sums, step = row_words(rows), np.empty(count, np.uint32), max(1, BLOCK_BYTES // item.row_bytes)
            for at in range(0, count, step):
                add_words(words[at : at + step], sums[at : at + step])
                write_all(one.file, memoryview(rows[at : at + step].reshape(-1)), offset + (first + at) * item.row_bytes)
            one.sums[index] += rows_sum(sums, first)
        one.written += 1

    def _open(self, one: OpenFile) -> None:
        """Make the temporary file and lay it out: the request's name says how many rows there will be. The header follows at the end, with the checksums."""
        with self.lock:
            self.serial += 1
            serial = self.serial
        header: dict[str, Any] = {"__metadata__": {**self.metadata, "rid": one.rid, "rows": str(one.tokens), "checksums": ""}}
        sizes = [item.row_bytes * one.tokens for item in self.fields]
        start = 0
        for item, size in zip(self.fields, sizes):
            shape = [one.tokens, item.columns] if item.columns else [one.tokens]
            header[item.name] = {"dtype": SAFETENSORS_DTYPE[item.dtype], "shape": shape, "data_offsets": [start, start + size]}
            start += size
        one.sums = [0] * len(self.fields)
        one.header = json.dumps(header, separators=(",", ":")).encode()
        length = len(one.header) + len(self._checksums(one))
        one.header += b" " * (-length % 8)
        length += -length % 8
        one.temporary = os.path.join(self.settings.dir, f".{one.rid}.{serial}.{os.getpid()}.tmp")
        one.file = os.open(one.temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        os.ftruncate(one.file, 8 + length + start)  # a tmpfs with huge=within_size gives pages of 2 MB only inside a file's size
        one.offsets = [8 + length + sum(sizes[:index]) for index in range(len(sizes))]

    def _checksums(self, one: OpenFile) -> bytes:
        """`name:16 hex digits` of each tensor (rows_sum), and `header:8 hex digits`: crc32 of the header, padding included, without this text."""
        sums = [f"{item.name}:{total & 0xFFFFFFFFFFFFFFFF:016x}" for item, total in zip(self.fields, one.sums)]
        return " ".join([*sums, f"header:{zlib.crc32(one.header):08x}"]).encode()

    def _finish(self, one: OpenFile) -> None:
        """The header with the checksums, then the name by which the client knows it."""
        text = one.header.replace(b'"checksums":""', b'"checksums":"' + self._checksums(one) + b'"', 1)
        write_all(one.file, memoryview(len(text).to_bytes(8, "little") + text), 0)
        os.close(one.file)
        one.file = -1
        os.rename(one.temporary, os.path.join(self.settings.dir, f"{one.rid}.safetensors"))
        one.dead = True
        with self.lock:
            self.open.pop(one.key, None)

    def _fail(self, key: int, rid: str, reason: str, rows: int) -> None:
        """Give a file up; its later rows are dropped. With a reason `<rid>.error` says so."""
        with self.lock:
            self.failed[key] = None
            if len(self.failed) > 10_000:  # the server sends no more rows of one once it has read the answer
                del self.failed[next(iter(self.failed))]
            one = self.open.get(key)
        if one is not None:
            self._drop(one)
        if reason:
            try:
                write_error(self.settings.dir, rid, reason, rows)
            except OSError as exc:
                logger.error("hidden-state dump: %s failed (%s), and so did writing that down: %s", rid, reason, exc)

    def _drop(self, one: OpenFile) -> None:
        with one.lock:
            one.dead = True
            try:
                if one.file >= 0:
                    os.close(one.file)
                    one.file = -1
                if one.temporary and os.path.exists(one.temporary):
                    os.unlink(one.temporary)
            except OSError as exc:
                logger.error("hidden-state dump: %s: %s", one.temporary, exc)
        with self.lock:
            self.open.pop(one.key, None)


def write_error(folder: str, rid: str, reason: str, rows: int) -> None:
    """`<rid>.error` by rename. Raises OSError."""
    temporary = os.path.join(folder, f".{rid}.error.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump({"rid": rid, "reason": reason, "rows": rows}, file)
        os.rename(temporary, os.path.join(folder, f"{rid}.error"))
    except OSError:
        if os.path.exists(temporary):  # a full disk has room for a name, though not for its content
            os.unlink(temporary)
        raise


def write_files(link_handle: int, ring_handle: int, server: int) -> None:
    """The whole life of the process: it ends when the server does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a server that is told to end still writes what it has; its end of the link then closes
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    link = socket.socket(fileno=link_handle)
    length = int.from_bytes(link.recv(4, socket.MSG_WAITALL), "little")  # the first message alone, the others are FileWriter's
    data = link.recv(length, socket.MSG_WAITALL) if length else b""
    if not length or len(data) < length:
        return  # the server is gone
    _, settings, metadata = pickle.loads(data)
    memory = np.frombuffer(mmap.mmap(ring_handle, 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    FileWriter(Settings(*settings), metadata, memory, link, server).run()


def write_all(file: int, data: memoryview, at: int) -> None:
    """pwrite until everything is written."""
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def layout(fields: list[Field], rows: int) -> tuple[list[int], int]:
    """Where each field of a batch of `rows` starts in its block, and the block's size."""
    starts, size = [], 0
    for item in fields:
        starts.append(size)
        size += -(-item.row_bytes * rows // ALIGN) * ALIGN
    return starts, size


# ---- the hook ---------------------------------------------------------------------------------------------------------------------------------


class Capture:
    """Wraps the text model's forward. Nothing here may raise into it."""

    def __init__(self, switch: LayerSwitch, settings: Settings, forward_modes: tuple[Any, ...], writer: Writer | None, device: torch.device):
        self.switch, self.settings, self.modes, self.writer = switch, settings, forward_modes, writer
        self.pending: dict[str, Dump] = {}
        self.refused: dict[str, float] = {}  # rids that failed: their later rows are dropped
        self.lock = threading.Lock()  # guards pending and refused against the housekeeper; never held during a copy or a write
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" and writer is not None else None
        self.made = torch.cuda.Event() if self.stream is not None else None  # recorded behind each forward: its states are there
        self.original = switch.text.forward
        parameters = list(inspect.signature(self.original).parameters)
        if "forward_batch" not in parameters:
            raise HiddenStateDumpError(f"{type(switch.text).__name__}.forward takes no forward_batch ({', '.join(parameters)}); this class is not supported")
        self.position = parameters.index("forward_batch")
        self.logged = 0
        self.kinds: tuple[list[torch.dtype], int] = ([], 0)  # of the states of every batch: dtypes, columns
        self.laid: tuple[int, list[int], int] = (0, [], 0)  # rows of the latest batch, and its layout()
        self.row_bytes: list[int] = []  # of the fields
        self.began = 0  # requests, not counted yet
        self.memcpy, self.memcpy_rows = device_copy(self.stream, writer.ring) if self.stream is not None else (None, None)
        self.kernel = fp8_kernel(self.stream, settings.ops) if self.stream is not None and settings.dtype == "fp8" and settings.ops else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the text model's forward: the same answer, and the rows of our requests on their way to the files."""
        begin = time.perf_counter()
        batch, pieces = self.plan(args, kwargs)
        if not pieces:
            return self.original(*args, **kwargs)
        if self.writer is not None:
            try:
                self.writer.pump()  # what the batches before have copied; done now, a GPU's copies of the last one had the time since its forward
            except Exception:
                self.log_exception()
        self.switch.set(True)
        before = time.perf_counter() - begin
        try:
            output = self.original(*args, **kwargs)
        finally:
            begin = time.perf_counter()
            self.switch.set(False)
        plain, aux = split_output(output)
        if self.writer is not None:
            try:
                self.take(pieces, batch, plain[0] if isinstance(plain, tuple) else plain, aux)
            except Exception as exc:
                self.log_exception()
                self.give_up([piece.rid for piece in pieces], f"the capture code failed: {exc!r}")
            self.writer.counters.add(requests=self.began, hook_s=before + time.perf_counter() - begin)
            self.began = 0
        return plain

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Piece]]:
        """The batch and our rows of it, before it runs; the same on every rank. Decode rows lie at or past a request's token count."""
        pieces: list[Piece] = []
        try:
            batch, start = kwargs["forward_batch"] if "forward_batch" in kwargs else args[self.position], 0
            if batch.forward_mode not in self.modes or not batch.rids:
                return batch, pieces
            for rid, length, prefix in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu):
                match = RID.fullmatch(rid) if isinstance(rid, str) else None
                if match:
                    tokens = int(match.group(1))
                    rows = min(int(length), tokens - int(prefix))
                    if rows > 0:
                        pieces.append(Piece(rid, tokens, start, int(prefix), rows))
                start += int(length)
            return batch, pieces
        except Exception:
            self.log_exception()
            return None, []

    def take(self, pieces: list[Piece], batch: Any, final: torch.Tensor, aux: Any) -> None:
        """Start the copies of our rows and queue them for the writers. Raises: forward() turns that into `.error` files."""
        points = len(self.switch.points)
        if aux is None:
            raise RuntimeError("forward returned no auxiliary states")
        states = list(aux) if isinstance(aux, (list, tuple)) else list(aux.chunk(points, dim=-1)) if aux.shape[-1] == points * final.shape[-1] else [aux]
        if len(states) != points:
            raise RuntimeError(f"forward returned {len(states)} auxiliary states for {points} capture points")
        ids, shape = batch.input_ids, final.shape
        if len(shape) != 2 or ids.shape[0] != shape[0] or any(state.shape != shape for state in states):
            raise RuntimeError(f"states of shape {[tuple(item.shape) for item in (*states, final)]} for {len(ids)} tokens (a shard of them?)")
        states.append(final)
        kinds = [state.dtype for state in states], shape[1]
        if not self.writer.fields:
            self.writer.fields, self.kinds = fields_of(states, self.settings.dtype == "fp8"), kinds
            self.row_bytes = [item.row_bytes for item in self.writer.fields]
        if self.kinds != kinds:
            raise RuntimeError(f"states changed from {self.kinds} to {kinds}")
        now = time.monotonic()
        with self.lock:
            kept = [(dump, piece) for piece in pieces if (dump := self.accept(piece, now)) is not None]
        if not kept:
            return
        rows = sum(piece.rows for _, piece in kept)
        if self.laid[0] != rows:
            self.laid = (rows, *layout(self.writer.fields, rows))
        _, starts, size = self.laid
        block = self.writer.ring.take(size)
        if block is None:
            self.writer.pump()  # what the process has written since
            block = self.writer.ring.take(size)
        if block is None:
            self.writer.counters.add(dropped=len(kept))
            slow = "the files are not written fast enough; send fewer requests at a time"
            small = f"one batch is larger than that; raise {PREFIX}BUDGET_MB or lower the server's --chunked-prefill-size"
            reason = f"no room for {size} bytes in the budget of {self.writer.ring.size} bytes: {small if size > self.writer.ring.size else slow}"
            self.give_up([piece.rid for _, piece in kept], reason)
            return
        job, row = Job(block=block, rows=rows), 0
        for dump, piece in kept:
            job.pieces.append((dump, piece, row))
            row += piece.rows
        try:
            self.copy(job, ids, states, starts)
        except Exception:
            if self.stream is not None:
                self.stream.synchronize()  # a copy that was started must not end in what the block holds next
            self.writer.ring.give_back(block)
            raise
        with self.lock:
            for dump, piece in kept:
                dump.pieces += 1
                if dump.next_row >= dump.tokens:
                    self.pending.pop(dump.rid, None)
        self.writer.put(job)

    def accept(self, piece: Piece, now: float) -> Dump | None:
        """The dump that these rows belong to; None when they are not wanted (any more). With the lock."""
        dump = self.pending.get(piece.rid)
        if piece.first == 0:  # a new request, or one that was retracted and starts over
            if dump is None:
                self.began += 1
            else:
                self.drop_quietly(dump)
            self.refused.pop(piece.rid, None)
            dump = self.pending[piece.rid] = Dump(piece.rid, piece.tokens)
        elif piece.rid in self.refused:
            return None
        elif dump is None or dump.dead or dump.next_row != piece.first:
            self.pending.pop(piece.rid, None)
            self.refused[piece.rid] = now
            if dump is None or not dump.dead:
                seen = dump.next_row if dump else 0
                reason = f"rows {seen} to {piece.first - 1} never passed through the model (served from a prefix cache?)" if seen < piece.first else "rows came twice"
                self.writer.fail(dump or Dump(piece.rid, piece.tokens), reason)
            return None
        dump.next_row = piece.first + piece.rows
        dump.touched = now
        return dump

    def drop_quietly(self, dump: Dump) -> None:
        """Forget what was written of a request that starts over (the writer removes its temporary file, no `.error`)."""
        self.writer.fail(dump, "")

    def give_up(self, rids: list[str], reason: str) -> None:
        """Drop these requests' dumps with a `.error`; never raises."""
        with self.lock:
            for rid in dict.fromkeys(rids):
                match = RID.fullmatch(rid)
                dump = self.pending.pop(rid, None) or Dump(rid, int(match.group(1)))
                self.refused[rid] = time.monotonic()
                self.writer.fail(dump, reason)

    def copy(self, job: Job, ids: torch.Tensor, states: list[torch.Tensor], starts: list[int]) -> None:
        """Enqueue the copies into the ring: on the GPU on a stream of their own, behind the forward that made the rows."""
        runs: list[list[int]] = []  # [first batch row, rows, first block row] of neighbouring pieces
        for _, piece, row in job.pieces:
            if runs and runs[-1][0] + runs[-1][1] == piece.batch_row:
                runs[-1][1] += piece.rows
            else:
                runs.append([piece.batch_row, piece.rows, row])
        by_address = self.memcpy is not None and self.settings.dtype != "fp8"
        if by_address:
            states = [state if self._has_rows(state) else state.contiguous() for state in states]
        if self.stream is None:
            self._by_address(job, (ids.to(torch.int32), *states), starts, runs) if by_address else self._by_torch(job, ids, states, starts, runs)
            return
        main = torch.cuda.current_stream(self.device)
        # ids are a view of the one buffer into which SGLang copies every batch's (0.5.17 and 0.5.23: model_executor/runner/eager_runner.py; seen on a GPU: the next
        # batch's ids in a dump), final may be one of a model's. The auxiliary states are fresh tensors of this forward (read in both versions:
        # layers/aux_hidden_states.py, the models' own lists, and the reductions that make a residual), so to hold them until they are copied is enough.
        ids, states[-1] = ids.to(torch.int32, copy=True), states[-1].clone()
        self.made.record(main)
        self.stream.wait_event(self.made)
        job.started, job.event = self.writer.events.pop() if self.writer.events else (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        job.started.record(self.stream)
        if by_address:
            self._by_address(job, (ids, *states), starts, runs)
        else:
            with torch.cuda.stream(self.stream):
                self._by_torch(job, ids, states, starts, runs)
        job.event.record(self.stream)
        # held until the copies are done; with record_stream() the allocator would ask at every allocation of the next forward whether they are
        job.held = (ids, *states)

    def _has_rows(self, state: torch.Tensor) -> bool:
        """Whether [T, H] can be copied by address: a row's values lie side by side, and so do its rows unless copies with a pitch work here."""
        return state.stride(1) == 1 and (self.memcpy_rows is not None or state.is_contiguous())

    def _by_address(self, job: Job, tensors: tuple[torch.Tensor, ...], starts: list[int], runs: list[list[int]]) -> None:
        """Enqueue the copies of the fields' tensors [T] or [T, H] as they lie on the device: no tensor is made, no kernel launched."""
        base = self.writer.ring.address + job.block[0]
        for tensor, start, row_bytes in zip(tensors, starts, self.row_bytes):
            source, pitch = tensor.data_ptr(), tensor.stride(0) * tensor.element_size()
            for first, count, row in runs:
                to, place = base + start + row * row_bytes, source + first * pitch
                code = self.memcpy(to, place, count * row_bytes) if pitch == row_bytes or count == 1 else self.memcpy_rows(to, place, pitch, row_bytes, count)
                if code:
                    raise RuntimeError(f"a copy to the host failed (CUDA error {code})")

    def _by_torch(self, job: Job, ids: torch.Tensor, states: list[torch.Tensor], starts: list[int], runs: list[list[int]]) -> None:
        """Enqueue the copies on the current stream, fp8 rows made on the way."""
        places = {item.name: (job.block[0] + start, item.row_bytes) for item, start in zip(self.writer.fields, starts)}
        names = [item.name for item in self.writer.fields if item.columns]
        fp8 = self.settings.dtype == "fp8"
        kernel = self.kernel if states[0].dtype is torch.bfloat16 else None
        if fp8 and kernel is None:  # in pieces, so that its float32 copies stay small beside a model that fills the GPU
            runs = [[first + at, min(FP8_ROWS, count - at), row + at] for first, count, row in runs for at in range(0, count, FP8_ROWS)]

        def send(name: str, rows: torch.Tensor, row: int) -> None:
            start, row_bytes = places[name]
            self.to_host(rows, start + row * row_bytes, rows.shape[0] * row_bytes)

        for first, count, row in runs:
            send("input_ids", ids[first : first + count].to(torch.int32), row)
            for name, state in zip(names, states):
                part = state[first : first + count]
                if fp8:
                    part, scale = kernel(part) if kernel is not None else quantize_rows_fp8(part)
                    send(f"{name}_scale", scale, row)
                send(name, part, row)

    def to_host(self, rows: torch.Tensor, at: int, nbytes: int) -> None:
        """Enqueue the copy of rows [R, ...] into the ring at byte `at`, on the copies' stream."""
        rows = rows.contiguous()
        if rows.nbytes != nbytes:
            raise RuntimeError(f"{rows.nbytes} bytes of rows for {nbytes} of the ring")
        ring = self.writer.ring
        if self.memcpy is None:
            ring.memory[at : at + nbytes].view(rows.dtype).view(rows.shape).copy_(rows, non_blocking=True)
        elif code := self.memcpy(ring.address + at, rows.data_ptr(), nbytes):
            raise RuntimeError(f"a copy to the host failed (CUDA error {code})")

    def log_exception(self) -> None:
        """The traceback of the first few failures; after that the counters tell."""
        self.logged += 1
        if self.logged <= 5:
            logger.exception("hidden-state dump: capture failed; the server goes on")

    def housekeep(self, now: float) -> None:
        """Free requests that got no rows for stale_s seconds (aborted) and forget old failures."""
        with self.lock:
            stale = [dump for dump in self.pending.values() if now - dump.touched > self.settings.stale_s]
            for dump in stale:
                del self.pending[dump.rid]
            while self.refused and now - self.refused[oldest := next(iter(self.refused))] > max(self.settings.stale_s, 600.0):  # all of them would take long under the lock
                del self.refused[oldest]
        for dump in stale:
            self.writer.fail(dump, f"no new rows for {self.settings.stale_s:.0f} s after {dump.next_row} of {dump.tokens}: the request was aborted")


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's cuda.h: where rows come from and where they go."""

    _fields_ = [
        ("srcXInBytes", ctypes.c_size_t), ("srcY", ctypes.c_size_t), ("srcMemoryType", ctypes.c_uint), ("srcHost", ctypes.c_void_p), ("srcDevice", ctypes.c_uint64),
        ("srcArray", ctypes.c_void_p), ("srcPitch", ctypes.c_size_t),
        ("dstXInBytes", ctypes.c_size_t), ("dstY", ctypes.c_size_t), ("dstMemoryType", ctypes.c_uint), ("dstHost", ctypes.c_void_p), ("dstDevice", ctypes.c_uint64),
        ("dstArray", ctypes.c_void_p), ("dstPitch", ctypes.c_size_t), ("WidthInBytes", ctypes.c_size_t), ("Height", ctypes.c_size_t),
    ]  # fmt: skip


Memcpy = Callable[[int, int, int], int]
MemcpyRows = Callable[[int, int, int, int, int], int]


def device_copy(stream: torch.cuda.Stream, ring: Ring) -> tuple[Memcpy | None, MemcpyRows | None]:
    """The CUDA driver's own copies from device to host on `stream`, as functions that return an error code: (to, from, bytes), and (to, from, pitch, bytes a row, rows) for rows
    that lie `pitch` bytes apart on the device and go side by side to the host. Each is tried on the ring first; None where it does not work.

    One call in place of slices, a copy in rows' order and a copy_(): eager prefill is bound by what the forward thread does on the host.
    """
    try:
        library = ctypes.PyDLL("libcuda.so.1")  # PyDLL: keeps Python's lock, for a few microseconds
        call, call_rows = library.cuMemcpyDtoHAsync_v2, library.cuMemcpy2DAsync_v2
    except (OSError, AttributeError) as exc:
        logger.warning("hidden-state dump: no libcuda.so.1 to copy with (%s); torch copies, which costs a little more", exc)
        return None, None
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    call_rows.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    handle, each = stream.cuda_stream, Memcpy2D(srcMemoryType=2, dstMemoryType=1)  # CU_MEMORYTYPE_DEVICE, CU_MEMORYTYPE_HOST
    where = ctypes.addressof(each)

    def memcpy(to: int, source: int, nbytes: int) -> int:
        return call(to, source, nbytes, handle)

    def memcpy_rows(to: int, source: int, pitch: int, nbytes: int, rows: int, each: Memcpy2D = each) -> int:
        each.dstHost, each.srcDevice, each.srcPitch, each.dstPitch, each.WidthInBytes, each.Height = to, source, pitch, nbytes, nbytes, rows
        return call_rows(where, handle)

    probe = torch.randint(0, 256, (min(ring.size // 4, 1 << 14) // 64, 256), dtype=torch.uint8, device=stream.device)  # [R, 256]: four packed states of 64 bytes a row
    torch.cuda.current_stream(stream.device).synchronize()
    code = memcpy(ring.address, probe.data_ptr(), probe.nbytes)
    stream.synchronize()
    if code or not torch.equal(ring.memory[: probe.nbytes].view(probe.shape), probe.cpu()):
        logger.warning("hidden-state dump: the driver's own copy to the host does not work here (CUDA error %d); torch copies, which costs a little more", code)
        return None, None
    rows = probe[3:-5, 64:128]
    code = memcpy_rows(ring.address, rows.data_ptr(), rows.stride(0), 64, len(rows))
    stream.synchronize()
    if code or not torch.equal(ring.memory[: rows.nbytes].view(rows.shape), rows.cpu()):
        logger.warning("hidden-state dump: the driver's copy of rows with a pitch does not work here (CUDA error %d); packed states are taken apart first", code)
        return memcpy, None
    return memcpy, memcpy_rows


def fp8_kernel(stream: torch.cuda.Stream, path: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None:
    """quantize_rows_fp8() by one launch of the drafter ops' kernel, tried against it; None, with a warning, where the library does not fit."""
    try:
        library = ctypes.PyDLL(path)
        if library.aerie_abi() != OPS_ABI:
            raise OSError(f"it is of version {library.aerie_abi()}, not {OPS_ABI}; build it again with make cuda")
        if code := library.aerie_prepare():
            raise OSError(f"it was built for other GPUs (CUDA error {code}); build it again with make cuda")
        kernel = library_quantize(library, stream.cuda_stream)
        probe = torch.randn(33, 1000, device=stream.device).to(torch.bfloat16)
        torch.cuda.current_stream(stream.device).synchronize()
        with torch.cuda.stream(stream):
            pairs = [(each.view(torch.uint8).cpu(), wanted.view(torch.uint8).cpu()) for each, wanted in zip(kernel(probe), quantize_rows_fp8(probe))]
        if all(torch.equal(*pair) for pair in pairs):
            return kernel
        raise OSError("its rows are not those that torch makes")
    except (OSError, AttributeError, RuntimeError) as exc:
        logger.warning("hidden-state dump: the drafter ops %s are not used for fp8 rows: %s", path, exc)
    return None


def library_quantize(library: ctypes.CDLL, stream: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """[T, H] bf16 -> e4m3 [T, H] and float32 scale [T] by the library's kernel on `stream`."""
    call = library.aerie_quantize_rows_fp8
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 3]

    def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        q, scale = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device), torch.empty(len(rows), device=rows.device)
        if code := call(rows.data_ptr(), rows.stride(0), *rows.shape, q.data_ptr(), scale.data_ptr(), stream):
            raise RuntimeError(f"aerie_quantize_rows_fp8 failed (CUDA error {code})")
        return q, scale

    return quantize


def split_output(output: Any) -> tuple[Any, Any]:
    """What forward returns without capture, and the auxiliary states: (plain, aux). Most return (hidden, aux); some (hidden, before_norm, aux)."""
    if not isinstance(output, tuple):
        return output, None
    return (output[0] if len(output) == 2 else output[:-1]), output[-1]


# ---- called by the patch ----------------------------------------------------------------------------------------------------------------------


def install(model_runner: Any) -> None:
    """Called once after the weights are loaded: wrap the text model's forward. Does nothing when capture is off. Raises HiddenStateDumpError."""
    settings = read_settings()
    if settings is None:
        return
    if model_runner.is_draft_worker:
        raise HiddenStateDumpError("this server loads a draft model; capture runs on a server without speculation")
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    switch = find_layers(model_runner.model, settings.layer_ids)
    device = next(model_runner.model.parameters()).device
    writer = None
    if parallel.attn_tp_rank == 0:
        budget = settings.budget_mb << 20 or default_budget(model_runner, len(switch.points))
        writer = Writer(settings, describe(model_runner, settings, switch), Ring(budget, pinned=device.type == "cuda"), Counters())
    capture = Capture(switch, settings, (ForwardMode.EXTEND, ForwardMode.MIXED), writer, device)
    switch.text.forward = capture.forward
    if writer is None:
        logger.info("hidden-state dump: attention-TP rank %d captures with rank 0 and writes nothing", parallel.attn_tp_rank)
        return
    logger.info(
        "hidden-state dump: %s, layer ids %s: state after %s decoder layers and the final norm, dtype %s, attention-DP rank %d, folder %s, budget %.0f MB, %d writers in process %d",
        type(switch.text).__name__, list(settings.layer_ids), switch.points, settings.dtype, parallel.attn_dp_rank, settings.dir, writer.ring.size / 1e6, settings.writers, writer.process.pid,
    )  # fmt: skip
    threading.Thread(target=watch, args=(capture, writer), name="hidden-state-watch", daemon=True).start()


def default_budget(model_runner: Any, points: int) -> int:
    """Bytes for at least four of the largest batches, from 256 MB to 8 GB; a power of two, which pinned memory is rounded to anyway."""
    args = model_runner.server_args
    batch_tokens = max(args.chunked_prefill_size or 0, 0) or args.max_prefill_tokens or 16384
    row = (points + 1) * model_runner.model_config.hidden_size * model_runner.model_config.dtype.itemsize
    return min(max(1 << (4 * batch_tokens * row - 1).bit_length(), 256 << 20), 8 << 30)


def describe(model_runner: Any, settings: Settings, switch: LayerSwitch) -> dict[str, str]:
    """The dump's metadata: what these states are, and how the model turns `final` into logits."""
    import sglang

    processors = [module for module in model_runner.model.modules() if type(module).__name__ == "LogitsProcessor"]
    logits = {name: value for name in ("logit_scale", "final_logit_softcapping") for value in {getattr(module, name, None) for module in processors} if value is not None}
    return {
        "kind": "aerie-dump", "format": str(VERSION), "model_path": str(model_runner.server_args.model_path), "model_class": type(model_runner.model).__name__,
        "sglang_version": sglang.__version__, "aux_layer_ids": json.dumps(list(settings.layer_ids)), "capture_points": json.dumps(switch.points),
        "normed": "true", "dtype": settings.dtype if settings.dtype == "fp8" else str(model_runner.model_config.dtype).removeprefix("torch."), "logits": json.dumps(logits),
    }  # fmt: skip


def watch(capture: Capture, writer: Writer) -> None:
    """Every second: free abandoned requests, keep `capture.<pid>.json` in the folder fresh; once a minute log the counters."""
    path = os.path.join(writer.settings.dir, f"capture.{os.getpid()}.json")
    temporary = os.path.join(writer.settings.dir, f".aerie.capture.{os.getpid()}.tmp")  # a name that open_folder() knows
    last_log, last_values = time.monotonic(), None
    while True:
        try:
            now = time.monotonic()
            capture.housekeep(now)
            if writer.counters.values != last_values:
                last_values = dict(writer.counters.values)
                info = {**writer.metadata, "pid": os.getpid(), "budget_bytes": writer.ring.size, "counters": last_values}
                with open(temporary, "w", encoding="utf-8") as file:
                    json.dump(info, file)
                os.rename(temporary, path)
            if now - last_log >= writer.settings.log_s:
                logger.info("hidden-state dump: %s", writer.counters.line())
                last_log = now
        except OSError as exc:
            if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
                logger.exception("hidden-state dump: watch")
        except Exception:
            logger.exception("hidden-state dump: watch")
        time.sleep(1.0)


if __name__ == "__main__":
    write_files(*map(int, sys.argv[1:4]))
