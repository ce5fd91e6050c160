"""How much is remembered."""

from __future__ import annotations

import apsw

from emberkeep.memory.retention import used_bytes
from emberkeep.memory.sql import value
from emberkeep.types import Json

_WHOSE = "(SELECT id FROM owners WHERE ?1 IS NULL OR name = ?1)"
_COUNTS = {
    "turns": f"SELECT coalesce(sum(turns), 0) FROM owners WHERE id IN {_WHOSE}",
    "answers": f"SELECT coalesce(sum(answers), 0) FROM owners WHERE id IN {_WHOSE}",
    "facts": f"SELECT count(*) FROM facts WHERE owner IN {_WHOSE}",
    "conversations": f"SELECT count(title) FROM conversations WHERE owner IN {_WHOSE}",
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


def stats(db: apsw.Connection, owner: str | None, limit_bytes: int) -> dict[str, Json]:
    """`oldest` and `newest` are when turns were archived, in Unix seconds; `bytes` and `limit` are of the file."""
    counts = _COUNTS if owner is not None else _COUNTS | _OF_ALL
    counted = {name: value(db, sql, owner) for name, sql in counts.items()}
    return {**counted, "bytes": used_bytes(db), "limit": limit_bytes}
