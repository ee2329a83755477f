#!/bin/bash
# What a GPU has to say about ops and trainer, in one go of under 10 minutes: build, correctness of every kernel by number, times of all of them and of other packages',
# the trainer at its sizes, against eager PyTorch, from a store, the memory and race checkers. Every part runs whatever the others said, within its own limit and
# what is left of BUDGET_S. JSON and logs lie under OUT, a short table comes last.
#   cuda/gpu_session.sh OUT [correct bench train eager loading long check]     some of the parts; all without names
# To try it without a GPU: MAIN=tiny LONG=tinyM EAGER=tiny LOADING=tiny BUDGET_S=300 cuda/gpu_session.sh OUT
set -u
out=$(mkdir -p "${1:?usage: cuda/gpu_session.sh OUT [PART...]}" && cd "$1" && pwd); shift; wanted=" ${*:-correct bench train eager loading long check} "; root=$(cd "$(dirname "$0")/.." && pwd); PY=${PY:-python3}
cd "$root" || exit 2
logs=$(mktemp -d); end=$((SECONDS + ${BUDGET_S:-570}))
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
: > "$logs/parts.txt"

part() {  # name, limit in seconds, command
    local name=$1 limit=$2 began=$SECONDS left=$((end - SECONDS)) rc; shift 2
    if ((left < 15)); then echo "$name - 0 no time was left" >> "$logs/parts.txt"; return 1; fi
    timeout -k 5 $((limit < left ? limit : left)) "$@" > "$logs/$name.txt" 2>&1; rc=$?
    echo "$name $rc $((SECONDS - began)) $(grep -E '[0-9]+ (passed|failed)|ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$name.txt" | tail -1 | cut -c1-100)" >> "$logs/parts.txt"
    echo "-- $name: exit $rc, $((SECONDS - began)) s"
    return $rc
}

want() { [[ $wanted == *" $1 "* ]]; }

arch=$("$PY" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())' 2> "$logs/gpu.txt") || { echo "no GPU here: $(tail -1 "$logs/gpu.txt")"; arch=90; }
part build 150 make -s -j"$(nproc)" -C cuda ARCHS="$arch" || tail -5 "$logs/build.txt"

if want correct; then  # side by side: nothing is timed here
    tests=(tests/test_drafter_ops.py tests/test_drafter_tree.py tests/test_drafter_ops_hook.py)
    pytest=("$PY" -m pytest -q -p no:cacheprovider --noconftest --maxfail=8 --tb=short)
    running=()
    part ops 170 "${pytest[@]}" "${tests[@]}" -k cuda & running+=($!)
    for number in 1 2 3; do  # each op's kernel of that number, modulo how many it has
        part "ops-$number" 170 env AERIE_DRAFTER_VARIANT=$number "${pytest[@]}" "${tests[@]}" -k "cuda and not every_variant and not graph and not goes_by_rows" & running+=($!)
    done
    part gradients 170 "$PY" tests/gpu_train_check.py & running+=($!)
    wait "${running[@]}"
    grep -hE '^(FAILED|ERROR|E  |BAD)' "$logs"/ops*.txt "$logs/gradients.txt" | cut -c1-200 | head -30
fi
bench=("$PY" scripts/bench_train.py)
want bench && part bench 190 "$PY" cuda/bench.py --variants --repeats 20 --report "$out/ops.json"
if want train; then
    part train 150 "${bench[@]}" --sizes "${MAIN:-S,K}" --shares 0.7,0.3 --profile --report "$out/train.json" ||
        AERIE_DRAFTER_OPS=reference part train-without-ops 120 "${bench[@]}" --sizes "${MAIN:-S,K}" --shares 0.7,0.3 --report "$out/train-without-ops.json"
fi
want eager && part eager 90 "${bench[@]}" --sizes "${EAGER:-S}" --eager "${EAGER:-S}" --report "$out/eager.json"
want loading && part loading 110 "${bench[@]}" --sizes "" --loading "${LOADING:-K,S}" --steps-timed 3 --report "$out/loading.json"
want long && part long 120 "${bench[@]}" --sizes "${LONG:-M,K8,S16,K16}" --steps-timed 3 --report "$out/long.json"
if want check; then  # memory and races, side by side
    sanitize=(compute-sanitizer --error-exitcode 99 --kernel-name kns=aerie --print-limit 5)
    tests=("$PY" -m pytest -q -p no:cacheprovider --noconftest --maxfail=8 --tb=short tests/test_drafter_ops.py tests/test_drafter_tree.py)
    part memcheck 90 "${sanitize[@]}" --tool memcheck "${tests[@]}" -k "cuda and (every_variant or strides or infin or topk or tree or fp8)" & running=($!)
    part racecheck 130 "${sanitize[@]}" --tool racecheck "${tests[@]}" -k "cuda and (every_variant_cuda and (64 or topk) or by_hand or fp8_rows_strides or frozen or (online and 1003))" & running+=($!)
    wait "${running[@]}"
fi

"$PY" cuda/session_table.py "$out" "$logs/parts.txt" 2>&1 | tee "$out/table.txt"
tar -czf "$out/logs.tgz" -C "$logs" . && rm -rf "$logs"
