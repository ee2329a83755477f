#!/usr/bin/env python3
"""Samples of a run as coloured text: what is supervised (green) and what is not (grey), special tokens visible. --html writes a page with twenty of them.

RUN is the run's name (its folder under runs/) or a folder that holds data/.
"""

import argparse
import html
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import DEFAULT_CONFIG, config_from_args
from aerie.errors import UserError, run_main
from aerie.paths import RunPaths
from aerie.prepare import MIN_SUPERVISED
from aerie.samples import Sample, SampleFile
from aerie.tokenizer import TargetTokenizer

PAGE_SAMPLES = 20
GREEN, GREY, RESET = "\x1b[32m", "\x1b[90m", "\x1b[0m"
INVERT = "\x1b[7m"  # special and other added tokens
STYLE = """body { font: 14px/1.5 monospace; max-width: 110em; margin: 2em auto; padding: 0 1em; color: #777; background: #fff }
h2 { font: bold 15px sans-serif; color: #222; border-top: 1px solid #ccc; padding-top: 1em } p { white-space: pre-wrap; overflow-wrap: anywhere }
.on { color: #063; background: #e2f5e6 } .mark { outline: 1px solid currentColor; border-radius: 3px; padding: 0 2px } .legend, .warn { font-family: sans-serif }
.warn { color: #a00 } span:hover { background: #fe9 }"""


def pieces(tokenizer: TargetTokenizer, sample: Sample) -> list[tuple[str, bool, bool, list[int]]]:
    """(text, supervised, added token, ids): one token each, or the few tokens that make up one character (an emoji is cut inside)."""
    added, found, waiting = set(tokenizer.added.values()), [], []
    for place, (token, on) in enumerate(zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)):
        waiting.append(token)
        text = tokenizer.decode(waiting)
        last = place + 1 == len(sample.input_ids) or sample.loss_mask[place + 1] != on or int(sample.input_ids[place + 1]) in added
        if "\ufffd" in text and not last and token not in added and len(waiting) < 16:
            continue
        found.append((text, bool(on), token in added, waiting))
        waiting = []
    return found


def coloured(parts: list[tuple[str, bool, bool, list[int]]]) -> str:
    """For a terminal."""
    shown = []
    for text, on, added, _ in parts:
        shown.append(f"{GREEN if on else GREY}{INVERT if added else ''}{text}{RESET}")
    return "".join(shown)


def plain(parts: list[tuple[str, bool, bool, list[int]]]) -> str:
    """Without colours: supervised stretches between ⟦ and ⟧."""
    shown, was = "", False
    for text, on, _, _ in parts:
        shown += ("⟦" if on and not was else "⟧" if was and not on else "") + text
        was = on
    return shown + ("⟧" if was else "")


def as_html(parts: list[tuple[str, bool, bool, list[int]]]) -> str:
    """One paragraph, a span a token; the ids are in the title."""
    spans = []
    for text, on, added, ids in parts:
        names = " ".join(name for name, yes in (("on", on), ("mark", added)) if yes)
        shown = html.escape(text).replace("\n", "↵\n") if not added else html.escape(text)
        spans.append(f'<span class="{names}" title="{" ".join(map(str, ids))}">{shown}</span>')
    return f"<p>{''.join(spans)}</p>"


def headline(sample: Sample, index: int) -> str:
    """Number, id, sizes."""
    on = int(sample.loss_mask.sum())
    return f"sample {index}, {sample.id}: {len(sample.input_ids):,} tokens, {on:,} supervised ({on / len(sample.input_ids):.0%})"


def chosen(count: int, wanted: int) -> list[int]:
    """`wanted` places spread over `count` samples."""
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(min(wanted, count))})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="", metavar="RUN", help="the run's name, or a folder that holds data/ (default: the config's name)")
    parser.add_argument("--config", default=DEFAULT_CONFIG, metavar="CONFIG", help="for trust_remote_code, and for the name where RUN is not given (default: %(default)s)")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key of the config")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="which sample (default: %(default)s)")
    parser.add_argument("--heldout", action="store_true", help="of the held-out chats, not of those trained on")
    parser.add_argument("--html", nargs="?", const="", default=None, metavar="FILE", help=f"write a page with {PAGE_SAMPLES} samples (default: data/samples.html of the run)")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="without colours supervised text stands between ⟦ and ⟧")
    args = parser.parse_args()
    folder = Path(args.run).expanduser() / "data" if "/" in args.run else None
    args.run = "" if folder else args.run
    config = config_from_args(args)
    folder = folder or RunPaths(args.run or config.name).data
    samples = SampleFile(folder / f"{'heldout' if args.heldout else 'train'}.safetensors")
    if not len(samples):
        raise UserError(f"{samples.path} holds no samples")
    if missing := {"model_path", "tokenizer_hash"} - samples.metadata.keys():
        raise UserError(f"{samples.path} does not say its {' and '.join(sorted(missing))}; make it again with `make data`")
    tokenizer = TargetTokenizer(samples.metadata["model_path"], config.target.trust_remote_code)
    if tokenizer.hash != samples.metadata["tokenizer_hash"]:
        raise UserError(f"the tokenizer in {tokenizer.folder} is not the one that {samples.path} was made with; make the data again with `make data`")
    share = float(samples.loss_mask.mean())
    warning = f"only {share:.1%} of all tokens are supervised, under {MIN_SUPERVISED:.0%}: is the mask right?" if share < MIN_SUPERVISED else ""
    if args.html is not None:
        path = Path(args.html or folder / "samples.html")
        if not path.parent.is_dir():
            raise UserError(f"--html {path}: the folder {path.parent} does not exist; make it, or name another file")
        body = [f"<h2>{html.escape(headline(samples[i], i))}</h2>\n{as_html(pieces(tokenizer, samples[i]))}" for i in chosen(len(samples), PAGE_SAMPLES)]
        legend = f'<p class="legend">{html.escape(str(samples.path))}: {len(samples):,} samples, {share:.1%} of the tokens supervised (<span class="on">like this</span>); '
        legend += 'special tokens <span class="mark">like this</span>; point at a token to see its id.</p>'
        warned = f'<p class="warn">{html.escape(warning)}</p>' if warning else ""
        path.write_text(f"<!doctype html><meta charset=utf-8><title>samples</title><style>{STYLE}</style>{legend}{warned}\n" + "\n".join(body) + "\n", encoding="utf-8", errors="backslashreplace")
        print(f"wrote {path}")
    else:
        if not 0 <= args.sample < len(samples):
            raise UserError(f"--sample {args.sample}: {samples.path} holds samples 0 to {len(samples) - 1}")
        parts = pieces(tokenizer, samples[args.sample])
        colours = args.color == "always" or args.color == "auto" and sys.stdout.isatty()
        print(headline(samples[args.sample], args.sample))
        print(coloured(parts) if colours else plain(parts))
    if warning:
        print(f"warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
