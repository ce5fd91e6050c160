"""OpenAI's Responses API, and the conversations that responses can belong to.

A user's responses are found with the same `user` as they were asked for: in the query where there is no body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.request import Name, UserFields
from emberkeep.api.responses import (
    ConversationBody,
    ItemsBody,
    MetadataBody,
    PromptBody,
    ResponseBody,
    conversation_json,
    items_json,
    new_conversation_id,
)
from emberkeep.api.responses_items import Item, references, to_items
from emberkeep.backend.capabilities import tokenizer_of
from emberkeep.errors import InvalidField, NoSuchEntry, RequestError
from emberkeep.library.user_memory import require_memory
from emberkeep.server.json_response import json_response
from emberkeep.server.memory_routes import Whose, one_owner
from emberkeep.server.openai import check_hops, number_in
from emberkeep.server.response_exchange import Background, Context, Exchange, is_stored, load_context
from emberkeep.server.routes import STREAMS, Routes, read_parameters, takes
from emberkeep.server.stream import gather, make_of_body, read_body, stream
from emberkeep.types.models import DEPTH_HEADER

if TYPE_CHECKING:
    from emberkeep.backend.models import Models
    from emberkeep.memory.memory import Memory
    from emberkeep.server.side_work import SideWork
    from emberkeep.types.request import Json, Request


class _ResponseId(StringConvertor):
    """Every id but the name of the one other path that is there."""

    regex = r"(?!input_tokens$)[^/]+"


register_url_convertor("response_id", _ResponseId())

_ANSWERED = (
    "The response was answered while it was asked for, and has ended: only one with background can be cancelled."
)


class ResponseParameters(Whose):
    response_id: Name


class RetrieveParameters(ResponseParameters):
    stream: SkipJsonSchema[bool] = False


class ItemsPage(Whose):
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: Name | None = None


class InputParameters(ItemsPage, ResponseParameters):
    pass


class ConversationParameters(Whose):
    conversation_id: Name


class ItemsParameters(ItemsPage, ConversationParameters):
    pass


class ItemParameters(ConversationParameters):
    item_id: Name


def responses_routes(models: Models, side: SideWork) -> Routes:
    routes = Routes("/v1", "")
    background = Background()
    _add_create(routes, models, side, background)
    _add_stored(routes, models, side, background)
    _add_conversations(routes, models, side)
    _add_items(routes, models, side)
    return routes


def _add_create(routes: Routes, models: Models, side: SideWork, background: Background) -> None:
    taken = takes(ResponseBody, input="Why is the sky blue?")

    @routes.post("/responses", parameters=Whose, content=STREAMS, body=taken)
    async def create(http: HttpRequest) -> Response:
        whose, body = read_parameters(http, Whose), await read_body(http, ResponseBody)
        body.check()
        backend = models.find(body.model)
        owner = one_owner(body, whose)
        memory = models.default.memory if body.store is not False else None
        context = await _context(http, models, side, body, owner)
        exchange = Exchange(backend, body, context, owner, memory)
        request = await make_of_body(http, lambda: body.to_request(context.items))
        request = _owned(http, request, body, whose, exchange.conversation_id)
        if body.background:
            require_memory(memory)
            return json_response(background.start(owner, exchange, request))
        if body.stream:
            return await stream(http, exchange, [request], exchange.frames)
        await gather(http, exchange, [request])
        return json_response(exchange.response)

    counted = takes(PromptBody, input="Why is the sky blue?")

    @routes.post("/responses/input_tokens", parameters=Whose, body=counted)
    async def input_tokens(http: HttpRequest) -> Response:
        whose, body = read_parameters(http, Whose), await read_body(http, PromptBody)
        backend = models.find(body.model)
        context = await _context(http, models, side, body, one_owner(body, whose))
        request = await make_of_body(http, lambda: body.to_prompt(context.items))
        count = await side.run_on(lambda loaded: tokenizer_of(loaded).count(request), backend)
        return json_response({"object": "response.input_tokens", "input_tokens": count})


async def _context(http: HttpRequest, models: Models, side: SideWork, body: PromptBody, owner: str) -> Context:
    """Without a look into memory where nothing of it is needed."""
    asked = await make_of_body(http, body.to_items)
    memory = models.default.memory
    needs_memory = bool(body.previous_response_id or body.conversation or references(asked))
    if not needs_memory and (memory is None or not is_stored(body)):
        return Context([], asked, None, 0)
    return await side.run(load_context, require_memory(memory), owner, body, asked)


def _owned(
    http: HttpRequest, request: Request, body: UserFields, whose: UserFields, conversation_id: str | None
) -> Request:
    return replace(
        request,
        user=body.to_user() or whose.to_user(),
        namespace=one_owner(body, whose),
        conversation_id=conversation_id,
        depth=number_in(http, DEPTH_HEADER),
        hops=check_hops(http),
    )


def _add_stored(routes: Routes, models: Models, side: SideWork, background: Background) -> None:
    @routes.get("/responses/{response_id:response_id}", parameters=RetrieveParameters)
    async def retrieve(http: HttpRequest) -> Response:
        asked = read_parameters(http, RetrieveParameters)
        if asked.stream:
            raise InvalidField("stream", "a stored response comes at once: leave it out.")
        owner, response_id = asked.to_namespace(), asked.response_id
        running = background.find(owner, response_id)
        return json_response(running or await side.run(_response, _memory(models), owner, response_id))

    @routes.delete("/responses/{response_id:response_id}", parameters=ResponseParameters)
    async def delete(http: HttpRequest) -> Response:
        asked = read_parameters(http, ResponseParameters)
        owner, response_id = asked.to_namespace(), asked.response_id
        await background.cancel(owner, response_id)
        await side.run(_memory(models).responses.delete, owner, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @routes.post("/responses/{response_id:response_id}/cancel", parameters=ResponseParameters)
    async def cancel(http: HttpRequest) -> Response:
        asked = read_parameters(http, ResponseParameters)
        owner = asked.to_namespace()
        await background.cancel(owner, asked.response_id)
        response = await side.run(_response, _memory(models), owner, asked.response_id)
        if not response["background"]:
            raise RequestError(_ANSWERED)
        return json_response(response)

    @routes.get("/responses/{response_id:response_id}/input_items", parameters=InputParameters)
    async def input_items(http: HttpRequest) -> Response:
        asked, responses = read_parameters(http, InputParameters), _memory(models).responses
        owner = asked.to_namespace()
        items = await side.run(responses.items_until, owner, asked.response_id, with_output=False)
        return json_response(_page(items, asked))


def _add_conversations(routes: Routes, models: Models, side: SideWork) -> None:
    @routes.post("/conversations", parameters=Whose, body=takes(ConversationBody))
    async def create(http: HttpRequest) -> Response:
        whose, body = read_parameters(http, Whose), await read_body(http, ConversationBody)
        items = await make_of_body(http, lambda: _whole(to_items(body.items or [], "items")))
        responses, owner = _memory(models).responses, one_owner(body, whose)
        name, metadata = new_conversation_id(), body.metadata or {}
        return json_response(
            conversation_json(await side.run(responses.create_conversation, owner, name, metadata, items))
        )

    @routes.get("/conversations/{conversation_id}", parameters=ConversationParameters)
    async def retrieve(http: HttpRequest) -> Response:
        asked, responses = read_parameters(http, ConversationParameters), _memory(models).responses
        found = await side.run(responses.conversation, asked.to_namespace(), asked.conversation_id)
        return json_response(conversation_json(found))

    described = takes(MetadataBody, metadata={"topic": "sky"})

    @routes.post("/conversations/{conversation_id}", parameters=ConversationParameters, body=described)
    async def update(http: HttpRequest) -> Response:
        asked, body = read_parameters(http, ConversationParameters), await read_body(http, MetadataBody)
        responses, owner = _memory(models).responses, one_owner(body, asked)
        changed = await side.run(responses.set_metadata, owner, asked.conversation_id, body.metadata or {})
        return json_response(conversation_json(changed))

    @routes.delete("/conversations/{conversation_id}", parameters=ConversationParameters)
    async def delete(http: HttpRequest) -> Response:
        asked = read_parameters(http, ConversationParameters)
        await side.run(_forget, _memory(models), asked.to_namespace(), asked.conversation_id)
        return json_response({"id": asked.conversation_id, "object": "conversation.deleted", "deleted": True})


def _add_items(routes: Routes, models: Models, side: SideWork) -> None:
    @routes.get("/conversations/{conversation_id}/items", parameters=ItemsParameters)
    async def items(http: HttpRequest) -> Response:
        asked = read_parameters(http, ItemsParameters)
        return json_response(_page(await _items(models, side, asked), asked))

    taken = takes(ItemsBody, items=[{"type": "message", "role": "user", "content": "Hello!"}])

    @routes.post("/conversations/{conversation_id}/items", parameters=ConversationParameters, body=taken)
    async def add(http: HttpRequest) -> Response:
        asked, body = read_parameters(http, ConversationParameters), await read_body(http, ItemsBody)
        items = await make_of_body(http, lambda: _whole(to_items(body.items, "items")))
        responses, owner = _memory(models).responses, one_owner(body, asked)
        await side.run(responses.add_items, owner, asked.conversation_id, items)
        return json_response(items_json(items, has_more=False))

    @routes.get("/conversations/{conversation_id}/items/{item_id}", parameters=ItemParameters)
    async def item(http: HttpRequest) -> Response:
        asked = read_parameters(http, ItemParameters)
        return json_response(_one(await _items(models, side, asked), asked.item_id))

    @routes.delete("/conversations/{conversation_id}/items/{item_id}", parameters=ItemParameters)
    async def delete(http: HttpRequest) -> Response:
        """Answers with the conversation that it was in."""
        asked, responses = read_parameters(http, ItemParameters), _memory(models).responses
        owner, conversation_id = asked.to_namespace(), asked.conversation_id
        await side.run(responses.delete_item, owner, conversation_id, asked.item_id)
        return json_response(conversation_json(await side.run(responses.conversation, owner, conversation_id)))


async def _items(models: Models, side: SideWork, asked: ConversationParameters) -> Sequence[Item]:
    return await side.run(_memory(models).responses.items, asked.to_namespace(), asked.conversation_id)


def _memory(models: Models) -> Memory:
    return require_memory(models.default.memory)


def _response(memory: Memory, owner: str, response_id: str) -> dict[str, Json]:
    return memory.responses.read(owner, response_id).data


def _forget(memory: Memory, owner: str, conversation_id: str) -> None:
    """With everything that was archived of it. Raises NoSuchEntry."""
    memory.responses.conversation(owner, conversation_id)
    memory.forget(owner, conversation_id)


def _whole(items: list[Item]) -> list[Item]:
    """Raises InvalidField for references, which would outlive what they refer to."""
    if references(items):
        raise InvalidField("items", "give the items themselves, not references to them.")
    return items


def _one(items: Sequence[Item], item_id: str) -> Item:
    found = next((item for item in items if item["id"] == item_id), None)
    if found is None:
        raise NoSuchEntry("The conversation has no such item: list its items.")
    return found


def _page(items: Sequence[Item], page: ItemsPage) -> dict[str, Json]:
    """Every id once: a client goes on after the last one that it has seen. Raises InvalidField."""
    by_id = {item["id"]: item for item in items}
    ids = list(by_id) if page.order == "asc" else list(reversed(by_id))
    if page.after is not None and page.after not in by_id:
        raise InvalidField("after", "no item here has this id: leave it out to begin with the first.")
    begin = ids.index(page.after) + 1 if page.after is not None else 0
    shown = [by_id[item_id] for item_id in ids[begin : begin + page.limit]]
    return items_json(shown, has_more=begin + len(shown) < len(ids))
