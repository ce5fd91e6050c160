"""Whose state it is, and whether it is exact."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

from emberkeep.types.asking import Repair

SHARED = "*"
"""The namespace of what an operator declared shareable: everybody reads it, only `--warm` writes it. No
user's namespace looks like this (see `private_namespace`)."""


def private_namespace(user: str, salt: str = "") -> str:
    """Where one user's state lives. A JSON list: no user and salt can be chosen to look like another pair."""
    return json.dumps([user, salt]) if user or salt else ""


def user_of(namespace: str) -> str:
    """The inverse of `private_namespace`, without the salt. Lineages belong to whom their state belongs to."""
    owner = exact_namespace(namespace)
    return str(json.loads(owner)[0]) if owner.startswith("[") else ""


# State that was moved, cut or quantised is approximate: it lives under a namespace of its own, `~MARKS~NAMESPACE`,
# which an exact lookup never sees. A lookup that allows some marks sees what has no other ones.


def marked_namespace(namespace: str, marks: Sequence[str]) -> str:
    """Where state of an exact `namespace` lives that is approximate in the ways that `marks` name."""
    return f"~{'+'.join(sorted(marks))}~{namespace}" if marks else namespace


EXACT_BITS = 16
"""As the engine has it, whatever its own type is."""


_REPAIRS = frozenset(Repair)
_CUT = "cut-"


def cut_mark(root: str) -> str:
    """The mark of state out of which something was cut; `root` names the conversation that it was cut in."""
    return f"{_CUT}{root}"


def bits_of(namespace: str) -> int:
    """In how many bits the state of a namespace is stored."""
    return next((int(mark) for mark in _split_marks(namespace)[0] if mark.isdigit()), EXACT_BITS)


def repair_of(namespace: str) -> Repair | None:
    """How what was moved in the state of a namespace was repaired; None where nothing was moved."""
    return next((Repair(mark) for mark in _split_marks(namespace)[0] if mark in _REPAIRS), None)


def without_mark(namespace: str, mark: str) -> str:
    """Where state lives that is approximate in the other ways of `namespace` only."""
    marks, owner = _split_marks(namespace)
    return marked_namespace(owner, [other for other in marks if other != mark])


def exact_namespace(namespace: str) -> str:
    """Whose namespace it is, without its marks."""
    return _split_marks(namespace)[1]


@lru_cache(maxsize=1024)
def visible_to(namespace: str) -> frozenset[str]:
    """Every namespace whose state may be reused for a request that belongs to `namespace`."""
    marks, owner = _split_marks(namespace)
    allowed = [some for count in range(len(marks) + 1) for some in combinations(marks, count)]
    return frozenset(marked_namespace(base, some) for base in (owner, SHARED) for some in allowed)


def _split_marks(namespace: str) -> tuple[list[str], str]:
    if not namespace.startswith("~"):
        return [], namespace
    marks, _, owner = namespace[1:].partition("~")
    return marks.split("+"), owner
