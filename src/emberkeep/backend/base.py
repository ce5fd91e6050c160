"""The backend seam: takes a request, yields events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from emberkeep.types import Event, Json, Message, Request, Tool


@dataclass(frozen=True, slots=True)
class ModelCard:
    id: str
    created: int
    """Unix seconds."""
    context: int
    owned_by: str = "emberkeep"
    details: Mapping[str, Json] | None = None


class Backend(Protocol):
    @property
    def card(self) -> ModelCard: ...

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """Events of one request, ending with `Completed`.

        Raises an `EmberkeepError`: before the first event for everything that is wrong with the request
        itself. Closing the iterator (or cancelling the task that reads it) stops the work within one step.
        """

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...

    def apply_template(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str: ...

    def stats(self) -> dict[str, Json]:
        """Counters and gauges, cheap enough to be polled."""

    async def close(self) -> None:
        """No new work; finish or fail what runs; write what is not yet on disk."""
