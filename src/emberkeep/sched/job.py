"""What the scheduler is asked to do, and how it answers."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from enum import Enum
from time import monotonic
from typing import Protocol

from emberkeep.errors import EmberkeepError
from emberkeep.kv.entries import Label
from emberkeep.kv.tree import ChunkKey, TokenArray
from emberkeep.sched.admission import Admitted
from emberkeep.sched.sampling import Sampler
from emberkeep.types import EXACT, Approximation, Lineage, LookupRecord, Progress, TokenLogprob


class EndReason(Enum):
    END_OF_TURN = "end of turn"  # the model sampled an end-of-generation token
    STOPPED = "stopped"  # the consumer asked to stop
    LENGTH = "length"  # max_tokens or the context


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job went. Times are in milliseconds and measured from submission."""

    reason: EndReason
    prompt_tokens: int
    sampled_tokens: int
    queue_ms: float
    prompt_ms: float
    """From the start of loading or evaluating to the first token."""
    ttft_ms: float
    decode_ms: float
    lookup: LookupRecord


class Consumer(Protocol):
    """Receives a job's results on the engine's thread: methods must be quick.

    What they raise ends the job, and `failed` is called; where that raises, it is called once more.
    """

    def progress(self, progress: Progress) -> None: ...

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        """A sampled token, end-of-generation tokens excepted. True: stop now."""

    def kept_tokens(self) -> int:
        """Asked after `token` answered True: how many sampled tokens belong to the answer."""

    def ended(self, ending: Ending) -> None: ...

    def failed(self, error: EmberkeepError) -> None: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """How a longer prompt, of which there may be state, becomes a shorter one: see `cutter`."""

    source: TokenArray
    """The longer one."""
    start: int
    end: int
    """What leaves it."""
    insert: TokenArray
    """What stands there instead: one token or more."""
    lineage: Lineage | None
    """Of state that was cut. None: nothing is moved, what follows is evaluated again."""

    def length(self, reached: int) -> int:
        """How much of the shorter prompt there is when so many tokens of the longer one have been computed."""
        return self.start + len(self.insert) + reached - self.end

    @property
    def saved(self) -> int:
        return self.end - self.start - len(self.insert)


@dataclass(frozen=True, slots=True)
class Room:
    """What a job whose context is full may go on with."""

    tokens: TokenArray
    """Its prompt from now on."""
    cut: Cut
    max_new: int


@dataclass(frozen=True, slots=True)
class Stable:
    """The beginning of a prompt that stays while conversations come and go: system message and tools."""

    label: Label
    length: int
    """In tokens."""


@dataclass(slots=True)
class Notes:
    """What is written down about the state that a job leaves behind. May be filled in until the job ends."""

    label: Label | None = None
    stable: Stable | None = None


@dataclass(eq=False, slots=True)
class Job:
    """One choice of one request. Exactly one of `ended` and `failed` succeeds unless it is cancelled."""

    tokens: TokenArray
    sampler: Sampler
    consumer: Consumer
    max_new: int
    """0: evaluate the prompt and end."""
    closing: tuple[int, ...] = ()
    """What the chat template writes after the answer: evaluated after the end, for the next turn."""
    given: bool = False
    """The client sent `tokens`, not text."""
    user: str = ""
    """Jobs of different users take turns."""
    lineage: Lineage = EXACT
    """Whose state it may reuse, and what its own may become: see `Sequence.lineage`."""
    approximate: Approximation | None = None
    """State from other places may be moved into it."""
    cut: Cut | None = None
    """Its prompt is a part of one that may be known."""
    on_full: Callable[[], bool] = lambda: False
    """The context is full. True: somebody has been told, and `make_room` will be called. Must be quick."""
    use_cache: bool = True
    is_kept: bool = True
    from_store: bool = False
    """Load what is stored, whatever is in the engine and however long it takes."""
    want_progress: bool = False
    deadline: float | None = None
    """On the monotonic clock."""
    notes: Notes = field(default_factory=Notes)
    borders: frozenset[int] = frozenset()
    """Positions in the prompt where others will go on: what cannot be cut by token is stored there."""
    affinity: str = ""
    """Jobs with equal ones (in one lineage) like to have the same slot."""
    wanted_slot: int | None = None
    read_ahead: Set[ChunkKey] = frozenset()
    """Chunks whose reading from disk began for this job before it was submitted."""
    admitted: Admitted | None = None
    """None: nothing was planned for it."""
    submitted: float = field(default_factory=monotonic)

    @property
    def reusable(self) -> int:
        """The last prompt token is evaluated alone: its logits start the answer, and a cached and an uncached run
        then end in the same computation. Where there is no answer it is like the others."""
        return len(self.tokens) - (self.max_new > 0)

    @property
    def memory(self) -> int:
        """The most bytes it can come to need, beyond what the engine always has."""
        return self.admitted.beyond if self.admitted else 0

    @property
    def cells(self) -> int:
        """The most token cells it can come to use."""
        return len(self.tokens) + self.max_new + len(self.closing)
