"""Forgetting a user: here, in the files, and in every other process on the same folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container

from emberkeep.errors import StoreFailed
from emberkeep.kv.books import Books
from emberkeep.kv.cold import ColdTier
from emberkeep.kv.counters import StoreCounters
from emberkeep.kv.forgotten import EVERYBODY, NOBODY, Whose, of_user
from emberkeep.kv.index import Row
from emberkeep.types import Removed

log = logging.getLogger("emberkeep.kv")


class Forgetter:
    """Safe to use from any thread. Methods block on disk; `lock`, the store's, is never held meanwhile."""

    def __init__(self, books: Books, lock: threading.Lock, cold: ColdTier | None, counters: StoreCounters) -> None:
        self._books = books
        self._lock = lock
        self._cold = cold
        self._counters = counters
        self._noticing = threading.Lock()
        self.settle: Callable[[], None] = lambda: None
        """Waits until nothing that was known before is being written any more."""
        self.remove_leaving: Callable[[], None] = lambda: None
        """Removes the files that the books have let go of."""
        self.adopt: Callable[[list[Row]], None] = lambda rows: None
        """Enters chunks that are on disk."""
        self.on_forget: Callable[[Container[str]], None] = lambda namespaces: None
        """Called for everybody who is forgotten, by whomever. Must be quick, and must not call the store."""

    def notice(self) -> None:
        """Let go of whoever was forgotten by any process on this folder. One system call unless there are some.

        Raises OSError: then nobody knows.
        """
        if self._cold is None or self._cold.forgotten.is_known():
            return
        with self._noticing:
            self._notice(self._cold)

    def adopt_unless_forgotten(self, read: Callable[[], list[Row]]) -> None:
        """Enter the chunks that `read` finds on disk, and nothing of those who are forgotten meanwhile.

        Raises OSError.
        """
        if self._cold is None:
            return
        with self._noticing:  # else what was read might be entered after its user was let go
            self._notice(self._cold)
            going = self._cold.forgotten.going
            rows = read()
            self.adopt(rows if going is NOBODY else [row for row in rows if row.namespace not in going])

    def _notice(self, cold: ColdTier) -> None:
        if cold.forgotten.is_known():
            return
        whose, known = cold.forgotten.news()
        if whose is EVERYBODY:
            self._begin_anew(cold)
        elif whose is not None:
            self._let_go(whose)
        known()

    def forget(self, user: str) -> Removed:
        """Leave nothing of `user`. Raises StoreFailed when something may be left in a file: what was possible is
        done, and what was not is tried again."""
        whose = of_user(user)
        removed = self._held_by(whose)
        if self._cold is None:
            self._let_go(whose)
            return removed
        try:
            swept = self._forget_on_disk(self._cold, user, whose)
        except OSError as error:
            self._let_go(whose)
            raise StoreFailed(
                f"Not everything of that user could be removed from the disk ({error.strerror or error}): "
                "what is left is not used any more; ask again when the disk is well."
            ) from error
        return Removed(removed.entries, removed.tokens, max(removed.bytes, swept))

    def _forget_on_disk(self, cold: ColdTier, user: str, whose: Whose) -> int:
        """Raises OSError."""
        swept = 0
        try:
            forgetting = cold.forgotten.begin(user)
        except OSError:
            # A full disk: what goes first makes the room to say so.
            self._let_go(whose)
            swept = cold.sweep(whose)
            forgetting = cold.forgotten.begin(user)
        try:
            self.notice()
            self.settle()
            try:
                swept += cold.sweep(whose)
            finally:
                self.remove_leaving()  # most of it is gone by now
            cold.finished(forgetting)
        except OSError:
            cold.owe(forgetting, whose)
            raise
        return swept

    def _held_by(self, whose: Whose) -> Removed:
        with self._lock:
            theirs = {lineage for lineage in self._books.lineages() if lineage.owner in whose}
            chunks = [chunk for chunk in self._books if chunk.lineage in theirs]
            self._counters.removed_chunks += len(chunks)
            return Removed(
                entries=sum(entry.lineage in theirs for entry in self._books.entries.values()),
                tokens=sum(len(chunk.tokens) for chunk in chunks),
                bytes=sum(chunk.bytes for chunk in chunks),
            )

    def _let_go(self, whose: Whose) -> None:
        with self._lock:
            self._books.forget(whose)
        if self._cold is not None:
            self._cold.forget_untold(whose)
        self.on_forget(whose)

    def _begin_anew(self, cold: ColdTier) -> None:
        """Nobody can tell any more who was forgotten: what the others have left on disk is all that there is."""
        with self._lock:
            self._books.forget(EVERYBODY, files_stay=True)
        cold.forget_untold(EVERYBODY)
        rows, notes = cold.news(everything=True), cold.notes()
        self.adopt(rows)
        with self._lock:
            self._books.restore_entries(notes.entries)
        self.on_forget(EVERYBODY)
