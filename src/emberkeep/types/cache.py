"""Values about the cache: entries, labels, and what warming, verifying and explaining return."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from emberkeep.types.events import LookupRecord
from emberkeep.types.lineage import EXACT_BITS, Repair
from emberkeep.types.request import Ttl
from emberkeep.values import dataclass


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
class EntryEnd:
    """Where a state of an entry ends."""

    id: str
    kind: EntryKind
    head: str
    """Its first words; empty where they are not known any more."""
    position: int
    is_latest: bool
    """It is the entry's latest state, and not an earlier branch of it."""
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A run of stored tokens up to where texts part, or several small branches together."""

    id: str
    parent: str | None
    """None: nothing that is shown comes before it."""
    start: int
    end: int
    """Positions; of several branches, where the longest ends."""
    branches: int
    """How many are together here; 0: it is one run."""
    below: int
    """Branches that go on from its end; of several branches, 0."""
    own_tokens: int
    tokens: int
    """In it, and in it with everything below."""
    hot_tokens: int
    warm_tokens: int
    """How many of `own_tokens`, each counted in the fastest tier that has it; the others are on disk."""
    bytes: int
    chunks: int
    """In it. A chunk in which texts part counts where it begins."""
    hits: int
    """Lookups that reused the part of it that was reused most."""
    is_pinned: bool
    """Some of it is."""
    user: str
    is_shared: bool
    is_exact: bool
    """Several branches show those of the first."""
    entries: tuple[EntryEnd, ...]
    """Some that end in it, the furthest first."""
    more_entries: int
    """How many end in it besides."""

    @property
    def cold_tokens(self) -> int:
        return self.own_tokens - self.hot_tokens - self.warm_tokens


@dataclass(frozen=True, slots=True)
class CacheTree:
    """What is stored, as a tree of few nodes: parents come before their children."""

    nodes: tuple[TreeNode, ...] = ()
    tokens: int = 0
    bytes: int = 0
    chunks: int = 0


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
    """How many of the reused ones: as in `LookupRecord`."""

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


def expectation(reused: int, wide: int, reproducible: int) -> str:
    """What a fresh evaluation of reused tokens may be expected to give."""
    if not reused:
        return "Nothing was reused."
    if reproducible == reused:
        return f"All {reused:,} tokens can be reproduced to the bit."
    return (
        f"{reproducible:,} of {reused:,} tokens can be reproduced to the bit ({wide:,} computed in wide steps, "
        f"{reused - wide:,} in narrow ones); of the others a fresh evaluation gives the same but for rounding."
    )
