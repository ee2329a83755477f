"""What scripts/04_serve.sh does: check the drafter, launch, warm up, compare with training's prediction, and watch over the server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from .check import Check, Serving, table
from .config import Config
from .config_rules import option_number
from .errors import EXIT_FAILED, UserError
from .generate import Prompt, accept_length, ask_server, prompts_of
from .host_memory import refuse_short_memory
from .predicted import Prediction
from .report import read_report, versions, write_json
from .samples import SampleFile
from .servers import Server, has_gpu, server_args, start_ticks, watcher_path, watcher_record

BACKGROUND = "AERIE_BACKGROUND"  # in the environment of a script that start_in_background() started: no Ctrl-C reaches it
WARM_UP_CHATS = 8
FAR_BELOW = 0.7  # served / predicted under this: something is wrong, not only noise


def serving_of(config: Config, store: dict[str, Any]) -> Serving:
    """What the check needs to know of the server that this config starts."""
    args = server_args(config, "serving")
    return Serving(
        dtype=str(args.get("dtype", "auto")),
        context_length=option_number(args, "context-length", default=0),
        quantization=str(args.get("quantization", "")),
        draft_quantization=str(args.get("speculative-draft-model-quantization", "")),
        attention_backend=str(args.get("attention-backend", "")),
        draft_attention_backend=str(args.get("speculative-draft-attention-backend", "")),
        gpu=has_gpu(),
        server_version=versions()["sglang"] or "",
        store=store,
    )


def read_manifest(config: Config) -> dict[str, Any]:
    """The manifest of the run's store, {} when it has none (any more)."""
    path = config.run.store / "manifest.json"
    return read_report(path, "`make extract`")


def refuse_bad_drafter(config: Config) -> None:
    """Print the table and end with exit code 1 when the run's drafter does not fit; one line when it does."""
    check = Check(config.run.drafter, config.model_path, serving_of(config, read_manifest(config)))
    lines = check.run()
    if check.failed:
        print(table(lines))
        print(f"error: {config.run.drafter}: {check.failed[0].key}: {check.failed[0].text}; nothing was launched", file=sys.stderr)
        raise SystemExit(EXIT_FAILED)
    print(f"drafter {config.run.drafter}: all {len(lines)} checks passed", flush=True)


def warm_up_prompts(config: Config) -> list[Prompt]:
    """A few held-out chats of the run, or one chat through the target's own template where it has none."""
    path = config.run.data / "heldout.safetensors"
    if path.is_file():
        file = SampleFile(path)
        prompts = [prompt for index in range(min(WARM_UP_CHATS, len(file))) for prompt in prompts_of(file[index], config.bench.max_new_tokens)]
        if prompts:
            return prompts[:WARM_UP_CHATS]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model_path, trust_remote_code=config.target.trust_remote_code)
    chat = [{"role": "user", "content": "Say in two sentences why the sky is blue."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **config.data.chat_template_kwargs)
    return [Prompt("warm-up", tokenizer(text, add_special_tokens=False)["input_ids"], min(64, config.bench.max_new_tokens))]


def warm_up(config: Config, server: Server) -> str:
    """Send the warm-up chats; returns the one line that compares the accept length seen with the predicted one."""
    prompts = warm_up_prompts(config)
    answers, _ = ask_server(server, prompts, min(4, len(prompts)), config.data.request_timeout_s)
    tokens = sum(len(answer.output_ids) for answer in answers)
    seen = accept_length(answers)
    if server.mode != "serving":
        return f"warm-up: {tokens} tokens in {len(answers)} chats, without a drafter"
    if seen is None:
        return f"warm-up: {tokens} tokens in {len(answers)} chats, but the server counted no verification: it does not speculate"
    prediction = Prediction.load(config)
    predicted, same = prediction.accept_length, prediction.compare(answers)
    text = f"warm-up: accept length {seen:.2f} over {len(answers)} chat{'s' if len(answers) != 1 else ''}, {tokens} tokens"
    if predicted is None:
        return f"{text}; training predicted none, so there is nothing to compare it with"
    if same and same.prompts == len(answers):
        predicted = same.predicted
        text += f"; training predicted {predicted:.2f} for these ({seen / predicted - 1:+.0%})"
    else:
        text += f"; training predicted {predicted:.2f} over all its held-out chats ({seen / predicted - 1:+.0%})"
    return f"{text}: far below, so the drafter does not see in serving what it saw in training" if seen < FAR_BELOW * predicted else text


def launch(config: Config, mode: str) -> Server:
    """Start the server of `mode` and wait until it is ready. Ends it again when something on the way fails."""
    refuse_short_memory(config, mode)
    server = Server.start(config, mode)
    try:
        print(f"starting the {mode} server on {server.url} (log: {server.log})", flush=True)
        server.wait_ready()
    except BaseException:
        server.stop()
        raise
    return server


def watch(config: Config, server: Server, poll_s: float = 0.5) -> None:
    """Stay with the server; start it again when it dies, serve.max_restarts times in all, then raise UserError."""
    restarts = 0
    while True:
        while server.alive():
            time.sleep(poll_s)
        reason = server.last_error()
        server.stop()  # children may outlive the first process
        if restarts >= config.serve.max_restarts:
            raise UserError(f"the {server.mode} server died, after {restarts} restarts (serve.max_restarts): {reason} (log: {server.log})")
        restarts += 1
        print(f"the {server.mode} server died: {reason}; restart {restarts} of {config.serve.max_restarts}", flush=True)
        server = launch(config, server.mode)
        print(f"{server.mode} server ready on {server.url}", flush=True)


def record_watcher(config: Config, mode: str, ready: bool) -> None:
    """Say that this process watches over the server of `mode`: then stopping the server ends the watcher too."""
    record = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "ready": ready, "command": [sys.executable, *sys.argv], "cwd": os.getcwd()}
    write_json(watcher_path(config, mode), record)


def start_in_background(config: Config, mode: str, command: list[str], cwd: str | None = None) -> int:
    """Run `command` (this script in the foreground) in a session of its own; print its words until the server is ready (0) or it ends (its exit code)."""
    log = config.run.logs / f"{mode}-watcher.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd, env=os.environ | {BACKGROUND: "1"})
    shown = 0
    try:
        while True:
            code = process.poll()
            record = watcher_record(config, mode)
            ready = record is not None and record["pid"] == process.pid and record["ready"]
            text = log.read_text(errors="replace")
            print(text[shown:], end="", flush=True)
            shown = len(text)
            if ready or code is not None:
                return 0 if ready else code
            time.sleep(0.2)
    except BaseException:
        process.terminate()
        raise
