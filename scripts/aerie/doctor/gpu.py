"""Driver, GPUs, how they reach each other, driver messages; and what is known to go wrong on SM120 (sm120.py)."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Iterator

from ..nvidia import HANGS, NOT_THERE, ask
from . import sm120
from .checks import GIB, Facts, Result, version_tuple
from .needs import for_gpus, ranks_of

# Lowest driver by CUDA major.minor (NVIDIA's CUDA compatibility table, Linux).
DRIVERS = {(13, 0): (580,), (12, 9): (575,), (12, 8): (570,), (12, 6): (560,), (12, 4): (550,)}
XID = {8: "the GPU stopped answering", 13: "a kernel's illegal instruction or access", 31: "a kernel read or wrote outside its memory", 48: "double-bit memory error", 62: "internal halt",
       79: "the GPU fell off the bus", 109: "context switch timeout", 119: "GSP firmware stopped answering", 120: "GSP error", 154: "recovery needed"}  # fmt: skip


def check_driver(facts: Facts) -> Iterator[Result]:
    if not facts.gpus:
        code, _ = ask(["nvidia-smi", "-L"])
        if facts.hidden:
            yield Result(None, "NVIDIA driver", f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides {'the GPU' if facts.hidden == 1 else f'all {facts.hidden} GPUs'}: everything runs on the CPU", "unset it to use them")
        elif code == NOT_THERE:
            enough = "which is enough for the demo and the tests" + (f", not for {facts.config.path.name}" if for_gpus(facts) else "")
            yield Result(None, "NVIDIA driver", f"none here: everything runs on the CPU, {enough}")
        elif code == HANGS:
            yield Result(False, "NVIDIA driver", "nvidia-smi does not answer: a GPU or its driver hangs", "reboot; after it the same make command goes on where it stopped")
        else:
            says = f" ({facts.smi_says})" if facts.smi_says else ""
            yield Result(False, "NVIDIA driver", f"nvidia-smi is there and lists no GPU{says}", "load the driver (dmesg says why it did not), or in a container pass the GPUs in (--gpus all)")
        return
    cuda = version_tuple((facts.probe or {}).get("torch_cuda") or "")[:2]
    least = next((driver for known, driver in sorted(DRIVERS.items(), reverse=True) if cuda >= known), None)
    good = least is None or version_tuple(facts.driver) >= least
    wanted = f", torch's CUDA {cuda[0]}.{cuda[1]} needs {least[0]}" if least else ""
    yield Result(good, "NVIDIA driver", facts.driver + wanted, f"install driver {least[0] if least else ''} or later")


def check_gpus(facts: Facts) -> Iterator[Result]:
    if facts.gpus and facts.smi_says:
        yield Result(False, "nvidia-smi", f"says in place of a GPU: {facts.smi_says}", "driver messages below may say why; a GPU that fell off the bus comes back with a reboot")
    if facts.gpus and facts.hidden:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        yield Result(None, "CUDA_VISIBLE_DEVICES", f"{shown!r} leaves {len(facts.gpus)} of {len(facts.gpus) + facts.hidden} GPUs; server.gpus and train.gpus count among these", "unset it to use all")
    kinds = {(gpu.name, gpu.capability, gpu.total) for gpu in facts.gpus}
    for name, capability, total in sorted(kinds):
        same = [gpu.index for gpu in facts.gpus if (gpu.name, gpu.capability, gpu.total) == (name, capability, total)]
        said = (f"SM{capability[0]}{capability[1]}" if capability > (0, 0) else "capability not said", f"{total / GIB:.1f} GiB each" if total else "memory not said (make plan: give --gpu-gib)")
        yield Result(capability >= (8, 0) or (None if capability == (0, 0) else False), f"{len(same)} x {name}", ", ".join(said), "Aerie needs SM80 or later")
    if len(kinds) > 1:
        yield Result(None, "GPUs", "are not all alike: SGLang sizes everything by the smallest; CUDA_VISIBLE_DEVICES chooses among them")
    busy = {gpu.index: gpu.used for gpu in facts.gpus if gpu.used > 2 * GIB}
    if busy:
        yield Result(None, "GPU memory", "in use: " + ", ".join(f"GPU {index} {used / GIB:.1f} GiB" for index, used in busy.items()), "nvidia-smi says by whom; `make stop` ends a run's own servers")


def check_enough_gpus(facts: Facts) -> Iterator[Result]:
    """What the config asks for against what is here, also where that is none."""
    if not facts.config:
        return
    name, here, ranks = facts.config.path.name, len(facts.gpus), ranks_of(facts.server_args)
    if here or ranks > 1:
        yield Result(ranks <= here, "tensor parallelism", f"{name} asks for {ranks} of {here} GPU{'' if here == 1 else 's'}", "run it on a machine that has them; `make plan` says what fits on fewer")
    elif facts.config.plan.gpus:
        planned = facts.config.plan.gpus
        yield Result(False, "GPUs", f"none here; {name} was written for {planned}", "run it where there is one; without a GPU this target is too slow to be of use")
    named = [*facts.config.server.gpus, *facts.config.train.gpus]
    if named:
        yield Result(max(named) < here, "GPUs by number", f"server.gpus and train.gpus name GPU {max(named)}, the last here is {here - 1 if here else 'none'}",
                     "set them to GPUs that nvidia-smi lists")  # fmt: skip


def matrix(*words: str) -> list[list[str]]:
    """A matrix of `nvidia-smi topo`: each GPU's row without its name. Some of them are indented."""
    rows = [line.split() for line in ask(["nvidia-smi", "topo", *words])[1].splitlines()]
    return [row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0]) and not row[1].startswith("GPU")]


def check_links(facts: Facts) -> Iterator[Result]:
    if len(facts.gpus) < 2:
        return
    rows = matrix("-m")
    links = {row[column] for place, row in enumerate(rows) for column in range(min(len(rows), len(row))) if column != place}
    if any(link.startswith("NV") for link in links):
        yield Result(True, "links between GPUs", f"NVLink ({', '.join(sorted(links))})")
    elif links:
        yield Result(None, "links between GPUs", f"PCIe, no NVLink ({', '.join(sorted(links))})", "every layer's all-reduce goes over PCIe: disable-custom-all-reduce = true, NCCL_P2P_LEVEL=SYS")
    table = matrix("-p2p", "r")
    states = {word for row in table for word in row[: len(table)]} - {"X"}
    if states:
        good = states == {"OK"}
        yield Result(good or None, "peer to peer", "works between all GPUs" if good else f"not between all: {', '.join(sorted(states))}",
                     "IOMMU off (kernel: iommu=off amd_iommu=off or intel_iommu=off) and resizable BAR on; or run without it: NCCL_P2P_DISABLE=1")  # fmt: skip
    small = [gpu.index for gpu in facts.gpus if gpu.bar1 and gpu.bar1 < gpu.total * 0.9]
    if any(gpu.bar1 for gpu in facts.gpus):
        yield Result(not small or None, "resizable BAR", "full size" if not small else f"smaller than the memory on GPU {', '.join(map(str, small))}", "BIOS: above 4G decoding and resizable BAR on")
    if any(Path("/sys/class/iommu").glob("*")):
        yield Result(None, "IOMMU", "is on", "owners of eight-card PCIe boxes switch it off: peer to peer through it is slow or hangs")


def check_hmm(facts: Facts) -> Iterator[Result]:
    switch = Path(os.environ.get("AERIE_SYS", "/sys")) / "module/nvidia_uvm/parameters/uvm_disable_hmm"
    if len(facts.gpus) < 2 or not facts.sm120 or not switch.is_file():
        return
    off = switch.read_text().strip() in ("Y", "1")
    yield Result(off, "nvidia_uvm", "uvm_disable_hmm=1" if off else "uvm_disable_hmm is not set", "NCCL locked up without it (owners' notes, May 2026): echo 'options nvidia_uvm uvm_disable_hmm=1' > /etc/modprobe.d/uvm.conf, then reboot")


def check_messages(facts: Facts) -> Iterator[Result]:
    if not facts.gpus and not shutil.which("nvidia-smi"):
        return
    code, text = ask(["dmesg"])
    if code:
        yield Result(None, "driver messages", "dmesg may not be read here; look for 'NVRM: Xid' as root")
        return
    found: dict[int, int] = {}
    for number in re.findall(r"NVRM: Xid \([^)]*\): (\d+)", text):
        found[int(number)] = found.get(int(number), 0) + 1
    if not found:
        yield Result(True, "driver messages", "no Xid since boot")
        return
    said = ", ".join(f"Xid {number} ({XID.get(number, 'see NVIDIA Xid catalogue')}) {count}x" for number, count in sorted(found.items()))
    fatal = found.keys() & {8, 48, 62, 79, 119, 120, 154}
    todo = "8 and 119 end with a reboot (open-gpu-kernel-modules #1111, #1159); after it the same make command goes on where it stopped"
    yield Result(False if fatal else None, "driver messages", said, todo if fatal else "")


CHECKS = (check_driver, check_gpus, check_enough_gpus, check_links, check_hmm, check_messages, sm120.check_sm120)
