"""Turns for memories, and what is in the files of one."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from emberkeep.memory.database import rows
from emberkeep.memory.memory import Memory
from emberkeep.types.memory import ToolUse, Turn

PLENTY = 1 << 40
DAY_S = 86400.0


def turn(
    user_text: str,
    assistant_text: str = "",
    *,
    conversation: str = "talk",
    days_ago: float = 0.0,
    tool_uses: tuple[ToolUse, ...] = (),
) -> Turn:
    key = hashlib.blake2b(f"{conversation}\n{user_text}".encode("utf-8", "replace"), digest_size=16).digest()
    return Turn(key, conversation, time.time() - days_ago * DAY_S, user_text, assistant_text, tool_uses)


def owners(memory: Memory) -> list[str]:
    """All that stored something and are not forgotten, by name."""
    with memory._database.snapshot() as db:
        return [name for (name,) in rows(db, "SELECT name FROM owners ORDER BY name")]


def raw_bytes(path: Path) -> bytes:
    """Of everything that SQLite has written beside `path`."""
    return b"".join(file.read_bytes() for file in path.parent.iterdir() if file.name.startswith(path.name))
