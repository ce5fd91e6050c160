"""OpenAI's Responses API, and the conversations that responses can belong to.

A user's responses are found with the same `user` as they were asked for: in the query where there is no body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Annotated, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.requests import Request as HttpRequest

from emberkeep.api.body import Name
from emberkeep.api.errors import Failure, failure_of
from emberkeep.api.responses_answer import Output, ResponseFrames, cancelled, failed
from emberkeep.api.responses_body import (
    ConversationBody,
    ItemsBody,
    MetadataBody,
    PromptBody,
    ResponseBody,
    conversation_json,
    items_json,
    new_conversation_id,
    new_response_id,
    response_head,
)
from emberkeep.api.responses_items import Item, references, resolve, response_of, to_items
from emberkeep.backend.base import Backend, tokenizer_of
from emberkeep.errors import EmberkeepError, InvalidField, MemoryFailed, NoSuchEntry, RequestError
from emberkeep.library.user_memory import require_memory
from emberkeep.memory.memory import Memory
from emberkeep.server.routes.base import STREAMS, Routes, Served, passed_on, register_path_part, respond
from emberkeep.server.routes.memory import OwnerParameters, one_owner
from emberkeep.server.stream import make_of_body
from emberkeep.types.events import Completed, Events
from emberkeep.types.memory import StoredResponse
from emberkeep.types.request import Json, Request
from emberkeep.values import dataclass

log = logging.getLogger(__name__)


register_path_part("response_id", r"(?!input_tokens$)[^/]+")  # but the name of the one other path that is there

_ANSWERED = (
    "The response was answered while it was asked for, and has ended: only one with background can be cancelled."
)


class ResponseParameters(OwnerParameters):
    response_id: Name


class RetrieveParameters(ResponseParameters):
    stream: SkipJsonSchema[bool] = False


class ItemsPage(OwnerParameters):
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Name | None = None


class InputParameters(ItemsPage, ResponseParameters):
    pass


class OneConversation(OwnerParameters):
    conversation_id: Name


class ItemsParameters(ItemsPage, OneConversation):
    pass


class ItemParameters(OneConversation):
    item_id: Name


def routes(served: Served) -> Routes:
    routes, background = Routes("/v1", ""), Background()
    _add_create(routes, served, background)
    _add_stored(routes, served, background)
    _add_conversations(routes, served)
    _add_items(routes, served)
    return routes


def _add_create(routes: Routes, served: Served, background: Background) -> None:
    models, example = served.models, {"input": "Why is the sky blue?"}

    @routes.post("/responses", content=STREAMS, example=example)
    async def create(http: HttpRequest, query: OwnerParameters, body: ResponseBody) -> Json:
        body.check()
        backend, owner = models.find(body.model), one_owner(body, query)
        memory = models.default.memory if body.store is not False else None
        context = await _context(http, served, body, owner)
        exchange = Exchange(backend, body, context, owner, memory)
        request = replace(
            passed_on(http, await make_of_body(http, lambda: body.to_request(context.items))),
            user=body.to_user() or query.to_user(),
            namespace=owner,
            conversation_id=exchange.conversation_id,
        )
        if body.background:
            require_memory(memory)
            return background.start(owner, exchange, request)
        frames = exchange.frames if body.stream else None
        return await respond(http, exchange, [request], frames, lambda _: exchange.response)

    @routes.post("/responses/input_tokens", example=example)
    async def input_tokens(http: HttpRequest, query: OwnerParameters, body: PromptBody) -> Json:
        backend = models.find(body.model)
        context = await _context(http, served, body, one_owner(body, query))
        request = await make_of_body(http, lambda: body.to_prompt(context.items))
        count = await served.side.run_on(lambda loaded: tokenizer_of(loaded).count(request), backend)
        return {"object": "response.input_tokens", "input_tokens": count}


async def _context(http: HttpRequest, served: Served, body: PromptBody, owner: str) -> Context:
    """Without a look into memory where nothing of it is needed."""
    items = await make_of_body(http, body.to_items)
    memory = served.models.default.memory
    needs_memory = bool(body.previous_response_id or body.conversation or references(items))
    if not needs_memory and (memory is None or not is_stored(body)):
        return Context([], items, None, 0)
    return await served.side.run(load_context, require_memory(memory), owner, body, items)


def _add_stored(routes: Routes, served: Served, background: Background) -> None:
    run, memory = served.side.run, partial(_memory, served)

    @routes.get("/responses/{response_id:response_id}")
    async def retrieve(query: RetrieveParameters) -> Json:
        if query.stream:
            raise InvalidField("stream", "a stored response comes at once: leave it out.")
        owner, response_id = query.to_namespace(), query.response_id
        return background.find(owner, response_id) or await run(_response, memory(), owner, response_id)

    @routes.delete("/responses/{response_id:response_id}")
    async def delete(query: ResponseParameters) -> Json:
        owner, response_id = query.to_namespace(), query.response_id
        await background.cancel(owner, response_id)
        await run(memory().responses.delete, owner, response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    @routes.post("/responses/{response_id:response_id}/cancel")
    async def cancel(query: ResponseParameters) -> Json:
        owner = query.to_namespace()
        await background.cancel(owner, query.response_id)
        response = await run(_response, memory(), owner, query.response_id)
        if not response["background"]:
            raise RequestError(_ANSWERED)
        return response

    @routes.get("/responses/{response_id:response_id}/input_items")
    async def input_items(query: InputParameters) -> Json:
        owner, items_until = query.to_namespace(), memory().responses.items_until
        return _page(await run(items_until, owner, query.response_id, with_output=False), query)


def _add_conversations(routes: Routes, served: Served) -> None:
    run, memory = served.side.run, partial(_memory, served)

    @routes.post("/conversations")
    async def create(http: HttpRequest, query: OwnerParameters, body: ConversationBody) -> Json:
        items = await make_of_body(http, lambda: to_items(body.items or []))
        owner, name, metadata = one_owner(body, query), new_conversation_id(), body.metadata or {}
        return conversation_json(await run(memory().responses.create_conversation, owner, name, metadata, items))

    @routes.get("/conversations/{conversation_id}")
    async def retrieve(query: OneConversation) -> Json:
        owner, conversation_id = query.to_namespace(), query.conversation_id
        return conversation_json(await run(memory().responses.conversation, owner, conversation_id))

    @routes.post("/conversations/{conversation_id}", example={"metadata": {"topic": "sky"}})
    async def update(query: OneConversation, body: MetadataBody) -> Json:
        set_metadata, owner = memory().responses.set_metadata, one_owner(body, query)
        return conversation_json(await run(set_metadata, owner, query.conversation_id, body.metadata or {}))

    @routes.delete("/conversations/{conversation_id}")
    async def delete(query: OneConversation) -> Json:
        await run(_forget, memory(), query.to_namespace(), query.conversation_id)
        return {"id": query.conversation_id, "object": "conversation.deleted", "deleted": True}


def _add_items(routes: Routes, served: Served) -> None:
    run, memory = served.side.run, partial(_memory, served)

    async def items_of(query: OneConversation) -> Sequence[Item]:
        return await run(memory().responses.items, query.to_namespace(), query.conversation_id)

    @routes.get("/conversations/{conversation_id}/items")
    async def items(query: ItemsParameters) -> Json:
        return _page(await items_of(query), query)

    @routes.post(
        "/conversations/{conversation_id}/items",
        example={"items": [{"type": "message", "role": "user", "content": "Hello!"}]},
    )
    async def add(http: HttpRequest, query: OneConversation, body: ItemsBody) -> Json:
        items = await make_of_body(http, lambda: to_items(body.items))
        await run(memory().responses.add_items, one_owner(body, query), query.conversation_id, items)
        return items_json(items, has_more=False)

    @routes.get("/conversations/{conversation_id}/items/{item_id}")
    async def item(query: ItemParameters) -> Json:
        found = next((item for item in await items_of(query) if item["id"] == query.item_id), None)
        if found is None:
            raise NoSuchEntry("The conversation has no such item: list its items.")
        return found

    @routes.delete("/conversations/{conversation_id}/items/{item_id}")
    async def delete(query: ItemParameters) -> Json:
        """Answers with the conversation that it was in."""
        responses, owner, conversation_id = memory().responses, query.to_namespace(), query.conversation_id
        await run(responses.delete_item, owner, conversation_id, query.item_id)
        return conversation_json(await run(responses.conversation, owner, conversation_id))


def _memory(served: Served) -> Memory:
    return require_memory(served.models.default.memory)


def _response(memory: Memory, owner: str, response_id: str) -> dict[str, Json]:
    return memory.responses.read(owner, response_id).data


def _forget(memory: Memory, owner: str, conversation_id: str) -> None:
    """With everything that was archived of it. Raises NoSuchEntry."""
    memory.responses.conversation(owner, conversation_id)
    memory.forget(owner, conversation_id)


def _page(items: Sequence[Item], page: ItemsPage) -> dict[str, Json]:
    """Every id once: a client goes on after the last one that it has seen. Raises InvalidField."""
    by_id = {item["id"]: item for item in items}
    ids = list(by_id) if page.order == "asc" else list(reversed(by_id))
    if page.after is not None and page.after not in by_id:
        raise InvalidField("after", "no item here has this id: leave it out to begin with the first.")
    begin = ids.index(page.after) + 1 if page.after is not None else 0
    shown = [by_id[item_id] for item_id in ids[begin : begin + page.limit]]
    return items_json(shown, has_more=begin + len(shown) < len(ids))


# ── one response: what it continues, its answer while it is written, and where it is stored ──


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
