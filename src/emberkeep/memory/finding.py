"""Which turns could answer a question: a bounded number of candidates, however many turns there are.

A word that a hundred thousand turns have says little and costs much. So the index is asked only for the newest and
the oldest turns of each word, which also shows how common it is, and then for the turns that have two of the
rarest words: the turn that has both is among them, whenever it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import combinations
from math import log, sqrt

import apsw
import numpy as np
import numpy.typing as npt

from emberkeep.memory.rows import conversation_token, word_token
from emberkeep.memory.sql import value

Ids = npt.NDArray[np.int64]

_WORDS = 24
"""Of a question that are looked up: its last ones, where people ask."""
_NEWEST, _OLDEST = 200, 64
"""Turns of one word; the oldest only of one that has more."""
_LEAST_WEIGHT = 0.2
"""How common a word is, is only estimated."""
_UNKNOWN = 0.3
"""What a word counts for that no turn has: people say more than they ask, and names in it are nothing to find."""
_PAIRED = 4
"""The rarest words, each two of which are looked up together."""
_SCANNED = 30_000
"""Index entries that looking up a pair may pass over; beyond them the oldest turns are not looked at."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose turns are searched."""

    owner: int
    conversation: int | None
    turns: int
    """How many the owner has."""
    first: int
    last: int
    """Ids of the oldest and the newest of all turns."""

    @property
    def length(self) -> int:
        return self.last - self.first + 1

    def match(self, *stems: str) -> str:
        """As an FTS5 expression: every token is quoted, so that none of them is syntax."""
        tokens = [word_token(self.owner, stem) for stem in stems]
        if self.conversation is not None:
            tokens.append(conversation_token(self.conversation))
        return " AND ".join(f'"{token}"' for token in tokens)


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the question."""

    stem: str
    ids: Ids
    """Turns that have it."""
    turns: float
    """About how many have it."""
    is_complete: bool
    """There are no others."""
    weight: float
    """BM25's inverse document frequency."""


def look_up(db: apsw.Connection, scope: Scope, stems: Iterable[str]) -> list[Word]:
    """The words, the rarest first."""
    words = [_look_up(db, scope, stem) for stem in list(stems)[-_WORDS:]]
    return sorted(words, key=lambda word: word.turns)


def candidates(
    db: apsw.Connection, scope: Scope, words: list[Word], count: int, exclude: Collection[int]
) -> dict[int, float]:
    """At most `count` turns, those with the most weight first, then the newest; and the weight of their words, as
    far as the index was asked."""
    if not words:
        return {}
    having = {word.stem: [word.ids] for word in words}
    for one, other in combinations([word for word in words if len(word.ids)][:_PAIRED], 2):
        if not (one.is_complete and other.is_complete):
            first = _oldest_looked_at(scope, one, other)
            both = _some(db, scope.match(one.stem, other.stem), count, first=first)
            having[one.stem].append(both)
            having[other.stem].append(both)
    lists = [np.unique(np.concatenate(having[word.stem])) for word in words]
    weights = [np.full(len(ids), word.weight) for ids, word in zip(lists, words, strict=True)]
    ids, places = np.unique(np.concatenate(lists), return_inverse=True)
    gained = np.bincount(places, np.concatenate(weights), len(ids))
    if exclude:
        gained[np.isin(ids, np.fromiter(exclude, np.int64))] = -1.0
    best = np.lexsort((-ids, -gained))[:count]
    return {int(ids[i]): float(gained[i]) for i in best if gained[i] > 0}


def _look_up(db: apsw.Connection, scope: Scope, stem: str) -> Word:
    match = scope.match(stem)
    ids = _some(db, match, _NEWEST)
    is_complete = len(ids) < _NEWEST
    turns = float(len(ids))
    if not is_complete:
        oldest = _some(db, match, _OLDEST, order="ASC")
        turns = max(turns, _estimate(scope, ids, oldest))
        ids = np.concatenate([ids, oldest])
    others = max(scope.turns - turns, 0.0)
    weight = max(log(1 + (others + 0.5) / (turns + 0.5)), _LEAST_WEIGHT)
    if not turns:
        weight *= _UNKNOWN
    return Word(stem, ids, turns, is_complete, weight)


def _estimate(scope: Scope, newest: Ids, oldest: Ids) -> float:
    """How many turns have a word, by how close together its newest and its oldest ones are. Their geometric mean:
    a word that was used much for a while is close together at one end only."""
    # In a damaged file they may be anywhere.
    recently = len(newest) / max(scope.last - int(newest[-1]) + 1, 1)
    formerly = len(oldest) / max(int(oldest[-1]) - scope.first + 1, 1)
    return min(sqrt(recently * formerly) * scope.length, float(scope.turns))


def _some(db: apsw.Connection, match: str, limit: int, *, first: int = 0, order: str = "DESC") -> Ids:
    """The newest that match, or the oldest. FTS5 steps over every entry on its way, so it begins at an end."""
    sql = f"""SELECT group_concat(rowid, ' ') FROM (SELECT rowid FROM words
              WHERE words MATCH ? AND rowid >= ? ORDER BY rowid {order} LIMIT ?)"""
    joined = value(db, sql, match, first, limit)
    return np.array((joined or "").split(), np.int64)


def _oldest_looked_at(scope: Scope, one: Word, other: Word) -> int:
    """The id from which on two words have so many turns as may be passed over."""
    share = min(1.0, _SCANNED / max(one.turns + other.turns, 1.0))
    return int(scope.last - share * scope.length) if share < 1 else 0
