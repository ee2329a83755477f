#!/usr/bin/env bash
# Target + drafter under SGLang speculative decoding: 04_serve.sh CONFIG [--run R] [--set K=V]... [--without-drafter] [--background | --stop]
# Checks the drafter first, warms up, compares the accept length with training's prediction, starts a dead server again. --help says more.
set -euo pipefail
scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PY:-${VENV:-$scripts/../.venv}/bin/python}
[ -x "$python" ] || python=$(command -v "$python") || { echo "error: no Python at ${PY:-${VENV:-$scripts/../.venv}/bin/python}; run make setup, or name one: PY=/path/to/python" >&2; exit 2; }
exec "$python" "$scripts/serve_drafter.py" "$@"
