"""What is remembered, as rows: owners, turns, answers, notes, facts and saved conversations.

Every function here works inside a transaction of its caller. What is in the index changes together with the rows.
Secrets are taken out of turns, answers and titles first; saved conversations and responses are continued word by
word, and are kept as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import apsw

from emberkeep.errors import InvalidField
from emberkeep.memory.database import rows, used_bytes, value
from emberkeep.memory.vectors import LONGEST, stems_of
from emberkeep.text import encodable, shorten
from emberkeep.types.memory import Fact, Note, SavedConversation, ToolUse, Turn
from emberkeep.types.request import Json, Message, ToolCall

_INDEXED_CHARS = 100_000
"""So much of what a tool gave back is indexed; the rest is data that no question names by its words."""

_TITLE_CHARS = 80


# ── owners and their conversations ──


def owner_id(db: apsw.Connection, name: str) -> int | None:
    found: int | None = value(db, "SELECT id FROM owners WHERE name = ?", name)
    return found


def make_owner(db: apsw.Connection, name: str) -> int:
    db.execute("INSERT INTO owners (name) VALUES (?) ON CONFLICT DO NOTHING", (name,))
    found = owner_id(db, name)
    assert found is not None
    return found


def conversation_id(db: apsw.Connection, owner: int, name: str) -> int | None:
    sql = "SELECT id FROM conversations WHERE owner = ? AND name = ?"
    found: int | None = value(db, sql, owner, encodable(name))
    return found


def make_conversation(db: apsw.Connection, owner: int, name: str) -> int:
    found = conversation_id(db, owner, name)
    if found is None:
        db.execute("INSERT INTO conversations (owner, name) VALUES (?, ?)", (owner, encodable(name)))
        found = db.last_insert_rowid()
    return found


# ── turns and answers ──


def add_turn(db: apsw.Connection, owner: int, conversation: int | None, turn: Turn) -> int | None:
    """Its id, or None where the owner has it. `conversation` None: a stored answer."""
    texts = redact(encodable(turn.user_text)), redact(encodable(turn.assistant_text))
    uses = tuple(
        ToolUse(*(redact(encodable(part)) for part in (u.name, u.arguments, u.result))) for u in turn.tool_uses
    )
    words = _indexed_words(*texts, uses)
    sql = """INSERT INTO turns (owner, conversation, key, at, words, user_text, assistant_text, tool_uses)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING RETURNING id"""
    values = (owner, conversation, turn.key, turn.at, len(words), *texts, _pack_uses(uses))
    id_: int | None = value(db, sql, *values)
    if id_ is None:
        return None
    tokens = _index_tokens(owner, conversation, words)
    db.execute("INSERT INTO words (rowid, terms) VALUES (?, ?)", (id_, tokens))
    column = "answers" if conversation is None else "turns"
    db.execute(f"UPDATE owners SET {column} = {column} + 1, words = words + ? WHERE id = ?", (len(words), owner))
    return id_


def remove_turns(db: apsw.Connection, ids: Sequence[int]) -> None:
    """Remove their vectors too, and everything the index knows of them, but for its free space."""
    bound = [(id_,) for id_ in ids]
    db.executemany(
        """UPDATE owners SET turns = turns - (t.conversation IS NOT NULL),
                             answers = answers - (t.conversation IS NULL), words = owners.words - t.words
           FROM turns AS t WHERE t.id = ? AND owners.id = t.owner""",
        bound,
    )
    for table, column in (("words", "rowid"), ("vectors", "id"), ("turns", "id")):
        db.executemany(f"DELETE FROM {table} WHERE {column} = ?", bound)


def answer_turn(question: str, answer: str, at: float) -> Turn:
    """A stored answer as it is kept: the same question has the same key."""
    asked = redact(encodable(question))
    key = b"answer" + hashlib.blake2b(asked.encode(), digest_size=16).digest()
    return Turn(key, "", at, asked, answer)


def store_answer(db: apsw.Connection, owner: int, turn: Turn) -> int:
    """Its id. Replaces an answer to the same question."""
    known = rows(db, "SELECT id FROM turns WHERE owner = ? AND key = ?", owner, turn.key)
    remove_turns(db, [id_ for (id_,) in known])
    added = add_turn(db, owner, None, turn)
    assert added is not None
    return added


def _pack_uses(uses: Sequence[ToolUse]) -> str:
    return json.dumps([[use.name, use.arguments, use.result] for use in uses], ensure_ascii=False) if uses else ""


def unpack_uses(packed: str) -> tuple[ToolUse, ...]:
    listed: list[Any] = json.loads(packed) if packed else []
    return tuple(ToolUse(*use) for use in listed)


# ── the index ──


def _indexed_words(user_text: str, assistant_text: str, uses: Iterable[ToolUse]) -> list[str]:
    words = stems_of(user_text) + stems_of(assistant_text)
    for use in uses:
        words += stems_of(f"{use.name} {use.arguments} {use.result[:_INDEXED_CHARS]}")
    return words


def _index_tokens(owner: int, conversation: int | None, words: Iterable[str]) -> str:
    """Every word carries its owner: a search neither touches nor is slowed down by what belongs to others."""
    marked = " ".join([word_token(owner, word) for word in set(words) if len(word) <= LONGEST])
    return marked if conversation is None else f"{conversation_token(conversation)} {marked}"


def word_token(owner: int, word: str) -> str:
    return f"{owner}·{word}"


def conversation_token(conversation: int) -> str:
    return f"·{conversation}"


# ── notes ──


def put_note(db: apsw.Connection, owner: int, conversation: int | None, note: Note) -> bool:
    """Replaces one of the same key and kind; False where it is known."""
    data = json.dumps(note.data)
    known = "SELECT data FROM notes WHERE owner = ? AND key = ? AND kind = ?"
    if value(db, known, owner, note.key, str(note.kind)) == data:
        return False
    sql = """INSERT OR REPLACE INTO notes (owner, conversation, key, kind, data, since)
             VALUES (?, ?, ?, ?, ?, (SELECT coalesce(max(id), 0) FROM turns))"""
    db.execute(sql, (owner, conversation, note.key, str(note.kind), data))
    return True


# ── facts ──

FACTS = "SELECT f.name, value, at FROM facts AS f JOIN owners AS o ON o.id = f.owner WHERE o.name = ?"


def set_fact(db: apsw.Connection, owner: int, fact: Fact) -> None:
    """Raises InvalidField for a secret."""
    name, text = encodable(fact.name), encodable(fact.value)
    if any(redact(part) != part for part in (name, text, f"{name}: {text}")):
        raise InvalidField("value", "memory does not keep secrets such as keys and passwords: leave it out.")
    sql = "INSERT OR REPLACE INTO facts (owner, name, value, at) VALUES (?, ?, ?, ?)"
    db.execute(sql, (owner, name, text, fact.at))


def read_facts(db: apsw.Connection, owner: str) -> list[Fact]:
    """By name."""
    return [Fact(*values) for values in rows(db, f"{FACTS} ORDER BY f.name", owner)]


# ── saved conversations: their messages, verbatim ──


def save_messages(
    db: apsw.Connection, owner: str, name: str, messages: Sequence[Message], model: str, *, anew: bool = False
) -> None:
    """Appends them, or with `anew` replaces all; a new conversation gets its title from the first thing the user
    said."""
    id_ = make_conversation(db, make_owner(db, owner), name)
    if anew:
        remove_messages(db, id_)
    now = time.time()
    sql = """UPDATE conversations SET model = ?, updated = ?, created = iif(title IS NULL, ?, created),
             title = iif(coalesce(title, '') = '', ?, title) WHERE id = ?"""
    db.execute(sql, (encodable(model), now, now, _title(messages), id_))
    add_messages(db, id_, messages)


def remove_messages(db: apsw.Connection, conversation: int) -> None:
    db.execute("DELETE FROM messages WHERE conversation = ?", (conversation,))


def add_messages(db: apsw.Connection, conversation: int, messages: Sequence[Message]) -> None:
    sql = "SELECT coalesce(max(place) + 1, 0) FROM messages WHERE conversation = ?"
    place = value(db, sql, conversation)
    added = [(conversation, place + i, json.dumps(message_json(m))) for i, m in enumerate(messages)]
    db.executemany("INSERT INTO messages (conversation, place, data) VALUES (?, ?, ?)", added)


def read_messages(db: apsw.Connection, conversation: int) -> tuple[Message, ...]:
    sql = "SELECT data FROM messages WHERE conversation = ? ORDER BY place"
    return tuple(message_from_json(json.loads(data)) for (data,) in rows(db, sql, conversation))


def saved_conversations(
    db: apsw.Connection, owner: str, *, limit: int = 1, name: str | None = None
) -> list[SavedConversation]:
    """The latest first, without their messages; with them the one that is called `name`."""
    sql = f"""SELECT c.id, c.name, title, model, created, updated,
                     (SELECT count(*) FROM messages AS m WHERE m.conversation = c.id)
              FROM conversations AS c JOIN owners AS o ON o.id = c.owner
              WHERE o.name = ?1 AND title IS NOT NULL {"AND c.name = ?2" if name is not None else ""}
              ORDER BY updated DESC, c.id DESC LIMIT ?3"""
    found = []
    wanted = encodable(name) if name is not None else None
    for id_, called, title, model, created, updated, count in rows(db, sql, owner, wanted, limit):
        messages = read_messages(db, id_) if name is not None else ()
        found.append(SavedConversation(called, title, model, created, updated, messages, count))
    return found


def _title(messages: Sequence[Message]) -> str:
    """The beginning of what the user said first."""
    first = next((m.content for m in messages if m.role == "user" and m.content.strip()), "")
    return shorten(" ".join(redact(encodable(first[: 10 * _TITLE_CHARS])).split()), _TITLE_CHARS)


def message_json(message: Message) -> dict[str, Any]:
    calls = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    fields = {
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {"role": message.role, **{key: value for key, value in fields.items() if value is not None}}


def message_from_json(data: dict[str, Any]) -> Message:
    """Raises LookupError or TypeError for another form."""
    calls = tuple(ToolCall(*call) for call in data["tool_calls"])
    return Message(
        data["role"], data["content"], data["reasoning"], calls, data.get("tool_call_id"), data.get("name")
    )


# ── how much there is ──

_WHOSE = "(SELECT id FROM owners WHERE ?1 IS NULL OR name = ?1)"

_COUNTS = {
    "turns": f"SELECT coalesce(sum(turns), 0) FROM owners WHERE id IN {_WHOSE}",
    "answers": f"SELECT coalesce(sum(answers), 0) FROM owners WHERE id IN {_WHOSE}",
    "facts": f"SELECT count(*) FROM facts WHERE owner IN {_WHOSE}",
    "conversations": f"SELECT count(coalesce(title, metadata)) FROM conversations WHERE owner IN {_WHOSE}",
    "responses": f"SELECT count(*) FROM responses WHERE owner IN {_WHOSE}",
    "notes": f"SELECT count(*) FROM notes WHERE owner IN {_WHOSE}",
    "oldest": f"""SELECT at FROM turns WHERE id = (SELECT min((SELECT min(t.id) FROM turns AS t
                  WHERE t.conversation = c.id)) FROM conversations AS c WHERE c.owner IN {_WHOSE})""",
    "newest": f"""SELECT at FROM turns WHERE id = (SELECT max((SELECT max(t.id) FROM turns AS t
                  WHERE t.conversation = c.id)) FROM conversations AS c WHERE c.owner IN {_WHOSE})""",
}

# The same without asking every conversation.
_OF_ALL = {
    "oldest": "SELECT at FROM turns WHERE ?1 IS NULL AND conversation IS NOT NULL ORDER BY id LIMIT 1",
    "newest": "SELECT at FROM turns WHERE ?1 IS NULL AND conversation IS NOT NULL ORDER BY id DESC LIMIT 1",
}


def read_stats(db: apsw.Connection, owner: str | None, limit_bytes: int) -> dict[str, Json]:
    """`oldest` and `newest` are when turns were archived, in Unix seconds; `bytes` and `limit` are of the file."""
    counts = _COUNTS if owner is not None else _COUNTS | _OF_ALL
    counted = {name: value(db, sql, owner) for name, sql in counts.items()}
    return {**counted, "bytes": used_bytes(db), "limit": limit_bytes}


MARK = "[secret]"

_KIND = r"(?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?"

_PEM = rf"-----BEGIN {_KIND}-----.*?(?:-----END {_KIND}-----|\Z)"

_TOKENS = (
    r"sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}",  # OpenAI, Anthropic and others that use the same form
    r"(?:sk|rk|pk)_(?:live|test)_[A-Za-z0-9]{16,}",  # Stripe
    r"gh[pousr]_[A-Za-z0-9]{30,}",
    r"github_pat_[A-Za-z0-9_]{30,}",
    r"glpat-[A-Za-z0-9_-]{20,}",
    r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    r"xai-[A-Za-z0-9]{40,}",
    r"gsk_[A-Za-z0-9]{40,}",
    r"hf_[A-Za-z0-9]{30,}",
    r"npm_[A-Za-z0-9]{36}",
    r"pypi-[A-Za-z0-9_-]{50,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    r"AIza[A-Za-z0-9_-]{35}",
    r"ya29\.[A-Za-z0-9_-]{20,}",
    r"SG\.[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{20,}",
    r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",  # a JWT: two JSON objects and a signature
)

_WHOLE = re.compile(rf"{_PEM}|(?<![A-Za-z0-9_-])(?:{'|'.join(_TOKENS)})[A-Za-z0-9_-]*", re.DOTALL)

# What follows keeps its surroundings: only the group `secret` goes.
_HEADER = r"\b(?:Bearer|Basic)\s+(?P<header>[A-Za-z0-9._~+/=-]{16,})"

_URL = r"\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@\[\]]{0,256}:(?P<url>[^\s/@\[\]]{1,256})@"

_NAMES = r"""(?:api|access|secret|private|auth|encryption|signing|client)[_-]?(?:key|token|secret)
           | (?:access|auth|refresh|bearer|session)[_-]?token | client[_-]?secret | secret
           | pass(?:word|wd|phrase)? | pwd"""

_ASSIGNED = re.compile(
    rf"""(?ix) (?<![A-Za-z]) (?:{_NAMES}) ["']? (?:\s+is)? \s{{0,8}} (?:=>|:=|=|:|(?<=\sis)) \s{{0,8}}
         (?: "(?P<double>[^"\n]{{4,}})" | '(?P<single>[^'\n]{{4,}})' | (?P<bare>[^\s"'`,;()\[\]{{}}<>$]{{6,}}) )"""
)

_PARTLY = re.compile(rf"{_HEADER}|{_URL}")

_BEGINNINGS = """
private|sk-|_live_|_test_|ghp_|gho_|ghu_|ghs_|ghr_|github_pat_|glpat-|xox|xai-|gsk_|hf_|npm_|pypi-|akia|asia|aiza|ya29|sg.|eyj
"""

_RULES = (
    (tuple(_BEGINNINGS.strip().split("|")), _WHOLE),
    (("bearer", "basic", "://"), _PARTLY),
    (("key", "token", "secret", "pass", "pwd"), _ASSIGNED),
)
"""Patterns, each with words without one of which it cannot match: looking for those takes no time."""


def redact(text: str) -> str:
    """Idempotent. What only looks random (hashes, UUIDs, images) stays."""
    lowered, without = text.lower(), text
    for words, pattern in _RULES:
        if any(word in lowered for word in words):
            without = pattern.sub(_remove_secret, without)
    # What stood next to a secret may be one by itself.
    return text if without == text else redact(without)


def _remove_secret(match: re.Match[str]) -> str:
    name = next((name for name, value in match.groupdict().items() if value is not None), 0)
    if not _is_secret(name, match[name]):
        return match[0]
    begin, end = (place - match.start() for place in match.span(name))
    return match[0][:begin] + MARK + match[0][end:]


def _is_secret(name: str | int, value: str) -> bool:
    """A word after `password:` in a sentence, or a call in a program, is none."""
    if value == MARK:
        return False
    return name != "bare" or (any(c.isdigit() for c in value) and any(c.isalpha() for c in value))
