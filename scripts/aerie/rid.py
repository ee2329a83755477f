"""A request's own name: aerie.<run>.<sample>.<attempt>.<tokens> (see patches/hidden_state_dump.py, which knows the same form)."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

RID_PATTERN = re.compile(r"^aerie\.[A-Za-z0-9_-]{1,48}\.[0-9a-f]{16}\.[0-9a-f]{8}\.[0-9]{1,7}$", re.ASCII)
RUN_PATTERN = re.compile(r"^[A-Za-z0-9_-]{1,48}$", re.ASCII)


class Rid(NamedTuple):
    """The parts of a request id; `sample` names the token ids and the mask, `attempt` is fresh for each try."""

    run: str
    sample: str  # 16 hex digits
    attempt: str  # 8 hex digits
    tokens: int

    def __str__(self) -> str:
        return f"aerie.{self.run}.{self.sample}.{self.attempt}.{self.tokens}"


def sample_id(input_ids: np.ndarray, loss_mask: np.ndarray) -> str:
    """First 16 hex digits of sha256 over ids (int32, little endian) and mask (uint8): the same chat has the same name in any order."""
    import numpy as np  # here alone: the names of runs are checked by `make doctor` too, before any package is there

    digest = hashlib.sha256(np.ascontiguousarray(input_ids, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return digest.hexdigest()[:16]


def new_rid(run: str, sample: str, tokens: int) -> Rid:
    """A rid that no earlier attempt can have had. Raises ValueError when the run's name or the sample does not fit the form."""
    rid = Rid(run, sample, secrets.token_hex(4), tokens)
    if not RID_PATTERN.fullmatch(str(rid)):
        raise ValueError(f"{rid!s} is not a valid request id (run: letters, digits, _ and -, at most 48)")
    return rid


def parse_rid(text: str) -> Rid | None:
    """The parts of `text`, or None when it does not have exactly the form (another client's request)."""
    if not RID_PATTERN.fullmatch(text):
        return None
    _, run, sample, attempt, tokens = text.split(".")
    return Rid(run, sample, attempt, int(tokens))
