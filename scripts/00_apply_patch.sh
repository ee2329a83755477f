#!/usr/bin/env bash
# Put the capture code into the installed SGLang: 00_apply_patch.sh [--check | --reverse]. Python: PY, else the active venv's, else VENV's (.venv's).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/aerie/find_python.sh"
exec "$PY" "$here/patch_sglang.py" "$@"
