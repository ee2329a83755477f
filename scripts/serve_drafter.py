#!/usr/bin/env python3
"""Check the drafter, serve target + drafter under SGLang's EAGLE3 speculation, warm up, and say whether it drafts as training predicted.

Stays in the foreground and starts a dead server again (serve.max_restarts times); Ctrl-C ends the server and all its children. Logs: runs/<run>/logs.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import Config, add_config_arguments, config_from_args, make_words
from aerie.errors import UserError, run_main
from aerie.other_runs import refuse_missing_drafter
from aerie.running import refuse_other_options
from aerie.servers import Server, make_room, refuse_bad_target, stop_servers, watcher_path, watcher_record
from aerie.serving import BACKGROUND, launch, record_watcher, refuse_bad_drafter, start_in_background, warm_up, watch


def foreground(config: Config, mode: str) -> None:
    """Check, launch, warm up, watch; the server ends with this process."""
    for name in (signal.SIGTERM, signal.SIGHUP):  # so that `finally` runs
        signal.signal(name, lambda *_: sys.exit(0))
    if mode == "serving":
        refuse_bad_drafter(config)
    make_room(config, ["extraction"])
    record_watcher(config, mode, ready=False)
    launched = False
    try:
        server = launch(config, mode)
        launched = True
        print(warm_up(config, server), flush=True)
        how = f"`make stop{make_words(config)}`" if os.environ.get(BACKGROUND) else "Ctrl-C"
        print(f"ready on {server.url}; end it with {how}", flush=True)
        record_watcher(config, mode, ready=True)
        watch(config, server)
    finally:
        if launched and (running := Server.find(config, mode)):
            running.stop()
        watcher_path(config, mode).unlink(missing_ok=True)


def main() -> int | None:
    parser = argparse.ArgumentParser(prog="04_serve.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser, positional=True)
    parser.add_argument("--without-drafter", action="store_true", help="serve the target alone, on bench.baseline_port")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--background", action="store_true", help="return when the server is ready; a process of its own watches over it")
    how.add_argument("--stop", action="store_true", help="end the server that --background started")
    args = parser.parse_args()
    config = config_from_args(args)
    mode = "baseline" if args.without_drafter else "serving"
    if args.stop:
        modes = ["baseline"] if args.without_drafter else ["serving", "baseline"]
        stopped = stop_servers(config, modes)
        print(f"ended: {', '.join(stopped)}" if stopped else f"no {' or '.join(modes)} server of run {config.run.name} is running")
        return 0
    running = Server.find(config, mode)
    if running:
        refuse_other_options(config, running)
    if running and running.healthy():
        print(f"the {mode} server of run {config.run.name} already runs on {running.url}; `make stop{make_words(config)}` ends it")
        return 0
    if running or watcher_record(config, mode):
        raise UserError(f"the {mode} server of run {config.run.name!r} is starting or does not answer; see {config.run.logs / f'{mode}.log'}, wait, or end "
            f"it with --stop")
    if mode == "serving":
        refuse_missing_drafter(config)
    if not config.run.root.exists():  # else a run is left that has a log and nothing else
        refuse_bad_target(config)
    if args.background:
        words = [word for word in sys.argv[1:] if word != "--background"]
        return start_in_background(config, mode, [sys.executable, str(Path(__file__).resolve()), *words])
    return foreground(config, mode)


if __name__ == "__main__":
    run_main(main)
