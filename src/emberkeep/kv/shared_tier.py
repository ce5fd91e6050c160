"""The tier that several hosts share, as a store sees it. `kv/remote/tier.py` is the one that has a server."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import field

from emberkeep.kv.keys import ChunkKey
from emberkeep.kv.tree import Chunk
from emberkeep.token_arrays import TokenArray
from emberkeep.types.lineage import Lineage
from emberkeep.values import dataclass


class StillElsewhere(OSError):
    """Something is left where other hosts may find it."""


@dataclass(slots=True)
class Arrival:
    give_up: float
    """Nothing waits for it any longer then; on the monotonic clock."""
    done: Future[frozenset[ChunkKey]] = field(default_factory=Future)
    """The chunks of the tree that came for it."""
    moved_at: float | None = None
    """When it was begun, or something came for it; None before that."""


class SharedTier:
    """The tier of a host that is alone: nothing is there, and nothing is taken.

    Safe to use from any thread. Methods return at once and never raise, unless they say otherwise.
    """

    is_shared = False

    @property
    def takes_more(self) -> bool:
        """Whether what is offered now would reach other hosts."""
        return False

    def prefetch(self, lineage: Lineage, tokens: TokenArray) -> None:
        """Begin to fetch what is there of a prompt that begins with `tokens`."""

    def bring_in(self, lineage: Lineage, tokens: TokenArray, *, snapshots: bool) -> Arrival | None:
        """Fetch what is cheaper to load than to evaluate; None where there is nothing to wait for."""
        return None

    def was_late(self, arrival: Arrival) -> None:
        """A request has given up waiting for it."""

    def offer(self, chunks: Iterable[Chunk]) -> None:
        """They are worth having elsewhere, too; or have been used, and are wanted for longer."""

    def offer_loose(self, chunk: Chunk) -> None:
        """Offer one that is not in the tree."""

    def remove(self, chunks: Iterable[Chunk]) -> None:
        """They were to be removed, and are out of the tree."""

    def forget(self, user: str) -> int:
        """Leave nothing of a user there; returns how many values went. Blocks. Raises StillElsewhere where
        something may be left: it is tried again."""
        return 0

    def flush(self) -> None:
        """Block until everything that was offered is there, or is not taken."""

    def close(self) -> None:
        """Write what is left, as far as there is time. Blocks."""

    def stats(self) -> dict[str, object] | None:
        return None
