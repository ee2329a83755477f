#!/usr/bin/env python3
"""Look at a run's store: verify (every checksum, value and token id again), info (what it is), export (files for other trainers)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.errors import EXIT_FAILED, UserError, run_main
from aerie.extract_plan import make_plan
from aerie.identity import model_hash
from aerie.paths import RunPaths
from aerie.progress import Progress
from aerie.store import Store
from aerie.store_check import check_head, check_store, info_lines
from aerie.store_export import FORMATS, export
from aerie.target_weights import TargetWeights


def store_folder(run: str) -> Path:
    """The store of a run by its name, or a store's folder by its path."""
    path = Path(run).expanduser()
    return path if "/" in run or (path / "manifest.json").is_file() else RunPaths(run).store


def verify(args: argparse.Namespace) -> int:
    """Exit code 1 when anything is wrong."""
    folder = store_folder(args.run)
    data = folder.parent / "data"
    plan = make_plan(data) if (data / "train.safetensors").is_file() else None
    findings = check_store(folder, plan)
    for problem in findings.problems:
        print(f"BAD: {problem}")
    against = "the data and " if plan else ""
    print(
        f"{findings.samples:,} samples, {findings.rows:,} rows: checksums, offsets, finiteness, token ids against {against}their names: "
        f"{len(findings.problems)} problems"
    )
    failed = bool(findings.problems)
    if not failed and args.proof:
        store = Store.open(folder)
        model = Path(args.model or store.manifest.get("model_path", ""))
        if model_hash(model) != store.manifest.get("model_hash"):
            raise UserError(f"{model} is not the target of these states (another config.json); name it with --model, or leave the proof out with --proof 0")
        head = check_head(store, TargetWeights(model).lm_head(), args.proof, args.url)
        print(
            f"argmax(lm_head(final)) is the sample's own next token in {head.equal_next:,} of {head.rows:,} supervised rows of {head.samples} "
            f"samples ({head.equal_next / max(head.rows, 1):.1%}; near 100% where the target wrote them greedily)"
        )
        if head.server.compared:
            print(head.server.sentence())
            failed = head.server.refuted(at_least=1)
            if failed:
                print("BAD: below 99%: these states are not of this server's model, or final is not what its LM head reads")
    return EXIT_FAILED if failed else 0


def run_export(args: argparse.Namespace) -> int:
    store = Store.open(store_folder(args.run))
    progress = Progress(int((store.heldout == args.heldout).sum()), "exported")
    count = export(store, args.format, Path(args.out).expanduser(), args.heldout, lambda number: progress.update(1))
    progress.close()
    print(f"{count:,} samples written to {args.out}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("verify", help="re-check the whole store; exit code 1 when anything is wrong")
    one.add_argument("run", help="a run's name, or the path of a store")
    one.add_argument("--proof", type=int, default=16, metavar="N", help="samples whose final rows go through the LM head (default: %(default)s; 0: none)")
    one.add_argument("--model", default="", help="the target's folder (default: the one in the manifest)")
    one.add_argument("--url", default="", help="also compare with what this server answers, for example http://127.0.0.1:30000")
    one = commands.add_parser("info", help="print what a store is")
    one.add_argument("run", help="a run's name, or the path of a store")
    one = commands.add_parser("export", help="write per-sample files for another trainer")
    one.add_argument("--format", required=True, choices=FORMATS)
    one.add_argument("--heldout", action="store_true", help="the held-out samples instead of the training ones")
    one.add_argument("run", help="a run's name, or the path of a store")
    one.add_argument("out", help="a new folder")
    args = parser.parse_args()
    if args.command == "verify":
        return verify(args)
    if args.command == "export":
        return run_export(args)
    print("\n".join(info_lines(store_folder(args.run))))
    return 0


if __name__ == "__main__":
    run_main(main)
