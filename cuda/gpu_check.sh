#!/bin/bash
# Everything that the drafter ops need a GPU for, in one go: build for this GPU, tests, compute-sanitizer, benchmark. Every part runs whatever the others said.
#   cuda/gpu_check.sh OUT [bench options]
set -u
out=${1:?usage: cuda/gpu_check.sh OUT [bench options]}; shift
root=$(cd "$(dirname "$0")/.." && pwd); PY=${PY:-python3}
mkdir -p "$out"; cd "$root" || exit 2
arch=$("$PY" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || exit 2
part() { local name=$1 start=$SECONDS rc; shift; "$@" > "$out/$name.txt" 2>&1; rc=$?; summary+="$name: exit $rc, $((SECONDS - start)) s\n"; return $rc; }
summary=""
tests=(tests/test_drafter_ops.py tests/test_drafter_tree.py tests/test_drafter_ops_hook.py)
pytest=("$PY" -m pytest -q -p no:cacheprovider --noconftest --maxfail=8 --durations=5)
part build make -s -j"$(nproc)" -C cuda ARCHS="$arch" || tail -20 "$out/build.txt"
part tests timeout "${TESTS_S:-150}" "${pytest[@]}" "${tests[@]}" -k cuda; grep -E '^(FAILED|ERROR|E  )|passed|failed' "$out/tests.txt" | cut -c1-220 | head -40
part bench timeout "${BENCH_S:-150}" "$PY" cuda/bench.py --report "$out/report.json" "$@"; cut -c1-190 "$out/bench.txt"
# one pass of the tests under the memory checker, a smaller one under the race checker
# error exit code 99 tells the sanitizer's findings from a test's failure
sanitize=(timeout "${SANITIZER_S:-60}" compute-sanitizer --error-exitcode 99 --kernel-name kns=aerie --print-limit 5)
part memcheck "${sanitize[@]}" --tool memcheck "${pytest[@]}" "${tests[@]}" -k "cuda and (320 or strides or infin or weights or topk or tree or fp8 or frozen or online)"
grep -E 'ERROR SUMMARY|passed|failed|Invalid' "$out/memcheck.txt" | sort | uniq -c | head -8
part racecheck "${sanitize[@]}" --tool racecheck "${pytest[@]}" "${tests[@]}" -k "cuda and (by_hand or (weights and True) or fp8_rows_strides or topk_refuses or frozen or (online and 1003) or unchecked)"
grep -E 'RACECHECK SUMMARY|ERROR SUMMARY|hazard|passed|failed' "$out/racecheck.txt" | sort | uniq -c | head -8
printf '%b' "$summary"
