#!/usr/bin/env python3
"""Memory, disk and hours of a run before it starts: what fits where, and exit code 2 with the number that does not."""

import argparse
import os
import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie import plan as planning
from aerie.config import AT_MOST, Config, add_config_arguments, config_from_args
from aerie.errors import UserError, run_main
from aerie.nvidia import gpu_rows, visible
from aerie.report import read_report, write_report
from aerie.servers import dump_dir, has_gpu, ops_built, server_args
from aerie.shapes import Shape

GIB = planning.GIB


def existing(path: Path) -> Path:
    """The folder itself or its nearest parent that is there: what a disk's free space is asked for."""
    while not path.exists():
        path = path.parent
    return path


def gpus_here() -> list[float]:
    """Bytes of each GPU that CUDA_VISIBLE_DEVICES leaves, as a process finds them free when nothing runs."""
    rows = visible(gpu_rows("memory.total"))
    if not rows:
        raise UserError(f"nvidia-smi lists no GPU that CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} shows; set it right, or plan with --gpus and --gpu-gib")
    for row in rows:
        if not re.fullmatch(r"[\d.]+", row[2]):
            raise UserError(f"nvidia-smi does not say the memory of GPU {row[0]} ({row[2]}); plan with --gpus and --gpu-gib")
    overhead = planning.CONTEXT_GIB + (planning.NCCL_GIB if len(rows) > 1 else 0)
    return [float(row[2]) * (1 << 20) - overhead * GIB for row in rows]


def refuse_odd_words(args: argparse.Namespace) -> None:
    """Raise UserError for a machine that cannot be, and for a named file that is not there."""
    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus {args.gpus} must be 1 or more; leave it out to plan for the GPUs here")
    if args.gpu_gib is not None and not 0 < args.gpu_gib <= AT_MOST["plan.gpu_gib"]:
        raise UserError(f"--gpu-gib {args.gpu_gib:g} must be above 0 and at most {AT_MOST['plan.gpu_gib']}")
    for flag, name in (("--server-log", args.server_log), ("--train-report", args.train_report), ("--bench-train", args.bench_train)):
        if name and not Path(name).is_file():
            raise UserError(f"{flag} {name} is no file; name the one that was written")


def choose_hardware(config: Config, args: argparse.Namespace) -> tuple[int, float, str]:
    """(GPUs, bytes free on each before loading, where that comes from)."""
    if args.gpus is not None or args.gpu_gib is not None:
        return args.gpus or config.plan.gpus or 1, (args.gpu_gib or config.plan.gpu_gib) * GIB, "the command line"
    if has_gpu() and not args.paper:
        found = gpus_here()
        return len(found), min(found), f"this machine's GPU{'' if len(found) == 1 else 's'}"
    if config.plan.gpus:
        return config.plan.gpus, config.plan.gpu_gib * GIB, f"the machine that [plan] of the config names: {'--paper' if args.paper else 'this one has no GPU'}"
    return 0, 0.0, "no GPU here and none in [plan]: memory of GPUs is left out"


def print_plan(plan: planning.Plan, config: Config, amounts: planning.Amounts, hardware: str) -> None:
    print(f"{config.path.name}, run {config.run.name}: {amounts.samples:,} samples, {amounts.tokens / 1e6:,.2f} M tokens ({amounts.source}), "
          f"`final` kept for {100 * amounts.final_rows / max(amounts.tokens, 1):.0f}%")  # fmt: skip
    several = f"{plan.gpus} GPUs with {plan.gpu_bytes / GIB:.2f} GiB free on each" if plan.gpus > 1 else f"a GPU with {plan.gpu_bytes / GIB:.2f} GiB free"
    print(f"{several} ({hardware})" if plan.gpus else hardware)
    for phase, parts in plan.phases.items():
        print(f"\n{phase}, GiB a GPU")
        for part in parts:
            print(f"  {part.bytes / GIB:8.2f}  {part.name}{f' ({part.how})' if part.how else ''}")
        print(f"  {plan.total(phase) / GIB:8.2f}  in all" + (f"; {plan.notes[phase]}" if phase in plan.notes else ""))
    if "host memory" in plan.notes:
        print(f"\nhost: {plan.notes['host memory']}")
    print("\ndisk, GB")
    for part in plan.disk:
        print(f"  {part.bytes / 1e9:8,.1f}  {part.name}{f' ({part.how})' if part.how else ''}")
    print(f"  {sum(part.bytes for part in plan.disk) / 1e9:8,.1f}  in all" + (f"\n  dump folder: {plan.notes['dump folder']}" if "dump folder" in plan.notes else ""))
    if plan.hours:
        print("\nhours")
        for step, hours in plan.hours.items():
            print(f"  {hours:8.{1 if hours >= 1 else 3}f}  {step} ({plan.notes[f'hours of {step}']})")
    else:
        print("\nhours: unknown without rates; give what you measured: --set plan.prefill_tok_s=... plan.decode_tok_s, plan.train_tok_s")


# --- compare with what was measured ----------------------------------------------------------------------------------------------------------


def measured_server(log: Path) -> dict[str, float]:
    """From an SGLang log: bytes of weights, KV tokens, KV bytes, bytes free before loading (first rank that says so)."""
    text = log.read_text(errors="replace")
    found: dict[str, float] = {}
    if match := re.search(r"Load weight end\..*?avail mem=([\d.]+) GB, mem usage=([\d.]+) GB", text):
        found["weights"] = float(match[2]) * GIB
        found["free before loading"] = (float(match[1]) + float(match[2])) * GIB
    sizes = r"#tokens: (\d+), (?:K size: ([\d.]+) GB, V size: ([\d.]+) GB|KV size: ([\d.]+) GB)"
    resized = re.findall(r"Post-capture KV sizing: KV cache allocated\..*?" + sizes, text)
    if pools := resized[-1:] or re.findall(sizes, text)[:1]:  # the target's pool comes before the drafter's
        tokens, key, value, both = pools[0]
        found["KV tokens"] = float(tokens)
        found["KV"] = (float(both) if both else float(key) + float(value)) * GIB
    return found


def loss_kernel(config: Config) -> bool:
    """Whether training would use the loss kernel of cuda/ on a GPU of this machine."""
    return ops_built() and config.train.kernels != "off"


def compare(plan: planning.Plan, config: Config, shape: Shape, args: argparse.Namespace, server_options: dict[str, dict]) -> list[tuple[str, float, float]]:
    """(what, predicted, measured) for everything that this run has measured. KV is predicted from what the log says was free before loading: other servers may share the card."""
    rows = []
    for mode in ("extraction", "serving"):
        log = Path(args.server_log) if args.server_log and mode == "extraction" else config.run.logs / f"{mode}.log"
        if mode not in plan.phases or not log.is_file():
            continue
        found = measured_server(log)
        again = planning.Plan(plan.gpus, found.pop("free before loading", plan.gpu_bytes))
        planning.plan_server(again, config, shape, mode, server_options[mode])
        parts = again.phases.get(mode, [])
        kv = next((part for part in parts if part.name == "KV"), None)
        predicted = {"weights": sum(part.bytes for part in parts if part.name.startswith("weights: ") and part.name != "weights: drafter")}
        if kv:
            predicted |= {"KV tokens": float(kv.how.split(" ")[0].replace(",", "")), "KV": kv.bytes}
        if mode == "serving":
            found.pop("KV", None)  # the plan's number has the drafter's KV in it, the log's has not
        # the log gives GB with two decimals: small numbers say nothing
        rows += [(f"{mode}: {name}", predicted[name], value) for name, value in found.items() if name in predicted and (value > 0.1 * GIB or name == "KV tokens")]
    report = Path(args.train_report) if args.train_report else config.run.drafter / "report.json"
    if report.is_file():
        content = read_report(report, "`make train`")
        peak = content.get("peak_gpu_bytes", 0)
        if peak:
            rows.append(("training: peak of one GPU", plan.total(plan.training), peak))
    if args.bench_train:  # those of its sizes that have this config's drafter
        count = sum(planning.drafter_parameters(config, shape).values())
        try:
            for result in read_report(Path(args.bench_train), "bench_train.py")["results"]:
                if "peak_gb" in result and abs(result["parameters"] / count - 1) < 0.002 and not result.get("checkpointing"):
                    parts = planning.training_parts(config, shape, result["tokens"], result["supervised_rows"] / result["tokens"], loss_kernel=loss_kernel(config))
                    rows.append((f"training: size {result['size']}, share {result['share']}", sum(part.bytes for part in parts), result["peak_gb"] * GIB))
        except (LookupError, TypeError, AttributeError, ZeroDivisionError) as exc:
            raise UserError(f"--bench-train {args.bench_train} is not a report of bench_train.py ({exc!r})") from None
    shards = sum(path.stat().st_size for path in config.run.store.glob("shard-*.safetensors"))
    if shards and not config.extract.keep_gb:  # streaming deletes what is trained on
        rows.append(("store: bytes on disk", next(part.bytes for part in plan.disk if part.name == "store"), shards))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--gpus", type=int, help="plan for this many GPUs instead of those found here")
    parser.add_argument("--gpu-gib", type=float, help="with so much memory free on each, GiB")
    parser.add_argument("--paper", action="store_true", help="plan for the machine in [plan], whatever is here; the disk is not asked either")
    parser.add_argument("--compare", action="store_true", help="after a run: predicted against measured; exit code 1 when one differs by more than 10%%")
    parser.add_argument("--server-log", default="", help="with --compare: an SGLang log other than the run's own")
    parser.add_argument("--train-report", default="", help="with --compare: a trainer's report.json other than the run's own")
    parser.add_argument("--bench-train", default="", metavar="FILE", help="with --compare: bench_train.py's report; sizes whose drafter is this config's are compared")
    parser.add_argument("--report", default="", metavar="FILE", help="write the plan as JSON")
    args = parser.parse_args()
    refuse_odd_words(args)
    config = config_from_args(args)
    shape = planning.shape_of(config)
    amounts = planning.read_amounts(config)
    gpus, gpu_bytes, hardware = choose_hardware(config, args)
    if gpus and gpu_bytes <= 0:
        raise UserError("the memory of a GPU is not known: give --gpu-gib, or set plan.gpu_gib")
    disk_free = float("inf") if args.paper else shutil.disk_usage(existing(config.run.root)).free
    dumps_free = None if args.paper or config.server.urls else shutil.disk_usage(existing(dump_dir(config))).free
    extraction, serving = (server_args(config, mode, True if gpus else None) for mode in ("extraction", "serving"))  # for a GPU box also from a machine without
    plan = planning.make_plan(config, shape, amounts, gpus=gpus, gpu_bytes=gpu_bytes, extraction_args=extraction, serving_args=serving, disk_free=disk_free, dumps_free=dumps_free,
                              loss_kernel=loss_kernel(config))  # fmt: skip
    print_plan(plan, config, amounts, hardware)
    if args.report:
        write_report(
            Path(args.report), config=config.as_dict(), gpus=gpus, gpu_bytes=gpu_bytes, hours=plan.hours, refusals=plan.refusals, notes=plan.notes,
            phases={phase: {part.name: part.bytes for part in parts} for phase, parts in plan.phases.items()}, disk={part.name: part.bytes for part in plan.disk},
        )  # fmt: skip
    if args.compare:
        rows = compare(plan, config, shape, args, {"extraction": extraction, "serving": serving})
        if not rows:
            raise UserError(f"nothing measured yet in {config.run.root}: no server log, no report of the trainer, no store")
        print(f"\n{'':40} {'predicted':>16} {'measured':>16}  predicted / measured")
        for name, predicted, value in rows:
            print(f"{name:40} {predicted:16,.0f} {value:16,.0f}  {predicted / value:.3f}{'' if abs(predicted / value - 1) <= 0.1 else '  over 10% off'}")
        return 1 if any(abs(predicted / value - 1) > 0.1 for _, predicted, value in rows) else 0
    if plan.refusals:
        print()
        raise UserError("this plan does not fit: " + "; ".join(plan.refusals))
    return 0


if __name__ == "__main__":
    run_main(main)
