#!/usr/bin/env bash
# Target + drafter under SGLang speculative decoding: 04_serve.sh CONFIG [--run R] [--set K=V]... [--without-drafter] [--background | --stop]
# Checks the drafter first, warms up, compares the accept length with training's prediction, starts a dead server again. Python: PY, else the active venv's, else VENV's (.venv's).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
py=${PY:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}}
venv=${VENV:-.venv}; case $venv in /*) ;; *) venv=$here/../$venv ;; esac
py=${py:-$venv/bin/python}
command -v "$py" >/dev/null || { echo "error: no Python at $py; run 'make setup', or name one that has SGLang: PY=/path/to/python" >&2; exit 2; }
exec "$py" "$here/serve_drafter.py" "$@"
