# Sourced by the scripts beside this folder, which have set `here`: PY (exported), else the active venv's Python, else that of the venv that VENV names, else .venv's.
venv=${VENV:-.venv}; case $venv in /*) ;; *) venv=$here/../$venv ;; esac
export PY=${PY:-${VIRTUAL_ENV:-$venv}/bin/python}
command -v "$PY" >/dev/null || { echo "error: no Python at $PY; run 'make setup', or name one that has SGLang: PY=/path/to/python" >&2; exit 2; }
