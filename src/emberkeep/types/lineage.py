"""Lineages say whose state it is, and how exact."""

from __future__ import annotations

import json
from enum import StrEnum
from functools import lru_cache
from typing import Literal

from emberkeep.values import dataclass

SHARED = "*"
"""The owner of what an operator declared shareable: all users read it, only `--warm` writes it. No user's
namespace looks like this (see `private_namespace`)."""

EXACT_BITS = 16
"""State in the engine's own type, whichever that is."""

_SPLICE = "cut-"


class Repair(StrEnum):
    """What is evaluated again of state that was moved from another position."""

    NONE = "none"  # nothing: its keys are rotated to where they stand now
    SELECTIVE = "selective"  # the tokens next to each seam
    CACHEBLEND = "cacheblend"  # the tokens that differ most after the first layers


def private_namespace(user: str, salt: str = "") -> str:
    """The owner of one user's state. A JSON list: no user and salt can be chosen to look like another pair."""
    return json.dumps([user, salt]) if user or salt else ""


def user_of(owner: str) -> str:
    """Inverse of `private_namespace`, without salt. Raises ValueError, LookupError, TypeError, RecursionError."""
    return str(json.loads(owner)[0]) if owner.startswith("[") else ""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where a chunk of state comes from: its owner, and what was done to it that makes it approximate.

    Each way to be approximate is a mark. A lookup sees a chunk of its owner, or a shared one, if it has all the
    chunk's marks itself: an exact lookup sees exact chunks only.

    In keys, files and the index a lineage is its name, `str(lineage)`: `~MARKS~OWNER`, or the owner alone where it
    is exact. Stored state depends on that.
    """

    owner: str = ""
    bits: int = EXACT_BITS
    """In how many bits the state is stored."""
    repair: Repair | None = None
    """How state that was moved from other positions was repaired. None: nothing was moved."""
    splice: str = ""
    """Names the conversation in which messages were taken out of the context, and out of the state with them.
    Empty: nothing was."""

    @property
    def is_exact(self) -> bool:
        return self.bits == EXACT_BITS and self.repair is None and not self.splice

    @property
    def in_place(self) -> Lineage:
        """This lineage without what was moved into it or spliced out."""
        return Lineage(self.owner, self.bits)

    @property
    def user(self) -> str:
        return user_of(self.owner)

    def sees(self, other: Lineage) -> bool:
        """Whether a request of this lineage may reuse state of the other one."""
        return (
            (other.owner == self.owner or other.owner == SHARED)
            and (other.bits == EXACT_BITS or other.bits == self.bits)
            and (other.repair is None or other.repair is self.repair)
            and (not other.splice or other.splice == self.splice)
        )

    def __str__(self) -> str:
        marks = [] if self.bits == EXACT_BITS else [str(self.bits)]
        marks += [self.repair] if self.repair else []
        marks += [f"{_SPLICE}{self.splice}"] if self.splice else []
        return f"~{'+'.join(sorted(marks))}~{self.owner}" if marks else self.owner

    @staticmethod
    @lru_cache(maxsize=4096)
    def parse(name: str) -> Lineage:
        """The inverse of `str`. A malformed name becomes an owner that no user is: nothing sees it."""
        if not name.startswith("~"):
            return Lineage(name)
        marks, _, owner = name[1:].partition("~")
        bits, repair, splice = EXACT_BITS, None, ""
        for mark in marks.split("+"):
            if mark.isdecimal():
                bits = int(mark)
            elif mark in _REPAIRS:
                repair = Repair(mark)
            else:
                splice = mark.removeprefix(_SPLICE)
        parsed = Lineage(owner, bits, repair, splice)
        return parsed if str(parsed) == name else Lineage(name)


_REPAIRS = frozenset(Repair)

EXACT = Lineage()
"""The exact lineage of requests without a user."""


def owner_of(name: str) -> str:
    """The owner in a lineage's name, even in a malformed one."""
    return name[1:].partition("~")[2] if name.startswith("~") else name


@dataclass(frozen=True, slots=True)
class Approximation:
    """Stored state may be reused at other positions than where it was computed. The result is not exact."""

    repair: Repair = Repair.CACHEBLEND
    ratio: float = 0.15
    """`cacheblend`: the share of the moved tokens that is evaluated again."""
    boundary: int = 16
    """`selective`: how many tokens at a seam are evaluated again."""
    side: Literal["first", "last", "both"] = "first"
    """`selective`: at which end of what was moved they are."""
    overlap: int = 0
    """Where two matches overlap, at most so many of their common tokens are evaluated again."""
    sinks: int = 4
    """The first tokens of a sequence (attention sinks), which are neither moved nor replaced."""
