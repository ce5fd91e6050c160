"""Questions to SQLite."""

from __future__ import annotations

from typing import Any

import apsw


def rows(db: apsw.Connection, sql: str, *values: Any) -> list[Any]:
    return db.execute(sql, values).fetchall()


def value(db: apsw.Connection, sql: str, *values: Any) -> Any:
    """The first column of the first row; None where there is no row."""
    found = rows(db, sql, *values)
    return found[0][0] if found else None
