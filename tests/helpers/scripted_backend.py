"""A backend that answers from a script, the real one over the deterministic engine, and what their events hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from emberkeep.backend.base import NO_ARGS, Extras, ModelCard, ModelTexts
from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from emberkeep.engine.fake import CHATML, FakeEngine
from emberkeep.errors import EmberkeepError
from emberkeep.kv.forgetting import Holders
from emberkeep.runtime.local_model import assemble
from emberkeep.runtime.parts import ModelParts
from emberkeep.types.cache import Warmed
from emberkeep.types.events import (
    CallEnded,
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    TextDelta,
    Timings,
    ToolCallDelta,
    Usage,
)
from emberkeep.types.request import Json, Message, Request, Tool, ToolCall


def fake_backend(
    config: Config,
    engine: FakeEngine | None = None,
    *,
    template: str = CHATML,
    name: str = "fake",
    parts: ModelParts | None = None,
) -> LocalBackend:
    engine = engine or FakeEngine()
    return assemble(config, engine, template, ModelCard(name, 0, engine.capabilities.context), parts=parts)


def settle(backend: LocalBackend) -> None:
    """Wait until no turn is being closed any more, which happens a moment after its answer."""
    # Between two steps: within one a turn is no longer active and not stored yet.
    while backend.scheduler.call(lambda: backend.scheduler.stats()["active"]).result():
        pass


FOREVER = "forever"
"""In a script: nothing more comes until the request is cancelled."""
Step = Event | EmberkeepError | str


def answer(
    text: str, *, prompt_tokens: int = 10, cached_tokens: int = 0, tokens: Sequence[int] = ()
) -> list[Step]:
    """A whole answer, one word per event."""
    words = [TextDelta(0, word) for word in text.split(" ")]
    spaced = [TextDelta(0, word.text if index == 0 else f" {word.text}") for index, word in enumerate(words)]
    return [
        *spaced,
        TextDelta(0, "", tokens=tuple(tokens)),
        Finished(0, FinishReason.STOP),
        Completed(
            Usage(prompt_tokens, len(spaced), cached_tokens),
            Timings(predicted_n=len(spaced), predicted_ms=10.0, ttft_ms=38.0),
            LookupRecord(prompt_tokens=prompt_tokens, hot_tokens=cached_tokens),
        ),
    ]


class ScriptedBackend(Extras):
    holders = Holders()

    def health(self) -> dict[str, Json]:
        return {"backend": "scripted", "model": self.card.id}

    def __init__(self, script: Callable[[Request], Iterable[Step]]) -> None:
        self._script = script
        self.tokenizer = self.warmer = self
        self.requests: list[Request] = []
        self.kept_warm: list[Request] = []
        self.cancelled = 0
        self.closed = False

    @property
    def card(self) -> ModelCard:
        return ModelCard("scripted", 0, 4096)

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        self.requests.append(request)
        try:
            for step in self._script(request):
                await self._play(step)
                assert not isinstance(step, (str, EmberkeepError))
                yield step
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def warm(self, request: Request) -> Warmed:
        usage = Usage()
        async for event in self.generate(replace(request, max_tokens=0).decided(is_prefix=True)):
            usage = event.usage if isinstance(event, Completed) else usage
        return Warmed(usage.prompt_tokens, usage.cached_tokens, 0.01, "0123456789ab")

    def keep_warm(self, prefixes: Sequence[Request]) -> None:
        self.kept_warm += prefixes

    async def _play(self, step: Step) -> None:
        if isinstance(step, EmberkeepError):
            raise step
        if step == FOREVER:
            await asyncio.Event().wait()
        await asyncio.sleep(0)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return list(text.encode())

    def detokenize(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode()

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [bytes([token]) for token in tokens]

    def texts(self) -> ModelTexts:
        return ModelTexts("", "", "")

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, Json] = NO_ARGS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        return "\n".join(message.content for message in messages)

    def count(self, request: Request) -> int:
        return sum(len(message.content) for message in request.messages)

    def stats(self) -> dict[str, Json]:
        return {"requests": len(self.requests), "kv": {"warm_bytes": 1048576}}

    async def close(self) -> None:
        self.closed = True


def read_events(backend: Any, request: Request) -> list[Event]:
    async def read() -> list[Event]:
        return [event async for event in backend.generate(request)]

    return asyncio.run(read())


def text_of(events: Iterable[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def calls_of(events: Iterable[Event]) -> list[ToolCall]:
    found: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            found[event.call_index] = event.added_to(found.get(event.call_index))
    assert list(found) == list(range(len(found)))
    return list(found.values())


def outcomes_of(events: Iterable[Event]) -> list[tuple[str, bool]]:
    """What each tool said, and whether that was a failure."""
    return [(event.outcome.text, event.outcome.failed) for event in events if isinstance(event, CallEnded)]


def end_of(events: list[Event]) -> tuple[Finished, Completed]:
    finished, completed = events[-2:]
    assert isinstance(finished, Finished) and isinstance(completed, Completed)
    return finished, completed
