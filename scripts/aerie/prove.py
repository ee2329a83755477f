"""Proof of the auxiliary states: the dump of a prompt against SGLang's own answer, from a server that knows nothing of our code.

The oracle is SGLang started with --enable-return-aux-hidden-states --speculative-algorithm EAGLE3 --return-aux-hidden-state-layer-ids (0.5.23 and later): it
returns in its answer what it would feed an EAGLE-3 drafter. It does so for the last chunk of a prompt only, so prompts are cut to fit in one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Callable, Sequence

import numpy as np
import requests
import torch

from . import dumps
from .capture_server import MODE, check_patch, running_server
from .config import Config
from .errors import UserError
from .patching import Installation
from .rid import new_rid, sample_id
from .samples import SampleFile
from .servers import Server, dump_dir, server_args

PROMPT_TOKENS = 256  # an answer is JSON text: 3H numbers a token
# Largest relative error (norm of the difference over norm of the oracle's, one capture point of all prompts) by dtype of the dump. On the CPU it is exactly 0
# in the model's dtype; on a GPU two servers may choose other kernels.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3, "fp8": 5e-2}


@dataclass
class AuxProof:
    """What was compared and how near it was."""

    prompts: int
    rows: int
    equal_rows: int  # every auxiliary value of the row is the same bit for bit
    dtype: str
    capture_points: list[int]
    relative_error: list[float]  # one a capture point
    nearest_other: float  # the smallest relative error of a point against another point's states: far larger when the layers are right
    max_abs_error: float

    @property
    def passed(self) -> bool:
        """Within the dtype's rounding, and each point nearer to its own states than to any other's."""
        worst = max(self.relative_error)
        return worst <= TOLERANCE[self.dtype] and (len(self.capture_points) == 1 or worst * 4 < self.nearest_other)

    def line(self) -> str:
        """One line for people."""
        errors = ", ".join(f"after {point} layers {error:.1e}" for point, error in zip(self.capture_points, self.relative_error))
        return (
            f"auxiliary states against SGLang's own answer: {self.equal_rows} of {self.rows} rows of {self.prompts} prompts equal bit for bit; relative error {errors} "
            f"(another layer's states: {self.nearest_other:.1e} or more): {'passed' if self.passed else 'FAILED'}"
        )

    def as_dict(self) -> dict[str, Any]:
        """For reports."""
        return {**asdict(self), "passed": self.passed}


def captured(config: Config, url: str, prompts: Sequence[np.ndarray], timeout_s: float = 300.0) -> list[dumps.Dump]:
    """One dump a prompt, sent alone, checked, copied into memory and deleted from the folder. Raises UserError."""
    found = []
    folder = dump_dir(config)
    for ids in prompts:
        rid = new_rid(config.run.name, sample_id(ids, np.zeros(len(ids), np.uint8)), len(ids))
        _generate(url, {"rid": str(rid), "input_ids": [int(token) for token in ids]}, timeout_s)
        try:
            dump = dumps.read_dump(dumps.wait_dump(folder, rid, timeout_s))
            dumps.check_dump(dump, rid, ids)
            found.append(dump._replace(
                input_ids=dump.input_ids.clone(), aux=[state.clone() for state in dump.aux], final=dump.final.clone(),
                aux_scale=[scale.clone() for scale in dump.aux_scale], final_scale=None if dump.final_scale is None else dump.final_scale.clone(),
            ))  # fmt: skip
        except dumps.DumpError as exc:
            raise UserError(f"a prompt of {len(ids)} tokens was not captured: {exc}") from None
        finally:
            dumps.remove_dump(folder, rid)
    return found


def oracle_states(url: str, prompts: Sequence[np.ndarray], timeout_s: float = 600.0) -> list[torch.Tensor]:
    """[T, 3H] float32 a prompt: SGLang's own auxiliary states, each prompt sent alone. Raises UserError."""
    found = []
    for ids in prompts:
        answer = _generate(url, {"input_ids": [int(token) for token in ids], "return_hidden_states": True}, timeout_s)
        rows = torch.tensor(answer["meta_info"]["hidden_states"][0], dtype=torch.float32)
        if rows.dim() != 2 or len(rows) != len(ids):
            raise UserError(f"the oracle returned states of shape {tuple(rows.shape)} for {len(ids)} tokens: it must prefill the prompt in one chunk (chunked-prefill-size)")
        found.append(rows)
    return found


def _generate(url: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        answer = requests.post(f"{url}/generate", json={**body, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}, timeout=timeout_s)
    except requests.RequestException as exc:
        raise UserError(f"{url} gave no answer: {exc}") from None
    if answer.status_code != 200:
        raise UserError(f"{url} answered {answer.status_code}: {answer.text[:300]}")
    return answer.json()


def compare(found: Sequence[dumps.Dump], wanted: Sequence[torch.Tensor], capture_points: list[int], dtype: str) -> AuxProof:
    """Dumps against the oracle's [T, 3H], point by point and each point also against the others. Raises UserError when the widths differ."""
    points = len(capture_points)
    mine = torch.cat([dump.aux_float() for dump in found])  # [sum T, 3H]
    theirs = torch.cat(list(wanted))
    if mine.shape != theirs.shape:
        raise UserError(f"the dumps hold {tuple(mine.shape)} auxiliary values, the oracle's answers {tuple(theirs.shape)}: it captures another number of layers")
    left, right = mine.double().chunk(points, dim=-1), theirs.double().chunk(points, dim=-1)
    error = [[float((a - b).norm() / b.norm()) for b in right] for a in left]
    others = [error[a][b] for a in range(points) for b in range(points) if a != b]
    return AuxProof(
        prompts=len(found), rows=len(mine), equal_rows=int((mine == theirs).all(dim=-1).sum()), dtype=dtype, capture_points=capture_points,
        relative_error=[error[index][index] for index in range(points)], nearest_other=min(others, default=float("inf")), max_abs_error=float((mine - theirs).abs().max()),
    )  # fmt: skip


def prompts_of_run(config: Config, count: int, limit: int) -> list[np.ndarray]:
    """`count` training samples of the run, spread over the file, cut to `limit` tokens."""
    samples = SampleFile(config.run.data / "train.safetensors")
    if not len(samples):
        raise UserError(f"{samples.path} holds no samples; make it with `make data`")
    places = np.unique(np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(int))
    return [np.array(samples[int(place)].input_ids[:limit]) for place in places]


def chunk_limit(config: Config) -> int:
    """How many tokens of a prompt both servers prefill in one chunk."""
    args = server_args(config, "oracle")
    sizes = [int(args[name]) for name in ("chunked-prefill-size", "context-length", "max-total-tokens") if int(args.get(name, 0)) > 0]
    return max(min([PROMPT_TOKENS, *(size - 8 if size > 16 else size for size in sizes)]), 2)


def refuse_without_oracle(found: Installation) -> None:
    """Raise UserError when this SGLang has no --enable-return-aux-hidden-states (0.5.17 has not)."""
    sources = [found.site / "sglang" / "srt" / name for name in ("server_args.py", "arg_groups/field_order.py")]
    if not any(path.is_file() and b"enable_return_aux_hidden_states" in path.read_bytes() for path in sources):
        raise UserError(f"SGLang {found.version} cannot answer with auxiliary states (--enable-return-aux-hidden-states), so it cannot prove them; use 0.5.23 for the proof")


def prove_aux(config: Config, count: int, say: Callable[[str], None] = print) -> AuxProof:
    """The whole proof, for `02b --prove-aux N`: prompts through the extraction server, then, that one ended (both may not fit), through the oracle.

    Starts what is not running and leaves neither server running. Raises UserError when a server does not start or answer.
    """
    check_patch()
    refuse_without_oracle(Installation.active())
    prompts = prompts_of_run(config, count, chunk_limit(config))
    server = running_server(config)
    if server is None:
        say("starting the extraction server")
        server = Server.start(config, MODE)
    with server:
        server.wait_ready()
        found = captured(config, server.url, prompts)
    say(f"{len(found)} prompts captured; the extraction server was ended, starting the oracle (the same model once more)")
    with Server.start(config, "oracle") as oracle:
        oracle.wait_ready()
        wanted = oracle_states(oracle.url, prompts)
    identity = found[0].identity()
    return compare(found, wanted, identity["capture_points"], identity["dtype"])
