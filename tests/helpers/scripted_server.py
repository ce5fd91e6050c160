"""A backend that does what a test says, and a real server around it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from emberkeep.backend.base import NO_ARGS, ModelCard, ModelTexts
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.kv.forgetting import Holders
from emberkeep.server.app import create_app
from emberkeep.server.http_server import Server
from emberkeep.server.lifecycle import bind
from emberkeep.server.middleware import Limits
from emberkeep.types.events import (
    Completed,
    Event,
    Finished,
    FinishReason,
    LookupRecord,
    MissReason,
    TextDelta,
    Timings,
    Usage,
)
from emberkeep.types.models import SpeculationStats, TimelineRecord
from emberkeep.types.request import Json, Message, Request, Tool

if TYPE_CHECKING:
    from emberkeep.backend.server_tools import ToolDesk
    from emberkeep.memory.memory import Memory

WAIT_S = 60.0
HANG = "wait until released or closed"

COMPLETED = Completed(
    Usage(prompt_tokens=12, completion_tokens=3, cached_tokens=8, reasoning_tokens=1),
    Timings(cache_n=8, prompt_n=4, prompt_ms=20.0, predicted_n=3, predicted_ms=30.0, ttft_ms=21.0, queue_ms=1.0),
    LookupRecord(
        prompt_tokens=12, hot_tokens=1, warm_tokens=2, cold_tokens=5, load_ms=0.5, reason=MissReason.NONE
    ),
)

Step = Event | Exception | str


def says(*texts: str, reason: FinishReason = FinishReason.STOP) -> list[Step]:
    return [*(TextDelta(0, text) for text in texts), Finished(0, reason), COMPLETED]


class ScriptedBackend:
    """Plays `script` for every request and remembers what it was asked."""

    memory: Memory | None = None
    host_tools: ToolDesk | None = None
    cache = warmer = embedder = experts = attention = None
    holders = Holders()

    @property
    def tokenizer(self) -> ScriptedBackend:
        return self

    def __init__(self, script: Sequence[Step] = ()) -> None:
        self.script: Sequence[Step] = script or says("Hello", " world")
        self.requests: list[Request] = []
        self.hanging = threading.Event()
        self.stopped_early = threading.Event()
        self.release = threading.Event()
        self.closed = threading.Event()
        self.card = ModelCard("org/tiny", 1_700_000_000, 4096, details={"quantization": "Q4_1"})

    @property
    def last(self) -> Request:
        return self.requests[-1]

    def reset(self, *script: Step) -> None:
        self.__init__(script)  # type: ignore[misc]

    async def generate(self, request: Request) -> AsyncIterator[Event]:
        self.requests.append(request)
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, str):
                    self.hanging.set()
                    await asyncio.to_thread(self.release.wait, WAIT_S)
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            self.stopped_early.set()
            self.release.set()
            raise

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [1] * add_special + [ord(letter) for letter in text]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [chr(token).encode() if token < 128 else bytes([token]) for token in tokens]

    def texts(self) -> ModelTexts:
        return ModelTexts("{{ messages }}", "<s>", "</s>")

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        args: Mapping[str, Json] = NO_ARGS,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        lines = [f"{message.role}: {message.content}" for message in messages]
        ending = ["assistant:"] if args.get("ends") and add_generation_prompt else []
        return "\n".join([*(tool.name for tool in tools), *lines, *ending])

    def count(self, request: Request) -> int:
        return sum(len(message.content) for message in request.messages)

    def stats(self) -> dict[str, Json]:
        return {"requests": len(self.requests)}

    def health(self) -> dict[str, Json]:
        return {"backend": "scripted", "model": self.card.id}

    def failure(self) -> EmberkeepError | None:
        return None

    def timeline(self) -> tuple[TimelineRecord, ...]:
        return ()

    def speculation_stats(self) -> SpeculationStats | None:
        return None

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.closed.set()


class Running:
    """A server in a thread of its own."""

    def __init__(self, backend: ScriptedBackend, config: Config, limits: Limits | None = None) -> None:
        self.backend = backend
        self._listener = bind("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = Server(create_app(Models(backend), config, limits), config)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    @property
    def tasks(self) -> int:
        return len(self._server.server_state.tasks)

    def stop(self) -> None:
        """Like one signal; nothing happens when the server has already stopped by itself."""
        with suppress(RuntimeError):  # its loop is closed
            self.loop.call_soon_threadsafe(self._server.stop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._server.serve(sockets=[self._listener]))


@contextmanager
def running(backend: ScriptedBackend, config: Config, limits: Limits | None = None) -> Iterator[Running]:
    server = Running(backend, config, limits)
    try:
        yield server
    finally:
        if server.thread.is_alive():
            server.stop()
            server.stop()
            server.thread.join(WAIT_S)
        assert not server.thread.is_alive()
