#!/usr/bin/env python3
"""Collect hidden states: send the samples of data/ to the extraction server by name, check each dump, keep it in the store. Resumes where it stopped."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import Config, add_config_arguments, config_from_args
from aerie.dumps import DumpError, check_dump, dump_path, read_dump, remove_dump, wait_dump
from aerie.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError, run_main
from aerie.extract_plan import Job, Plan, choose, lengths_line, make_plan, state_bytes
from aerie.extraction import Extraction, Outcome
from aerie.generate_client import Client, RequestTimeout, ServerGone, error_text
from aerie.identity import model_hash, read_model_config, text_config, tokenizer_hash
from aerie.pipeline import call, script_command
from aerie.prove import prove_aux
from aerie.report import read_report, write_report
from aerie.rid import new_rid
from aerie.servers import Server, dump_dir, url_of
from aerie.store import StoreWriter, read_done, read_manifest, refuse_other_identity, whole_lines

STATE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="extract at most N of the samples that are left")
    parser.add_argument("--start-from", type=int, default=0, metavar="N", help="leave out the first N training samples of the data file")
    parser.add_argument("--only-failed", action="store_true", help="ask only for samples listed in failed.jsonl")
    parser.add_argument("--prove-aux", type=int, default=0, metavar="N",
                        help="compare N prompts' auxiliary states with SGLang's own answer (a second server, after the first), and stop")
    parser.add_argument("--start-server", action="store_true", help="start the run's extraction server where one is needed and none runs (as make extract does)")
    parser.add_argument("--dry-run", action="store_true", help="print samples, tokens, bytes and hours, and stop; needs no server")
    parser.add_argument("--rate", type=float, default=0.0, metavar="TOK_S", help="tokens a second, for the hours of --dry-run")
    return parser.parse_args()


def known_identity(config: Config, plan: Plan) -> dict[str, Any]:
    """What the states will be, as far as it is known without the server. Raises UserError when the data are of another tokenizer."""
    identity = {
        "model_hash": model_hash(config.model_path), "aux_layer_ids": config.target.aux_layer_ids, "all_final_rows": config.extract.all_final_rows,
        **plan.identity(),
    }  # fmt: skip
    if identity["tokenizer_hash"] and identity["tokenizer_hash"] != tokenizer_hash(config.model_path):
        raise UserError(f"{plan.files[False].path} was made with another tokenizer than that of {config.model_path}; run `make data` again, or use another run")
    if config.extract.dtype == "fp8":
        identity["dtype"] = "fp8"
    return identity


def failed_before(config: Config) -> dict[str, dict[str, Any]]:
    """failed.jsonl by sample; a torn line is left out."""
    found = {}
    for line in whole_lines(config.run.store / "failed.jsonl"):
        try:
            entry = json.loads(line)
            found[entry["sample"]] = entry
        except (ValueError, KeyError, TypeError):
            continue
    return found


def write_failed(config: Config, failed: dict[str, dict[str, Any]]) -> None:
    """failed.jsonl anew, by rename; none when nothing failed."""
    path = config.run.store / "failed.jsonl"
    if not failed:
        path.unlink(missing_ok=True)
        return
    temporary = path.with_name(".failed.jsonl.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in failed.values())
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def ready_urls(config: Config, args: argparse.Namespace) -> list[str]:
    """The servers to ask; with --start-server our own is started. Raises UserError when none of them answers; waits for our own while it starts."""
    if args.start_server and not config.server.urls:
        call(script_command(config, args.overrides, "01_launch_server.sh", ("--background",)), "the extraction server")
    urls = [url.rstrip("/") for url in config.server.urls] or [url_of(config, "extraction")]
    if not config.server.urls and (server := Server.find(config, "extraction")):
        server.wait_ready()
    try:
        clients = [Client(url, 5.0) for url in urls]
    except ValueError as exc:
        raise UserError(f"server.urls: {exc}") from None
    if not any(client.healthy() for client in clients):
        raise UserError(f"no extraction server answers at {', '.join(urls)}; start it with `make server`, or set server.urls")
    return urls


def probe(config: Config, plan: Plan, job: Job, urls: list[str], folder: Path) -> dict[str, Any]:
    """One small request through the dump path: what the states are, by the server's own word. Raises UserError when no good dump comes."""
    sample = plan.sample(job)
    rid = new_rid(config.run.name, job.id, job.tokens)
    problem = ""
    for url in urls:
        try:
            body = {"rid": str(rid), "input_ids": sample.input_ids.tolist(), "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            status, data = Client(url, config.extract.request_timeout_s).request("POST", "/generate", body)
            if status == 200:
                wait_dump(folder, rid, timeout_s=min(30.0, config.extract.request_timeout_s))
                dump = read_dump(dump_path(folder, rid))
                check_dump(dump, rid, sample.input_ids)
                dtype = dump.metadata["dtype"]
                if (dtype == "fp8") != (config.extract.dtype == "fp8"):
                    raise UserError(
                        f"the server dumps {dtype} and extract.dtype is {config.extract.dtype!r}; start the server again with this config (make "
                        "stop, make server)"
                    )
                return {"sglang_version": dump.metadata.get("sglang_version", ""), "model_class": dump.metadata.get("model_class", ""), **dump.identity()}
            problem = f"{url} answered {status}: {error_text(data)}"
        except (ServerGone, RequestTimeout, DumpError) as exc:
            problem = f"{url}: {exc}"
        finally:
            remove_dump(folder, rid)
    raise UserError(f"the first sample gave no states: {problem}")


def print_plan(config: Config, plan: Plan, todo: list[Job], left_out: dict[str, int], identity: dict[str, Any] | None, rate: float) -> None:
    """What will be asked for, and how large it will be; refuses when the disk is too small for it."""
    in_store = len(plan.jobs) - len(todo) - sum(left_out.values())
    reasons = [f"{count:,} {why}" for why, count in ({"in the store already": in_store} | plan.skipped | left_out).items() if count]
    print(f"to extract: {lengths_line(todo)}; of all {plan.samples:,} samples {', '.join(reasons) or 'none left out'}")
    model = text_config(read_model_config(config.model_path))
    hidden = identity["hidden_size"] if identity else int(model["hidden_size"])
    dtype = identity["dtype"] if identity else "fp8" if config.extract.dtype == "fp8" else str(model.get("dtype") or model.get("torch_dtype") or "bfloat16")
    if not identity and config.extract.dtype != "fp8" and config.target.dtype != "auto":
        dtype = config.target.dtype
    item = STATE_BYTES.get(dtype, 2)
    layers = len(config.target.aux_layer_ids)
    size = state_bytes(todo, layers, hidden, item)
    everywhere = sum(job.tokens for job in todo) * (layers + 1) * hidden * item
    existing = next(folder for folder in (config.run.store, *config.run.store.parents) if folder.is_dir())
    free = shutil.disk_usage(existing).free
    note = "" if config.extract.all_final_rows else f", {everywhere / 1e9:.2f} GB with every row of `final`"
    print(f"states: H {hidden}, {dtype}, {layers} auxiliary layers and final: {size / 1e9:.2f} GB in the store{note}; {free / 1e9:.1f} GB free at {existing}")
    if rate:
        hours = sum(job.tokens for job in todo) / rate / 3600
        print(f"at {rate:,.0f} tok/s: {hours:.{1 if hours >= 1 else 3}f} hours")
    wanted = min(size, config.extract.keep_gb * 1e9) if config.extract.keep_gb else size
    if wanted > free:
        advice = ["" if config.extract.dtype == "fp8" else ", or set extract.dtype = fp8", "" if config.extract.keep_gb else ", or set extract.keep_gb and stream"]
        raise UserError(f"the store will need {wanted / 1e9:.2f} GB and {existing} has {free / 1e9:.2f} GB free; free some{''.join(advice)}")


def accounting(plan: Plan, done: int, failed: int, left_out: dict[str, int], remaining: int) -> str:
    """The sentence that must add up."""
    skipped = plan.skipped | {why: count for why, count in left_out.items() if count} | ({"not reached": remaining} if remaining else {})
    total = done + failed + sum(skipped.values())
    if total != plan.samples:
        raise AssertionError(f"the accounting does not add up: done {done}, failed {failed}, skipped {skipped}, of {plan.samples}")
    reasons = f" ({', '.join(f'{count:,} {why}' for why, count in skipped.items())})" if skipped else ""
    return f"done {done:,} + failed {failed:,} + skipped {sum(skipped.values()):,}{reasons} = {plan.samples:,} samples"


def prove(config: Config, count: int) -> int:
    """--prove-aux: exit code 1 when the states are not SGLang's own."""
    proof = prove_aux(config, count)
    print(proof.line())
    write_report(config.run.root / "prove_aux.json", config=config.as_dict(), **proof.as_dict())
    return 0 if proof.passed else EXIT_FAILED


def main() -> int:
    args = parse()
    config = config_from_args(args)
    if args.prove_aux:
        return prove(config, args.prove_aux)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    plan = make_plan(config.run.data, config.extract.all_final_rows)
    identity = known_identity(config, plan)
    if manifest := read_manifest(config.run.store):
        refuse_other_identity(config.run.store, manifest, identity)
    failed = failed_before(config)
    options = (failed, args.limit, args.start_from, args.only_failed)
    if args.dry_run:
        todo, left_out = choose(plan, read_done(config.run.store), *options)
        print_plan(config, plan, todo, left_out, None, args.rate)
        return 0
    outcome, shard_bytes = Outcome(), int(config.extract.shard_gb * 2**30)
    if config.extract.keep_gb:
        shard_bytes = min(shard_bytes, int(config.extract.keep_gb * 1e9 / 4))
    urls: list[str] = []
    proof = None
    states = {key: manifest[key] for key in ("capture_points", "hidden_size", "dtype", "logits") if key in manifest} if manifest else None
    if not states or choose(plan, read_done(config.run.store), *options)[0]:
        if not plan.jobs:
            raise UserError(f"{plan.files[False].path} holds no sample with a supervised prediction ({dict(plan.skipped)}); nothing to extract")
        urls, folder = ready_urls(config, args), dump_dir(config)
        states = probe(config, plan, min(plan.jobs, key=lambda job: job.tokens), urls, folder)
    fields = {"model_path": config.model_path, **identity, **states, "planned": len(plan.jobs)}
    writer = StoreWriter(config.run.store, fields, shard_bytes, config.extract.shard_s)
    for name, reason in writer.removed:
        print(f"{name} was damaged ({reason}) and is removed; its samples are asked for again", flush=True)
    todo, left_out = choose(plan, writer.done, *options)
    try:
        if todo and not urls:
            urls, folder = ready_urls(config, args), dump_dir(config)
        if todo:
            dump_identity = {key: writer.manifest[key] for key in ("aux_layer_ids", "capture_points", "hidden_size", "dtype", "logits")}
            print(
                f"layers {dump_identity['aux_layer_ids']}: state after {dump_identity['capture_points']} decoder layers; servers: "
                f"{', '.join(urls)}; dumps: {folder}"
            )
            print_plan(config, plan, todo, left_out, dump_identity, args.rate)
            run = Extraction(config, plan, todo, writer, urls, folder, dump_identity)
            outcome = run.run()
            proof = run.proof.tally
        else:
            writer.close(complete=not any(left_out.values()))
    except BaseException:
        writer.abandon()
        raise
    return finish(config, plan, writer, todo, left_out, failed, outcome, proof)


def earlier_work(config: Config, writer: StoreWriter) -> tuple[int, float]:
    """Tokens and seconds of the earlier calls that filled this store, by its last report: the rate counts them all."""
    try:
        report = read_report(config.run.store / "report.json")
    except UserError:  # damaged: only the rate is lost
        return 0, 0.0
    return (report.get("tokens_all", 0), report.get("seconds_all", 0.0)) if report.get("data_hash") == writer.manifest["data_hash"] else (0, 0.0)


def finish(config: Config, plan: Plan, writer: StoreWriter, todo: list[Job], left_out: Any, failed: dict, outcome: Outcome, proof: Any) -> int:
    """failed.jsonl, the accounting, report.json, the exit code."""
    failed = {sample: entry for sample, entry in failed.items() if sample not in writer.done and sample not in outcome.failed}
    failed |= {sample: {"sample": sample, "reason": reason, "attempts": attempts} for sample, (reason, attempts) in outcome.failed.items()}
    write_failed(config, failed)
    done = sum(job.id in writer.done for job in plan.jobs)
    remaining = len(todo) - outcome.extracted - len(outcome.failed)
    if proof is not None and proof.compared:
        print(f"proof of final: {proof.sentence()}")
    sentence = accounting(plan, done, len(outcome.failed), left_out, remaining)
    print(sentence)
    tokens = sum(job.tokens for job in plan.jobs if job.id in writer.done)
    tokens_all, seconds_all = earlier_work(config, writer)
    tokens_all, seconds_all = tokens_all + outcome.tokens, seconds_all + outcome.seconds
    write_report(
        config.run.store / "report.json",
        config=config.as_dict(), samples=done, tokens=tokens, extract_tok_s=tokens_all / seconds_all if seconds_all else 0.0,
        tokens_all=tokens_all, seconds_all=seconds_all, data_hash=plan.data_hash,
        extracted_now=outcome.extracted, tokens_now=outcome.tokens, seconds=outcome.seconds, failed=len(outcome.failed), skipped=dict(plan.skipped | left_out),
        accounting=sentence, store_bytes=writer.manifest["bytes"], shards=writer.manifest["shards"], retries=outcome.retries, late_dumps=outcome.late,
        server_losses=outcome.server_losses, peak_requests_in_flight=outcome.peak_in_flight, peak_dump_bytes=outcome.peak_dump_bytes, stopped=outcome.stopped,
        workers=outcome.workers, workers_peak_bytes=outcome.workers_peak_bytes,
        proof=proof._asdict() if proof else {},
    )  # fmt: skip
    if outcome.stopped == "interrupted":
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    if outcome.stopped:
        raise UserError(f"{outcome.stopped}; what is done is kept, run the same command again to go on")
    if len(outcome.failed) > outcome.extracted:
        raise UserError(
            f"{len(outcome.failed):,} samples failed for good and {outcome.extracted:,} were extracted, so something is wrong with more than a sample: "
            f"{next(iter(outcome.failed.values()))[0]} (all reasons: {config.run.store / 'failed.jsonl'}); mend it, then run the same command again"
        )
    if proof is not None and proof.refuted(1):
        raise UserError(f"`final` is not what the LM head reads: {proof.sentence()}, and at least 99% must be equal; were the states made by this target?")
    return 0


if __name__ == "__main__":
    run_main(main)
