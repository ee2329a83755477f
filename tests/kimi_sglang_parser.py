"""Does SGLang's own argument parser accept a command line? Many lines, one subprocess: importing SGLang takes seconds, and its argparse exits."""

import json
import subprocess
import sys

CHECK = r"""
import argparse, contextlib, io, json, sys
from sglang.srt.server_args import ServerArgs

def answer(words):
    # A fresh parser a line would cost seconds; one parser keeps no state. Abbreviations would hide an option's wrong name.
    error = io.StringIO()
    try:
        with contextlib.redirect_stderr(error):
            return {"values": {k: v for k, v in vars(parser.parse_args(words)).items()}, "error": ""}
    except SystemExit:
        return {"values": {}, "error": error.getvalue().strip().splitlines()[-1]}

parser = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False)
ServerArgs.add_cli_args(parser)
lines = json.load(sys.stdin)
print("ANSWERS" + json.dumps([answer(words) for words in lines], default=str))
"""


def parse_lines(lines: list[list[str]]) -> list[dict]:
    """For each list of options (what follows sglang.launch_server): {'values': option -> value, 'error': '' or what the parser said}."""
    done = subprocess.run([sys.executable, "-c", CHECK], input=json.dumps(lines), capture_output=True, text=True, timeout=300, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    assert found, f"SGLang's parser could not be asked: {done.stderr[-2000:]}"
    return json.loads(found[0].removeprefix("ANSWERS"))
