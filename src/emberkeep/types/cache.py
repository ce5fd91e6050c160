"""Values about the cache: entries, labels, and what warming, verifying and explaining return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from emberkeep.types.events import LookupRecord
from emberkeep.types.request import EXACT_BITS, Repair, Ttl


class EntryKind(StrEnum):
    CONVERSATION = "conversation"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Label:
    """What a request calls the state that it leaves behind."""

    kind: EntryKind
    key: str
    """Requests with equal keys (in one lineage) belong to one entry."""
    head: str
    """The first words, for people."""
    ttl: Ttl | None = None
    """None: as before, or the default for its kind."""
    name: str = ""
    """The conversation id, if the client gave one."""
    source: str = ""
    """Hash of the stable segments before any template, by which other models' stores can be searched."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A conversation or a prefix in the store."""

    id: str
    kind: EntryKind
    name: str
    """The conversation id, if a client gave one."""
    head: str
    """Its first words; empty where they are not known any more."""
    user: str
    is_shared: bool
    """Declared shareable by the operator: all users may reuse it."""
    tokens: int
    bytes: int
    """Including what it shares with others."""
    warm_tokens: int
    cold_tokens: int
    """How many of `tokens` are in RAM and on disk; often both."""
    idle_s: float
    """Seconds since it was last used."""
    hits: int
    turns: int
    branches: int
    ttl: Ttl
    expires_in_s: float
    """Negative: it has expired, and is the first to go when room is needed."""
    is_pinned: bool
    hot_tokens: int = 0
    """How many of `tokens` are in the engine."""
    kv_bits: int = EXACT_BITS
    repair: Repair | None = None
    """How moved state in it was repaired; None if nothing was moved."""


@dataclass(frozen=True, slots=True)
class EntryText:
    entry: CacheEntry
    text: str
    """The whole of its latest state, as the model reads it."""


@dataclass(frozen=True, slots=True)
class Removed:
    entries: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Warmed:
    """A prefix that is ready."""

    tokens: int
    cached_tokens: int
    """How many of them were stored before."""
    seconds: float
    entry_id: str
    """Its entry in the cache."""
    ttl: Ttl | None = None
    """How long it is kept ready after its last use; None where it is not stored."""
    error: str | None = None
    """Why it is not ready after all. The next request evaluates it instead."""


@dataclass(frozen=True, slots=True)
class Verified:
    """A stored state, continued greedily beside a fresh evaluation of the same tokens."""

    entry: CacheEntry
    reused_tokens: int
    compared: int
    agreed: int
    """Tokens of the continuation, and how many were equal before the first difference."""
    wide_tokens: int = 0
    reproducible_tokens: int = 0
    """Of the reused ones: as in `LookupRecord`."""

    @property
    def narrow_tokens(self) -> int:
        return self.reused_tokens - self.wide_tokens

    @property
    def is_equal(self) -> bool:
        return self.agreed == self.compared


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a request would reuse now, and why not more."""

    lookup: LookupRecord
    sentence: str
    pieces: Sequence[bytes] = ()
    """The prompt, token by token, where it is known."""
