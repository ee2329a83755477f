"""A server that runs already and the config as it is now: what differs, so that nobody goes on with the options of yesterday."""

from __future__ import annotations

from typing import Sequence

from .config import Config
from .errors import UserError
from .records import loaded_models
from .servers import Server, command_line, server_env

NOT_OPTIONS = ("PYTHONPATH", "AERIE_ROOT", "SGLANG_HS_DUMP_OPS", "CUDA_VISIBLE_DEVICES")  # follow the caller's shell and what is built, not the config


def options_of(command: Sequence[str]) -> dict[str, str]:
    """{option: its values as one text} of a command that starts SGLang."""
    found: dict[str, list[str]] = {}
    for word in command[next((at for at, word in enumerate(command) if word.startswith("--")), len(command)) :]:
        if word.startswith("--"):
            values = found[word.removeprefix("--")] = []
        else:
            values.append(word)
    return {name: " ".join(values) or "on" for name, values in found.items()}


def differences(config: Config, server: Server) -> list[str]:
    """Each option of SGLang, and each environment variable of ours, that the server was started with otherwise than the config says now."""
    then, now = options_of(server.record["command"]), options_of(command_line(config, server.mode))
    found = [f"{name} = {then.get(name, 'not set')}, the config says {now.get(name, 'not set')}" for name in now | then if then.get(name) != now.get(name)]
    before, env = server.record.get("env"), server_env(config, server.mode)
    if isinstance(before, dict):  # a value may be a key: names alone
        found += [f"the environment variable {name} is another" for name in env | before if before.get(name) != env.get(name) and name not in NOT_OPTIONS]
    return found


def refuse_other_options(config: Config, server: Server) -> None:
    """Raise UserError where a running server was started with other options than the config's, or its model or drafter was written anew since: it would go on serving those."""
    if found := differences(config, server):
        raise UserError(f"the running {server.mode} server of run {config.run.name!r} was started with other options: {'; '.join(found)}; end it with `make stop` first")
    models, command = server.record.get("models"), server.record["command"]
    for folder, now in loaded_models(command).items():
        if isinstance(models, dict) and models.get(folder) != now:
            raise UserError(f"the running {server.mode} server of run {config.run.name!r} loaded {folder} before it was written anew; end it with `make stop` first")
