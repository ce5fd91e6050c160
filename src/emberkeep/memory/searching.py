"""Search over turns and stored answers."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import NamedTuple

import apsw

from emberkeep.memory.finding import Scope, Word, candidates, look_up
from emberkeep.memory.ranking import Texts, freshness, highlight, relevance
from emberkeep.memory.rows import conversation_id, unpack_uses
from emberkeep.memory.sql import rows, value
from emberkeep.memory.terms import asked_stems
from emberkeep.types import MemoryKind, Recollection

_CANDIDATES = 64
_READ_CHARS = 160_000
"""Of all candidates together: their words are counted one by one."""
_LEAST_CHARS = 1000
"""Of each."""


class _Row(NamedTuple):
    id: int
    conversation: str | None
    at: float
    words: int
    user_text: str
    assistant_text: str
    tool_uses: str


def search(
    db: apsw.Connection,
    owner: str,
    query: str,
    max_results: int,
    conversation: str | None,
    exclude: Collection[int],
) -> list[Recollection]:
    """The best first."""
    found = _scope(db, owner, conversation)
    stems = asked_stems(query)
    if found is None or not stems or max_results < 1:
        return []
    scope, usual_length = found
    words = look_up(db, scope, stems)
    ids = candidates(db, scope, words, max(_CANDIDATES, max_results), exclude)
    found_rows = _read(db, ids.tolist())
    most_chars = max(_LEAST_CHARS, _READ_CHARS // max(len(found_rows), 1))
    now = time.time()
    scored = [
        (relevance(_texts(row, most_chars), words, row.words, usual_length) * freshness(now - row.at), row)
        for row in found_rows
    ]
    scored.sort(key=lambda one: (-one[0], -one[1].id))
    return [_recollection(score, row, words) for score, row in scored[:max_results]]


def _texts(row: _Row, most_chars: int | None = None) -> Texts:
    tools = "\n".join(" ".join((u.name, u.arguments, u.result)) for u in unpack_uses(row.tool_uses))
    return row.user_text[:most_chars], row.assistant_text[:most_chars], tools[:most_chars]


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
    sql = f"""SELECT t.id, c.name, t.at, t.words, t.user_text, t.assistant_text, t.tool_uses
              FROM turns AS t LEFT JOIN conversations AS c ON c.id = t.conversation
              WHERE t.id IN ({",".join("?" * len(ids))})"""
    return [_Row(*values) for values in rows(db, sql, *ids)]


def _recollection(score: float, row: _Row, words: list[Word]) -> Recollection:
    kind = MemoryKind.ANSWER if row.conversation is None else MemoryKind.TURN
    texts, uses = (row.user_text, row.assistant_text), unpack_uses(row.tool_uses)
    return Recollection(
        row.id, kind, score, *texts, uses, row.at, row.conversation or "", highlight(_texts(row), words)
    )
