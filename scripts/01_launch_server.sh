#!/usr/bin/env bash
# Start the extraction server: 01_launch_server.sh CONFIG [--run R] [--set K=V]... [--background | --stop]. Python: PY, else the active venv's, else VENV's (.venv's).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
py=${PY:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}}
venv=${VENV:-.venv}; case $venv in /*) ;; *) venv=$here/../$venv ;; esac
py=${py:-$venv/bin/python}
command -v "$py" >/dev/null || { echo "error: no Python at $py; run 'make setup', or name one that has SGLang: PY=/path/to/python" >&2; exit 2; }
exec "$py" "$here/launch_server.py" "$@"
