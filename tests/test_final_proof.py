"""The proof of `final`: equal rows, near ties of a low precision, and states that are not what the LM head reads."""

import sys
import threading

import torch
from aerie.final_proof import NEAR_TIE, FinalProof, choice_gaps


def answer(choices):
    """An answer whose rows 0..T-1 chose `choices`, in the form that SGLang gives."""
    return {"meta_info": {"input_top_logprobs": [None, *([[-0.1, int(token), None]] for token in choices[:-1])]}, "output_ids": [int(choices[-1])]}


def proof_with(head):
    proof = FinalProof("unused")
    proof._head = head
    return proof


def test_gaps_against_a_dense_product():
    generator = torch.Generator().manual_seed(0)
    final, head = torch.randn(50, 32, generator=generator), torch.randn(500, 32, generator=generator)
    choices = torch.randint(0, 500, (50,), generator=generator)
    logits = final.double() @ head.double().T
    ours, gaps = choice_gaps(final, head, choices)
    assert ours.tolist() == logits.argmax(1).tolist()
    expected = (logits.max(1).values - logits[torch.arange(50), choices]) / logits.max(1).values
    torch.testing.assert_close(gaps.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_choice_within_rounding_is_a_near_tie_and_no_more():
    head = torch.eye(4, 8)
    final = torch.zeros(3, 8)
    final[:, :2] = torch.tensor([[10.0, 9.99], [10.0, 9.0], [5.0, 10.0]])
    for dtype, near in (("float32", 0), ("bfloat16", 1), ("fp8", 1)):
        proof = proof_with(head)
        proof.compare(final, answer(torch.tensor([1, 1, 1])), dtype)  # a tie within 0.1%, a gap of 10%, equal
        assert proof.tally == (1, 3, 1, near), dtype
    assert set(NEAR_TIE) == {"float32", "float16", "bfloat16", "fp8"}


def test_rows_shifted_by_one_are_refuted_even_in_fp8():
    generator = torch.Generator().manual_seed(1)
    final, head = torch.randn(400, 64, generator=generator), torch.randn(1000, 64, generator=generator)
    choices = (final @ head.T).argmax(1)
    right, shifted = proof_with(head), proof_with(head)
    right.compare(final, answer(choices), "fp8")
    shifted.compare(final.roll(1, 0), answer(choices), "fp8")
    assert right.tally == (1, 400, 400, 0) and not right.tally.refuted()
    assert shifted.tally.refuted() and shifted.tally.share < 0.2


def test_a_reader_never_sees_half_a_sample():
    head = torch.eye(64)
    proof = proof_with(head)
    good = answer(torch.arange(64))
    threads = [threading.Thread(target=lambda: [proof.compare(head, good, "float32") for _ in range(200)]) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            tally = proof.tally
            assert not tally.refuted(1) and tally.compared == 64 * tally.samples == tally.equal
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert proof.tally == (600, 600 * 64, 600 * 64, 0)
