"""Memory, disk, /dev/shm, limits, ports, and the config's model folder."""

from __future__ import annotations

import json
import os
import resource
import struct
from pathlib import Path
from typing import Iterator

from ..errors import UserError
from ..paths import expanded, runs_dir
from ..ports import port_problem
from ..records import server_on_port
from .checks import GIB, Facts, Result, free_bytes
from .needs import LEAST_DISK, for_gpus


def memory_available() -> tuple[int, int]:
    """(available, total) bytes of host memory."""
    found = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return tuple(int(found[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))


def check_memory(facts: Facts) -> Iterator[Result]:
    available, total = memory_available()
    planned = facts.needs
    needed = int(max(32 * GIB if facts.gpus else 6 * GIB, planned.memory if planned else 0))
    bound = bool(planned and planned.at_least)  # then a tick would say too much
    later = f"; {facts.config.path.name} needs {planned.memory / GIB:.0f} GiB and one weight file on each rank, whose size is not known before the download" if bound else ""
    yield Result(
        False if available < needed else None if bound else True, "host memory", f"{available / GIB:.0f} of {total / GIB:.0f} GiB available{later}",
        "run `make doctor` again when the model is there" if bound and available >= needed else
        f"a server needs {'at least' if bound else 'about'} {needed // GIB} GiB here; loading a large target with less was killed (exit -9, sglang #21898)",
    )  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    yield Result(None if cores < 8 and facts.gpus else True, "processors", f"{cores} usable", "")


def check_space(facts: Facts) -> Iterator[Result]:
    runs = runs_dir()
    if not (there := next(folder for folder in (runs, *runs.parents) if os.path.lexists(folder))).is_dir():
        raise UserError(f"{there} is no folder; set AERIE_RUNS_DIR to one on a large disk, or unset it")
    free, planned = free_bytes(runs), facts.needs
    needed = max(LEAST_DISK, planned.disk if planned else 0)
    detail, todo = f"{free / 1e9:,.0f} GB free for {runs}", "the demo needs 20 GB; AERIE_RUNS_DIR points runs at another disk; `make plan CONFIG=...` says what a run needs"
    if planned and planned.disk > LEAST_DISK:
        detail += f", {facts.config.path.name} needs {planned.disk / 1e9:,.0f} GB"
        todo = "`make plan CONFIG=...` says for what; AERIE_RUNS_DIR points runs at another disk"
        todo += "" if facts.config.extract.dtype == "fp8" else "; extract.dtype = \"fp8\" takes half"
        todo += "" if facts.config.extract.keep_gb else "; `make stream` (extract.keep_gb) never holds it all"
    unknown = planned is None and for_gpus(facts)  # then a tick would say too much
    if unknown:
        detail += f"; what {facts.config.path.name} needs cannot be computed yet"
    yield Result(False if free < needed else None if unknown else True, "disk", detail, todo)
    shm = Path("/dev/shm")
    folder = expanded(facts.config.server.dump_dir).absolute() if facts.config and facts.config.server.dump_dir else shm
    if facts.gpus or folder != shm:
        room = free_bytes(folder)
        yield Result(room >= max(8 * GIB, planned.dumps if planned else 0), "dump folder", f"{room / GIB:.1f} GiB free in {folder}", "mount -o remount,size=64G /dev/shm (containers: --shm-size=64g), or set server.dump_dir to a fast disk")


def check_limits(facts: Facts) -> Iterator[Result]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= 4096
    yield Result(enough, "open files", f"limit {soft}, at most {hard}", "ulimit -n 65535 (in containers: --ulimit nofile=65535)")
    if facts.gpus:
        locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        good = locked == resource.RLIM_INFINITY or locked >= 8 * GIB
        yield Result(good or None, "locked memory", "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / GIB:.2f} GiB", "containers: --ulimit memlock=-1")


def check_ports(facts: Facts) -> Iterator[Result]:
    if not facts.config:
        return
    host = facts.config.server.host
    for what, port, key in (("extraction", facts.config.server.port, "server.port"), ("serving", facts.config.serve.port, "serve.port"), ("baseline", facts.config.bench.baseline_port, "bench.baseline_port")):
        problem = port_problem(host, port)
        run, mode = (server_on_port(port) if "in use" in problem else None) or ("", "")
        if not problem:
            yield Result(True, f"port {port}", f"free ({what})")
        elif run == facts.config.run.name:
            yield Result(None, f"port {port}", f"in use by this run's own {mode} server", f"make stop RUN={run} ends it")
        elif run:
            yield Result(False, f"port {port}", f"in use by the {mode} server of run {run} ({what})", f"make stop RUN={run} ends it, --set {key}=N chooses another port; with RUN={run} doctor looks at that run")
        else:
            yield Result(False, f"port {port}", f"{problem} ({what})", f"--set {key}=N chooses another port")


def check_chats(facts: Facts) -> Iterator[Result]:
    """What `make data` will read, where this run has no data yet."""
    if not facts.config or (facts.config.run.data / "report.json").is_file():
        return
    from ..inputs import input_files

    try:
        files = input_files(facts.config)
    except UserError as exc:
        problem, _, todo = str(exc).partition("; ")
        yield Result(False, "chats (data.inputs)", problem, todo)
        return
    yield Result(True, "chats (data.inputs)", f"{len(files)} file{'s' if len(files) != 1 else ''}, {sum(path.stat().st_size for path in files) / 1e6:,.1f} MB")


def safetensors_problem(path: Path) -> str:
    """Empty when the file is as long as its own header says; reads the header alone."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(8)
            if len(start) < 8:
                return "is empty"
            length = struct.unpack("<Q", start)[0]
            if length > size - 8:
                return "is cut off inside its header"
            text = file.read(length)
    except OSError as exc:
        return f"cannot be read ({exc.strerror})"
    try:
        header = json.loads(text)
        end = max((int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):  # no JSON, or JSON of another kind
        return "has a damaged header"
    return "" if size == 8 + length + end else f"has {size:,} bytes, its header says {8 + length + end:,}"


def check_model(facts: Facts) -> Iterator[Result]:
    if not facts.config:
        return
    folder = Path(facts.config.model_path)
    from ..config import make_words  # needs Python 3.11; a config has been read, so it is
    from ..config_rules import check_against_model_config

    todo = f"make it with `make target{make_words(facts.config)}`" if facts.config.target.from_package else f"download the model and link it: ln -s /path/to/model {folder}, or --set target.model_path=/path/to/model"
    if not (folder / "config.json").is_file():
        yield Result(False, "model folder", f"{folder} has no config.json", todo)
        return
    try:
        check_against_model_config(facts.config)
    except UserError as exc:
        yield Result(False, "config and target", str(exc))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = sorted({str(Path(name)) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (ValueError, RecursionError, AttributeError, LookupError, TypeError, OSError):
            yield Result(False, "model folder", f"{index} is not a safetensors index", "download that file again")
            return
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in files if not (folder / name).is_file()]
    broken = {name: problem for name in files if name not in missing if (problem := safetensors_problem(folder / name))}
    if missing or not files:
        yield Result(False, "model folder", f"{folder}: {len(missing)} of {len(files)} files missing{', ' + missing[0] + ' first' if missing else ''}", "go on downloading")
    elif broken:
        name, problem = next(iter(broken.items()))
        yield Result(False, "model folder", f"{folder}: {name} {problem}" + (f", and {len(broken) - 1} more" if len(broken) > 1 else ""), "download these files again")
    else:
        size = sum((folder / name).stat().st_size for name in files)
        yield Result(True, "model folder", f"{folder}: {len(files)} files, {size / 1e9:,.1f} GB, all whole")
    names = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
    if not any((folder / name).is_file() for name in names):
        yield Result(False, "tokenizer", f"{folder} has none of {', '.join(names)}", "download the tokenizer's files too")
    needs_code = (folder / "tiktoken.model").is_file() or any(folder.glob("tokenization_*.py"))
    if needs_code and not facts.config.target.trust_remote_code:
        yield Result(False, "tokenizer", "is Python code in the model's folder", "read it, then set target.trust_remote_code = true")


CHECKS = (check_memory, check_space, check_limits, check_ports, check_chats, check_model)
