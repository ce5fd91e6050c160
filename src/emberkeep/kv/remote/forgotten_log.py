"""The record of users who were forgotten by any host, which every host follows."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from emberkeep.files import replace_file
from emberkeep.kv.remote.link import FORGOTTEN, RemoteLink

if TYPE_CHECKING:
    from valkey.client import Pipeline
log = logging.getLogger("emberkeep.kv")
T = TypeVar("T")


_READ_AT_ONCE = 256


class ForgottenLog:
    """Who was forgotten by any host, in order, and how far this one has followed. Safe to use from any thread."""

    def __init__(
        self, link: RemoteLink, let_go: Callable[[Callable[[str], bool]], None], folder: Path | None
    ) -> None:
        """`let_go` drops the users of whom a function is true, and raises OSError."""
        self._link = link
        self._let_go = let_go
        self._path = folder / "remote.json" if folder else None
        self._lock = threading.Lock()
        self._last = self._saved()

    def ask(self, pipe: Pipeline) -> Any:
        """Put the question into a pipeline, or ask it at once where that does so."""
        return pipe.xrange(FORGOTTEN, f"({self._last}", "+", count=_READ_AT_ONCE)

    def follow(self, ask: Callable[[], Any]) -> bool:
        """To the end, with as many questions as it takes; False where this host cannot."""
        while self._drop(entries := ask()):
            if len(entries) < _READ_AT_ONCE:
                return True
        return False

    def take(self, entries: Any) -> bool:
        """The answer: drop who was forgotten. Whether that was everybody."""
        return self._drop(entries) and len(entries) < _READ_AT_ONCE

    def _drop(self, entries: Any) -> bool:
        if not entries:
            return True
        tags = {fields.get(b"user", b"").decode("ascii", "replace") for _, fields in entries}
        with self._lock:
            try:
                self._let_go(lambda user: self._link.tag(user) in tags)
            except OSError as error:
                log.warning("a user who was forgotten elsewhere is not forgotten here yet: %s", error)
                return False
            self._last = entries[-1][0].decode()
            self._save()
        return True

    def _saved(self) -> str:
        try:
            return str(json.loads(self._path.read_text())["forgotten"]) if self._path else "0-0"
        except (OSError, ValueError, KeyError, TypeError):
            return "0-0"

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            replace_file(self._path, json.dumps({"forgotten": self._last}).encode())
        except OSError as error:
            log.warning("it cannot be kept who was forgotten elsewhere: %s", error)
