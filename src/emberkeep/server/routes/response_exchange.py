"""One response: what it continues, its answer while it is written, and where it is stored."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing

from emberkeep.api.errors import Failure, failure_of
from emberkeep.api.responses.answer import Output, ResponseFrames, cancelled, failed
from emberkeep.api.responses.body import PromptBody, ResponseBody, new_response_id, response_head
from emberkeep.api.responses.items import Item, references, resolve, response_of
from emberkeep.backend.base import Backend
from emberkeep.errors import EmberkeepError, MemoryFailed, NoSuchEntry
from emberkeep.memory.memory import Memory
from emberkeep.types.events import Completed, Events
from emberkeep.types.memory import StoredResponse
from emberkeep.types.request import Json, Request
from emberkeep.values import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Context:
    """What a request continues, and what it asks."""

    earlier: list[Item]
    new: list[Item]
    """What it asks, without references."""
    conversation: str | None
    """The one that it continues, or the first response of its chain."""
    as_of: int
    """The last forgetting before it began."""

    @property
    def items(self) -> list[Item]:
        return [*self.earlier, *self.new]

    @property
    def begins(self) -> bool:
        """Nothing was answered before: whoever continues it will do so by its id."""
        return all(item["type"] == "message" and item["role"] != "assistant" for item in self.items)


def load_context(memory: Memory, owner: str, body: PromptBody, given: list[Item]) -> Context:
    """Blocks. Raises NoSuchEntry, InvalidField and MemoryFailed."""
    as_of = memory.last_forgetting()
    earlier: list[Item] = []
    conversation = body.conversation
    if body.previous_response_id is not None:
        conversation = memory.responses.read(owner, body.previous_response_id).conversation
        earlier = memory.responses.items_until(owner, body.previous_response_id)
    elif conversation is not None:
        earlier = memory.responses.items(owner, conversation)
    there = {item["id"]: item for item in earlier}
    whole = resolve(given, _referenced(memory, owner, references(given), there))
    if body.conversation is not None and is_stored(body):
        memory.responses.check_addition(owner, body.conversation, whole)
    # What is there is not asked once more: the model would read it twice.
    new = [item for item in whole if there.get(item["id"]) != item]
    return Context(earlier, new, conversation, as_of)


def is_stored(body: PromptBody) -> bool:
    return isinstance(body, ResponseBody) and body.store is not False


def _referenced(memory: Memory, owner: str, ids: Sequence[str], there: Mapping[str, Item]) -> Mapping[str, Item]:
    """Items that come before, of the owner's conversations, and of what stored responses answered."""
    sought = [item_id for item_id in ids if item_id not in there]
    if not sought:
        return there
    known = memory.responses.find_items(owner, sought)
    for response_id in {response_of(item_id) for item_id in sought if item_id not in known} - {None}:
        try:
            output = memory.responses.read(owner, response_id or "").data["output"]
        except NoSuchEntry:
            continue
        known |= {item["id"]: item for item in output if item["id"] in sought}
    return {**known, **there}


class Exchange:
    """Belongs to the event loop. It is what answers `request`: the backend, whose answer it stores."""

    def __init__(
        self, backend: Backend, body: ResponseBody, context: Context, owner: str, memory: Memory | None
    ) -> None:
        """`memory` None: nothing of it is stored."""
        self.id = new_response_id()
        self._backend = backend
        self._body = body
        self._context = context
        self._owner = owner
        self._memory = memory
        self._created = int(time.time())
        self._output = self._new_output()
        self._head: dict[str, Json] = {}
        self.response: dict[str, Json] = {}
        """What there is of it."""

    @property
    def conversation_id(self) -> str | None:
        """A response that may be continued by its id begins a conversation of that name."""
        begins = self._memory is not None and self._context.begins
        return self._context.conversation or self._body.conversation_id or (self.id if begins else None)

    def frames(self) -> ResponseFrames:
        return ResponseFrames(self.head(), self._new_output(), self.conversation_id)

    def head(self) -> dict[str, Json]:
        """The response before its answer. When it is asked for first, it must be known which backend answers."""
        if not self._head:
            keeps = self._memory is not None
            self._head = response_head(self._body, self.id, self._created, self._backend.card.id, keeps)
        return self._head

    async def generate(self, request: Request) -> Events:
        """The backend's events. The response is stored before Completed: a client that has it may continue it."""
        async with aclosing(self._backend.generate(request)) as events:
            async for event in events:
                self._output.add(event)
                if isinstance(event, Completed):
                    await self.end(self._output.finished(self.head(), self.conversation_id))
                yield event

    async def end(self, response: dict[str, Json]) -> None:
        """It is stored when this returns, or raises: a thread cannot be cancelled."""
        self.response = response
        if self._memory is None:
            return
        saving = asyncio.ensure_future(asyncio.to_thread(self._save, self._memory, response))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await asyncio.wait([saving])
            raise

    def failed(self, failure: Failure) -> dict[str, Json]:
        return failed(self.head(), self._output, failure)

    def cancelled(self) -> dict[str, Json]:
        return cancelled(self.head(), self._output)

    def _save(self, memory: Memory, response: dict[str, Json]) -> None:
        context, body = self._context, self._body
        stored = StoredResponse(
            self.id,
            context.conversation or self.id,
            body.previous_response_id,
            body.conversation is not None,
            response,
            context.new,
        )
        try:
            memory.responses.save(self._owner, stored, as_of=context.as_of)
        except MemoryFailed as error:
            log.warning("a response was not stored: %s", error)

    def _new_output(self) -> Output:
        seals = self._body.wants_encrypted_reasoning
        return Output(self.id, self._body.toolset, seals_reasoning=seals)


class Background:
    """Responses that are written without a client. Belongs to the event loop."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], tuple[Exchange, asyncio.Task[None]]] = {}

    def start(self, owner: str, exchange: Exchange, request: Request) -> dict[str, Json]:
        """The response as it is now."""
        task = asyncio.create_task(self._run((owner, exchange.id), exchange, request))
        self._running[owner, exchange.id] = exchange, task
        return exchange.head() | {"status": "queued"}

    def find(self, owner: str, response_id: str) -> dict[str, Json] | None:
        """One that is being written."""
        found = self._running.get((owner, response_id))
        return found[0].head() if found else None

    async def cancel(self, owner: str, response_id: str) -> bool:
        """Whether it was being written; it is stored when this returns: as cancelled, unless it had ended."""
        found = self._running.get((owner, response_id))
        if found is None:
            return False
        exchange, task = found
        if not exchange.response:
            task.cancel()
        await asyncio.wait([task])  # which leaves it alone if this request is cancelled
        return True

    async def _run(self, key: tuple[str, str], exchange: Exchange, request: Request) -> None:
        try:
            async with aclosing(exchange.generate(request)) as events:
                async for _ in events:
                    pass
        except asyncio.CancelledError:
            if not exchange.response:
                await exchange.end(exchange.cancelled())
            raise
        except Exception as error:
            if not isinstance(error, EmberkeepError):
                log.exception("A response in the background failed.")
            if not exchange.response:
                await exchange.end(exchange.failed(failure_of(error)))
        finally:
            del self._running[key]
