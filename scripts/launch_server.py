#!/usr/bin/env python3
"""Start the extraction server: SGLang with capture on, ready only when one prefill has gone through the dump path. Foreground; Ctrl-C ends it and its children."""

import argparse
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.capture_server import MODE, check_patch, running_server, self_test
from aerie.config import add_config_arguments, config_from_args, make_words
from aerie.errors import UserError, run_main
from aerie.servers import Server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="01_launch_server.sh")
    add_config_arguments(parser, positional=True)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--background", action="store_true", help="return once it is ready; end it with --stop")
    group.add_argument("--stop", action="store_true", help="end this run's extraction server and all its children")
    args = parser.parse_args()
    config = config_from_args(args)
    if args.stop:
        server = Server.find(config, MODE)
        if server:
            server.stop()
        print(f"the extraction server of run {config.run.name!r} {'was ended' if server else 'is not running'}")
        return 0
    server = running_server(config)
    if server and server.healthy(60):  # a busy server answers behind the prefills that came before
        print(f"the extraction server of run {config.run.name!r} is already running and healthy: {server.url}")
        return 0
    if server:
        raise UserError(f"the extraction server of run {config.run.name!r} is running but does not answer (yet?); see {server.log}, or end it with --stop")
    check_patch()
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, _interrupt)
    server = Server.start(config, MODE)
    leave = False
    try:
        print(f"starting the extraction server of run {config.run.name!r} on {server.url}; log: {server.log}", flush=True)
        begin = time.monotonic()
        server.wait_ready()
        print(self_test(config, server))
        print(f"ready after {time.monotonic() - begin:.0f} s: {server.url}; end it with {f'`make stop{make_words(config)}`' if args.background else 'Ctrl-C'}", flush=True)
        leave = args.background
        if not leave:
            while server.alive():
                time.sleep(0.5)
            raise UserError(f"the extraction server ended by itself: {server.last_error()} (log: {server.log})")
    finally:
        if not leave:
            server.stop()
    return 0


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_main(main)
