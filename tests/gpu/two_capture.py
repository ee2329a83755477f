#!/usr/bin/env python3
"""Capture over two GPUs (about six minutes): TP 2 against TP 1, its cost, and data-parallel attention. Writes OUT/two_capture.json, prints a JSON line a part.

Run by hand on a machine with two GPUs whose Python has SGLang: tests/gpu/two_capture.py OUT [--no-patch]. Every part goes on when another fails. The target is
capture_gpu.py's random DeepSeek-V3. Four servers: tp1, tp2, dp (two ranks of data-parallel attention) and plain (tp2 with capture off). All start together, since a first prefill on
a fresh machine compiles for two minutes; rates are measured once all are ready, and with --go FILE not before that file is there: another script may use the machine until then.
Without a GPU: the same motions on a tiny model, one server at a time (its numbers then mean nothing).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
from aerie import capture_bench, dumps  # noqa: E402
from aerie.config import Config, load_config  # noqa: E402
from aerie.final_proof import THRESHOLD, FinalProof, logprob_request  # noqa: E402
from aerie.servers import Server, dump_dir  # noqa: E402
from capture_gpu import ARGS, BUDGET_MB, DEVICE, LAYER_IDS, LOADS, PLAIN_S, Targets, check_states, load_of, row_errors  # noqa: E402
from capture_reference import Client  # noqa: E402
from cpu_tools import free_port, write_config  # noqa: E402
from gpu_parts import Parts, begin  # noqa: E402

NAME = "deepseek"
TP2: dict[str, Any] = {"tp-size": 2}
if DEVICE == "cuda":  # large prefill batches go through NCCL either way; FlashInfer's fused sums would be compiled here, and may want multicast
    TP2 |= {"disable-custom-all-reduce": True, "enforce-disable-flashinfer-allreduce-fusion": True}
KINDS: dict[str, tuple[dict[str, Any], list[int]]] = {  # options, GPUs
    "tp1": ({}, [1]), "tp2": (TP2, [0, 1]), "plain": (TP2, [0, 1]), "dp": (TP2 | {"dp-size": 2, "enable-dp-attention": True}, [0, 1]),
}  # fmt: skip
MEASURE_S, COST_S = 30.0 if DEVICE == "cuda" else 0.0, 55.0  # a rate is measured so long at least; no further pair of blocks begins after the other


def config_of(work: Path, model: Path, kind: str) -> Config:
    """The config of one server."""
    args, gpus = KINDS[kind]
    run = f"two-{kind}"
    memory = Path("/dev/shm")
    folder = (memory if shutil.disk_usage(memory).free > 8 << 30 else work / "dumps") / f"aerie-{run}"
    env = {"SGLANG_HS_DUMP_BUDGET_MB": str(BUDGET_MB), "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
    if DEVICE == "cpu" and "tp-size" in args:
        env["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    server = {
        "args": ARGS | args, "gpus": gpus if DEVICE == "cuda" else [], "ready_timeout_s": 300.0, "port": free_port(), "dump_dir": str(folder),
        "cpu_args": {"mem-fraction-static": 0.7}, "env": env,
    }  # fmt: skip
    path = write_config(work / f"{run}.toml", model, LAYER_IDS[NAME], target={"dtype": "bfloat16"}, server=server, bench={"baseline_port": free_port()})
    return load_config(str(path), run)


def states_of(dump: dumps.Dump) -> list[torch.Tensor]:
    """The auxiliary states and `final`, each [T, H] float32."""
    return [*(state.float() for state in dump.aux), dump.final_float()]


def between(found: list[dumps.Dump], wanted: list[dumps.Dump]) -> dict[str, float]:
    """Relative error of each row against the same row of another server, by capture point and for `final`."""
    result = {}
    for place, pairs in enumerate(zip(*(zip(states_of(mine), states_of(theirs)) for mine, theirs in zip(found, wanted)))):
        rows = torch.cat([row_errors(mine, theirs) for mine, theirs in pairs])
        name = f"aux_{place}" if place < len(found[0].aux) else "final"
        result |= {f"{name}_median": float(rows.median()), f"{name}_q99": float(rows.quantile(0.99)), f"{name}_max": float(rows.max())}
    return result


class Run:
    """Servers by kind, what they gave, and the parts."""

    def __init__(self, parts: Parts, targets: Targets, out: Path, go: Path | None = None):
        self.parts, self.targets, self.out, self.go = parts, targets, out, go
        self.configs: dict[str, Config] = {}
        self.servers: dict[str, Server] = {}
        self.alone: dict[str, list[dumps.Dump]] = {}

    def start(self, *kinds: str) -> None:
        """Start servers, not waited for; without a GPU one at a time: then only when it is needed."""
        for kind in kinds:
            self.parts(f"{kind} start", lambda kind=kind: self._start(kind))

    def _start(self, kind: str) -> str:
        if kind not in self.servers:
            self.configs[kind] = config_of(self.targets.work, self.targets.folder(NAME), kind)
            if DEVICE == "cuda":
                self.servers[kind] = capture_bench.start(self.configs[kind], kind != "plain")
        return "started"

    def ready(self, *kinds: str) -> None:
        """Wait for servers; one that is not ready in time is ended, and its parts then fail."""
        for kind in kinds if DEVICE == "cuda" else ():
            self.parts(f"{kind} ready", lambda kind=kind: self.servers[kind].wait_ready(300) or "yes")

    def has(self, kind: str) -> bool:
        """Whether this server can be asked. Without a GPU: the others end, and it starts now."""
        if DEVICE == "cpu":
            for other in list(self.servers):
                self.stop(other)
            self.servers[kind] = capture_bench.start(self.configs[kind], kind != "plain")
            return self.parts(f"{kind} ready", lambda: self.servers[kind].wait_ready(300) or "yes") is not None
        return kind in self.servers and self.servers[kind].alive()

    def wait_for_go(self) -> str:
        """Until the file that --go named is there, or no part may begin any more."""
        while not self.go.exists() and self.parts.elapsed < self.parts.seconds:
            time.sleep(0.2)
        return "there" if self.go.exists() else "the time is over"

    def stop(self, kind: str) -> None:
        server = self.servers.pop(kind, None)
        if server is not None:
            (self.out / f"two-{kind}.log").write_bytes(server.log.read_bytes()[-300_000:])
            server.stop()
            shutil.rmtree(dump_dir(self.configs[kind]), ignore_errors=True)

    def all(self) -> None:
        """Every part; whatever happens no server is left."""
        try:
            self.start("tp1", "tp2", "dp", "plain")
            self.parts("reference", lambda: f"{len(self.targets.reference(NAME)[0])} prompts of transformers")
            self.ready("tp1", "tp2", "dp", "plain")
            if self.go is not None:
                self.parts("go", self.wait_for_go)
            if self.has("tp1"):
                self.parts("tp1 states", lambda: self.states("tp1"))
            if self.has("tp2"):
                self.parts("tp2 states", lambda: self.states("tp2"))
                self.parts("tp2 proof", self.proof)
                self.parts("tp2 writers", self.writers)
                self.parts("tp2 cost", self.cost)
            if self.has("dp"):
                self.parts("dp states", lambda: self.states("dp"))
                self.parts("dp each once", self.each_once)
            if self.has("plain"):
                self.parts("plain cost", self.plain_cost)
        finally:
            with ThreadPoolExecutor(len(KINDS)) as pool:  # side by side: SGLang takes five seconds to end
                list(pool.map(self.stop, list(self.servers)))

    def states(self, kind: str) -> dict[str, Any]:
        """Each prompt alone and all together: hidden size, states against transformers, against TP 1."""
        client, prompts = Client(self.servers[kind]), self.targets.prompts
        alone = self.alone[kind] = [client.capture(ids) for ids in prompts]
        together = client.capture_together(prompts * 3)
        points = json.loads(alone[0].metadata["capture_points"])
        hidden = json.loads((self.targets.folder(NAME) / "config.json").read_text())["hidden_size"]
        result: dict[str, Any] = {"capture_points": points, "full_hidden_size": all(state.shape[1] == hidden for dump in together for state in states_of(dump))}
        if NAME in self.targets.states:
            checked = check_states(alone, *self.targets.states[NAME], points, fp8=False)
            result |= {"right": checked["right"], "against_transformers": checked, **{f"transformers_{point}": entry["own"] for point, entry in checked["points"].items()}}
        if kind != "tp1" and "tp1" in self.alone:
            result |= between(alone, self.alone["tp1"])
            errors = [result.get(f"transformers_{point}") for point in points]
            if all(errors):  # two servers round apart as one server and transformers do: at each depth by as much, and not more
                result["within_rounding"] = all(result[f"aux_{place}_median"] <= 1.5 * error for place, error in enumerate(errors))
            result |= {f"together_{name}": value for name, value in between(together, self.alone["tp1"] * 3).items() if name.endswith("median")}
        return result

    def cost(self) -> dict[str, Any]:
        """Prefill with our names and without, on the same server."""
        config, server = self.configs["tp2"], self.servers["tp2"]
        return capture_bench.measure(config, server, server, load_of(config, NAME, MEASURE_S, COST_S))

    def plain_cost(self) -> dict[str, Any]:
        """The same against a server with capture off, in turns where both live."""
        config, server = self.configs["tp2"], self.servers["plain"]
        if "tp2" in self.servers:
            return capture_bench.measure(config, server, self.servers["tp2"], load_of(config, NAME, MEASURE_S, COST_S))
        return capture_bench.plain_rate(server, load_of(config, NAME, PLAIN_S))

    def proof(self) -> dict[str, Any]:
        """argmax(lm_head(final)) against the server's own choices, near ties counted as the product does."""
        client, proof = Client(self.servers["tp2"]), FinalProof(str(self.targets.folder(NAME)))
        for ids in self.targets.prompts:
            rid = client.rid(ids)
            answer = client.post(rid, ids, **logprob_request(len(ids))).json()
            dump = client.dump(rid, ids)
            proof.compare(dump.final_float(), answer, dump.identity()["dtype"])
        tally = proof.tally
        return {"final_rows": tally.compared, "final_equal": tally.equal, "final_near_ties": tally.near_ties, "final_share": tally.share, "right": tally.share >= THRESHOLD}

    def writers(self) -> dict[str, Any]:
        """How many ranks write, as the folder and the log say."""
        infos = dumps.capture_info(dump_dir(self.configs["tp2"]))
        silent = self.servers["tp2"].log.read_text(errors="replace").count("captures with rank 0 and writes nothing")
        return {"writers": len(infos), "silent_ranks": silent, "errors": sum(info["counters"]["errors"] for info in infos), "right": len(infos) == 1 and silent == 1}

    def each_once(self) -> dict[str, Any]:
        """Many requests at once under data-parallel attention: each is written once, by the rank that ran it."""
        client = Client(self.servers["dp"])
        before = self.dp_counters()
        requests, tokens = LOADS[NAME][:2]
        prompts = [ids.tolist() for ids in capture_bench.make_prompts(self.configs["dp"], min(requests, 128), tokens)]
        checked = len(client.capture_together(prompts))
        after = self.dp_counters()
        ranks = [{name: after[pid][name] - before.get(pid, {}).get(name, 0) for name in ("requests", "dumps", "rows", "errors")} for pid in after]
        right = checked == sum(rank["dumps"] for rank in ranks) == len(prompts) and len(ranks) == 2
        right &= all(rank["dumps"] == rank["requests"] > 0 and not rank["errors"] for rank in ranks)
        return {"checked_dumps": checked, "ranks": ranks, "dumps_by_rank": str([rank["dumps"] for rank in ranks]), "right": right}

    def dp_counters(self) -> dict[int, dict[str, float]]:
        """Counters by the writing process, once their files have caught up."""
        time.sleep(2.5)
        return {info["pid"]: info["counters"] for info in dumps.capture_info(dump_dir(self.configs["dp"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("/tmp/two_capture"), help="model, runs, configs")
    parser.add_argument("--prepare", action="store_true", help="only make the model")
    parser.add_argument("--go", type=Path, help="ask nothing of the servers, once they are ready, before this file is there")
    parser.add_argument("--no-patch", action="store_true", help="leave the installed SGLang as it is")
    parser.add_argument("--seconds", type=float, default=350.0, help="no part begins after that (default: %(default)s)")
    args = parser.parse_args()
    begin(args.out, args.work / "runs")
    targets = Targets(args.work, None)
    made = args.work / "models" / NAME
    if (made / "tokenizer_config.json").is_file():
        targets.folders[NAME] = made
    if args.prepare:
        print(targets.folder(NAME))
        return
    parts = Parts(args.out / "two_capture.json", args.seconds, torch=torch.__version__, gpus=torch.cuda.device_count(), cores=os.cpu_count())
    if not args.no_patch:
        patch = [str(ROOT / "scripts" / "00_apply_patch.sh")]
        parts("patch", lambda: subprocess.run(patch, env=os.environ | {"PY": sys.executable}, check=True, capture_output=True, text=True).stdout.strip())
    try:
        parts("model", lambda: str(targets.folder(NAME)))
        Run(parts, targets, args.out, args.go).all()
    finally:
        parts.summary((
            "ratio", "ratio_low", "ratio_high", "ratio_of_neighbours", "forward_ratio", "plain_tok_s", "capture_tok_s", "right", "within_rounding", "full_hidden_size", "writers", "silent_ranks", "final_share", "final_equal", "final_near_ties",
            "final_rows", "checked_dumps", "dumps_by_rank", "failed_requests", *(f"{name}_{kind}" for name in ("aux_0", "aux_1", "aux_2", "final") for kind in ("median", "q99")),
            *(f"transformers_{point}" for point in LAYER_IDS[NAME]),
        ))  # fmt: skip


if __name__ == "__main__":
    main()
