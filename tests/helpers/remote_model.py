"""A provider that answers from a script, and a remote backend over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from emberkeep.backend.base import ModelCard
from emberkeep.backend.limits import Permits
from emberkeep.backend.remote.backend import RemoteBackend, RemoteOptions
from emberkeep.backend.remote.base import RemoteAbout
from emberkeep.errors import EmberkeepError
from emberkeep.memory.memory import Memory
from emberkeep.session.sessions import Policy, Sessions
from emberkeep.tools.permissions import HostToolBox
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    TextDelta,
    Timings,
    Usage,
)
from emberkeep.types.request import Message, Recall, Request

Step = Event | EmberkeepError | float
"""An event, an error to raise, or seconds to take."""


def tokens_of(messages: Sequence[Message]) -> int:
    """As this service counts them: four characters each, and four for a message."""
    return sum(len(message.content) // 4 + 4 for message in messages)


def said(text: str, prompt_tokens: int = 10, cached_tokens: int = 0) -> list[Step]:
    completed = Completed(Usage(prompt_tokens, 3, cached_tokens), Timings(), LookupRecord())
    return [TextDelta(0, text), Finished(0, FinishReason.STOP), completed]


@dataclass
class ScriptedProvider:
    script: Callable[[Request], Iterable[Step]]
    asked: list[Request] = field(default_factory=list)
    closed: int = 0
    left: int = 0

    async def answer(self, request: Request) -> AsyncIterator[Event]:
        self.asked.append(request)
        ended = False
        try:
            for step in self.script(request):
                if isinstance(step, EmberkeepError):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step
            ended = True
        finally:
            self.left += not ended

    async def about(self) -> RemoteAbout:
        return RemoteAbout(("far",), 1000)

    async def close(self) -> None:
        self.closed += 1


def remote(
    provider: ScriptedProvider,
    folder: Path | None = None,
    *,
    context: int = 400,
    recall: Recall = Recall.OFF,
    tools: ToolBox | None = None,
    permits: Permits | None = None,
    **settings: Any,
) -> RemoteBackend:
    """`settings`: of `RemoteOptions`."""
    memory = Memory(folder / "memory.sqlite3", limit_bytes=10 << 30) if folder else None
    sessions = Sessions(memory, Policy(context, recall=recall, recall_tokens=64))
    card = ModelCard("far-1", 0, context, remote="far")
    ours = HostToolBox(tools, ToolPolicy(), asks=False) if tools is not None else None
    return RemoteBackend(card, provider, sessions, RemoteOptions(**settings), tools=ours, permits=permits)
