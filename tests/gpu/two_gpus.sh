#!/usr/bin/env bash
# Everything that needs two GPUs of one host, in two calls of at most nine minutes each. Every part goes on when another fails; a JSON line a part, summaries last.
#   two_gpus.sh servers OUT     extraction over two servers, capture with TP 2 and with data-parallel attention
#   two_gpus.sh training OUT    DDP and FSDP2, a run that changes its number of processes, target and trainer on a GPU each through the streaming store
# Python: PY (with SGLang and CUDA torch). OUT gets few files: the JSON of each script, and the logs as one archive.
# QUICK=1 (a CPU): SGLang is left as it is, no two parts at once, DEADLINE=3000 gives them time.
set -u
what=${1:?usage: two_gpus.sh servers|training OUT}; out=$(mkdir -p "${2:?usage: two_gpus.sh servers|training OUT}" && cd "$2" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd); here=$root/tests/gpu; export PY=${PY:-python3} PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1  # no NVLink multicast: not every shared host allows it
work=${WORK:-/tmp/two_gpus}; mkdir -p "$work/$what"; cd "$root" || exit 2
keep() { cp "$work/$what"/*/two_*.json "$out/" 2>/dev/null; (cd "$work/$what" && find . -name '*.log' -o -name 'bench-*.json' -o -name '*.toml' | tar czf "$out/logs-$what.tar.gz" -T -); }
trap keep EXIT
part() {  # SECONDS COMMAND...: no longer than that, nor past DEADLINE seconds of the whole call
  local limit=$1 start=$SECONDS left=$((${DEADLINE:-525} - SECONDS)); shift
  [ "$left" -ge "$limit" ] || limit=$((left > 1 ? left : 1))
  timeout -k 25 "$limit" "$@"; echo "== $(basename "${2:-$1}") exit $?, $((SECONDS - start)) s, $SECONDS s in all"
}
case $what in
servers)
  "$PY" "$here/two_capture.py" "$work/servers/capture" --work "$work/capture" --prepare > "$work/servers/prepare.log" 2>&1 & prepare=$!
  [ -n "${QUICK:-}" ] || scripts/00_apply_patch.sh
  part 90 "$PY" -c "import sglang.launch_server, sglang.srt.managers.scheduler" > "$work/servers/import.log" 2>&1  # the servers then find everything compiled and in memory
  echo "ready to start servers after $SECONDS s"
  part "${EXTRACT_S:-225}" "$PY" "$here/two_extract.py" "$work/servers/extract" --seconds "${EXTRACT_S:-190}"
  wait "$prepare"
  part "${CAPTURE_S:-265}" "$PY" "$here/two_capture.py" "$work/servers/capture" --work "$work/capture" --no-patch --seconds "${CAPTURE_S:-240}"
  ;;
training)
  part "${TRAIN_S:-330}" "$PY" "$here/two_train.py" "$work/training/train" --seconds "${TRAIN_S:-300}" --skip chain
  [ -n "${QUICK:-}" ] || scripts/00_apply_patch.sh
  part "${CHAIN_S:-180}" "$PY" "$here/two_train.py" "$work/training/chain" --seconds "${CHAIN_S:-160}" --parts chain & chain=$!
  [ -z "${QUICK:-}" ] || wait "$chain"
  part "${STREAM_S:-260}" "$PY" "$here/two_stream.py" "$work/training/stream" --seconds "${STREAM_S:-230}"
  wait "$chain"
  ;;
*) echo "error: $what is neither servers nor training" >&2; exit 2 ;;
esac
