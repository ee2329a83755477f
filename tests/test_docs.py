"""README.md and docs/ say what is: commands run or parse, keys exist, messages are in the code, files and links are there."""

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import lru_cache
from pathlib import Path

import pytest
from aerie import config as configuration
from aerie.chats import parse_row
from aerie.config import SECTIONS, load_config
from aerie.paths import CONFIGS, ROOT
from kimi_sglang_parser import parse_lines

pytestmark = pytest.mark.docs

PAGES = sorted((ROOT / "docs").glob("*.md")) + [path for path in (ROOT / "README.md", ROOT / "patches" / "README.md", ROOT / "cuda" / "README.md") if path.is_file()]
STARTS = ("make ", "scripts/", "./scripts/", "python", "torchrun ", "PY=", "AERIE_", "tests/", "cuda/")
RUN = (  # short ones: executed, and must end with this code
    ("make help", 0), ("scripts/plan_run.py --config kimi-k2.5 --paper", 0), ("scripts/plan_run.py --config qwen3-8b --gpus 1 --gpu-gib 31 --paper", 0),
    ("scripts/sglang_args.py kimi-k2.5 extraction --shell --paper", 0), ("scripts/sglang_args.py kimi-k2.5 serving --shell --paper", 0), ("scripts/00_apply_patch.sh --check", 0),
)  # fmt: skip


def blocks(text: str) -> list[str]:
    """Lines of code: fenced as sh, bash or nothing, or indented by four spaces outside of lists."""
    lines, fenced, found = text.splitlines(), "", []
    for line in lines:
        if line.lstrip().startswith("```"):
            fenced = "" if fenced else line.strip().removeprefix("```") or "text"
        elif fenced in ("sh", "bash", "console") or (not fenced and line.startswith("    ")):
            found.append(re.split(r"\s{2,}(?!\\)", line.strip().removeprefix("$ "))[0])  # what follows two spaces explains
    return found


def commands(path: Path) -> list[str]:
    return [line for line in blocks(path.read_text()) if line.startswith(STARTS)]


COMMANDS = sorted({(path.name, line) for path in PAGES for line in commands(path)})


@lru_cache
def help_of(script: str, *sub: str) -> str:
    """What a script (or one of its commands) says of itself; shell scripts pass --help on to Python."""
    path = ROOT / script
    assert path.is_file(), f"{script} does not exist"
    command = [str(path)] if path.suffix == ".sh" else [sys.executable, str(path)]
    done = subprocess.run([*command, *sub, "--help"], capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PY": sys.executable})
    assert done.returncode == 0, f"{script} --help: {done.stderr[-500:]}"
    return done.stdout


def check_config(words: list[str], positional: bool) -> None:
    """--config, --run and --set (or a positional CONFIG) as the loader takes them; a name that the reader is to choose is left out."""
    overrides = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    name = words[words.index("--config") + 1] if "--config" in words else next((word for word in words[:1] if positional and not word.startswith("-")), "smollm2-135m")
    if name not in ("NAME", "CONFIG", "configs/mine.toml"):
        load_config(name, overrides=overrides)


def check_script(words: list[str]) -> None:
    script, rest = words[0].removeprefix("./"), words[1:]
    text = help_of(script)
    if rest and (match := re.search(r"\{([a-z,]+)\}", text)) and rest[0] in match[1].split(","):
        text += help_of(script, rest[0])
    for word in rest:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){re.escape(word.split('=')[0])}(?![\w-])", text), f"{script} has no option {word}"
    if "--set" in text:
        check_config(rest, positional="[CONFIG]" in text)


def check_make(words: list[str]) -> None:
    """make knows the target, the script that it calls is there, and CONFIG and SET are good."""
    settings = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    done = subprocess.run(["make", "-n", f"PY={sys.executable}", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for script in re.findall(r"(?<![\w/])scripts/[\w.]+", done.stdout):
        assert (ROOT / script).is_file(), f"{script} does not exist"
    if settings.get("CONFIG", "") not in ("", "NAME", "configs/mine.toml"):
        load_config(settings["CONFIG"], overrides=settings.get("SET", "").split())
    elif "SET" in settings:
        load_config(overrides=settings["SET"].split())


def check_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == "make":
        check_make(words)
    elif words[0] == "torchrun" or words[0].startswith("python"):
        at = next((i for i, word in enumerate(words) if word.endswith(".py") or word == "sglang.launch_server"), None)
        assert at is not None, f"no script in {line}"
        if words[at] == "sglang.launch_server":
            answer = parse_lines([words[at + 1 :]])[0]
            assert not answer["error"], answer["error"]
        else:
            check_script(words[at:])
    else:
        check_script(words)


def test_there_are_pages_and_commands():
    names = {path.name for path in PAGES}
    assert {"overview.md", "data.md", "extract.md", "train.md", "serve.md", "bench.md", "adding.md", "compare.md", "sm120.md", "scale.md", "config.md"} <= names
    assert len(COMMANDS) > 30


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}"[:90] for page, line in COMMANDS])
def test_command_parses(page, line):
    check_command(line)


def test_server_lines_are_sglangs():
    """What sglang_args.py prints for every config goes through SGLang's own parser (the same lines as tests/test_config_parser.py, as a reader sees them)."""
    lines = []
    for name in sorted(path.stem for path in CONFIGS.glob("*.toml")):
        for mode in ("extraction", "serving"):
            done = subprocess.run([sys.executable, str(ROOT / "scripts/sglang_args.py"), name, mode, "--shell"], capture_output=True, text=True, check=True)
            words = shlex.split(done.stdout)
            lines.append(words[words.index("sglang.launch_server") + 1 :])
    assert [answer["error"] for answer in parse_lines(lines) if answer["error"]] == []


@pytest.mark.parametrize(("line", "code"), RUN, ids=[line for line, _ in RUN])
def test_short_command_runs(line, code):
    assert any(line == found for _, found in COMMANDS) or line == "make help", f"no page has {line!r} any more"
    words = shlex.split(line)
    if words[0] == "make":
        words.insert(1, f"PY={sys.executable}")
    elif words[0].endswith(".py"):
        words = [sys.executable, *words]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, env={**os.environ, "PY": sys.executable})
    assert done.returncode == code, done.stdout[-500:] + done.stderr[-500:]


def test_config_keys_exist():
    """Every `section.key` in the pages is a key that the loader knows."""
    known = {f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.__dataclass_fields__}
    for path in PAGES:
        for section, key in re.findall(rf"`({'|'.join(SECTIONS)})\.([a-z_]+)[`= ]", path.read_text()):
            if key not in ("py", "md", "toml", "safetensors", "log", "jsonl", "json"):
                assert f"{section}.{key}" in known, f"{path.name}: {section}.{key}; {configuration.nearest(f'{section}.{key}', known)}"


def test_config_page_has_every_key():
    """docs/config.md: a table a section, every key of the loader in its order with its default and a meaning, and no other key."""
    section, found = "", []
    for line in (ROOT / "docs" / "config.md").read_text().splitlines():
        section = match[1] if (match := re.match(r"## \[(\w+)\]$", line)) else section
        if match := re.match(r"\| `(\w+)\.(\w+)` \| (`([^`]*)`|none) \| (.+) \|$", line):
            assert match[1] == section and match[5].endswith(".") and "`|" not in match[5], line
            found.append((f"{match[1]}.{match[2]}", tomllib.loads(f"value = {match[4]}")["value"] if match[4] else None))
        else:
            assert not line.startswith("| `"), line
    known = []
    for name, kind in SECTIONS.items():
        for item in dataclasses.fields(kind):
            made = item.default_factory is not dataclasses.MISSING
            known.append((f"{name}.{item.name}", item.default_factory() if made else None if item.default is dataclasses.MISSING else item.default))
    assert [key for key, _ in found] == [key for key, _ in known]
    for (key, said), (_, default) in zip(found, known):
        assert said == default and type(said) is type(default), f"{key}: the page says {said!r}, the loader {default!r}"


def test_example_chats_are_chats():
    """docs/data.md shows one row of each form, and the data step reads them."""
    text = (ROOT / "docs" / "data.md").read_text()
    rows = [json.loads(line) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    assert [next(iter(row)) for row in rows] == ["messages", "conversations", "prompt", "input_ids", "system"]
    chats = [parse_row(row) for row in rows]
    assert [chat.messages[-1]["role"] for chat in chats if chat.input_ids is None] == ["assistant"] * 3 + ["user"]
    assert chats[-1].tools and chats[-1].messages[0]["role"] == "system"


def test_messages_are_in_the_code():
    """The first column of a table of messages quotes the code."""
    code = "\n".join(path.read_text() for folder in ("scripts", "patches", "cuda") for path in (ROOT / folder).rglob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # sentences that run over two lines
    count = 0
    for path in PAGES:
        table = False
        for line in path.read_text().splitlines():
            table = (table or line.startswith(("| message |", "| it says |"))) and line.startswith("|")
            if table and (match := re.match(r"\| `([^`]+)` \|", line)):
                assert match[1] in code, f"{path.name}: no code says {match[1]!r}"
                count += 1
    assert count > 40


def test_files_and_links_are_there():
    for path in PAGES:
        text = path.read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
        for name in re.findall(r"`((?:scripts|configs|docs|tests|patches|cuda)/[\w./-]+)`", text):
            if not any(mark in name for mark in ("NAME", "mine")):
                assert (ROOT / name).exists(), f"{path.name} names {name}"


def test_nothing_of_this_workplace_is_written_down():
    """No machine's paths in what people read."""
    for path in PAGES:
        assert not re.search(r"/work/|/tmp/\w+/|/root/", path.read_text()), path.name
