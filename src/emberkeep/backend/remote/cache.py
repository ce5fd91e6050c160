"""The cache of a model that runs elsewhere: nothing of it is here."""

from __future__ import annotations

from dataclasses import dataclass

from emberkeep.errors import NoSuchEntry, RequestError
from emberkeep.types import CacheEntry, EntryText, Explanation, Removed, Request


@dataclass(frozen=True, slots=True)
class NoCache:
    name: str

    def entries(self) -> list[CacheEntry]:
        return []

    def show(self, entry_id: str) -> EntryText:
        raise self._nothing()

    def pin(self, entry_id: str, pinned: bool) -> CacheEntry:
        raise self._nothing()

    def remove(self, entry_id: str) -> Removed:
        raise self._nothing()

    def remove_user(self, user: str) -> Removed:
        return Removed(0, 0)

    def gc(self) -> Removed:
        return Removed(0, 0)

    def explain(self, request: Request) -> Explanation:
        raise RequestError(f"{self.name} runs elsewhere: what it reuses is not known here.")

    def _nothing(self) -> NoSuchEntry:
        return NoSuchEntry(f"{self.name} runs elsewhere: nothing of it is stored here.")
