"""Which turns could answer a question: a bounded number of candidates, however many turns there are.

A word that a hundred thousand turns have says little and costs much. So the index is asked for the newest turns of
each word only, which also shows how common the word is, and then for the turns that have two of the rarest words:
the old turn that has both is among them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import combinations
from math import log

import apsw
import numpy as np
import numpy.typing as npt

from emberkeep.memory.rows import conversation_token, word_token
from emberkeep.memory.sql import value

Ids = npt.NDArray[np.int64]

_WORDS = 24
"""Of a question that are looked up: its last ones, where people ask."""
_NEWEST = 400
"""Turns of one word."""
_PAIRED = 4
"""The rarest words, each two of which are looked up together."""
_SCANNED = 40_000
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
    """The newest turns that have it."""
    turns: float
    """About how many have it."""
    is_complete: bool
    weight: float
    """BM25's inverse document frequency."""


def look_up(db: apsw.Connection, scope: Scope, stems: Iterable[str]) -> list[Word]:
    """The words, the rarest first."""
    words = [_word(scope, stem, _newest(db, scope.match(stem), _NEWEST)) for stem in list(stems)[-_WORDS:]]
    return sorted(words, key=lambda word: word.turns)


def candidates(db: apsw.Connection, scope: Scope, words: list[Word], count: int, exclude: Collection[int]) -> Ids:
    """At most `count` turns, those with the most weight first, then the newest."""
    having = {word.stem: [word.ids] for word in words}
    for one, other in combinations([word for word in words if len(word.ids)][:_PAIRED], 2):
        if not (one.is_complete and other.is_complete):
            both = _newest(db, scope.match(one.stem, other.stem), count, _oldest_looked_at(scope, one, other))
            having[one.stem].append(both)
            having[other.stem].append(both)
    lists = [np.unique(np.concatenate(having[word.stem])) for word in words]
    weights = [np.full(len(ids), word.weight) for ids, word in zip(lists, words, strict=True)]
    ids, places = np.unique(np.concatenate(lists), return_inverse=True)
    gained = np.bincount(places, np.concatenate(weights), len(ids))
    if exclude:
        gained[np.isin(ids, np.fromiter(exclude, np.int64))] = -1.0
    best = np.lexsort((-ids, -gained))[:count]
    return ids[best][gained[best] > 0]


def _newest(db: apsw.Connection, match: str, limit: int, oldest: int = 0) -> Ids:
    sql = """SELECT group_concat(rowid, ' ') FROM
             (SELECT rowid FROM words WHERE words MATCH ? AND rowid >= ? ORDER BY rowid DESC LIMIT ?)"""
    joined = value(db, sql, match, oldest, limit)
    return np.array((joined or "").split(), np.int64)


def _word(scope: Scope, stem: str, ids: Ids) -> Word:
    is_complete = len(ids) < _NEWEST
    turns = (
        len(ids)
        if is_complete
        else len(ids) * max(1.0, (scope.last - scope.first + 1) / (scope.last - ids[-1] + 1))
    )
    turns = min(float(turns), float(max(scope.turns, len(ids))))
    total = max(scope.turns, len(ids))
    return Word(stem, ids, turns, is_complete, log(1 + (total - turns + 0.5) / (turns + 0.5)))


def _oldest_looked_at(scope: Scope, one: Word, other: Word) -> int:
    """The id from which on two words have so many turns as may be passed over."""
    share = min(1.0, _SCANNED / max(one.turns + other.turns, 1.0))
    return int(scope.last - share * (scope.last - scope.first + 1)) if share < 1 else 0
