"""Drops what belongs to users whom any process on a folder has forgotten."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container
from typing import TypeVar

from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.forgotten import ALL_USERS, NO_USER, Whose
from emberkeep.kv.disk.index import ChunkRow
from emberkeep.kv.ledger import Transact

log = logging.getLogger("emberkeep.kv")
T = TypeVar("T")


class Forgetter:
    """Drops the state of users that any process on this folder has forgotten. Safe to use from any thread; blocks
    on disk."""

    def __init__(self, files: ChunkFiles | None, transact: Transact) -> None:
        self._files = files
        self._transact = transact
        self._noticing = threading.Lock()
        self.on_forget: Callable[[Container[str]], None] = lambda owners: None
        """Called for all who are forgotten, by any process. Must be quick, and must not call the store."""

    def notice(self) -> None:
        """Drop the state of users that were forgotten meanwhile. One system call if there are none.

        Raises OSError: then it is not known who was.
        """
        if self._files is None or self._files.forgotten.is_known():
            return
        with self._noticing:
            self._notice(self._files)

    def refresh(self) -> None:
        """Learn what other processes stored, and which users they forgot. Reads the index. Never raises."""
        if (files := self._files) is None:
            return
        try:
            self.adopt(lambda: self._new_rows(files))
        except OSError as error:
            log.warning("cannot read what others have stored: %s", error)

    def adopt(self, read: Callable[[], list[ChunkRow]]) -> None:
        """Enter the chunks that `read` finds on disk, and nothing of those who are forgotten meanwhile.

        Raises OSError.
        """
        if self._files is None:
            return
        with self._noticing:  # else what was read might be entered after its user was let go
            self._notice(self._files)
            going = self._files.forgotten.going
            rows = read()
            allowed = rows if going is NO_USER else [row for row in rows if row.namespace not in going]
            self._transact(lambda ledger: ledger.adopt(allowed))

    def let_go(self, whose: Whose) -> None:
        """Drop everything of theirs that this process knows."""
        self._transact(lambda ledger: ledger.forget(whose))
        if self._files is not None:
            self._files.index.forget_untold(whose)
        self.on_forget(whose)

    def _new_rows(self, files: ChunkFiles, *, everything: bool = False) -> list[ChunkRow]:
        return files.forgotten.allowed(files.index.new_rows(everything=everything))

    def _notice(self, files: ChunkFiles) -> None:
        if files.forgotten.is_known():
            return
        whose, known = files.forgotten.newly_forgotten()
        if whose is ALL_USERS:
            self._begin_anew(files)
        elif whose is not None:
            self.let_go(whose)
        known()

    def _begin_anew(self, files: ChunkFiles) -> None:
        """It cannot be told any more who was forgotten: what the others have left on disk is all that there is."""
        self._transact(lambda ledger: ledger.forget(ALL_USERS, files_stay=True))
        files.index.forget_untold(ALL_USERS)
        rows, notes = self._new_rows(files, everything=True), files.index.notes()
        self._transact(lambda ledger: ledger.adopt(rows))
        self._transact(lambda ledger: ledger.entries.restore(notes.entries))
        self.on_forget(ALL_USERS)
