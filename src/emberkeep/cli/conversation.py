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
        """Write a new .md or .json file. Raises EmberkeepError; an existing file is left alone."""
        written = {".md": self._markdown, ".json": self._json}.get(path.suffix)
        if written is None:
            raise EmberkeepError(f"Cannot write {path}: give a name that ends in .md or .json.")
        if not self._turns:
            raise EmberkeepError("There is nothing to save yet: say something first.")
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(written())
        except FileExistsError as error:
            raise EmberkeepError(f"{path} exists already: give another name.") from error
        except OSError as error:
            raise EmberkeepError(f"Cannot write {path}: {error.strerror or error}.") from error

    def _json(self) -> str:
        messages = [{"role": message.role, "content": message.content} for message in self.messages]
        return json.dumps({"messages": messages}, indent=2, ensure_ascii=False) + "\n"

    def _markdown(self) -> str:
        return "\n".join(f"## {message.role}\n\n{message.content}\n" for message in self.messages)
