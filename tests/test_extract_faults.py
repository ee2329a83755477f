"""Servers, disks, data and processes that fail: the run ends with a complete and verified store, or with one sentence and a store that resumes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from aerie.generate_client import Client, ServerGone, was_closed
from aerie.rid import sample_id
from aerie.samples import Sample
from aerie.store import Store
from cpu_tools import free_port
from extract_tools import children_named, fake_run  # noqa: F401  (a fixture)


def test_requests_that_time_out_and_arrive_late(fake_run):
    run = fake_run(extract={"request_timeout_s": 0.7, "attempts": 6})
    run.start_server("--fault", "slow:6", "--slow-s", "1.5")
    code, out, err = run.extract_here()
    assert code == 0, err
    assert run.report()["retries"] > 0
    time.sleep(1.6)  # the last late dump may come after the run; the next one removes it
    assert run.extract_here("--set", "extract.proof_samples=0")[0] == 0
    for path in run.dumps.glob("aerie.*"):  # nothing was left to do, so nobody looked: the next real run sweeps
        path.unlink()
    run.assert_complete()


def test_a_closed_idle_connection_is_no_lost_server(fake_run):
    """While the store is full nothing is sent, and a server closes connections that idle: the next request opens a new one."""
    run = fake_run()
    run.start_server("--idle-s", "0.2")
    client = Client(f"http://127.0.0.1:{run.port}", 5.0)
    assert client.request("GET", "/health")[0] == 200
    deadline = time.monotonic() + 30
    while not was_closed(client._connection.sock):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert client.request("POST", "/abort_request", {"rid": "x"})[0] == 200


@pytest.mark.parametrize("fault", ["close:7", "reset:7", "half:7", "list:5", "null:5", "nometa:5", "word:5"])
def test_answers_that_are_cut_off_or_of_another_kind(fake_run, fault):
    """A connection that ends before the answer or in it; answers that are JSON and none of /generate. The last kind is a finish_reason as other versions say it."""
    run = fake_run(samples=60, extract={"attempts": 6, "proof_samples": 0})
    run.start_server("--fault", fault)
    code, out, err = run.extract_here()
    assert code == 0 and "Traceback" not in err, err
    assert (run.report()["server_losses"] > 0) == (fault in ("close:7", "reset:7", "half:7")) and (run.report()["retries"] > 0) == (fault in ("list:5", "null:5", "nometa:5"))
    run.assert_complete()


def test_an_answer_of_impossible_length_is_a_lost_server():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n{}")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(ServerGone):
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}", 5.0).request("GET", "/health")
        thread.join(10)


def test_late_dumps_are_swept(fake_run):
    run = fake_run()
    run.start_server()
    (run.dumps / f"aerie.{run.name}.{'0' * 16}.00000000.9.safetensors").write_bytes(b"of a run that was killed")
    other = run.dumps / f"aerie.another-run.{'0' * 16}.00000000.9.safetensors"
    other.write_bytes(b"not ours")
    code, _, err = run.extract_here()
    assert code == 0 and run.report()["late_dumps"] == 0, err
    assert other.exists()
    other.unlink()
    run.assert_complete()


def test_the_same_sample_twice_is_stored_once(fake_run):
    run = fake_run()
    unique = list(run.train)
    run.train = unique + [unique[3], unique[5], run.heldout[0]]
    empty = np.zeros(9, np.uint8)
    run.train.append(Sample(sample_id(np.arange(9, dtype=np.int32), empty), np.arange(9, dtype=np.int32), empty))
    run.write_data()
    run.start_server()
    code, out, err = run.extract_here()
    assert code == 0, err
    assert "done 28 + failed 0 + skipped 4 (" in out and "= 32 samples" in out
    assert "1 also held out" in out and "2 repeated" in out and "1 nothing to supervise" in out
    run.assert_complete(unique + run.heldout)


def test_a_server_that_dies_and_comes_back(fake_run):
    run = fake_run(samples=40, extract={"max_in_flight": 4})
    run.start_server("--fault", "die:15")
    stop = threading.Event()

    def restart() -> None:
        while not stop.is_set():
            if run.server.poll() is not None:
                run.start_server("--fault", "die:15")
            time.sleep(0.1)

    keeper = threading.Thread(target=restart)
    keeper.start()
    try:
        code, out, err = run.extract_here()
    finally:
        stop.set()
        keeper.join()
    assert code == 0, err
    assert run.report()["server_losses"] >= 2 and "is back" in out
    run.assert_complete()


def test_a_server_that_stays_away_ends_the_run(fake_run):
    run = fake_run(extract={"server_wait_s": 1.0, "max_in_flight": 2})
    run.start_server("--fault", "die:9")
    code, out, err = run.extract_here()
    assert code == 2 and "extract.server_wait_s" in err and len(err.splitlines()[-1]) < 400
    run.start_server()
    code, out, err = run.extract_here()
    assert code == 0, err
    run.assert_complete()


def test_a_server_that_answers_500_for_a_while_fails_no_sample(fake_run):
    """A bad moment is not the samples' fault: they wait until it is over."""
    run = fake_run(samples=120)
    bad = run.folder / "bad"
    run.start_server("--bad-while", str(bad))

    def trouble() -> None:
        while not run.log.exists() or len(run.requested()) < 20:
            time.sleep(0.005)
        bad.touch()
        time.sleep(2.0)
        bad.unlink()

    while_it_runs = threading.Thread(target=trouble)
    while_it_runs.start()
    code, out, err = run.extract_here()
    while_it_runs.join()
    assert code == 0 and "answered 500: out of memory; waiting for it" in out and "is back" in out, err
    assert run.report()["failed"] == 0 and run.report()["server_losses"] <= 3
    run.assert_complete()


@pytest.mark.parametrize("fault", ["twice:5", "both:4", "again:4"])
def test_answers_and_dumps_that_come_twice(fake_run, fault):
    """An answer sent twice, a dump beside its .error, a dump that comes again after it was taken."""
    run = fake_run(samples=60)
    run.start_server("--fault", fault)
    code, out, err = run.extract_here()
    assert code == 0, err
    if fault.startswith("again"):
        time.sleep(0.5)  # the last ones come after the run; the next real run sweeps them
        for path in run.dumps.glob("aerie.*"):
            path.unlink()
    run.assert_complete()


def test_several_servers_and_one_of_them_dies(fake_run):
    run = fake_run(samples=60)
    second = free_port()
    run.start_server("--tok-s", "3000")
    other = run.start_server("--tok-s", "3000", "--fault", "die:12", port=second)
    urls = json.dumps([f"http://127.0.0.1:{run.port}", f"http://127.0.0.1:{second}"])
    try:
        code, out, err = run.extract_here("--set", f"server.urls={urls}")
    finally:
        other.kill()
        other.wait()
    assert code == 0, err
    assert run.report()["server_losses"] == 1
    run.assert_complete()


def test_a_server_that_dies_between_answer_and_dump(fake_run):
    """What it answered and never wrote is asked for again at once: not after request_timeout_s, which is longer here than the whole test may take."""
    run = fake_run(samples=60, extract={"request_timeout_s": 1000.0, "proof_samples": 0})
    second = free_port()
    run.start_server("--tok-s", "1000")  # the slower one: the other one must get its twelve requests, also on a busy machine
    other = run.start_server("--tok-s", "3000", "--fault", "nodump:5", "--fault", "die:12", port=second)
    urls = json.dumps([f"http://127.0.0.1:{run.port}", f"http://127.0.0.1:{second}"])
    try:
        done = run.extract("--set", f"server.urls={urls}", timeout=120)
    finally:
        other.kill()
        other.wait()
    assert done.returncode == 0, done.stderr
    assert run.report()["server_losses"] == 1 and run.report()["retries"] == 0
    run.assert_complete()


def test_no_server_no_capture_and_a_wrong_folder_are_said(fake_run):
    run = fake_run(extract={"request_timeout_s": 1.0})
    code, out, err = run.extract_here()
    assert code == 2 and err.startswith("error: no extraction server answers at") and "make server" in err
    run.start_server("--fault", "nodump:1")
    code, out, err = run.extract_here()
    assert code == 2 and "no dump after" in err
    run.end_server()
    run.start_server("--fault", "error:1")
    code, out, err = run.extract_here()
    assert code == 2 and "no room in the budget" in err
    run.end_server()
    run.start_server("--format", "1")
    code, out, err = run.extract_here()
    assert code == 2 and "the server runs another version of the capture code; run scripts/00_apply_patch.sh and start the server again" in err
    assert not run.store_path.exists()  # nothing half-written


@pytest.mark.parametrize(
    "option, word", [("target.aux_layer_ids=[1,2,3]", "aux_layer_ids"), ("extract.all_final_rows=true", "all_final_rows"), ("extract.dtype=fp8", "dtype")]
)
def test_a_changed_config_is_refused(fake_run, option, word):
    run = fake_run()
    run.start_server()
    assert run.extract_here("--limit", "5")[0] == 0
    code, out, err = run.extract_here("--set", option)
    assert code == 2 and word in err and "other states" in err
    assert run.extract_here()[0] == 0
    run.assert_complete()


def test_changed_data_model_and_server_are_refused_and_reordered_data_are_not(fake_run, tmp_path):
    run = fake_run()
    run.start_server()
    assert run.extract_here("--limit", "5")[0] == 0
    whole = list(run.train)

    run.train = whole[:-1]
    run.write_data()
    code, out, err = run.extract_here()
    assert code == 2 and "data_hash" in err
    run.train = whole
    run.write_data(template_hash="another")
    code, out, err = run.extract_here()
    assert code == 2 and "template_hash" in err
    run.write_data(tokenizer_hash="another")
    code, out, err = run.extract_here()
    assert code == 2 and "another tokenizer" in err
    run.write_data()

    model = tmp_path / "model2"
    shutil.copytree(run.model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    code, out, err = run.extract_here("--set", f"target.model_path={model}")
    assert code == 2 and "model_hash" in err

    run.end_server()
    run.start_server("--dtype", "bfloat16")
    code, out, err = run.extract_here()
    assert code == 2 and "dtype" in err
    run.end_server()
    run.start_server()

    random.Random(1).shuffle(run.train)
    run.write_data()
    code, out, err = run.extract_here()
    assert code == 0, err
    assert run.report()["extracted_now"] == 23
    run.assert_complete()


def test_limit_start_from_only_failed_and_dry_run(fake_run):
    run = fake_run(extract={"attempts": 1})
    code, out, err = run.extract_here("--dry-run", "--rate", "1000")  # no server yet
    assert code == 0 and "28 samples" in out and "GB in the store" in out and "hours" in out, err
    run.start_server("--fault", "nan:6")
    code, out, err = run.extract_here("--limit", "10")
    assert code == 0 and "18 beyond --limit" in out, err
    failed = [json.loads(line) for line in (run.store_path / "failed.jsonl").read_text().splitlines()]
    assert failed and all("not finite" in entry["reason"] and entry["attempts"] == 1 for entry in failed)
    run.end_server()
    run.start_server()
    before = len(run.requested())
    code, out, err = run.extract_here("--only-failed")
    assert code == 0 and sorted(run.requested()[before + 1 :]) == sorted(entry["sample"] for entry in failed), err  # + 1: the probe
    assert not (run.store_path / "failed.jsonl").exists()
    code, out, err = run.extract_here("--start-from", "1000000")
    assert code == 0 and "before --start-from" in out, err
    assert run.extract_here()[0] == 0
    run.assert_complete()


def test_too_many_failures_end_the_run(fake_run):
    run = fake_run(extract={"attempts": 1, "max_failed": 2, "max_in_flight": 2})
    run.start_server("--fault", "nan:2")
    code, out, err = run.extract_here()
    assert code == 2 and "extract.max_failed = 2" in err
    run.end_server()
    run.start_server()
    assert run.extract_here()[0] == 0
    run.assert_complete()


def test_more_failures_than_samples_is_no_success(fake_run):
    """Fewer than extract.max_failed, and yet `make all` must not train on what is left."""
    run = fake_run(extract={"attempts": 1, "max_in_flight": 2})
    run.start_server("--fault", "nan:2", "--fault", "inf:3")
    code, out, err = run.extract_here()
    assert code == 2 and "wrong with more than a sample: " in err and "failed.jsonl" in err and "Traceback" not in err
    run.end_server()
    run.start_server()
    assert run.extract_here()[0] == 0
    run.assert_complete()


def test_wrong_final_is_refused(fake_run):
    run = fake_run(samples=60, extract={"proof_samples": 30})
    run.start_server("--wrong-final")
    code, out, err = run.extract_here()
    assert code == 2 and "is not what the LM head reads" in err


def test_dumps_on_another_file_system_than_the_store(fake_run, mount_tmpfs):
    run = fake_run()
    mount_tmpfs(run.dumps, "16m")
    assert run.dumps.stat().st_dev != run.folder.stat().st_dev
    run.start_server()
    code, out, err = run.extract_here()
    assert code == 0, err
    run.assert_complete()


def test_a_full_disk_ends_the_run_with_a_whole_store(fake_run, mount_tmpfs, tmp_path):
    small_disk = mount_tmpfs(tmp_path / "disk", "6m")
    run = fake_run(samples=120, extract={"shard_gb": 3e-4, "proof_samples": 0})
    run.start_server()
    run.store_path.parent.mkdir(parents=True, exist_ok=True)
    run.store_path.symlink_to(small_disk)
    (small_disk / "ballast").write_bytes(bytes(5_000_000))
    code, out, err = run.extract_here()
    assert code == 2 and "free some" in err and not list(small_disk.glob("shard-*"))  # seen before the first sample
    (small_disk / "ballast").unlink()
    over = threading.Event()

    def fill() -> None:  # somebody else fills the disk while the run goes on
        while not list(small_disk.glob("shard-*")):
            if over.wait(0.001):
                return
        try:
            with open(small_disk / "ballast", "wb") as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            pass

    filler = threading.Thread(target=fill)
    filler.start()
    code, out, err = run.extract_here("--set", "extract.max_in_flight=1")
    over.set()
    filler.join()
    assert code == 2 and ("no space left" in err or "runs short" in err) and "Traceback" not in err
    (small_disk / "ballast").unlink(missing_ok=True)
    assert Store.open(run.store_path).verify() == [] and 0 < len(Store.open(run.store_path)) < 124
    run.set_extract(max_in_flight=4)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    code, out, err = run.extract_here()
    assert code == 0, err
    run.assert_complete()


@pytest.mark.parametrize("seed", range(3))
def test_power_loss(fake_run, seed):
    run = fake_run(samples=40)
    run.start_server()
    assert run.extract_here("--limit", "30")[0] == 0
    rng = random.Random(seed)
    files = [*sorted(run.store_path.glob("shard-*"))[-2:], run.store_path / "done.log", run.store_path / "manifest.json", run.store_path / "report.json"]
    for path in rng.sample(files, rng.randrange(1, len(files) + 1)):
        os.truncate(path, rng.randrange(path.stat().st_size))
    code, out, err = run.extract_here()
    assert code == 0, err
    run.assert_complete()


def test_ctrl_c_keeps_what_is_done(fake_run):
    run = fake_run(samples=80)
    run.start_server("--tok-s", "500")
    process = subprocess.Popen(run.command(), env=run.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (run.log.exists() and len(run.requested()) > 12):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "interrupted" in err and "not reached" in out and "Traceback" not in err, err
    assert len(Store.open(run.store_path)) > 0
    run.end_server()
    run.start_server()
    assert run.extract_here()[0] == 0
    run.assert_complete()


def killed_run(run, kills: int, server_too: bool, seed: int) -> None:
    rng = random.Random(seed)
    run.start_server("--tok-s", "600")
    for _ in range(kills):
        asked = len(run.requested()) if run.log.exists() else 0
        process = subprocess.Popen(run.command(), env=run.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        point = rng.randrange(1, 14)  # requests after which it dies
        deadline = time.monotonic() + 60
        while process.poll() is None and (len(run.requested()) if run.log.exists() else 0) < asked + point and time.monotonic() < deadline:
            time.sleep(rng.uniform(0.001, 0.05))
        if server_too:
            run.end_server()
            time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.communicate()
        if server_too:
            run.start_server("--tok-s", "600")
    run.end_server()
    run.start_server()
    code, out, err = run.extract_here()
    assert code == 0, err
    run.assert_complete()


def test_kill_9_of_the_client(fake_run):
    killed_run(fake_run(samples=60, extract={"shard_gb": 5e-5}), kills=2, server_too=False, seed=0)


@pytest.mark.slow
def test_kill_9_of_the_client_20_times(fake_run):
    killed_run(fake_run(samples=300, extract={"shard_gb": 5e-5}), kills=20, server_too=False, seed=1)


@pytest.mark.slow
def test_kill_9_of_client_and_server(fake_run):
    killed_run(fake_run(samples=120, extract={"shard_gb": 5e-5}), kills=6, server_too=True, seed=2)


def test_a_worker_process_that_is_killed_ends_the_run_with_one_sentence(fake_run):
    """As when memory is short: whole shards stay, what a dead one had in the making is asked for again."""
    run = fake_run(samples=80, extract={"shard_gb": 5e-5})
    run.start_server("--tok-s", "1000")
    process = subprocess.Popen(run.command(), env=run.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(run.store_path.glob("shard-*")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.02)
    workers = children_named(process.pid, "aerie.dump_worker")
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "a worker process of the extraction ended (exit code -9" in err and "Traceback" not in err, err
    assert not any(is_alive(worker) for worker in workers)
    assert Store.open(run.store_path).verify() == [] and len(Store.open(run.store_path)) > 0
    run.end_server()
    run.start_server()
    code, out, err = run.extract_here()
    assert code == 0, err
    run.assert_complete()
    assert run.report()["workers"] >= 1 and run.report()["workers_peak_bytes"] > 10**7


def test_the_worker_processes_end_with_a_client_that_is_killed(fake_run):
    run = fake_run(samples=80)
    run.start_server("--tok-s", "500")
    process = subprocess.Popen(run.command(), env=run.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (workers := children_named(process.pid, "aerie.dump_worker")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert workers
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "a worker process outlives its client"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
