#!/usr/bin/env bash
# Start the extraction server: 01_launch_server.sh CONFIG [--run R] [--set K=V]... [--background | --stop]. Python: PY, else the active venv's, else VENV's (.venv's).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
. "$here/aerie/find_python.sh"
exec "$PY" "$here/launch_server.py" "$@"
