#!/usr/bin/env bash
# Everything that needs two GPUs of one host, in three calls of less than ten minutes each. Every part goes on when another fails; a JSON line a part, summaries last.
#   two_gpus.sh servers OUT     extraction over two servers, capture with TP 2 and with data-parallel attention (about eight minutes on a fresh machine)
#   two_gpus.sh training OUT    DDP and FSDP2 (about four)
#   two_gpus.sh stream OUT      a run that changes its number of processes; target and trainer on a GPU each through the streaming store (about seven; times nothing,
#                               so other work may go on beside it)
# Python: PY (with SGLang and CUDA torch). OUT gets few files: the JSON of each script, and the logs as one archive.
# QUICK=1 (a CPU): SGLang is left as it is, no two parts at once, DEADLINE=3000 gives them time.
set -u
case ${1:-} in -h | --help) sed -n '2,8s/^# \?//p' "$0"; exit ;; esac
usage="usage: two_gpus.sh servers|training|stream OUT"
what=${1:?$usage}; out=$(mkdir -p "${2:?$usage}" && cd "$2" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd); here=$root/tests/gpu; export PY=${PY:-python3} PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1  # no NVLink multicast: not every shared host allows it
work=${WORK:-/tmp/two_gpus}; mkdir -p "$work/$what"; cd "$root" || exit 2
keep() { cp "$work/$what"/*/two_*.json "$out/" 2>/dev/null; (cd "$work/$what" && find . -name '*.log' -o -name 'bench-*.json' -o -name '*.toml' | tar czf "$out/logs-$what.tar.gz" -T -); }
trap keep EXIT
ended() { trap '' INT TERM HUP; kill $(jobs -p) 2>/dev/null; wait; exit 130; }  # the parts hear of it alone through us, and end their servers
trap ended INT TERM HUP
part() {  # always in the background. LIMIT REST COMMAND...: no longer than LIMIT seconds, nor past DEADLINE seconds of the whole call; REST before that the command begins nothing new
  local limit=$1 rest=$2 start=$SECONDS left=$((${DEADLINE:-560} - SECONDS)) code=0; shift 2
  [ "$left" -ge "$limit" ] || limit=$((left > 1 ? left : 1))
  timeout -k 25 "$limit" "$@" --seconds $((limit > rest ? limit - rest : 1)) & child=$!
  trap 'kill "$child" 2>/dev/null' TERM
  while code=0; wait "$child" || code=$?; kill -0 "$child" 2>/dev/null; do :; done
  echo "== $(basename "$2") exit $code, $((SECONDS - start)) s, $SECONDS s in all"
}
case $what in
servers)  # a server's first prefill on a fresh machine compiles for two minutes: the servers of both scripts start together, and take turns with what is timed
  go=$work/servers/go; rm -f "$go"; [ -z "${QUICK:-}" ] || touch "$go"
  "$PY" "$here/two_capture.py" "$work/servers/capture" --work "$work/capture" --prepare > "$work/servers/prepare.log" 2>&1 & prepare=$!
  [ -n "${QUICK:-}" ] || scripts/00_apply_patch.sh  # imports SGLang: it is compiled and in memory when the servers want it
  wait "$prepare"; echo "ready to start servers after $SECONDS s"
  part "${EXTRACT_S:-360}" 40 "$PY" "$here/two_extract.py" "$work/servers/extract" & extract=$!
  [ -z "${QUICK:-}" ] || wait "$extract"
  part "${CAPTURE_S:-520}" 90 "$PY" "$here/two_capture.py" "$work/servers/capture" --work "$work/capture" --no-patch --go "$go" & capture=$!
  wait "$extract"; touch "$go"; wait "$capture"
  ;;
training)
  part "${TRAIN_S:-500}" 40 "$PY" "$here/two_train.py" "$work/training/train" --skip chain &
  wait
  ;;
stream)
  [ -n "${QUICK:-}" ] || scripts/00_apply_patch.sh
  part "${CHAIN_S:-240}" 40 "$PY" "$here/two_train.py" "$work/stream/chain" --parts chain & chain=$!
  [ -z "${QUICK:-}" ] || wait "$chain"
  part "${STREAM_S:-520}" 40 "$PY" "$here/two_stream.py" "$work/stream/stream" &
  wait
  ;;
*) echo "error: $what is none of servers, training, stream" >&2; exit 2 ;;
esac
