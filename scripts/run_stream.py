#!/usr/bin/env python3
"""Extract and train at the same time through the store's folder, so that the store never has to be whole (extract.keep_gb).

Either end may die: it is started again and goes on.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.config import Config, add_config_arguments, config_from_args
from aerie.errors import EXIT_INTERRUPTED, UserError, run_main
from aerie.extract_plan import make_plan, state_bytes
from aerie.gpus import training_env
from aerie.identity import read_model_config, text_config
from aerie.pipeline import call, end_with_parent, script_command

RESTARTS = 5  # of one end in a row, when it was killed or crashed; an error that the user can mend is not repeated
SETTLED_S = 600.0  # an end that ran this long got somewhere: its restarts count anew, for a job of days may meet more than five deaths
PAUSE_S = 2.0


@dataclass
class End:
    """One of the two processes."""

    name: str
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)  # on top of ours
    process: subprocess.Popen | None = None
    restarts: int = 0
    started: float = 0.0
    done: bool = False
    codes: list[int] = field(default_factory=list)

    def start(self) -> None:
        self.started = time.monotonic()
        self.process = subprocess.Popen(self.command, env=os.environ | {"PY": sys.executable} | self.env, preexec_fn=end_with_parent)  # noqa: PLW1509  no threads here

    def stop(self) -> None:
        """Ask it to end as Ctrl-C does (both keep what is done), and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def store_size(config: Config) -> int:
    """Bytes of the whole store, as planned from the data and the target's config."""
    plan = make_plan(config.run.data, config.extract.all_final_rows)
    model = text_config(read_model_config(config.model_path))
    item = 1 if config.extract.dtype == "fp8" else 4 if config.target.dtype == "float32" else 2
    return state_bytes(plan.jobs, len(config.target.aux_layer_ids), int(model["hidden_size"]), item)


def training(config: Config, overrides: list[str], *flags: str) -> End:
    """The trainer's end, with train.gpus in its environment (several GPUs: it starts a process on each itself)."""
    gpus = config.train.gpus
    return End("training", script_command(config, overrides, "03_train.py", flags), training_env(gpus) if len(gpus) == 1 else {})


def watch(ends: list[End]) -> int:
    """Until both are done; starts again what died. Returns the exit code of the first that cannot go on."""
    for end in ends:
        end.start()
    try:
        while not all(end.done for end in ends):
            time.sleep(0.2)
            for end in ends:
                code = None if end.done else end.process.poll()
                if code is None:
                    continue
                end.codes.append(code)
                if time.monotonic() - end.started >= SETTLED_S:
                    end.restarts = 0
                if code == 0:
                    end.done = True
                elif code in (1, 2) or end.restarts >= RESTARTS:
                    print(
                        f"{end.name} ended with exit code {code}; mend what it says above, then run the same command again: both go on from here",
                        file=sys.stderr,
                    )
                    return code if code > 0 else 1
                else:
                    end.restarts += 1
                    print(
                        f"{end.name} died ({'signal ' + str(-code) if code < 0 else 'exit code ' + str(code)}); starting it again ({end.restarts} "
                        f"of {RESTARTS})",
                        file=sys.stderr, flush=True,
                    )
                    time.sleep(PAUSE_S)
                    end.start()
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        for end in ends:
            end.stop()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_config_arguments(parser)
    parser.add_argument("--start-server", action="store_true", help="start the run's extraction server where one is needed and none runs (as make stream does)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else both ends would go on without us
    config = config_from_args(args)
    size, keep = store_size(config), config.extract.keep_gb * 1e9
    fits = not keep or size <= keep
    if not fits and config.train.epochs != 1:
        raise UserError(
            f"the store would be {size / 1e9:.1f} GB and extract.keep_gb keeps {config.extract.keep_gb:g}: then each sample is read once; set "
            f"train.epochs = 1 (it is {config.train.epochs}), or a larger keep_gb"
        )
    if args.start_server and not config.server.urls:
        call(script_command(config, args.overrides, "01_launch_server.sh", ("--background",)), "the extraction server")
    extract = End("extraction", script_command(config, args.overrides, "02b_extract_hidden_states_sglang.py"))
    if fits and config.train.epochs != 1:
        print(f"the store of {size / 1e9:.2f} GB is kept whole and read {config.train.epochs} times: training starts when extraction is done", flush=True)
        return watch([extract]) or watch([training(config, args.overrides)])
    print(f"the store of {size / 1e9:.2f} GB " + ("is kept whole" if fits else f"passes through {config.extract.keep_gb:g} GB") + "; training starts with the first shard", flush=True)
    return watch([extract, training(config, args.overrides, "--stream")])


if __name__ == "__main__":
    run_main(main)
