"""A conversation in the terminal: its messages, and how it is written to a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from emberkeep.errors import EmberkeepError
from emberkeep.types import Message


class Conversation:
    def __init__(self, system: str = "") -> None:
        self.system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> Sequence[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, *self._turns]

    def add(self, user: Message, assistant: Message) -> None:
        self._turns += [user, assistant]

    def clear(self) -> None:
        """Forget every turn; the system message stays."""
        self._turns.clear()

    def save(self, path: Path) -> None:
        """Write Markdown for a name that ends in .md, else JSON. Replaces the file. Raises EmberkeepError."""
        text = self._markdown() if path.suffix == ".md" else self._json()
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise EmberkeepError(f"Cannot write {path}: {error.strerror or error}.") from error

    def _json(self) -> str:
        messages = [{"role": message.role, "content": message.content} for message in self.messages]
        return json.dumps({"messages": messages}, indent=2, ensure_ascii=False) + "\n"

    def _markdown(self) -> str:
        return "\n".join(f"## {message.role}\n\n{message.content}\n" for message in self.messages)
