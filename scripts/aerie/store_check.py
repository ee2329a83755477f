"""Look at a whole store again: checksums, offsets, finiteness, token ids against the data, and the LM head on its `final` rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .dumps import first_bad_row
from .extract_plan import Plan
from .final_proof import ROWS, Tally, argmax_logits, compare_choices, logprob_request, server_choices
from .generate_client import Client, RequestTimeout, ServerGone, error_text
from .errors import UserError
from .rid import sample_id
from .shards import BadShard, Shard
from .store import Store, read_done, read_manifest, sample_of, shard_paths, supervised_rows, whole_lines


@dataclass
class Findings:
    """Problems, each a sentence that names its place, and what was looked at."""

    problems: list[str] = field(default_factory=list)
    samples: int = 0
    rows: int = 0


def check_shard(path: Path, manifest: dict[str, Any], seen: dict[str, str], findings: Findings) -> None:
    """One shard: header, checksums, index, every sample's ids, mask, final rows and values."""

    def bad(text: str) -> None:
        findings.problems.append(f"{path.name}: {text}")

    try:
        shard = Shard(path)
        shard.verify()
    except (BadShard, KeyError, ValueError) as exc:
        bad(str(exc))
        return
    if (np.diff(shard.offsets) <= 0).any() or (np.diff(shard.final_offsets) < 0).any() or shard.final_offsets[-1] != shard.entries["final"]["shape"][0]:
        bad("its offsets do not rise to the number of rows")
        return
    inside = json.loads(shard.metadata["manifest"])
    for key in ("model_hash", "aux_layer_ids", "capture_points", "hidden_size", "dtype"):
        if inside.get(key) != manifest.get(key):
            bad(f"its {key} is {inside.get(key)!r}, the store's {manifest.get(key)!r}")
    mapped = shard.map()
    for place, name in enumerate(shard.ids):
        sample = sample_of(shard, mapped, place)
        findings.samples += 1
        findings.rows += len(sample.input_ids)
        if name in seen:
            bad(f"sample {name} is in {seen[name]} too")
        seen[name] = path.name
        mask = sample.loss_mask.numpy()
        if sample_id(sample.input_ids.numpy(), mask) != name:
            bad(f"sample {name}: its token ids and mask make another name")
        wanted = np.arange(len(mask)) if manifest.get("all_final_rows") else supervised_rows(mask)
        if not np.array_equal(sample.final_rows.numpy(), wanted):
            bad(f"sample {name}: final is kept for {len(sample.final_rows)} rows, {len(wanted)} are supervised")
        for kind, states, scale in (("aux", sample.aux, sample.aux_scale), ("final", sample.final, sample.final_scale)):
            row = first_bad_row(states) if states.numel() else None
            if row is not None or scale is not None and not bool(torch.isfinite(scale).all()):
                bad(f"sample {name}: {kind} holds a value that is not finite" + ("" if row is None else f" in row {row}"))


def check_store(folder: Path, plan: Plan | None) -> Findings:
    """Everything but the LM head. `plan` (the run's data) may be None when the data are gone; then ids are checked against the samples' own names alone."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise UserError(f"there is no store in {folder}; make it with `make extract`")
    findings, seen = Findings(), {}
    for path in shard_paths(folder):
        check_shard(path, manifest, seen, findings)
    consumed = set(whole_lines(folder / "consumed.log"))
    done = read_done(folder)
    missing = [f"{sample} in {shard}" for sample, (shard, _) in done.items() if sample not in seen and shard not in consumed]
    if missing:
        findings.problems.append(f"done.log names {len(missing)} samples that are in no shard, the first: {missing[0]}; `make extract` asks for them again")
    if plan is not None:
        names = {job.id: job.heldout for job in plan.jobs}
        foreign = [sample for sample in seen if sample not in names]
        if foreign:
            findings.problems.append(f"{len(foreign)} samples are not in the data, the first: {foreign[0]}")
    return findings


@dataclass
class HeadCheck:
    """argmax(lm_head(final)) against the samples' own next tokens, and against the server where there is one."""

    samples: int = 0
    rows: int = 0
    equal_next: int = 0
    server: Tally = Tally()


def check_head(store: Store, head: torch.Tensor, count: int, url: str = "") -> HeadCheck:
    """On `count` samples spread over the store. Raises UserError when the server cannot be asked."""
    result = HeadCheck()
    client = Client(url, 300.0) if url else None
    for index in np.unique(np.linspace(0, len(store) - 1, min(count, len(store))).astype(int)):
        sample = store.get(int(index))
        rows = sample.final_rows[-ROWS:]
        if not len(rows):
            continue
        final = sample.final_float()[-ROWS:]
        ours = argmax_logits(final, head)
        result.samples += 1
        inside = rows + 1 < len(sample.input_ids)
        result.rows += int(inside.sum())
        result.equal_next += int((ours[inside] == sample.input_ids.long()[rows[inside] + 1]).sum())
        if client is None:
            continue
        tokens = len(sample.input_ids)
        body = {"input_ids": sample.input_ids.tolist(), "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **logprob_request(tokens)}
        try:
            status, data = client.request("POST", "/generate", body)
        except (ServerGone, RequestTimeout) as exc:
            raise UserError(f"{exc}; start the server, or leave --url out") from None
        if status != 200:
            raise UserError(f"{url} answered {status}: {error_text(data)}")
        choices = server_choices(json.loads(data), tokens)
        asked = [place for place, row in enumerate(rows.tolist()) if row in choices]
        if asked:
            result.server = result.server.plus(compare_choices(final[asked], head, choices, rows[asked].tolist(), store.manifest["dtype"]))
    return result


def info_lines(folder: Path) -> list[str]:
    """What a store is, for a person."""
    store = Store.open(folder)
    manifest, done = store.manifest, read_done(folder)
    rows, finals = int(store.lengths.sum()), int(store.final_counts.sum())
    lines = [f"store    {folder}" + ("" if manifest.get("complete") else "  (not complete)")]
    lines.append(
        f"target   {manifest.get('model_path', '?')} ({manifest.get('model_class', '?')}), config {str(manifest.get('model_hash', '?'))[:12]}, "
        f"SGLang {manifest.get('sglang_version', '?')}"
    )
    lines.append(
        f"layers   ids {manifest['aux_layer_ids']}: state after {manifest.get('capture_points')} decoder layers, and final after the norm; H "
        f"{manifest['hidden_size']}, {manifest['dtype']}"
    )
    lines.append(
        f"samples  {len(store):,} in {len(store.shards):,} shards, {int(store.heldout.sum()):,} held out; done {len(done):,} of "
        f"{manifest.get('planned', '?')} planned"
    )
    if len(store):
        quarters = np.percentile(store.lengths, [0, 25, 50, 75, 100]).astype(int)
        lines.append(
            f"rows     {rows:,}; tokens a sample: min {quarters[0]}, quarter {quarters[1]}, median {quarters[2]}, three quarters {quarters[3]}, "
            f"max {quarters[4]}"
        )
        lines.append(f"final    {finals:,} rows ({finals / max(rows, 1):.1%} of all)")
        lines.append(f"bytes    {store.bytes / 1e9:.3f} GB, {store.bytes / max(rows, 1):,.0f} a token")
    failed = len(whole_lines(folder / "failed.jsonl"))
    consumed = len(whole_lines(folder / "consumed.log"))
    lines.append(f"failed   {failed}; consumed shards {consumed}")
    repeated = [sample for sample, count in Counter(store.ids).items() if count > 1]
    if repeated:
        lines.append(f"REPEATED {len(repeated)} samples are stored twice, the first: {repeated[0]}")
    return lines
