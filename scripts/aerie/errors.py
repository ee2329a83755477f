"""Errors the user can mend, and the one place where a script turns them into an exit code."""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from typing import Callable, NoReturn

EXIT_USER = 2  # what the user can mend: config, paths, disk, port
EXIT_FAILED = 1  # a check did not pass
EXIT_INTERRUPTED = 130
SAYS = "AERIE_SAYS"  # in the environment of processes that work together: the file for their error; who started them prints it, once
EXIT_PIPE = 141  # as a shell says it of a program that SIGPIPE ended
WRITING = {
    errno.ENOSPC: "no space left on the device while writing {}; free some space and run the same command again",
    errno.EDQUOT: "no space left on the device while writing {}; free some space and run the same command again",
    errno.EFBIG: "{} would be larger than a file may be here; raise the limit (ulimit -f), or use another file system (AERIE_RUNS_DIR)",
    errno.EIO: "the disk or the network file system of {} reports an error (Input/output error); look after it and run the same command again",
}  # fmt: skip
BAD_PATH = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)


make_words = ""  # " CONFIG=... RUN=..." of the config that the script has read, as far as they are not make's defaults; set by config_from_args


class UserError(Exception):
    """What is wrong, the value, where it stands, what to do: one sentence, no traceback, exit code 2."""


def with_make_words(text: str) -> str:
    """The sentence with CONFIG and RUN in every `make STEP` that it advises, so that the command can be copied."""
    steps = "target|server|data|extract|train|stream|check|serve|bench|stop|plan|doctor|all"
    return re.sub(rf"`make ({steps})`", lambda found: f"`make {found[1]}{make_words}`", text)


def complain(sentence: str, says: str) -> None:
    """The sentence on stderr; of several processes that work together the first one's goes to the file `says`."""
    if not says:
        print(sentence, file=sys.stderr)
        return
    try:
        with open(says, "x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(sentence)
    except FileExistsError:
        pass
    except OSError:  # a full disk
        print(sentence, file=sys.stderr)


def run_main(main: Callable[[], int | None]) -> NoReturn:
    """Run a script's main() and exit; UserError, a full disk and a path that cannot be used become one line on stderr and exit code 2."""
    global make_words
    make_words = ""
    says = os.environ.pop(SAYS, "")
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w", encoding="utf-8") for stream in (sys.stdout, sys.stderr))  # closed: `script >&-`
    for stream in (sys.stdout, sys.stderr):  # a locale without the characters that we print must not end a run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = main() or 0
        sys.stdout.flush()
    except UserError as exc:
        complain(f"error: {with_make_words(str(exc))}", says)
        code = EXIT_USER
    except RuntimeError:
        if not os.path.exists(says):
            raise
        code = EXIT_USER  # the connection to a process that ended with an error of its own, which is told already
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # `script | head`: nothing to say, but a step that was cut off must not count as done; and stdout can no longer be flushed
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_PIPE
    except OSError as exc:
        bad_path = exc.errno in BAD_PATH and exc.filename is not None
        if exc.errno not in WRITING and not bad_path:
            raise
        where = os.fsdecode(exc.filename)[:300] if isinstance(exc.filename, (str, bytes, os.PathLike)) else "the output folder"
        if bad_path:
            complain(f"error: {where} cannot be used ({exc.strerror}); mend that path or its permissions, or name another", says)
        else:
            complain(f"error: {WRITING[exc.errno].format(where)}", says)
        code = EXIT_USER
    sys.exit(code)
