"""One pattern for many fixed texts, such as the special tokens of a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

_MAX_NESTING = 100


def alternatives(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Whichever of them comes first, the longest where several begin there; None where there are none.

    Beginnings that several have in common are compared once: `re` tries alternatives one by one, and a vocabulary
    with 6,000 of them that begin with `<` would make every `<` of a text cost as much as 6,000 comparisons.
    """
    distinct = sorted({text for text in texts if text})
    if not distinct:
        return None
    pattern = _one_of(distinct, _MAX_NESTING)
    longest_first = sorted(distinct, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if pattern is None else pattern)


def _one_of(texts: list[str], nesting: int) -> str | None:
    """A pattern for `texts`, which are sorted; None where `re` could not read it, so deep would it be."""
    start = _common_start(texts[0], texts[-1])
    rests = [text[len(start) :] for text in texts]
    if rests == [""]:
        return re.escape(start)
    if not nesting:
        return None
    branches = [_one_of(list(same), nesting - 1) for first, same in groupby(rests, lambda rest: rest[:1]) if first]
    if None in branches:
        return None
    # An empty alternative, the last to be tried, where one of them ends here already.
    ends = [""] if not rests[0] else []
    return re.escape(start) + "(?:" + "|".join([*filter(None, branches), *ends]) + ")"


def _common_start(a: str, b: str) -> str:
    return a[: next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), len(a))]
