"""The page of a benchmark: speed-up against concurrency, acceptance by position, predicted against served; a PNG, and one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from .bench import table


def plain(name: str) -> str:
    """A name as matplotlib shows it as it is: no formula between dollars, not left out of a legend, nothing that no font or file can hold."""
    shown = name.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


def draw(content: dict[str, Any], path: Path) -> None:
    """Write the PNG with the three plots."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (speed, position, served) = plt.subplots(1, 3, figsize=(15, 4.2))
    for name, one in content["sets"].items():
        levels = one["levels"]
        speed.plot([level["concurrency"] for level in levels], [level["speedup"] for level in levels], marker="o", label=plain(name))
        rows = one["acceptance_by_position"]
        position.plot([row["position"] for row in rows], [row["accepted"] for row in rows], marker="o", label=plain(name))
    speed.axhline(1.0, color="grey", linewidth=0.8)
    speed.set(title="Speed-up", xlabel="requests in flight", ylabel="tok/s with / without the drafter", ylim=(0, None))
    if any(len(one["levels"]) > 1 for one in content["sets"].values()):
        speed.set_xscale("log", base=2)
        ticks = sorted({level["concurrency"] for one in content["sets"].values() for level in one["levels"]})
        speed.set_xticks(ticks, [str(tick) for tick in ticks])
    position.set(title="Acceptance by position", xlabel="draft position", ylabel="share of verifications that accept it", ylim=(0, 1))
    position.set_xticks(range(1, content["num_steps"] + 1))
    names, values = [f"served: {plain(name)}" for name in content["sets"]], [one["accept_length"] for one in content["sets"].values()]
    predicted = (content["same_prompts"] or {}).get("predicted", content["predicted_accept_length"])
    if predicted is not None:
        names, values = ["predicted (held-out)", *names], [predicted, *values]
    bars = served.bar(range(len(values)), values, color=["tab:grey" if name.startswith("predicted") else "tab:blue" for name in names])
    served.bar_label(bars, fmt="%.2f")
    served.set_xticks(range(len(names)), names, rotation=15, ha="right")
    served.set(title="Accept length", ylabel="tokens a verification, pooled", ylim=(0, max(values) * 1.15))
    for axes in (speed, position):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary, dpi=110)
    plt.close(figure)
    temporary.replace(path)


def write_page(content: dict[str, Any], folder: Path, title: str, about: str) -> Path:
    """Write report.png and report.html into `folder`; returns the page. `about`: when, where and with what it was measured."""
    draw(content, folder / "report.png")
    picture = base64.b64encode((folder / "report.png").read_bytes()).decode()
    rows = []
    for name, one in content["sets"].items():
        for level in one["levels"]:
            without, fast = level["baseline"], level["speculative"]
            cells = [name, level["concurrency"], level["requests"], f"{without['tok_s']:.1f}", f"{fast['tok_s']:.1f}", f"{level['speedup']:.2f}x", f"{fast['accept_length']:.3f}"]
            for side in (without, fast):
                first, wait = side.get("time_to_first_token_ms"), side.get("inter_token_latency_ms")
                cells += [f"{first['p50']:.1f} / {first['p99']:.1f}" if first else "", f"{wait['p50']:.2f} / {wait['p99']:.2f}" if wait else ""]
            cells.append("" if level["drafting_share"] is None else f"{level['drafting_share']:.0%}")
            rows.append(cells)
    heads = [
        "prompts", "in flight", "requests", "tok/s without", "tok/s with", "speed-up", "accept length", "first token without, ms p50 / p99", "between tokens without, ms",
        "first token with, ms", "between tokens with, ms", "drafting and wider verification",
    ]  # fmt: skip
    kept = [place for place in range(len(heads)) if any(cells[place] != "" for cells in rows)]  # without bench.latency nothing was timed by token
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(str(cells[place]))}</td>" for place in kept) + "</tr>" for cells in rows)
    page = f"""<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>body{{font:15px sans-serif;margin:2em;max-width:110em}}table{{border-collapse:collapse}}td,th{{border:1px solid #ccc;padding:.3em .6em;text-align:right}}img{{max-width:100%}}</style>
<h1>{html.escape(title)}</h1>
<p>{html.escape(about)}</p>
<img alt="speed-up, acceptance by position, accept length" src="data:image/png;base64,{picture}">
<table><tr>{''.join(f'<th>{html.escape(heads[place])}</th>' for place in kept)}</tr>{lines}</table>
<pre>{html.escape(table(content))}</pre>
"""
    path = folder / "report.html"
    temporary = folder / ".report.html.tmp"
    temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)
    return path
