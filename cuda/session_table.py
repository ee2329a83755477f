#!/usr/bin/env python3
"""The short table at the end of gpu_session.sh: `session_table.py OUT PARTS`. What is missing is left out, what misses its goal is marked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GOALS = {"S": (40_000, 32), "K": (16_000, 36), "K8": (0, 80)}  # tok/s at 70%, GB
SHARE = 0.85  # of the copy bandwidth, for ops 1, 2 and 5
PEERS = ("PyTorch", "PyTorch eager", "sgl_kernel")  # decode rows of others have no goal
LAUNCH = 1.2  # times an empty kernel, both in a CUDA graph, for ops 3 and 4; launched through a stream (shown beside it) the empty kernel takes longer


def load(path: Path) -> dict[str, Any]:
    """A report, empty where it was not written."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def mark(good: bool) -> str:
    return "ok  " if good else "MISS"


def ops_lines(report: dict[str, Any]) -> list[str]:
    """A line an op and size: the usual kernel alone and in a row, a copy of its size both ways, the fastest by number; decode ops in a graph, which decides, and launched
    through a stream; the other packages without a mark."""
    rows, lines = report.get("rows", []), []
    fastest = {(row["op"], row["size"]): row for row in report.get("fastest", [])}
    if rows:
        lines.append(f"copy {report['copy_bytes_s'] / 1e12:.2f} TB/s, an empty launch {1e3 * report['launch_ms']:.1f} us")
    for row in [row for row in rows if " (" not in row["op"]]:  # those by number are in `fastest`
        key, best = (row["op"], row["size"]), fastest.get((row["op"], row["size"]))
        if "graph_us" in row:
            floor = row["floor"]["graph_us"]
            better = f", fastest {best['graph_us']:.2f} ({best['best']})" if best else ""
            good = "    " if key[0].endswith(PEERS) else mark(row["graph_us"] <= LAUNCH * floor)
            launched = f"; launched back to back {row['launch_us'] / row['floor']['launch_us']:.2f} times ({row['launch_us']:.2f} us)" if "launch_us" in row else ""
            lines.append(f"{good} {key[0]:41} {key[1]:16} {row['graph_us']:6.2f} us in a graph, {row['graph_us'] / floor:.2f} times an empty kernel{launched}{better}")
        elif "row_ms" in row:
            better = f"; fastest {best['row_ms']:8.4f} ({best['best']})" if best else ""
            good = max(row["of_copy"], row["row_of_copy"]) >= SHARE
            lines.append(
                f"{mark(good)} {key[0]:41} {key[1]:16} {row['ms']:8.4f} ms {row['of_copy']:6.1%}, in a row {row['row_ms']:8.4f} ms {row['row_of_copy']:6.1%};"
                f" a copy {row['copy_ms']:8.4f}, in a row {row['copy_row_ms']:8.4f}{better}"
            )
        else:
            lines.append(f"     {key[0]:41} {key[1]:16} {row['ms']:8.4f} ms {row['of_copy']:6.1%}")
    return lines


def train_lines(out: Path) -> list[str]:
    """Rates, memory, the share's effect, eager PyTorch, loading."""
    lines = []
    rates: dict[tuple[str, float], float] = {}
    for name in ("train", "long"):
        for row in load(out / f"{name}.json").get("results", []):
            rates[row["size"], row["share"]] = row["tok_s"]
            rate, memory = GOALS.get(row["size"], (0, 1e9))
            good = (row["tok_s"] >= rate or row["share"] != 0.7) and row.get("peak_gb", 0) <= memory and row["first_step_s"] < 90
            lines.append(f"{mark(good)} {row['size']:5} share {row['share']:.1f} {row['step_ms']:8.1f} ms {row['tok_s']:8.0f} tok/s {row.get('peak_gb', 0):6.1f} GB, first step {row['first_step_s']:.1f} s")
    for size in sorted({size for size, share in rates if share == 0.3}):
        ratio = rates[size, 0.3] / rates.get((size, 0.7), float("nan"))
        lines.append(f"{mark(ratio >= 1.4)} {size:5} 30% against 70% supervised: {ratio:.2f} times the rate")
    for size, found in load(out / "eager.json").get("ratio", {}).items():
        good = found["speed"] >= 3 and found["loss_difference"] <= 1e-3 and found.get("memory", 0) <= 0.5
        lines.append(f"{mark(good)} {size:5} against eager: {found['speed']:.2f} times as fast, {found.get('memory', float('nan')):.3f} of the memory, losses apart by {found['loss_difference']:.1e}")
    for row in load(out / "loading.json").get("loading", []):
        lines.append(f"{mark(row['share'] < 0.05)} {row['size']:5} loading in {row['stored']}: {row['share']:.1%} of a step, {row['bytes'] / 2**20:.0f} MiB a step, {row['batches_s_alone']:.1f} batches/s alone")
    for name in ("ops", "train", "long", "eager", "loading"):
        lines += [f"FAILED {text}" for text in load(out / f"{name}.json").get("failed") or []]
    return lines


def main() -> int:
    out, parts = Path(sys.argv[1]), Path(sys.argv[2])
    for line in [*ops_lines(load(out / "ops.json")), *train_lines(out)]:
        print(line)
    for text in parts.read_text().splitlines():
        name, rc, seconds, *rest = text.split(maxsplit=3)
        print(f"{mark(rc == '0')} {name:12} exit {rc:>3} {seconds:>4} s  {' '.join(rest)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
