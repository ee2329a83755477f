#!/usr/bin/env bash
# Target + drafter under SGLang speculative decoding: 04_serve.sh CONFIG [--run R] [--set K=V]... [--without-drafter] [--background | --stop]
# Checks the drafter first, warms up, compares the accept length with training's prediction, starts a dead server again. Python: PY, else the active venv's, else VENV's (.venv's).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/aerie/find_python.sh"
exec "$PY" "$here/serve_drafter.py" "$@"
