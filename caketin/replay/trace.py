"""The load: Mooncake's published trace format, or a built-in generator of multi-turn conversations.

A trace has one JSON object a line with `hash_ids`: one id a block of the prompt, where an equal id means an
equal prefix up to and with that block. Here an id becomes one page: its tokens are made from the id alone,
and the page hash is the real hash chain over them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from metadata.errors import FieldError, InvalidInput

TRACE_PAGE_TOKENS: Final = 512
"""Tokens of a block in the published traces."""

VOCABULARY: Final = 151_936
_MIX: Final = np.uint64(0x9E3779B97F4A7C15)


class TraceLine(msgspec.Struct, frozen=True):
    """One request of a trace; other fields are skipped."""

    hash_ids: list[int]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to replay.

    Attributes:
        name: for the report.
        requests: block ids of each request's prompt.
    """

    name: str
    requests: list[list[int]]

    @property
    def pages(self) -> int:
        """Pages that all requests ask for together."""
        return sum(len(r) for r in self.requests)

    @property
    def longest(self) -> int:
        """Pages of the longest request."""
        return max((len(r) for r in self.requests), default=0)


def read_trace(path: Path, limit: int | None = None) -> Load:
    """Return the first `limit` requests of a trace file.

    Raises:
        InvalidInput: the file cannot be read, or names the line that is no request.
    """
    try:
        with path.open("rb") as lines:
            requests = [_hash_ids(path, i, line) for i, line in enumerate(islice(lines, limit), start=1)]
    except OSError as error:
        detail = f"{path} cannot be read: {error.strerror}"
        raise InvalidInput("there is no such trace", [FieldError("TRACE", "unreadable", detail)]) from error
    if not requests:
        detail = f"{path} has no request"
        raise InvalidInput("the trace is empty", [FieldError("TRACE", "empty", detail)])
    return Load(path.name, requests)


def generate(requests: int = 400, *, seed: int = 7) -> Load:
    """Return a made-up load: users who share system prompts and come back with longer conversations.

    Args:
        requests: how many.
        seed: the same seed gives the same load.
    """
    dice = random.Random(seed)  # noqa: S311  a load, not a secret
    fresh = iter(range(1 << 40))
    systems = [[next(fresh) for _ in range(dice.randint(2, 8))] for _ in range(4)]
    users: list[list[int]] = []
    load: list[list[int]] = []
    for _ in range(requests):
        if users and dice.random() < 0.7:  # noqa: PLR2004  the share of follow-up turns
            at = dice.randrange(len(users))
            users[at] = users[at] + [next(fresh) for _ in range(dice.randint(1, 4))]
        else:
            at = len(users)
            users.append(dice.choice(systems) + [next(fresh) for _ in range(dice.randint(1, 6))])
        load.append(users[at])
    return Load("generated multi-turn load", load)


def tokens(ids: list[int], page_tokens: int) -> NDArray[np.uint32]:
    """Return the token ids of a prompt, uint32, (len(ids) * page_tokens,), from its block ids alone."""
    first = np.array(ids, dtype=np.uint64) * np.uint64(page_tokens)
    positions: NDArray[np.uint64] = np.add.outer(first, np.arange(page_tokens, dtype=np.uint64))
    mixed = np.multiply(positions, _MIX)  # wraps, on purpose
    mixed = np.bitwise_xor(mixed, np.right_shift(mixed, np.uint64(29)))
    return np.remainder(mixed, np.uint64(VOCABULARY)).astype(np.uint32).ravel()


def _hash_ids(path: Path, number: int, line: bytes) -> list[int]:
    try:
        ids = msgspec.json.decode(line, type=TraceLine).hash_ids
    except msgspec.MsgspecError as error:
        detail = f"line {number} of {path.name}: {error}"
        raise InvalidInput("this is no trace", [FieldError("TRACE", "bad_line", detail)]) from error
    if any(not 0 <= i < 1 << 50 for i in ids):
        detail = f"line {number} of {path.name}: ids must be 0 to 2^50"
        raise InvalidInput("this is no trace", [FieldError("TRACE", "bad_id", detail)])
    return ids
