"""Search over turns and stored answers."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import apsw

from emberkeep.memory.embedding import Floats
from emberkeep.memory.finding import Scope, Word, candidates, look_up
from emberkeep.memory.ranking import Question, Texts, freshness, fused, highlight, relevance
from emberkeep.memory.rows import conversation_id, unpack_uses
from emberkeep.memory.sql import rows, value
from emberkeep.memory.terms import asked_stems
from emberkeep.memory.vectors import Vectors, similarities
from emberkeep.types import MemoryKind, Recollection

_CANDIDATES = 48
_READ_CHARS = 60_000
"""Of all candidates together: their words are counted one by one."""
_LEAST_CHARS = 1000
"""Of each."""


class Asked(NamedTuple):
    query: str
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
    db: apsw.Connection, owner: str, asked: Asked, vectors: Vectors | None, meaning: Floats | None
) -> list[Recollection]:
    """The best first. `meaning` is the vector of the query, where there are vectors."""
    found = _scope(db, owner, asked.conversation)
    if found is None or asked.max_results < 1:
        return []
    scope, usual_length = found
    words = look_up(db, scope, asked_stems(asked.query))
    known = candidates(db, scope, words, max(_CANDIDATES, asked.max_results), asked.exclude)
    near: list[int] = []
    meant: dict[int, float] = {}
    if vectors is not None and meaning is not None and meaning.any():
        near = vectors.nearest(db, scope.owner, scope.conversation, meaning, asked.exclude)
        meant = similarities(db, [*known, *near], meaning)
    near.sort(key=lambda id_: -meant.get(id_, 0.0))
    ids = {*known, *near[: max(_CANDIDATES, asked.max_results)]}
    scored = _scored(_read(db, list(ids)), Question(words, usual_length, known), meant)
    return [_recollection(score, row, words) for score, row in scored[: asked.max_results]]


def _scored(found: Sequence[_Row], question: Question, meant: dict[int, float]) -> list[tuple[float, _Row]]:
    """Those that answer anything at all, the best first."""
    most_chars = max(_LEAST_CHARS, _READ_CHARS // max(len(found), 1))
    now = time.time()
    scored = []
    for row in found:
        said = relevance(_beginning(row, most_chars), row.words, question, question.known.get(row.id, 0.0))
        scored.append((fused(said, meant.get(row.id, 0.0)) * freshness(now - row.at), row))
    return sorted((one for one in scored if one[0] > 0), key=lambda one: (-one[0], -one[1].id))


def _scope(db: apsw.Connection, owner: str, conversation: str | None) -> tuple[Scope, float] | None:
    """What is searched, and how many words its turns have; None where there is nothing."""
    found = rows(db, "SELECT id, turns + answers, words FROM owners WHERE name = ?", owner)
    if not found or not found[0][1]:
        return None
    id_, count, words = found[0]
    within = conversation_id(db, id_, conversation) if conversation is not None else None
    if conversation is not None and within is None:
        return None
    first, last = value(db, "SELECT min(id) FROM turns"), value(db, "SELECT max(id) FROM turns")
    return Scope(id_, within, count, first, last), words / count


def _read(db: apsw.Connection, ids: list[int]) -> list[_Row]:
    sql = f"""SELECT t.id, c.name, t.at, t.words, t.key, t.user_text, t.assistant_text, t.tool_uses
              FROM turns AS t LEFT JOIN conversations AS c ON c.id = t.conversation
              WHERE t.id IN ({",".join("?" * len(ids))})"""
    return [_Row(*values) for values in rows(db, sql, *ids)]


def _beginning(row: _Row, most_chars: int) -> Texts:
    tools = row.tool_uses[:most_chars].replace(
        "\\n", " "
    )  # as JSON: unpacking all of it takes longer than counting
    return row.user_text[:most_chars], row.assistant_text[:most_chars], tools


def _recollection(score: float, row: _Row, words: list[Word]) -> Recollection:
    kind = MemoryKind.ANSWER if row.conversation is None else MemoryKind.TURN
    texts, uses = (row.user_text, row.assistant_text), unpack_uses(row.tool_uses)
    shown = highlight(texts, words)
    return Recollection(row.id, kind, score, *texts, uses, row.at, row.conversation or "", shown, row.key)
