"""What a benchmark that speaks with the scheduler itself gets of an answer."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from time import perf_counter

from emberkeep.errors import EmberkeepError
from emberkeep.sched.sequence_state import Ending
from emberkeep.types.events import Progress, TokenLogprob


@dataclass(eq=False, slots=True)
class Listener:
    """Receives a sequence's output, on the engine's thread."""

    submitted: float = field(default_factory=perf_counter)
    first: float = 0.0
    """When its first token came."""
    tokens: list[int] = field(default_factory=list)
    ending: Future[Ending] = field(default_factory=Future)

    def progress(self, progress: Progress) -> None: ...

    def scored(self, start: int, logprobs: Iterable[TokenLogprob]) -> None: ...

    def token(self, token: int, logprob: TokenLogprob | None) -> bool:
        self.first = self.first or perf_counter()
        self.tokens.append(token)
        return False

    def full(self) -> bool:
        return False

    def kept_tokens(self) -> int:
        return len(self.tokens)

    def ended(self, ending: Ending) -> None:
        self.ending.set_result(ending)

    def failed(self, error: EmberkeepError) -> None:
        self.ending.set_exception(error)
