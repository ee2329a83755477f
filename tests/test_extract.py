"""02b as a user starts it, against the fake server: whatever goes wrong, the run ends with a complete and verified store and an accounting that adds up."""

from __future__ import annotations

import json

import pytest
from extract_tools import fake_run  # noqa: F401  (a fixture)


def test_a_plain_run_and_a_second_one(fake_run):
    run = fake_run()
    run.start_server()
    first = run.extract()
    assert first.returncode == 0, first.stderr
    assert "done 28 + failed 0 + skipped 0 = 28 samples" in first.stdout and "equals the server's own choice" in first.stdout
    run.assert_complete()
    report = run.report()
    assert report["samples"] == 28 and report["tokens"] == sum(len(sample.input_ids) for sample in run.train + run.heldout) and report["extract_tok_s"] > 0
    assert report["proof"]["equal"] == report["proof"]["compared"] > 0
    assert json.loads((run.store_path / "manifest.json").read_text())["complete"]
    run.end_server()
    second = run.extract()  # everything is there: no server is needed
    assert second.returncode == 0 and "done 28" in second.stdout, second.stderr
    assert run.report()["extracted_now"] == 0 and run.report()["extract_tok_s"] == report["extract_tok_s"]


FAULTS = [
    ("nan:5",), ("inf:5",), ("token:5",), ("row:5",), ("torn:5",), ("header:5",), ("flip:5",), ("rid:5",), ("error:5",), ("http500:5",), ("garbage:5",), ("late:3",),
    ("nan:7", "token:6", "row:5", "error:4"),
]  # fmt: skip


@pytest.mark.parametrize("faults", FAULTS, ids=lambda faults: "+".join(faults))
def test_bad_dumps_are_asked_for_again(fake_run, faults):
    run = fake_run(extract={"attempts": 8})
    run.start_server(*(word for fault in faults for word in ("--fault", fault)))
    code, out, err = run.extract_here()
    assert code == 0, err
    assert "done 28 + failed 0 + skipped 0 = 28 samples" in out
    run.assert_complete()
    if not faults[0].startswith("late"):
        assert run.report()["retries"] > 0


def test_a_flipped_byte_never_enters_the_store(fake_run):
    """The low bit of one byte of a state: nothing but the checksum shows it. Without a second attempt the sample fails by name, with one it is right."""
    run = fake_run(extract={"attempts": 1})
    run.start_server("--fault", "flip:6")
    code, out, err = run.extract_here()
    assert code == 0, err
    failed = [json.loads(line) for line in (run.store_path / "failed.jsonl").read_text().splitlines()]
    assert len(failed) == 4 and all("is not as the server wrote it: checksum" in entry["reason"] for entry in failed)
    run.end_server()
    run.start_server()
    code, out, err = run.extract_here("--only-failed")
    assert code == 0, err
    run.assert_complete()
