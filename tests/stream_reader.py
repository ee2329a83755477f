#!/usr/bin/env python3
"""A stand-in trainer for the streaming tests: reads each shard once, notes its samples and the store's size, says it is consumed; dies up to three times when told to."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from aerie.store import StreamingStore


def main() -> None:
    path, log, die_every, pause = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    stream = StreamingStore(path)
    for number, store in enumerate(stream.shards(poll_s=0.02), 1):
        size = sum(file.stat().st_size for file in path.glob("shard-*"))
        time.sleep(pause)  # training
        lines = [f"{store.ids[index]} {int(store.heldout[index])} {store.get(index).aux.double().sum():.0f} {size}\n" for index in range(len(store))]
        deaths = log.with_suffix(".deaths")
        if die_every and number % die_every == 0 and (not deaths.exists() or deaths.stat().st_size < 3):
            with open(deaths, "a") as file:
                file.write("x")
            os.kill(os.getpid(), 9)
        with open(log, "a") as file:
            file.writelines(lines)
            os.fsync(file.fileno())
        stream.consume(store.shards[0].path.name)


if __name__ == "__main__":
    main()
