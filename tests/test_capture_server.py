"""What a running server does while we capture: one server (tiny DeepSeek-V3, chunks of 256 tokens, float32) and every kind of traffic at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable

import pytest
import requests
import torch
from aerie import dumps, prove
from aerie.servers import Server
from capture_reference import Client, assert_reference, assert_same_states, lm_head, random_prompt, reference_states, relative_error

pytestmark = pytest.mark.server
POINTS = [2, 3, 5]
LENGTHS = (2, 17, 255, 256, 257, 600)


@pytest.fixture(scope="module")
def client(capture_server: Server) -> Client:
    return Client(capture_server)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [random_prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def alone(client: Client, prompts: list[list[int]]) -> list[dumps.Dump]:
    """Each prompt sent alone."""
    return [client.capture(ids) for ids in prompts]


def test_states_equal_transformers(alone: list[dumps.Dump], prompts: list[list[int]], tiny_model: Callable[..., Path]) -> None:
    for dump, states in zip(alone, reference_states(tiny_model("deepseek_v3"), prompts)):
        assert dump.metadata["capture_points"] == str(POINTS)
        assert_reference(dump, states, POINTS)


def test_aux_states_equal_sglangs_own_answer_bit_for_bit(client: Client, prompts: list[list[int]], start_server: Callable[..., Server]) -> None:
    short = [ids for ids in prompts if len(ids) <= 256]
    config = client.server.config
    oracle = start_server(config, "oracle")
    wanted = prove.oracle_states(oracle.url, short)
    oracle.stop()
    proof = prove.compare(prove.captured(config, client.server.url, short), wanted, POINTS, "float32")
    assert proof.passed, proof.line()
    assert proof.equal_rows == proof.rows == sum(map(len, short)), proof.line()


def test_final_times_the_lm_head_gives_the_servers_own_logprobs(client: Client, prompts: list[list[int]], tiny_model: Callable[..., Path]) -> None:
    head = lm_head(tiny_model("deepseek_v3"))
    for ids in prompts[1:]:
        rid = client.rid(ids)
        answer = client.post(rid, ids, return_logprob=True, logprob_start_len=0, top_logprobs_num=5).json()["meta_info"]
        logprobs = torch.log_softmax(client.dump(rid, ids).final @ head.T, dim=-1)  # row t: the distribution of token t + 1
        server = torch.tensor([entry[0] for entry in answer["input_token_logprobs"][1:]])
        mine = logprobs[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(mine, server, rtol=1e-3, atol=1e-3)
        value, token, *_ = answer["output_token_logprobs"][0]
        assert int(logprobs[-1].argmax()) == token and abs(float(logprobs[-1].max()) - value) < 1e-3


def test_mixed_lengths_together_equal_each_alone(client: Client, prompts: list[list[int]], alone: list[dumps.Dump]) -> None:
    for order in (1, -1):  # a prompt of three chunks among whole ones, and all of it once more in reverse
        together = client.capture_together(prompts[::order])
        for dump, wanted in zip(together, alone[::order]):
            assert_same_states(dump, wanted)


def test_equal_lengths_and_shared_prefixes(client: Client) -> None:
    shared = random_prompt(60, 99)
    prompts = [[*shared, *random_prompt(4, 1000 + index)] for index in range(8)]
    together = client.capture_together([*prompts, prompts[0]])
    for ids, dump in zip([*prompts, prompts[0]], together):
        assert len(dump.final) == 64
        assert_same_states(dump, client.capture(ids))
    assert relative_error(together[0].final[:60], together[5].final[:60]) < 1e-5 < relative_error(together[0].final[60:], together[5].final[60:])


def test_sampled_answers_of_many_tokens_leave_no_decode_rows(client: Client, prompts: list[list[int]], alone: list[dumps.Dump]) -> None:
    together = client.capture_together(prompts[1:], max_new_tokens=12, temperature=0.8)
    for dump, wanted in zip(together, alone[1:]):
        assert_same_states(dump, wanted)


def test_other_traffic_at_the_same_time_is_left_alone(client: Client, prompts: list[list[int]], alone: list[dumps.Dump]) -> None:
    url, stop, failures, answers = client.server.url, threading.Event(), [], []
    quiet = client.post(None, prompts[2], max_new_tokens=8).json()["output_ids"]

    def chat() -> None:
        while not stop.is_set():
            body = {"model": "default", "messages": [{"role": "user", "content": "write a short story about the sea"}], "max_tokens": 8, "temperature": 0}
            answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=120)
            if answer.status_code != 200 or not answer.json()["choices"]:
                failures.append(answer.text[:200])

    def foreign() -> None:
        while not stop.is_set():
            answers.append(client.post("user-17", prompts[2], max_new_tokens=8).json()["output_ids"])

    def health() -> None:
        while not stop.is_set():
            for path in ("/health", "/health_generate"):
                answer = requests.get(url + path, timeout=120)
                if answer.status_code != 200:
                    failures.append(f"{path}: {answer.status_code}")
            time.sleep(0.05)

    threads = [threading.Thread(target=target) for target in (chat, foreign, health)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            for dump, wanted in zip(client.capture_together(prompts), alone):
                assert_same_states(dump, wanted)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures and answers
    assert all(answer == quiet for answer in answers)
    assert not [path for path in client.folder.iterdir() if not path.name.startswith("capture.")]


def test_two_runs_on_one_server(client: Client, prompts: list[list[int]], alone: list[dumps.Dump]) -> None:
    first, second = Client(client.server, "first"), Client(client.server, "second")
    ids = prompts[3]
    names = [one.rid(ids) for one in (first, second)]
    threads = [threading.Thread(target=one.post, args=(rid, ids)) for one, rid in zip((first, second), names)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, rid in zip((first, second), names):
        assert rid.split(".")[1] == one.run
        assert_same_states(one.dump(rid, ids), alone[3])


@pytest.mark.parametrize(
    "rid", ["mine", "aerie.test.0123456789abcdef.00000000", "aerie.../../etc.0123456789abcdef.00000000.17", "../aerie.test.0123456789abcdef.00000000.17", "aerie." + "x" * 300 + ".0123456789abcdef.00000000.17"],
)
def test_a_rid_that_is_not_ours_gets_its_answer_and_no_file(client: Client, prompts: list[list[int]], rid: str) -> None:
    before = sorted(path.name for path in client.folder.iterdir())
    assert client.post(rid, prompts[1]).status_code == 200
    client.capture(prompts[0])  # the writer has been through everything before this one
    assert sorted(path.name for path in client.folder.iterdir()) == before
    assert not list(client.folder.parent.glob("aerie*"))


def test_a_rid_that_is_still_alive_is_refused_by_the_server_and_a_finished_one_is_dumped_again(client: Client, prompts: list[list[int]], alone: list[dumps.Dump]) -> None:
    ids = prompts[5]
    rid = client.rid(ids)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(client.post(rid, ids, max_new_tokens=24).status_code)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200, 400, 400] or codes.count(200) >= 1 and set(codes) <= {200, 400}
    assert_same_states(client.dump(rid, ids), alone[5])
    assert client.post(rid, ids).status_code == 200
    assert_same_states(client.dump(rid, ids), alone[5])


def test_two_tokens_and_one(client: Client, tiny_model: Callable[..., Path]) -> None:
    for ids in ([11, 12], [11]):
        dump = client.capture(ids)
        assert dump.final.shape == (len(ids), 64)
        assert_reference(dump, reference_states(tiny_model("deepseek_v3"), [ids])[0], POINTS)


def test_a_prompt_that_is_not_as_long_as_its_name_says_is_no_dump_of_it(client: Client, prompts: list[list[int]]) -> None:
    longer, shorter = client.rid([*prompts[1], 9, 9]), client.rid(prompts[1][:-2])
    client.post(longer, prompts[1])
    client.post(shorter, prompts[1])
    dump = dumps.read_dump(dumps.wait_dump(client.folder, shorter, 30))
    with pytest.raises(dumps.DumpError):
        dumps.check_dump(dump, shorter, prompts[1])
    assert not dumps.dump_path(client.folder, longer).exists()
    for rid in (longer, shorter):
        dumps.remove_dump(client.folder, rid)


def test_a_request_aborted_half_way_leaves_no_dump_and_disturbs_nobody(client: Client, prompts: list[list[int]], alone: list[dumps.Dump]) -> None:
    ids = random_prompt(2000, 7)  # eight chunks
    for _ in range(5):
        rid = client.rid(ids)
        thread = threading.Thread(target=client.post, args=(rid, ids))
        thread.start()
        deadline = time.monotonic() + 60
        while not list(client.folder.glob(f".{rid}.*")) and not dumps.dump_path(client.folder, rid).exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        requests.post(f"{client.server.url}/abort_request", json={"rid": rid}, timeout=60)
        thread.join()
        assert_same_states(client.capture(prompts[3]), alone[3])
        if not dumps.dump_path(client.folder, rid).exists():
            break
        dumps.remove_dump(client.folder, rid)  # it was through before the abort came
    else:
        pytest.fail("no abort came in time")
    reason = wait_for(lambda: dumps.read_error(client.folder, rid), 60)
    assert "aborted" in reason
    assert not list(client.folder.glob(f".{rid}.*"))
    dumps.remove_dump(client.folder, rid)


def wait_for(question: Callable[[], Any], seconds: float) -> Any:
    """The first answer that is not None."""
    deadline = time.monotonic() + seconds
    while (answer := question()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def test_a_dump_folder_that_goes_away_harms_nobody_and_may_come_back(client: Client, prompts: list[list[int]], alone: list[dumps.Dump]) -> None:
    away = client.folder.with_name("away")
    client.folder.rename(away)
    try:
        rid = client.rid(prompts[2])
        assert client.post(rid, prompts[2]).status_code == 200
        assert client.post(None, prompts[2], max_new_tokens=4).status_code == 200
    finally:
        away.rename(client.folder)
    assert_same_states(client.capture(prompts[2]), alone[2])
    assert not dumps.dump_path(client.folder, rid).exists()
    dumps.remove_dump(client.folder, rid)


def writing_process(server: Server) -> int:
    """The id of the process that writes the server's dumps."""
    found = [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if b"hidden_state_dump.py" in path.read_bytes() and os.getpgid(int(path.parent.name)) == server.record["pid"]]
    assert len(found) == 1
    return int(found[0].name)


def test_the_server_answers_while_the_process_that_writes_stands_still_and_after_it_was_killed(client: Client, prompts: list[list[int]], alone: list[dumps.Dump]) -> None:
    writer = writing_process(client.server)
    os.kill(writer, signal.SIGSTOP)
    rids = [client.rid(ids) for ids in prompts]
    for rid, ids in zip(rids, prompts):
        assert client.post(rid, ids, max_new_tokens=4).status_code == 200
    assert not [rid for rid in rids if dumps.dump_path(client.folder, rid).exists()]
    os.kill(writer, signal.SIGCONT)
    for rid, ids, wanted in zip(rids, prompts, alone):
        assert_same_states(client.dump(rid, ids), wanted)
    os.kill(writer, signal.SIGSTOP)
    rid = client.rid(prompts[3])
    assert client.post(rid, prompts[3]).status_code == 200
    os.kill(writer, signal.SIGKILL)
    assert "ended (exit code -9)" in wait_for(lambda: dumps.read_error(client.folder, rid), 60)
    dumps.remove_dump(client.folder, rid)
    assert_same_states(client.capture(prompts[3]), alone[3])
    assert writing_process(client.server) != writer and not Path(f"/proc/{writer}").exists()  # no zombie
    assert not list(client.folder.glob(".aerie.*"))


def test_the_server_says_what_it_captures_and_counts(client: Client) -> None:
    (info,) = dumps.capture_info(client.folder)
    assert info["aux_layer_ids"] == "[2, 3, 5]" and info["capture_points"] == "[2, 3, 5]" and info["model_class"] == "DeepseekV3ForCausalLM"
    client.capture(random_prompt(40, 5))
    wait_for(lambda: True if dumps.capture_info(client.folder)[0]["counters"]["dumps"] > info["counters"]["dumps"] else None, 20)
    counters = dumps.capture_info(client.folder)[0]["counters"]
    assert counters["bytes"] == counters["rows"] * (4 + 4 * 64 * 4) and counters["dropped"] == 0
    log = client.server.log.read_text(errors="replace")
    assert log.count("hidden-state dump: DeepseekV2Model, layer ids [2, 3, 5]: state after [2, 3, 5] decoder layers") == 1
    assert client.folder.stat().st_mode & 0o777 == 0o700
