"""Who receives what a sequence samples, and what is said of it when it has ended."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from emberkeep.errors import EmberkeepError
from emberkeep.types.events import LookupRecord, Progress, TokenLogprob
from emberkeep.values import dataclass


class EndReason(Enum):
    END_OF_TURN = "end of turn"  # the model sampled an end-of-generation token
    STOPPED = "stopped"  # the output asked to stop
    LENGTH = "length"  # max_tokens or the context


@dataclass(frozen=True, slots=True)
class Ending:
    """How a sequence went. Times are in milliseconds and measured from submission."""

    reason: EndReason
    prompt_tokens: int
    sampled_tokens: int
    queue_ms: float
    prompt_ms: float
    """From the start of loading or evaluating to the first token."""
    ttft_ms: float
    decode_ms: float
    lookup: LookupRecord
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """How many of the drafted tokens are part of the answer."""
    slot: int = -1
    saved_ms: float = 0.0


class SequenceOutput(Protocol):
    """Receives what a sequence samples, on the engine's thread: methods must be quick.

    What they raise ends the sequence, and `failed` is called; where that raises, it is called once more. Exactly
    one of `ended` and `failed` succeeds unless the sequence is cancelled.
    """

    def progress(self, progress: Progress) -> None: ...

    def scored(self, start: int, logprobs: Iterable[TokenLogprob]) -> None:
        """How likely the tokens of the prompt from `start` on were; some may be told again."""

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        """A sampled token, end-of-generation tokens excepted. True: stop now."""

    def kept_tokens(self) -> int:
        """Asked after `token` answered True: how many sampled tokens belong to the answer."""

    def full(self) -> bool:
        """The context is full. True: `Scheduler.make_room` will be called."""

    def ended(self, ending: Ending) -> None: ...

    def failed(self, error: EmberkeepError) -> None: ...
