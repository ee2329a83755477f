#!/usr/bin/env python3
"""Chats -> token ids and loss mask, through the target's own chat template; with --regenerate the answers are written by the served target itself.

Reads data.inputs, writes runs/<run>/data: train.safetensors, heldout.safetensors, vocab_map.safetensors, answers.jsonl, rejected.jsonl, report.json.
Run again it asks only for answers that are not there yet.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.answer_log import AnswerLog
from aerie.config import add_config_arguments, config_from_args
from aerie.errors import run_main
from aerie.pipeline import call, script_command
from aerie.prepare import MIN_SUPERVISED, Preparation
from aerie.report import write_report
from aerie.row_writer import Rejected, one_writer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser)
    choice = "whether the served target writes the answers (default: data.regenerate of the config)"
    parser.add_argument("--regenerate", action=argparse.BooleanOptionalAction, default=None, help=choice)
    parser.add_argument("--start-server", action="store_true", help="start the run's extraction server where it is to write the answers and does not run (as make data does)")
    args = parser.parse_args()
    config = config_from_args(args)
    regenerate = config.data.regenerate if args.regenerate is None else args.regenerate

    start = time.monotonic()
    preparation = Preparation(config, regenerate)
    folder = preparation.folder
    with one_writer(folder):
        asks_ours = regenerate and not (config.data.url or config.server.urls)
        launcher = script_command(config, args.overrides, "01_launch_server.sh", ("--background",)) if args.start_server and asks_ours else []
        report = write_all(preparation, folder, regenerate, start, launcher)
    print_summary(folder, report)


def write_all(preparation: Preparation, folder: Path, regenerate: bool, start: float, launcher: list[str]) -> dict:
    """Select, answer, render and write; returns the report. launcher: the command that starts the server, once the chats are known to be good; [] for none."""
    rejected, interrupted = Rejected(folder / "rejected.jsonl"), False
    log = None
    try:
        log = AnswerLog(folder / "answers.jsonl") if regenerate else None
        selection = preparation.select(rejected)
        print(f"{preparation.counts['chats']:,} chats: {selection.train:,} to train on, {selection.heldout:,} held out, {rejected.count:,} rows rejected", flush=True)
        if launcher:
            call(launcher, "the extraction server")
        if log is not None:
            preparation.write_answers(selection, log, rejected)
        made = preparation.write_rows(selection, log, rejected)
    except KeyboardInterrupt:
        interrupted = True
        raise
    finally:
        rejected.close(publish=not interrupted)
        if log is not None:
            log.close()
    config, seconds = preparation.config, time.monotonic() - start
    report = {"run": config.run.name, "config": config.as_dict(), "inputs": [str(path) for path in preparation.inputs], "regenerate": regenerate, **preparation.metadata()}
    report |= {"counts": {**preparation.counts, "rejected": rejected.count}, "rejected_reasons": dict(rejected.reasons), **made}
    report |= {"seconds": {**preparation.seconds, "all": seconds}, **preparation.rates()}
    write_report(folder / "report.json", **report)
    return report


def print_summary(folder: Path, report: dict) -> None:
    """What a reader wants to know before the states are extracted."""
    for split, counts in report["splits"].items():
        tokens, supervised = counts["tokens"], counts["supervised"]
        print(f"{split}: {counts['rows']:,} rows, {tokens:,} tokens, {supervised:,} supervised ({supervised / max(tokens, 1):.1%})")
    print("draft vocabulary: " + ", ".join(f"{int(size):,} ids cover {share:.2%}" for size, share in report["coverage"].items()) + " of the supervised tokens")
    odd = {name: value for name, value in report["counts"].items() if value and name not in ("chats", "train_chats", "heldout_chats")}
    if odd:
        print("counted: " + ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in odd.items()))
    if not report["splits"]["heldout"]["rows"]:
        chosen = report["counts"].get("heldout_chats", 0)
        why = f"none of the {chosen} held-out chats gave one (see the counts above)" if chosen else "data.heldout = 0"
        print(f"warning: there is no held-out row, so no accept length can be predicted: {why}; set data.heldout higher", file=sys.stderr)
    train = report["splits"]["train"]
    if train["supervised"] < MIN_SUPERVISED * train["tokens"]:
        print(
            f"warning: only {train['supervised'] / train['tokens']:.1%} of the tokens are supervised (under {MIN_SUPERVISED:.0%}); "
            f"look at some samples with scripts/show_sample.py before you go on",
            file=sys.stderr,
        )
    print(f"wrote {folder} in {report['seconds']['all']:.1f} s")


if __name__ == "__main__":
    run_main(main)
