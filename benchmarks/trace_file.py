"""Recorded requests: one per line, in the form of the traces that were published with Mooncake.

    {"timestamp": 3000, "input_length": 1100, "output_length": 60, "hash_ids": [0, 7, 8]}

Each id stands for 512 tokens and everything before them; the last one for what is left. Times are milliseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from emberkeep.errors import EmberkeepError
from emberkeep.values import dataclass

BLOCK = 512
MOST = 2**31 - 1
"""Ids stand in for tokens."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request."""

    blocks: tuple[int, ...]
    tokens: int
    answer: int = 0
    """Tokens."""
    at: float = 0.0
    """Seconds since the trace began."""

    def covered(self, blocks: int) -> int:
        """Tokens of its first so many blocks."""
        return min(blocks * BLOCK, self.tokens)


def read_trace(path: Path, *, timed: bool = False) -> list[Visit]:
    """`timed`: when requests came and how long their answers were has to be there. Blocks. Raises EmberkeepError,
    OSError."""
    before: dict[int, tuple[int | None, int]] = {}
    visits = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        visit = _visit(line, timed=timed)
        if visit is None or not _fits(visit, before):
            needed = " with `timestamp` and `output_length`" if timed else ""
            wrong = f"{path.name}, line {number} is not a request of a trace{needed}"
            raise EmberkeepError(f"{wrong}: see `trace` in docs/benchmarks.md.")
        visits.append(visit)
    if not visits:
        raise EmberkeepError(f"{path.name} is empty: give a trace with at least one request.")
    return visits


def _visit(line: str, *, timed: bool) -> Visit | None:
    try:
        fields = json.loads(line)
        blocks = tuple(int(block) for block in fields["hash_ids"])
        answer, at = _timing(fields) if timed else (0, 0.0)
        visit = Visit(blocks, int(fields["input_length"]), answer, at)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    is_long_enough = 0 < visit.tokens <= len(visit.blocks) * BLOCK < visit.tokens + BLOCK
    return visit if is_long_enough and all(0 <= block <= MOST for block in visit.blocks) else None


def _timing(fields: Mapping[str, Any]) -> tuple[int, float]:
    """Raises KeyError, TypeError, ValueError."""
    answer, at = int(fields["output_length"]), float(fields["timestamp"]) / 1000
    if answer < 0 or at < 0 or not isfinite(at):
        raise ValueError("a request from before the trace, or an answer of less than nothing")
    return answer, at


def _fits(visit: Visit, before: dict[int, tuple[int | None, int]]) -> bool:
    """Whether each of its ids follows the same one as everywhere else, and stands for as many tokens."""
    parent = None
    for index, block in enumerate(visit.blocks):
        place = (parent, visit.covered(index + 1) - visit.covered(index))
        if before.setdefault(block, place) != place:
            return False
        parent = block
    return True
