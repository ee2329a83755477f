"""Signals that end a script, held back for the moment in which a process exists that nobody knows of yet."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_held() -> Iterator[None]:
    """Python's handlers of SIGINT, SIGTERM and SIGHUP run after the block, not in it; default actions and ignored signals stay as they are.

    A thread other than the main one is left alone: no handler runs in it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []
    handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
    for number in handlers:
        signal.signal(number, lambda number, _: caught.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in caught:
            os.kill(os.getpid(), number)
