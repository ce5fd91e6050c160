"""The one way into memory."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from emberkeep.errors import MemoryFailed
from emberkeep.memory import records
from emberkeep.memory.database import Database, rows, value
from emberkeep.memory.export import export, import_rows
from emberkeep.memory.forget import forget, forgotten_since, retain
from emberkeep.memory.responses import Responses
from emberkeep.memory.search import Query, search
from emberkeep.memory.vectors import Embed, Vectors, add_vectors, turns_without_vectors
from emberkeep.text import encodable
from emberkeep.types.memory import Fact, Forgotten, Note, NoteKind, Recollection, SavedConversation, Turn
from emberkeep.types.request import Json, Message

_KEYS_AT_ONCE = 128
"""Keys of notes in one statement: always as many, so that SQLite has it prepared."""
_READ_NOTES = f"""SELECT key, kind, data FROM notes WHERE owner = (SELECT id FROM owners WHERE name = ?)
                  AND key IN ({",".join("?" * _KEYS_AT_ONCE)})"""


class Memory:
    """Safe to use from several threads and processes; every method blocks. Nothing of one owner is ever seen by
    another. Raises MemoryFailed: one sentence that says what is wrong and the way out."""

    def __init__(self, path: Path, *, limit_bytes: int, embed: Embed | None = None) -> None:
        """Opens the file at `path`, or creates it. With `embed`, which is first called by a search, search finds
        what means the same too."""
        self._limit = limit_bytes
        self._database = Database(path)
        self._vectors = Vectors(embed) if embed is not None else None
        self.responses = Responses(self._database, limit_bytes)

    def close(self) -> None:
        """Waits for what is under way. Idempotent."""
        self._database.close()

    # ── what left a context ──

    def archive(
        self,
        owner: str,
        turns: Sequence[Turn],
        notes: Sequence[Note] = (),
        *,
        conversation: str | None = None,
        as_of: int | None = None,
    ) -> int:
        """All of it in one transaction, on disk when this returns. A turn whose key the owner has is left as it
        is; a note replaces one of the same key and kind. Returns how many turns are new.

        `conversation` is what the notes belong to, and are forgotten with; by default that of the first turn.
        `as_of`: nothing is written if the owner or the conversation was forgotten since.
        """
        name = turns[0].conversation if turns and conversation is None else conversation
        with self._database.transaction() as db:
            if as_of is not None and forgotten_since(db, as_of, owner, encodable(name or "")):
                return 0
            id_ = records.make_owner(db, owner)
            added = [
                records.add_turn(db, id_, records.make_conversation(db, id_, turn.conversation), turn)
                for turn in turns
            ]
            within = records.make_conversation(db, id_, name) if name is not None and notes else None
            for note in notes:
                records.put_note(db, id_, within, note)
            retain(db, self._limit)
        return len(added) - added.count(None)

    def last_forgetting(self) -> int:
        """For `archive` and `forgotten_since`, of what begins now; 0 where there was none."""
        with self._database.snapshot() as db:
            return int(value(db, "SELECT max(id) FROM forgettings") or 0)

    def forgotten_since(self, as_of: int, owner: str, conversation: str) -> bool:
        with self._database.snapshot() as db:
            return forgotten_since(db, as_of, owner, encodable(conversation))

    def notes(self, owner: str, keys: Sequence[bytes]) -> list[Note]:
        """Every note at one of these places, in no order."""
        found: list[Any] = []
        with self._database.snapshot() as db:
            for begin in range(0, len(keys), _KEYS_AT_ONCE):
                some = keys[begin : begin + _KEYS_AT_ONCE]
                padding = (None,) * (_KEYS_AT_ONCE - len(some))
                found += rows(db, _READ_NOTES, owner, *some, *padding)
            return [Note(key, NoteKind(kind), json.loads(data)) for key, kind, data in found]

    def search(
        self,
        owner: str,
        query: str,
        *,
        max_results: int = 5,
        conversation: str | None = None,
        exclude: Collection[int] = (),
    ) -> list[Recollection]:
        """Archived turns and stored answers, the best first. `query` is what a person would ask, `exclude` are ids
        of recollections that are not wanted. Stored answers belong to no conversation."""
        meaning = None
        if self._vectors is not None:
            meaning = self._vectors.embed([query])[0]
            self._add_missing_vectors(self._vectors)
        with self._database.snapshot() as db:
            return search(db, owner, Query(query, max_results, conversation, exclude), self._vectors, meaning)

    # ── facts and answers ──

    def set_fact(self, owner: str, name: str, value: str) -> Fact:
        """It replaces one of the same name. Raises InvalidField for a secret."""
        with self._database.transaction() as db:
            records.set_fact(db, records.make_owner(db, owner), fact := Fact(name, value, time.time()))
        return fact

    def fact(self, owner: str, name: str) -> Fact | None:
        with self._database.snapshot() as db:
            facts = rows(db, f"{records.FACTS} AND f.name = ?", owner, encodable(name))
        return Fact(*facts[0]) if facts else None

    def facts(self, owner: str) -> list[Fact]:
        """By name."""
        with self._database.snapshot() as db:
            return records.read_facts(db, owner)

    def delete_fact(self, owner: str, name: str) -> bool:
        """Returns whether there was one."""
        with self._database.transaction() as db:
            sql = "DELETE FROM facts WHERE owner = (SELECT id FROM owners WHERE name = ?) AND name = ?"
            db.execute(sql, (owner, encodable(name)))
            return db.changes() > 0

    def store_answer(self, owner: str, question: str, answer: str) -> int:
        """Its id. The same question again replaces the answer."""
        with self._database.transaction() as db:
            turn = records.answer_turn(question, answer, time.time())
            return records.store_answer(db, records.make_owner(db, owner), turn)

    # ── saved conversations ──

    def save_messages(self, owner: str, conversation: str, messages: Sequence[Message], *, model: str) -> None:
        """Appends, verbatim; a new conversation gets its title from the first thing the user said."""
        with self._database.transaction() as db:
            records.save_messages(db, owner, conversation, messages, model)

    def replace_messages(self, owner: str, conversation: str, messages: Sequence[Message], *, model: str) -> None:
        with self._database.transaction() as db:
            records.save_messages(db, owner, conversation, messages, model, anew=True)

    def conversations(self, owner: str, limit: int = 50) -> list[SavedConversation]:
        """The latest first, without their messages."""
        with self._database.snapshot() as db:
            return records.saved_conversations(db, owner, limit=limit)

    def conversation(self, owner: str, conversation: str) -> SavedConversation | None:
        with self._database.snapshot() as db:
            return next(iter(records.saved_conversations(db, owner, name=conversation)), None)

    # ── housekeeping ──

    def forget(self, owner: str, conversation: str | None = None) -> Forgotten:
        """Removes one conversation, or everything of the owner, so that no byte of it is left in the file."""
        forgotten = forget(self._database, owner, conversation)
        if self._vectors is not None:
            with self._database.snapshot():
                self._vectors.forget()
        return forgotten

    def stats(self, owner: str | None = None) -> dict[str, Json]:
        """Counts, sizes and times; of all owners without one."""
        with self._database.snapshot() as db:
            return records.read_stats(db, owner, self._limit)

    def export(self, owner: str | None = None) -> Iterator[dict[str, Json]]:
        """JSON objects, `kind` first: a header, then one for each row. Others may write meanwhile."""
        return export(self._database, owner)

    def import_(self, rows: Iterable[Mapping[str, Json]]) -> int:
        """What `export` gave; returns how much of it is new here. A bad row raises MemoryFailed that names its
        line; of the two thousand rows around it nothing is kept."""
        return import_rows(self._database, rows)

    def _add_missing_vectors(self, vectors: Vectors) -> None:
        """Where nothing can be written, turns without a vector are found by their words."""
        with self._database.snapshot() as db:
            missing = turns_without_vectors(db)
        if missing:
            meanings = vectors.embed([text for _, text in missing])  # takes longer than a transaction may
            with suppress(MemoryFailed), self._database.transaction() as db:
                add_vectors(db, [id_ for id_, _ in missing], meanings)
