"""A model in this process with the product around it but HTTP: what it answers, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import perf_counter

from emberkeep.backend.local import LocalBackend
from emberkeep.bench.servers import is_settled
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.library.results import Collector, Result
from emberkeep.runtime.served_models import open_backend
from emberkeep.types.events import TextDelta, TokenLogprob
from emberkeep.types.request import Message, Request
from emberkeep.values import dataclass

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Reply:
    ttft_ms: float
    """From the call to the first text, by the caller's clock; to the end if there was none."""
    result: Result
    first: TokenLogprob | None
    """How likely the first token was, and others, where that was asked for."""


class ModelUnderTest:
    def __init__(self, backend: LocalBackend) -> None:
        self.backend = backend

    def tokenize(self, text: str) -> list[int]:
        return self.backend.tokenizer.tokenize(text, add_special=False, parse_special=True)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """What a fresh conversation with these messages is evaluated as."""
        return self.tokenize(self.backend.tokenizer.apply_template(messages, ()))

    async def ask(self, request: Request) -> Reply:
        """Waits until everything that was computed is also on disk. Raises EmberkeepError."""
        collector, begin = Collector(), perf_counter()
        at, first = None, None
        async for event in self.backend.generate(request):
            if isinstance(event, TextDelta) and at is None:
                at, first = perf_counter(), next(iter(event.logprobs), None)
            collector.add(event)
        reply = Reply(1e3 * ((at or perf_counter()) - begin), collector.result(), first)
        while not is_settled(self.backend.stats()):
            await asyncio.sleep(_POLL_S)
        return reply


@asynccontextmanager
async def open_under_test(config: Config) -> AsyncIterator[ModelUnderTest]:
    """Raises EngineError, ModelError, and EmberkeepError for a model whose context is shorter than `config.ctx`,
    or which does not generate."""
    backend = open_backend(config)
    try:
        if not isinstance(backend, LocalBackend):
            raise EmberkeepError(f"{config.local_model} gives no text: choose another --model.")
        if config.ctx is not None and backend.card.context < config.ctx:
            raise EmberkeepError(
                f"This needs {config.ctx:,} tokens of context and the model has {backend.card.context:,}: "
                "choose smaller sizes or another --model."
            )
        yield ModelUnderTest(backend)
    finally:
        await backend.close()
