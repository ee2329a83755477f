"""How fast a folder takes new files from several processes: what the extraction client's own rate is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from .dump_pool import start_module
from .shard_writer import WRITEBACK_BYTES, start_writeback

BLOCK = 1 << 20


def write_rate(folder: Path, nbytes: int, processes: int, file_bytes: int) -> float:
    """Bytes a second of `processes` processes that write `nbytes` together into files of `file_bytes` as the client does: the disk begins early, fsync at
    each file's end. 1 MiB a call, from a block in the cache."""
    each = max(1, nbytes // processes // BLOCK) * BLOCK
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [start_module("write_rate", folder, each, file_bytes, number, **pipes) for number in range(processes)]
    try:
        for writer in writers:
            writer.stdout.readline()
        start = time.monotonic()
        for writer in writers:
            writer.stdin.write(b"go\n")
            writer.stdin.flush()
        for writer in writers:
            if writer.stdout.readline() != b"done\n":
                raise OSError(f"a plain write of {each} bytes into {folder} failed")
        seconds = time.monotonic() - start
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
        for path in folder.glob("rate.*"):
            path.unlink()
    return each * processes / seconds


def main() -> None:
    """FOLDER BYTES FILE_BYTES NUMBER: one of the processes."""
    folder, nbytes, file_bytes, number = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    block = memoryview(os.urandom(BLOCK))
    print("ready", flush=True)
    sys.stdin.readline()
    done, files = 0, 0
    while done < nbytes:
        with open(folder / f"rate.{number}.{files}", "wb", buffering=0) as file:
            while done < nbytes and file.tell() < file_bytes:
                done += file.write(block)
                if file.tell() % WRITEBACK_BYTES == 0:
                    start_writeback(file.fileno(), file.tell() - WRITEBACK_BYTES, WRITEBACK_BYTES)
            os.fsync(file.fileno())
        files += 1
    print("done", flush=True)


if __name__ == "__main__":
    main()
