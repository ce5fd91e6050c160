"""Our server and a llama-server with the same model, to be compared: each is alone while it is measured."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import ClassVar, Self

from emberkeep.bench.disk import chunk_files, drop_from_page_cache
from emberkeep.bench.http_client import Client, Messages, Reply, chat_body, parse_stream
from emberkeep.bench.server_process import PeerProcess, ServerProcess, ServerUnderTest
from emberkeep.bench.stage import ModelPlace
from emberkeep.errors import EmberkeepError
from emberkeep.signals import with_default_signals
from emberkeep.types.request import Json
from emberkeep.values import dataclass

OURS, PEER = "emberkeep", "llama-server"
_SLOT = 0
_SAVED = "slot.bin"


class Side(ABC):
    """A server that may be killed and started again. Leaving the `with` block kills it."""

    name: ClassVar[str]
    process: ServerUnderTest

    @property
    def client(self) -> Client:
        return Client(self.process.port)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()

    @abstractmethod
    async def settle(self) -> None:
        """Returns when it has nothing left to do: what it does in the background must not disturb the other."""

    @abstractmethod
    async def resume(self, messages: Messages, max_tokens: int) -> Reply:
        """Kill it, start it and ask what it was asked last. Starting is not timed; bringing its state back is."""


class OwnSide(Side):
    name = OURS

    def __init__(self, place: ModelPlace, *, parallel: int, ctx: int) -> None:
        self._place, self._parallel, self._ctx = place, parallel, ctx
        self._data_dir = place.new_data_dir()
        self.process = self._start()

    async def settle(self) -> None:
        await self.client.wait_until_settled()

    async def resume(self, messages: Messages, max_tokens: int) -> Reply:
        await self.settle()
        self.process.kill()
        drop_from_page_cache(chunk_files(self._data_dir))
        self.process = self._start()
        return await self.client.chat(messages, max_tokens)

    def _start(self) -> ServerProcess:
        return ServerProcess(self._place.model, self._data_dir, parallel=self._parallel, ctx=self._ctx)


class PeerSide(Side):
    name = PEER

    def __init__(
        self, place: ModelPlace, program: Path, *, parallel: int, ctx: int, more: Sequence[str] = ()
    ) -> None:
        self._place, self._program, self._parallel, self._ctx = place, program, parallel, ctx
        self._more = more
        self._folder = place.new_data_dir()
        self.process: PeerProcess = self._start()

    @property
    def flags(self) -> str:
        return " ".join(self.process.flags)

    async def settle(self) -> None:
        """It does nothing in the background."""

    async def resume(self, messages: Messages, max_tokens: int) -> Reply:
        """Its client saves the slot before and restores it afterwards; cold where it can do neither."""
        body = {**chat_body(messages, max_tokens), "id_slot": _SLOT}
        await self.client.post("/v1/chat/completions", body)
        is_saved = await self._slot("save")
        self.process.kill()
        if is_saved:
            drop_from_page_cache([self._folder / _SAVED])
        self.process = self._start()
        begin = perf_counter()
        if is_saved:
            await self._slot("restore")
        restored_ms = 1e3 * (perf_counter() - begin)
        reply = parse_stream(await self.client.post("/v1/chat/completions", body))
        return replace(reply, ttft_ms=restored_ms + reply.ttft_ms)

    async def _slot(self, action: str) -> bool:
        """Whether it was done: models with recurrent layers and old versions cannot."""
        with suppress(EmberkeepError):
            (await self.client.post(f"/slots/{_SLOT}?action={action}", {"filename": _SAVED})).body()
            return True
        return False

    def _start(self) -> PeerProcess:
        return PeerProcess(
            self._program,
            self._place.model,
            self._folder,
            parallel=self._parallel,
            ctx=self._ctx,
            more=self._more,
        )


@dataclass(frozen=True, slots=True)
class Rate:
    tokens_per_s: float
    lengths: tuple[int, ...]
    """Of the answers."""


async def burst(side: Side, requests: Sequence[tuple[str, Json]]) -> Rate:
    """Post these bodies to these paths at once. By the wall clock: from the first request to the last byte."""
    exchanges = await asyncio.gather(*(side.client.post(path, body) for path, body in requests))
    lengths = tuple(parse_stream(exchange).completion_tokens for exchange in exchanges)
    seconds = max(e.ended for e in exchanges) - min(e.sent for e in exchanges)
    return Rate(sum(lengths) / seconds, lengths)


def alone(side: Side, sides: Sequence[Side]) -> AbstractContextManager[None]:
    """The others stand still meanwhile: threads of an idle server may spin."""
    return standing_still([other for other in sides if other is not side])


@contextmanager
def standing_still(sides: Sequence[Side]) -> Iterator[None]:
    with ExitStack() as paused:
        for side in sides:
            paused.enter_context(side.process.pause())
        yield


_BUSY = """
from time import monotonic
end = monotonic() + 60
while monotonic() < end:
    pass
"""


@contextmanager
def busy_process() -> Iterator[None]:
    """One core has something else to do, for a minute at most: threads that spin for each other on one core may
    need much longer than that for a few tokens."""
    process = subprocess.Popen(with_default_signals([sys.executable, "-P", "-c", _BUSY]))
    try:
        yield
    finally:
        process.kill()
        process.wait()
