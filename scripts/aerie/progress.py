"""Progress: tqdm on a terminal, one line per 10 items or 10 seconds in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tqdm import tqdm


class Progress:
    """Counts items, tokens and errors; says how far it is and when it will be done.

    The log line is `[199] 200 extracted (200 total), 1.17 samples/s, 2602 tok/s, req_time=0.2s, ETA: 527 min, errors: 0, ~4.6 GB`.
    """

    def __init__(self, total: int, verb: str, unit: str = "samples", already: int = 0, stream: TextIO | None = None):
        self.total, self.verb, self.unit, self.already = total, verb, unit, already
        self.stream = stream or sys.stderr
        self.items = self.tokens = self.errors = self.bytes = 0
        self.request_seconds = 0.0
        self.start = self.last_line = time.monotonic()
        self.last_items = 0
        self.bar = tqdm(total=total, initial=already, unit=unit, file=self.stream, dynamic_ncols=True) if self.stream.isatty() else None

    def update(self, items: int = 1, tokens: int = 0, nbytes: int = 0, request_seconds: float = 0.0, errors: int = 0) -> None:
        """Add finished items; `request_seconds` is the time their requests took, for the mean."""
        self.items += items
        self.tokens += tokens
        self.bytes += nbytes
        self.errors += errors
        self.request_seconds += request_seconds
        if self.bar is not None:
            self.bar.update(items)
            self.bar.set_postfix_str(f"{self.rate(self.tokens):.0f} tok/s, errors: {self.errors}", refresh=False)
        elif self.items - self.last_items >= 10 and time.monotonic() - self.last_line >= 1 or time.monotonic() - self.last_line >= 10:
            self.print_line()

    def rate(self, count: float) -> float:
        """`count` a second since the start."""
        return count / max(time.monotonic() - self.start, 1e-9)

    def line(self) -> str:
        """The log line of the design."""
        per_second = self.rate(self.items)
        left = self.total - self.already - self.items
        eta = f"{left / per_second / 60:.0f} min" if per_second > 0 else "unknown"
        mean = self.request_seconds / max(self.items, 1)
        done = self.already + self.items
        return (
            f"[{max(done - 1, 0)}] {self.items} {self.verb} ({done} total), {per_second:.2f} {self.unit}/s, {self.rate(self.tokens):.0f} tok/s, "
            f"req_time={mean:.1f}s, ETA: {eta}, errors: {self.errors}, ~{self.bytes / 1e9:.1f} GB"
        )

    def print_line(self) -> None:
        """Print the line now and start the 10 items or 10 seconds anew."""
        print(self.line(), file=self.stream, flush=True)
        self.last_line, self.last_items = time.monotonic(), self.items

    def close(self) -> None:
        """End the bar, or print the last line."""
        if self.bar is not None:
            self.bar.close()
        elif self.items != self.last_items:
            self.print_line()
