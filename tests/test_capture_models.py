"""Capture on every tiny model family against transformers and SGLang's own answer; which classes of SGLang can be captured; 01_launch_server.sh as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import requests
import torch
from aerie import dumps, prove
from aerie.config import Config
from aerie.paths import ROOT
from aerie.servers import Server, dump_dir, server_env
from capture_reference import Client, assert_reference, assert_same_states, lm_head, random_prompt, reference_states

POINTS = [2, 3, 5]
LENGTHS = (2, 40, 256, 600)
SCRIPT = ROOT / "scripts" / "01_launch_server.sh"


def check_family(client: Client, folder: Path) -> None:
    """Prompts alone and together (one of three chunks) against transformers, and final times the LM head against the server's choice."""
    prompts = [random_prompt(length, 50 + length) for length in LENGTHS]
    states = reference_states(folder, prompts)
    alone = [client.capture(ids) for ids in prompts]
    for dump, wanted in zip(alone, states):
        assert json.loads(dump.metadata["capture_points"]) == POINTS
        assert_reference(dump, wanted, POINTS)
    for dump, wanted in zip(client.capture_together(prompts), alone):
        assert_same_states(dump, wanted)
    rid = client.rid(prompts[1])
    answer = client.post(rid, prompts[1]).json()
    assert int((client.dump(rid, prompts[1]).final[-1] @ lm_head(folder).T).argmax()) == answer["output_ids"][0]


# ---- the registry ----


def test_every_class_that_can_be_an_eagle3_target_fits_the_hook(make_config: Callable[..., Config]) -> None:
    config = make_config("llama", "registry")
    environ = os.environ | server_env(config, "baseline")
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "capture_registry.py")], env=environ, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout.split("REGISTRY ", 1)[1])
    wanted = {
        "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM",
        "GptOssForCausalLM", "Glm4MoeForCausalLM",
    }  # fmt: skip
    assert wanted <= set(found["targets"])
    print(f"{len(found['targets'])} of {found['registered']} registered classes can be captured: {', '.join(found['targets'])}")
    stated = re.search(r"(\d+) of the (\d+) model classes", (ROOT / "patches" / "README.md").read_text())
    assert stated and (int(stated[1]), int(stated[2])) == (len(found["targets"]), found["registered"])
    assert found["prefill_graphs"] == {backend: backend != "disabled" for backend in found["prefill_graphs"]} and len(found["prefill_graphs"]) >= 3
    assert len(found["text_models"]) > 30
    for name, model in found["text_models"].items():
        assert "forward_batch" in model["parameters"], name  # where the hook reads the batch
        for returned in model["returns"]:  # aux last; one state or a tuple of states before it
            assert re.fullmatch(r"\(?[\w, ]+\)?, (dspark_)?aux_hidden_states(\.finalize\(\))?", returned), (name, returned)


# ---- 01_launch_server.sh, with Kimi-K2.5's nesting as its target ----


def run_script(config: Config, *words: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """The script by hand, from another directory."""
    command = [str(SCRIPT), str(config.path), "--run", config.run.name, *words]
    return subprocess.run(command, cwd="/", env=os.environ | {"PY": sys.executable}, capture_output=True, text=True, timeout=timeout, check=False)


def children_of(pgid: int) -> list[int]:
    """Processes of a group that still live."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == pgid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.server
def test_the_launch_script_from_start_to_ctrl_c_on_kimi_k25(make_config: Callable[..., Config], tiny_model: Callable[..., Path]) -> None:
    config = make_config("kimi_k25", "kimi", server={"args": {"chunked-prefill-size": 256}})
    script = subprocess.Popen(
        [str(SCRIPT), str(config.path), "--run", "kimi"], cwd="/", env=os.environ | {"PY": sys.executable}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        lines: list[str] = []
        while not any("ready after" in line for line in lines):
            line = script.stdout.readline()
            assert line, lines
            lines.append(line)
        assert re.search(r"self-test: 512 tokens .* layer ids \[2, 3, 5\] = state after 2, 3, 5 decoder layers", "".join(lines))
        server = Server.find(config, "extraction")
        assert server is not None and server.healthy()
        assert not [path for path in dump_dir(config).iterdir() if not path.name.startswith("capture.")]  # the self-test leaves nothing
        check_family(Client(server, "kimi"), tiny_model("kimi_k25"))

        again = run_script(config, "--background")
        assert again.returncode == 0 and "already running and healthy" in again.stdout
        other = run_script(config, "--background", "--set", f"target.model_path={tiny_model('deepseek_v3')}")
        assert other.returncode == 2 and "serves" in other.stderr and "--stop first" in other.stderr and len(other.stderr.splitlines()) == 1
        layers = run_script(config, "--background", "--set", "target.aux_layer_ids=[2, 3, 4]")
        assert layers.returncode == 2 and "aux_layer_ids" in layers.stderr
        foreign = subprocess.run(
            [str(SCRIPT), str(config.path), "--run", "another", "--background"], env=os.environ | {"PY": sys.executable}, capture_output=True, text=True, timeout=120, check=False
        )
        assert foreign.returncode == 2 and "a server of another run already listens" in foreign.stderr

        group = server.record["pid"]
        assert len(children_of(group)) >= 2
        os.kill(script.pid, signal.SIGINT)
        assert script.wait(60) == 130
        assert not children_of(group) and Server.find(config, "extraction") is None
    finally:
        if script.poll() is None:
            script.kill()
        if (left := Server.find(config, "extraction")) is not None:
            left.stop()
    stopped = run_script(config, "--stop")
    assert stopped.returncode == 0 and "is not running" in stopped.stdout


def test_a_busy_port_is_one_sentence(make_config: Callable[..., Config]) -> None:
    config = make_config("llama", "busy")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", config.server.port))
        listener.listen()
        done = run_script(config, "--background")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"port {config.server.port} on 127.0.0.1 is in use" in done.stderr and "--set server.port=N" in done.stderr


@pytest.mark.server
@pytest.mark.slow
def test_a_server_that_cannot_start_is_one_sentence_and_leaves_nothing(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config("llama", "noweights", target={"model_path": str(tmp_path / "no-model")})
    done = run_script(config, "--background")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "no-model" in done.stderr
    assert Server.find(config, "extraction") is None


# ---- families ----


@pytest.mark.server
@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("llama", marks=pytest.mark.slow), pytest.param("qwen3", marks=pytest.mark.slow)])
def test_family_equals_transformers(family: str, make_config: Callable[..., Config], start_server: Callable[..., Server], tiny_model: Callable[..., Path]) -> None:
    config = make_config(family, f"family-{family}", server={"args": {"chunked-prefill-size": 256}})
    server = start_server(config, "extraction")
    check_family(Client(server), tiny_model(family))
    server.stop()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "kimi_k25"])
def test_aux_states_equal_sglangs_own_answer(family: str, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `02b --prove-aux`: both servers, one after the other. (deepseek_v3 is in test_capture_server.py.)"""
    config = make_config(family, f"prove-{family}")
    monkeypatch.setattr(prove, "prompts_of_run", lambda _, count, limit: [np.array(random_prompt(length, length)) for length in (2, 40, min(limit, 256))][:count])
    proof = prove.prove_aux(config, 3)
    assert proof.passed, proof.line()
    assert proof.equal_rows == proof.rows and proof.capture_points == POINTS
    assert Server.find(config, "extraction") is None and Server.find(config, "oracle") is None


# ---- modes that need a server of their own ----


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [({"disable-radix-cache": False}, "radix cache would leave holes"), ({"pp-size": 2}, "pipeline parallel"), ({"speculative-algorithm": "NGRAM"}, "speculative decoding")],
)
def test_refused_at_start_by_a_real_server(args: dict[str, Any], words: str, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    from aerie import servers

    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if "pp-size" in args else {}  # SGLang asks for it when a CPU serves two ranks
    config = make_config("deepseek_v3", f"refused-{next(iter(args))}", server={"env": cores})
    real = servers.server_args
    monkeypatch.setattr(servers, "server_args", lambda config, mode, gpu=None: real(config, mode, gpu) | args)
    with Server.start(config, "extraction") as server:
        with pytest.raises(Exception, match=words):
            server.wait_ready(200)
    assert not server.alive()


@pytest.mark.server
@pytest.mark.slow
def test_tensor_parallel_two_ranks_one_writer(make_config: Callable[..., Config], start_server: Callable[..., Server], tiny_model: Callable[..., Path]) -> None:
    config = make_config("deepseek_v3", "tp2", server={"args": {"chunked-prefill-size": 256, "tp-size": 2}, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}})
    server = start_server(config, "extraction")
    client = Client(server)
    check_family(client, tiny_model("deepseek_v3"))
    (info,) = dumps.capture_info(client.folder)
    assert info["counters"]["errors"] == 0
    log = server.log.read_text(errors="replace")
    assert log.count("captures with rank 0 and writes nothing") == 1
    server.stop()


@pytest.mark.server
@pytest.mark.slow
def test_mixed_chunks_drop_decode_rows(make_config: Callable[..., Config], start_server: Callable[..., Server], tiny_model: Callable[..., Path]) -> None:
    config = make_config("deepseek_v3", "mixed", server={"args": {"chunked-prefill-size": 128, "enable-mixed-chunk": True}})
    server = start_server(config, "extraction")
    client = Client(server)
    check_family(client, tiny_model("deepseek_v3"))
    prompts = [random_prompt(length, 70 + length) for length in (20, 40, 300, 500, 60, 350)]
    alone = [client.capture(ids) for ids in prompts]
    for _ in range(3):  # answers are being decoded while other prompts are prefilled
        for dump, wanted in zip(client.capture_together(prompts, max_new_tokens=40), alone):
            assert_same_states(dump, wanted)
    assert dumps.capture_info(client.folder)[0]["counters"]["errors"] == 0
    server.stop()


@pytest.mark.server
@pytest.mark.slow
def test_retracted_and_rerun_requests(make_config: Callable[..., Config], start_server: Callable[..., Server], tiny_model: Callable[..., Path]) -> None:
    """Long answers of many requests in a KV cache of 1,500 tokens: the server must retract some and prefill them again with what they had answered."""
    config = make_config("deepseek_v3", "retract", server={"args": {"chunked-prefill-size": 256}, "cpu_args": {"max-total-tokens": 1500}})
    server = start_server(config, "extraction")
    client = Client(server)
    prompts = [random_prompt(100 + index, 200 + index) for index in range(10)]
    alone = [client.capture(ids) for ids in prompts]
    names = [client.rid(ids) for ids in prompts]
    threads = [threading.Thread(target=client.post, args=(rid, ids, 300)) for rid, ids in zip(names, prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "Retract" in server.log.read_text(errors="replace") or "retract" in server.log.read_text(errors="replace")
    time.sleep(2)
    for rid, ids, wanted in zip(names, prompts, alone):
        assert_same_states(client.dump(rid, ids), wanted)
    assert not [path for path in client.folder.iterdir() if not path.name.startswith("capture.")]
    server.stop()


@pytest.mark.server
@pytest.mark.slow
def test_a_server_killed_in_the_middle_and_started_again(make_config: Callable[..., Config], start_server: Callable[..., Server]) -> None:
    config = make_config("deepseek_v3", "killed", server={"args": {"chunked-prefill-size": 256}})
    server = start_server(config, "extraction")
    client, ids = Client(server), random_prompt(2000, 3)
    rid = client.rid(ids)
    def send() -> None:
        with pytest.raises(requests.RequestException):
            client.post(rid, ids)

    thread = threading.Thread(target=send)
    thread.start()
    deadline = time.monotonic() + 60
    while not list(client.folder.glob(f".{rid}.*")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    os.killpg(server.record["pid"], signal.SIGKILL)
    thread.join()
    server.stop()
    assert not dumps.dump_path(client.folder, rid).exists() and list(client.folder.glob(f".{rid}.*"))
    server = start_server(config, "extraction")
    assert not list(client.folder.glob(f".{rid}.*"))  # the new server removes what the dead one left half-written
    client = Client(server)
    client.capture(ids)
    server.stop()


@pytest.mark.server
@pytest.mark.slow
def test_a_budget_that_is_too_small_drops_the_dump_and_the_server_goes_on(make_config: Callable[..., Config], start_server: Callable[..., Server]) -> None:
    config = make_config("deepseek_v3", "budget", server={"args": {"chunked-prefill-size": 2048}, "env": {"SGLANG_HS_DUMP_BUDGET_MB": "1"}})
    client = Client(start_server(config, "extraction"))
    big, small = random_prompt(1500, 1), random_prompt(300, 2)  # 1.5 MB of rows, and 0.3
    rid = client.rid(big)
    assert client.post(rid, big).status_code == 200
    with pytest.raises(dumps.DumpError, match="no room for .* bytes in the budget of 1048576 bytes"):
        dumps.wait_dump(client.folder, rid, 30)
    client.capture(small)
    assert client.post(None, big, max_new_tokens=4).status_code == 200
    client.server.stop()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    "args", [{"dp-size": 2}, {"dp-size": 2, "tp-size": 2, "enable-dp-attention": True}], ids=["replicas", "attention"]
)
def test_data_parallel_each_rank_writes_its_own(
    args: dict[str, Any], make_config: Callable[..., Config], start_server: Callable[..., Server], tiny_model: Callable[..., Path]
) -> None:
    config = make_config("deepseek_v3", f"dp{len(args)}", server={"args": {"chunked-prefill-size": 256, **args}, "env": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}})
    client = Client(start_server(config, "extraction"))
    for _ in range(2):
        check_family(client, tiny_model("deepseek_v3"))
    time.sleep(3)
    counts = [info["counters"] for info in dumps.capture_info(client.folder)]
    assert len(counts) == 2 and all(each["dumps"] > 0 and each["errors"] == 0 for each in counts)
    client.server.stop()


@pytest.mark.server
@pytest.mark.slow
def test_fp8_dumps_of_a_real_server(make_config: Callable[..., Config], start_server: Callable[..., Server], tiny_model: Callable[..., Path]) -> None:
    config = make_config("deepseek_v3", "fp8", extract={"dtype": "fp8"}, server={"args": {"chunked-prefill-size": 256}})
    server = start_server(config, "extraction")
    client, folder = Client(server), tiny_model("deepseek_v3")
    prompts = [random_prompt(length, 30 + length) for length in LENGTHS]
    for ids, states in zip(prompts, reference_states(folder, prompts)):
        rid = client.rid(ids)
        client.post(rid, ids)
        path = dumps.wait_dump(client.folder, rid, 60)
        dump = dumps.read_dump(path)
        dumps.check_dump(dump, rid, ids)
        wanted = torch.cat([states[point] for point in POINTS], dim=-1)
        assert float((dump.aux_float() - wanted).norm() / wanted.norm()) < 0.04
        assert float((dump.final_float() - states[-1]).norm() / states[-1].norm()) < 0.04
        assert dump.nbytes == len(ids) * (4 + 4 * (64 + 4))
        dumps.remove_dump(client.folder, rid)
    server.stop()
