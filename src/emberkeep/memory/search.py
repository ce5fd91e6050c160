"""Search over turns and stored answers: a bounded number of candidates, scored by their words and their meaning.

    query -> words of the index -> candidates -> score (words, meaning, age) -> recollections with a passage

A word that a hundred thousand turns have says little and costs much. So the index is asked only for the newest and
the oldest turns of each word, which also shows how common it is, and then for the turns that have two of the
rarest words: the turn that has both is among them, whenever it was.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from math import log, sqrt
from typing import NamedTuple

import apsw
import numpy as np

from emberkeep.memory.database import rows, value
from emberkeep.memory.records import conversation_id, conversation_token, unpack_uses, word_token
from emberkeep.memory.vectors import Floats, Ids, Term, Vectors, asked_stems, similarities, stems_of, terms_of
from emberkeep.text import encodable
from emberkeep.types.memory import MemoryKind, Recollection
from emberkeep.values import dataclass

_CANDIDATES = 48
_READ_CHARS = 60_000
"""All candidates together are read so far: their words are counted one by one."""
_LEAST_CHARS = 1000
"""Each of them is read so far at least."""


class Query(NamedTuple):
    text: str
    max_results: int
    conversation: str | None
    exclude: Collection[int]


class _Row(NamedTuple):
    id: int
    conversation: str | None
    at: float
    words: int
    key: bytes
    user_text: str
    assistant_text: str
    tool_uses: str


def search(
    db: apsw.Connection, owner: str, query: Query, vectors: Vectors | None, meaning: Floats | None
) -> list[Recollection]:
    """The best first. `meaning` is the vector of the query, where there are vectors."""
    scope = _find_scope(db, owner, query.conversation)
    if scope is None or query.max_results < 1:
        return []
    words = _look_up_words(db, scope, asked_stems(query.text))
    known = _candidates(db, scope, words, max(_CANDIDATES, query.max_results), query.exclude)
    near: list[int] = []
    meant: dict[int, float] = {}
    if vectors is not None and meaning is not None and meaning.any():
        near = vectors.nearest(db, scope.owner, scope.conversation, meaning, query.exclude)
        meant = similarities(db, [*known, *near], meaning)
    near.sort(key=lambda id_: -meant.get(id_, 0.0))
    ids = {*known, *near[: max(_CANDIDATES, query.max_results)]}
    scored = _score(_read(db, list(ids)), _Question(words, scope.usual_length, known), meant)
    return [_recollection(score, row, words) for score, row in scored[: query.max_results]]


def _score(found: Sequence[_Row], question: _Question, meant: dict[int, float]) -> list[tuple[float, _Row]]:
    """Those that answer anything at all, the best first."""
    most_chars = max(_LEAST_CHARS, _READ_CHARS // max(len(found), 1))
    now = time.time()
    scored = []
    for row in found:
        by_words = _relevance(_beginning(row, most_chars), row.words, question, question.known.get(row.id, 0.0))
        scored.append((_fuse(by_words, meant.get(row.id, 0.0)) * _freshness(now - row.at), row))
    return sorted((one for one in scored if one[0] > 0), key=lambda one: (-one[0], -one[1].id))


def _find_scope(db: apsw.Connection, owner: str, conversation: str | None) -> _Scope | None:
    """None where there is nothing to search."""
    found = rows(db, "SELECT id, turns + answers, words FROM owners WHERE name = ?", owner)
    if not found or not found[0][1]:
        return None
    id_, count, words = found[0]
    within = conversation_id(db, id_, conversation) if conversation is not None else None
    if conversation is not None and within is None:
        return None
    first, last = value(db, "SELECT min(id) FROM turns"), value(db, "SELECT max(id) FROM turns")
    return _Scope(id_, within, count, words / count, first, last)


def _read(db: apsw.Connection, ids: list[int]) -> list[_Row]:
    sql = f"""SELECT t.id, c.name, t.at, t.words, t.key, t.user_text, t.assistant_text, t.tool_uses
              FROM turns AS t LEFT JOIN conversations AS c ON c.id = t.conversation
              WHERE t.id IN ({",".join("?" * len(ids))})"""
    return [_Row(*values) for values in rows(db, sql, *ids)]


def _beginning(row: _Row, most_chars: int) -> _Texts:
    # As JSON: unpacking all of it takes longer than counting.
    tools = row.tool_uses[:most_chars].replace("\\n", " ")
    return row.user_text[:most_chars], row.assistant_text[:most_chars], tools


def _recollection(score: float, row: _Row, words: list[_Word]) -> Recollection:
    kind = MemoryKind.ANSWER if row.conversation is None else MemoryKind.TURN
    texts, uses = (row.user_text, row.assistant_text), unpack_uses(row.tool_uses)
    passage, matches = _matching_passage(texts, words)
    return Recollection(
        row.id, kind, score, *texts, uses, row.at, row.conversation or "", passage, matches, row.key
    )


# ── which turns could answer ──

_WORDS = 24
"""So many words of a question are looked up: its last ones, where people ask."""
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
class _Scope:
    owner: int
    conversation: int | None
    turns: int
    """How many the owner has."""
    usual_length: float
    """How many words one of them has."""
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
class _Word:
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


def _look_up_words(db: apsw.Connection, scope: _Scope, stems: Iterable[str]) -> list[_Word]:
    """The words, the rarest first."""
    words = [_look_up(db, scope, stem) for stem in list(stems)[-_WORDS:]]
    return sorted(words, key=lambda word: word.turns)


def _candidates(
    db: apsw.Connection, scope: _Scope, words: list[_Word], count: int, exclude: Collection[int]
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


def _look_up(db: apsw.Connection, scope: _Scope, stem: str) -> _Word:
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
    return _Word(stem, ids, turns, is_complete, weight)


def _estimate(scope: _Scope, newest: Ids, oldest: Ids) -> float:
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


def _oldest_looked_at(scope: _Scope, one: _Word, other: _Word) -> int:
    """The id from which on two words have so many turns as may be passed over."""
    share = min(1.0, _SCANNED / max(one.turns + other.turns, 1.0))
    return int(scope.last - share * scope.length) if share < 1 else 0


# ── how well a turn answers, from 0 to 1 ──

_SATURATION = 0.8
_LENGTH = 0.3
"""BM25's k1 and b; the usual 1.2 and 0.75 are for pages. Turns are short, and small models repeat themselves."""
_WEIGHTS = (1.3, 0.6, 0.4)
"""What a word counts for where it stands: what people said themselves is what they ask for."""
_APART = 0.7
"""What it costs when the words stand in different sentences, or not at all: the answer to a question has them in
one, and the same question about something else has them all over its own answer."""
_SENTENCES = 40
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n+")
_RECENT = 0.15
"""Share of the score that age takes away in the end: an old exact answer stays before a vague new one."""
_HALF_LIFE_S = 30 * 86400.0
_UNRELATED, _SAME = 0.12, 0.6
"""Cosines of texts that have nothing to do with each other, and of the same thing in other words."""
_MEANT = 0.8
"""What the same meaning counts for without a single common word."""
_SNIPPET = 24
_HITS = 500
_LEAD = 4
"""Words of a passage, those of a text that it may begin with, how many stand before one of them."""

_Texts = tuple[str, str, str]
"""What the user said, what the assistant said, and what went to and came from tools."""


@dataclass(frozen=True, slots=True)
class _Question:
    words: Sequence[_Word]
    usual_length: float
    """How many words a turn has."""
    known: Mapping[int, float]
    """Turns with the weight of those words that they are known to have, somewhere."""


def _relevance(texts: _Texts, length: int, question: _Question, known: float) -> float:
    """BM25 with a weight for each part of a turn, as a share of what a turn could have at most.

    `texts` may be only the beginning of a turn of `length` words: what is `known` of it counts in any case.
    """
    best: float = sum(word.weight for word in question.words)
    if best <= 0:
        return 0.0
    parts = [(weight, _sentences(text)) for weight, text in zip(_WEIGHTS, texts, strict=True) if text]
    slack = _SATURATION * (1 - _LENGTH + _LENGTH * length / max(question.usual_length, 1.0))
    gained: float = 0.0
    for word in question.words:
        often = sum(weight * stems.count(word.stem) for weight, sentences in parts for stems in sentences)
        gained += word.weight * often / (often + slack)
    least = known * _WEIGHTS[-1] / (_WEIGHTS[-1] + slack)
    together = max((_share_had(question, stems) for _, sentences in parts for stems in sentences), default=0.0)
    return max(gained, least) / best * (1 - _APART * (1 - together))


def _sentences(text: str) -> list[list[str]]:
    """The stems of each."""
    pieces = _SENTENCE_END.split(text, maxsplit=_SENTENCES)
    return [stems_of(piece) for piece in pieces]


def _share_had(question: _Question, stems: list[str]) -> float:
    """The share of the words that a sentence has, of those that any turn has. Whatever they weigh: a name that a
    small model repeats in all of its answers weighs nothing, and is still what was asked for."""
    known = [word.stem for word in question.words if word.turns]
    return sum(stem in stems for stem in known) / max(len(known), 1)


def _freshness(age_s: float) -> float:
    fresh: float = 0.5 ** (max(age_s, 0.0) / _HALF_LIFE_S)
    return 1 - _RECENT * (1 - fresh)


def _fuse(by_words: float, meant: float) -> float:
    """The score for the same words and for the same meaning (a cosine): either is enough, both are better.

    Ranks are not fused, as is usual: the nearest vector of a question about nothing that is remembered would be
    worth as much as a perfect match.
    """
    near = min(max((meant - _UNRELATED) / (_SAME - _UNRELATED), 0.0), 1.0)
    return 1 - (1 - by_words) * (1 - _MEANT * near)


_Passage = tuple[str, tuple[tuple[int, int], ...]]
"""Its text, and where in it the words stand."""


def _matching_passage(texts: tuple[str, str], words: Sequence[_Word]) -> _Passage:
    """The one with the most of the words; the beginning where there is none."""
    weights = {word.stem: word.weight for word in words}
    parts = [(text, terms_of(text)) for text in texts]
    passages = [_best_passage(terms, weights) for _, terms in parts]
    chosen = max((0, 1), key=lambda i: passages[i][0])
    text, terms = parts[chosen]
    return _passage(encodable(text).encode(), terms, passages[chosen][1], weights)


def _best_passage(terms: list[Term], weights: dict[str, float]) -> tuple[float, int]:
    """(weight of the different words in it, index of its first word)."""
    hits = [i for i, (_, _, stem) in enumerate(terms) if stem in weights][:_HITS]
    best = (0.0, 0)
    for first, hit in enumerate(hits):
        within = {terms[i][2] for i in hits[first : bisect_left(hits, hit + _SNIPPET - _LEAD)]}
        best = max(best, (sum(weights[stem] for stem in within), max(0, hit - _LEAD)), key=lambda one: one[0])
    return best


def _passage(encoded: bytes, terms: list[Term], first: int, weights: dict[str, float]) -> _Passage:
    shown = terms[first : first + _SNIPPET]
    begin = shown[0][0] if first else 0
    end = shown[-1][1] if first + _SNIPPET < len(terms) else len(encoded)
    text, at, matches = "", begin, []
    for start, stop, stem in shown:
        if stem in weights and start >= at:
            text += encoded[at:start].decode()
            word = encoded[start:stop].decode()
            matches.append((len(text), len(text) + len(word)))
            text, at = text + word, stop
    text += encoded[at:end].decode()
    lead = "…" if begin else ""
    moved = len(lead) - (len(text) - len(text.lstrip()))
    passage = f"{lead}{text.strip()}{'…' if end < len(encoded) else ''}"
    return passage, tuple((start + moved, stop + moved) for start, stop in matches)
