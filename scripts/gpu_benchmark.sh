#!/usr/bin/env bash
# The numbers of one GPU: 10,000 chats that SmolLM2 answers, states, drafter, served as a chain and as a tree, benchmark. About 13 minutes on an H200.
# gpu_benchmark.sh OUT [--set KEY=VALUE]...   Reports, pages and logs go to OUT; a table comes last. Python: PY, else the active venv's, else VENV's (.venv's).
# STAGE=train ends after the drafter, STAGE=measure goes on from there. OPS=1 adds the chain served with our drafter ops and with SGLang's own, at 1, 8 and 32 requests
# (about 2 minutes more, nvcc on the PATH). PROMPTS=heldout measures that set alone (default: heldout builtin). A part that fails is named at the end and the rest goes on. Everything runs under runs/gpu-bench and is done again each time.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
case ${1:-} in ''|-*) sed -n '2,5s/^# //p' "$0"; exit $([ "${1:-}" = --help ] && echo 0 || echo 2) ;; esac
out=$1; shift
. "$here/aerie/find_python.sh"
cd "$here/.." && mkdir -p "$out"
config=smollm2-gpu run=gpu-bench tree=gpu-bench-tree runs=${AERIE_RUNS_DIR:-runs} stage=${STAGE:-all}
# Servers share the card and start side by side: a small cache each, the decode graphs that the concurrencies need, and no prefill graphs (about 60 more captures a server).
common=(--set server.args.mem-fraction-static=0.2 --set server.args.max-total-tokens=131072 --set server.args.disable-prefill-cuda-graph=true --set server.ready_timeout_s=300 "$@")
wide=("${common[@]}" --run $run --set 'server.args.cuda-graph-bs-decode=[16,64,128,256]' --set server.args.max-running-requests=256)
narrow=("${common[@]}" --set 'server.args.cuda-graph-bs-decode=[1,2,4,8,16,32]' --set server.args.max-running-requests=32)
chain=("${narrow[@]}" --run $run)
branch=("${narrow[@]}" --run $tree --set serve.port=30011 --set serve.topk=4 --set serve.num_draft_tokens=16)
failed=() times=()

step() {  # step NAME COMMAND...: its seconds and its log
    local name=$1 start=$SECONDS; shift
    echo "== $name"
    "$@" 2>&1 | tee "$out/$name.log" | tail -n 25
    local code=${PIPESTATUS[0]}
    times+=("$name $((SECONDS - start)) s")
    [ "$code" -eq 0 ] || { failed+=("$name ($code)"); return 1; }
}

if [ "$stage" != measure ]; then
    rm -rf "${runs:?}/$run" "${runs:?}/$tree"
    step prompts "$PY" scripts/make_prompts.py 15550 runs/prompts/smollm2-gpu.jsonl
    step target "$PY" scripts/prepare_target.py --config $config "${wide[@]}"
    step server scripts/01_launch_server.sh $config "${wide[@]}" --background
    step data "$PY" scripts/02a_prepare_data.py --config $config "${wide[@]}"
    step extract "$PY" scripts/02b_extract_hidden_states_sglang.py --config $config "${wide[@]}"
    scripts/01_launch_server.sh $config "${wide[@]}" --stop
    step train "$PY" scripts/03_train.py --config $config "${wide[@]}"
    for each in drafter:train store:extract data:data; do cp "$runs/$run/${each%:*}/report.json" "$out/${each#*:}.json"; done
fi
if [ "$stage" = train ]; then
    printf '%s\n' "${times[@]}"
    [ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
    exit 0
fi

[ -f "$runs/$run/drafter/config.json" ] || { echo "error: $runs/$run/drafter holds no drafter; run STAGE=train first" >&2; exit 2; }
# What an earlier call left running or half-started, when it was cut off, is ended first; its reports go too, so that the table shows none of them.
rm -rf "$runs/$tree/baseline.json" "$runs/$run/bench" "$runs/$tree/bench" "$out/$run.json" "$out/$tree.json" "$out/drafter_ops.json"
for each in "--run $run" "--run $tree" "--run $run-ops"; do scripts/04_serve.sh $config "${narrow[@]}" $each --stop & done; wait
cuda_build() { make -s -j8 -C cuda ARCHS="$("$PY" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')"; }
building=
if [ "${OPS:-0}" = 1 ]; then cuda_build > "$out/cuda.log" 2>&1 & building=$!; fi
scripts/04_serve.sh $config "${chain[@]}" --without-drafter --background > "$out/baseline.log" 2>&1 & baseline=$!
# The tree's run shares drafter, data, store report and the plain server with the chain's.
mkdir -p "$runs/$tree" && for each in drafter data store; do ln -sfn "$(realpath "$runs/$run/$each")" "$runs/$tree/$each"; done
scripts/04_serve.sh $config "${branch[@]}" --background > "$out/serve-tree.log" 2>&1 & second=$!
step serve scripts/04_serve.sh $config "${chain[@]}" --background
wait $second || { failed+=("serve-tree"); tail -n 3 "$out/serve-tree.log"; }
wait $baseline || { failed+=("baseline"); tail -n 3 "$out/baseline.log"; }
[ -z "$building" ] || wait $building || { failed+=("cuda"); tail -n 5 "$out/cuda.log"; }  # before anything is timed
cp "$runs/$run/baseline.json" "$runs/$tree/baseline.json"
read -ra sets <<< "${PROMPTS:-heldout builtin}"
step bench "$PY" scripts/05_benchmark.py --config $config "${chain[@]}" --prompts "${sets[@]}"
step bench-tree "$PY" scripts/05_benchmark.py --config $config "${branch[@]}" --set 'bench.concurrency=[1,32]' --prompts heldout
rm -f "$runs/$tree/baseline.json"
scripts/04_serve.sh $config "${branch[@]}" --stop & scripts/04_serve.sh $config "${chain[@]}" --without-drafter --stop &
# The chain's server is the one without the ops; while the one with them starts, the others end.
[ -z "$building" ] || step bench-ops "$PY" scripts/bench_drafter_ops.py --config $config "${chain[@]}" --prompts heldout --report "$out/drafter_ops.json"
wait
scripts/04_serve.sh $config "${chain[@]}" --stop

for each in $run $tree; do
    for kind in json html png; do [ -f "$runs/$each/bench/report.$kind" ] && cp "$runs/$each/bench/report.$kind" "$out/$each.$kind"; done
done
for each in $run $tree $run-ops; do [ -f "$runs/$each/logs/serving.log" ] && cp "$runs/$each/logs/serving.log" "$out/$each-server.log"; done
printf '%s\n' "${times[@]}"
"$PY" - "$out" <<'TABLE'
import json, pathlib, sys
out = pathlib.Path(sys.argv[1])
for name in ("gpu-bench", "gpu-bench-tree"):
    path = out / f"{name}.json"
    if path.is_file():
        report = json.loads(path.read_text())
        print(name, f"steps {report['num_steps']} topk {report['topk']}: accept length {report['accept_length']:.3f}, predicted {report['predicted_accept_length']}, same prompts {report.get('same_prompts')}, gap {report['gap']}")
        for kind, one in report["sets"].items():
            lossless = one["lossless"]
            said = {key: value for key, value in lossless.items() if key != "different"} if lossless else "not compared"
            print(" ", kind, "texts", said, "different", len(lossless["different"]) if lossless else "unknown")
            for level in one["levels"]:
                print("   ", level["concurrency"], f"{level['baseline']['tok_s']:.0f} -> {level['speculative']['tok_s']:.0f} tok/s ({level['speedup']:.2f}x), accept {level['speculative']['accept_length']:.3f}")
path = out / "drafter_ops.json"
if path.is_file():
    report = json.loads(path.read_text())
    print("drafter ops, called:", ", ".join(report["ops_in_use"]) or "none")
    for level in report["levels"]:
        different = len(level["lossless"]["different"]) if level["lossless"] else "unknown"
        print("   ", level["concurrency"], f"off {level['off_tok_s']:.0f}, on {level['on_tok_s']:.0f} tok/s (ratio {level['ratio']:.3f}), different texts {different}")
TABLE
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
