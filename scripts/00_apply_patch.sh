#!/usr/bin/env bash
# Put the capture code into the installed SGLang: 00_apply_patch.sh [--check | --reverse]. Python: PY, else the active venv's, else VENV's (.venv's).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
py=${PY:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}}
venv=${VENV:-.venv}; case $venv in /*) ;; *) venv=$here/../$venv ;; esac
export PY=${py:-$venv/bin/python}
command -v "$PY" >/dev/null || { echo "error: no Python at $PY; run 'make setup', or name one that has SGLang: PY=/path/to/python" >&2; exit 2; }
exec "$PY" "$here/patch_sglang.py" "$@"
