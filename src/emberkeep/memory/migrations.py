"""The schema, step by step: a file of any earlier version becomes one of this version, or stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import apsw

from emberkeep.errors import MemoryFailed

Migration = Callable[[apsw.Connection], None]


def m001_initial(db: apsw.Connection) -> None:
    db.execute(_INITIAL)


def m002_forgettings(db: apsw.Connection) -> None:
    db.execute(_FORGETTINGS)


def m003_responses(db: apsw.Connection) -> None:
    db.execute(_RESPONSES)


def m004_items(db: apsw.Connection) -> None:
    db.execute(_ITEMS)


MIGRATIONS: tuple[Migration, ...] = (m001_initial, m002_forgettings, m003_responses, m004_items)


def migrate(db: apsw.Connection, steps: Sequence[Migration] = MIGRATIONS) -> None:
    """All missing steps in one transaction: several processes may come here at once, one of them does it.

    Raises MemoryFailed for a file of a newer version, and whatever a step raises; the file is then as it was.
    """
    if _is_current(db, len(steps)):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        if not _is_current(db, len(steps)):
            for step in steps[db.pragma("user_version") :]:
                step(db)
            db.pragma("user_version", len(steps))
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def _is_current(db: apsw.Connection, newest: int) -> bool:
    version = db.pragma("user_version")
    if version > newest:
        raise MemoryFailed(
            f"The memory was written by a newer Emberkeep (its file has version {version}, not {newest}): "
            "update Emberkeep, or move the file away."
        )
    return bool(version == newest)


_FORGETTINGS = """
CREATE TABLE forgettings (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    salt BLOB NOT NULL,
    owner BLOB NOT NULL,  -- digests of names, never the names
    conversation BLOB  -- NULL: everything of the owner
);
"""

_RESPONSES = """
ALTER TABLE conversations ADD COLUMN metadata TEXT;  -- NULL: no client made it as a list of items
CREATE TABLE responses (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER NOT NULL REFERENCES conversations(id),
    name TEXT NOT NULL,
    previous TEXT,  -- the name of the response that it continues
    in_conversation INTEGER NOT NULL,  -- it continues the conversation, and added its items to it
    at REAL NOT NULL,
    data TEXT NOT NULL,
    input TEXT NOT NULL,
    UNIQUE (owner, name)
);
CREATE INDEX responses_by_conversation ON responses (conversation);
CREATE TABLE items (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER NOT NULL REFERENCES conversations(id),
    name TEXT NOT NULL,
    data TEXT NOT NULL
);
CREATE INDEX items_by_conversation ON items (conversation, id);
CREATE INDEX items_by_name ON items (owner, name);
"""

_ITEMS = """
-- The newest item when the response came to its conversation: what was said before it. NULL: not known.
ALTER TABLE responses ADD COLUMN began INTEGER;
-- Lists of items go when the file is full, those first that were not used for longest.
UPDATE conversations AS c SET updated = max(updated, created,
    coalesce((SELECT max(at) FROM responses WHERE conversation = c.id), 0)) WHERE metadata IS NOT NULL;
CREATE INDEX conversations_by_use ON conversations (updated) WHERE metadata IS NOT NULL;
"""

_INITIAL = """
CREATE TABLE owners (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- a number is never used twice: it is part of what is indexed
    name TEXT NOT NULL UNIQUE,
    turns INTEGER NOT NULL DEFAULT 0,
    answers INTEGER NOT NULL DEFAULT 0,
    words INTEGER NOT NULL DEFAULT 0  -- of turns and answers together
);
CREATE TABLE conversations (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES owners(id),
    name TEXT NOT NULL,
    title TEXT,  -- NULL: only its archived turns are known, its messages were never saved
    model TEXT NOT NULL DEFAULT '',
    created REAL NOT NULL DEFAULT 0,
    updated REAL NOT NULL DEFAULT 0,
    UNIQUE (owner, name)
);
CREATE INDEX conversations_by_time ON conversations (owner, updated) WHERE title IS NOT NULL;
CREATE TABLE messages (
    conversation INTEGER NOT NULL REFERENCES conversations(id),
    place INTEGER NOT NULL,
    data TEXT NOT NULL,
    UNIQUE (conversation, place)
);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- the order of archiving, which no clock can change
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER REFERENCES conversations(id),  -- NULL: a stored answer
    key BLOB NOT NULL,
    at REAL NOT NULL,
    words INTEGER NOT NULL,
    user_text TEXT NOT NULL,
    assistant_text TEXT NOT NULL,
    tool_uses TEXT NOT NULL,
    UNIQUE (owner, key)
);
CREATE INDEX turns_by_conversation ON turns (conversation);
CREATE TABLE notes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER REFERENCES conversations(id),
    key BLOB NOT NULL,
    kind TEXT NOT NULL,
    data TEXT NOT NULL,
    since INTEGER NOT NULL,  -- the newest turn when it was written: it goes when that turn would go
    UNIQUE (owner, key, kind)
);
CREATE INDEX notes_by_conversation ON notes (conversation);
CREATE TABLE facts (
    owner INTEGER NOT NULL REFERENCES owners(id),
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    at REAL NOT NULL,
    PRIMARY KEY (owner, name)
) WITHOUT ROWID;
CREATE TABLE vectors (
    id INTEGER PRIMARY KEY REFERENCES turns(id),
    owner INTEGER NOT NULL REFERENCES owners(id),
    conversation INTEGER,
    vector BLOB NOT NULL  -- a signed byte for each dimension
);
CREATE INDEX vectors_by_owner ON vectors (owner, id);
-- The texts are in `turns`; how often a word stands in one is counted there when it is a candidate. So the index
-- needs to know in which turns a word is, and nothing else.
CREATE VIRTUAL TABLE words USING fts5(
    terms, content='', contentless_delete=1, detail=none, tokenize='ascii'
);
-- Merged half as often as by default: the longest write among a million turns takes 8 ms instead of 34.
INSERT INTO words (words, rank) VALUES ('automerge', 8);
"""
