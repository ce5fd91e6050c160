"""Memory: search it, facts and answers to tell it, saved conversations, taking it along, forgetting it.

Every route concerns one user and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from emberkeep.api.errors import failure_of
from emberkeep.api.messages import message_json
from emberkeep.api.request import (
    FactName,
    Label,
    MaxConversations,
    MaxResults,
    Name,
    Question,
    Remembered,
    UserFields,
    UserId,
)
from emberkeep.api.stored import found_json
from emberkeep.backend.base import Backend
from emberkeep.errors import EmberkeepError, InvalidField, NoSuchEntry
from emberkeep.library.user_memory import check_fact, line, require_memory
from emberkeep.server.json_response import PAGE, PageLimit, PageOffset, json_response, page_response
from emberkeep.server.openapi import takes
from emberkeep.server.side_work import SideWork
from emberkeep.server.stream import read_body
from emberkeep.types import Fact, Forgotten, Json, SavedConversation

if TYPE_CHECKING:
    from emberkeep.memory.memory import Memory

LINES: dict[int | str, dict[str, Json]] = {200: {"content": {"application/x-ndjson": {}}}}

_ROWS = 256
_BYTES = 1 << 20
"""Of an export, at a time: whichever is reached first."""


class FactBody(UserFields):
    value: Remembered


class AnswerBody(UserFields):
    question: Remembered
    answer: Remembered


def one_owner(body: UserFields, query: UserFields) -> str:
    """The user may be named in the query or in the body. Raises InvalidField if they differ."""
    told, asked = body.to_namespace(), query.to_namespace()
    if told and asked and told != asked:
        raise InvalidField("user_id", "the query and the body name different users: name one.")
    return told or asked


class _AnyText(StringConvertor):
    """A path parameter that may contain slashes and line breaks, as names of facts do."""

    regex = r"[\s\S]+"


register_url_convertor("any_text", _AnyText())


def _whose(
    user_id: UserId | None = None,
    llama_user_id: UserId | None = None,
    user: Label | None = None,
    safety_identifier: Label | None = None,
    cache_salt: Name | None = None,
) -> UserFields:
    return UserFields(
        user_id=user_id,
        llama_user_id=llama_user_id,
        user=user,
        safety_identifier=safety_identifier,
        cache_salt=cache_salt,
    )


Whose = Annotated[UserFields, Depends(_whose)]


def memory_routes(backend: Backend, side: SideWork) -> APIRouter:
    router = APIRouter()
    _add_search(router, backend, side)
    _add_facts(router, backend, side)
    _add_conversations(router, backend, side)
    _add_whole_memory(router, backend, side)
    return router


def _add_search(router: APIRouter, backend: Backend, side: SideWork) -> None:
    @router.get("/v1/memory/search")
    async def search(
        query: Question, whose: Whose, max_results: MaxResults = 5, conversation_id: Label | None = None
    ) -> Response:
        memory, owner = require_memory(backend.memory), whose.to_namespace()

        def found() -> Response:
            of = conversation_id or None
            return json_response(found_json(memory.search(owner, query, max_results=max_results, conversation=of)))

        return await side.run(found)

    example = {"question": "Where is the spare key?", "answer": "Under the blue pot."}

    @router.post("/v1/memory/answers", openapi_extra=takes(AnswerBody, **example))
    async def store_answer(http: HttpRequest, whose: Whose) -> Response:
        memory, body = require_memory(backend.memory), await read_body(http, AnswerBody)
        owner = one_owner(body, whose)
        return json_response(answer_json(await side.run(memory.store_answer, owner, body.question, body.answer)))


def _add_facts(router: APIRouter, backend: Backend, side: SideWork) -> None:
    @router.get("/v1/memory/facts")
    async def facts(whose: Whose, limit: PageLimit = PAGE, offset: PageOffset = 0) -> Response:
        memory, owner = require_memory(backend.memory), whose.to_namespace()
        return await side.run(lambda: page_response(memory.facts(owner), fact_json, limit, offset))

    @router.get("/v1/memory/facts/{name:any_text}")
    async def fact(name: FactName, whose: Whose) -> Response:
        memory = require_memory(backend.memory)
        return json_response(fact_json(await side.run(_fact, memory, whose.to_namespace(), name)))

    @router.put("/v1/memory/facts/{name:any_text}", openapi_extra=takes(FactBody, value="Ada"))
    async def set_fact(http: HttpRequest, name: FactName, whose: Whose) -> Response:
        memory, body = require_memory(backend.memory), await read_body(http, FactBody)
        check_fact(name, body.value)
        told = await side.run(_set_fact, memory, one_owner(body, whose), name, body.value)
        return json_response(fact_json(told))

    @router.delete("/v1/memory/facts/{name:any_text}")
    async def delete_fact(name: FactName, whose: Whose) -> Response:
        memory = require_memory(backend.memory)
        if not await side.run(memory.delete_fact, whose.to_namespace(), name):
            raise _no_fact(name)
        return json_response(forgotten_json(Forgotten(facts=1)))


def _add_conversations(router: APIRouter, backend: Backend, side: SideWork) -> None:
    @router.get("/v1/memory/conversations")
    async def conversations(whose: Whose, limit: MaxConversations = 50) -> Response:
        memory = require_memory(backend.memory)
        saved = await side.run(memory.conversations, whose.to_namespace(), limit)
        return json_response(conversations_json(saved))

    @router.get("/v1/memory/conversations/{conversation_id:any_text}")
    async def conversation(conversation_id: Name, whose: Whose) -> Response:
        memory = require_memory(backend.memory)
        return await side.run(_conversation, memory, whose.to_namespace(), conversation_id)


def _add_whole_memory(router: APIRouter, backend: Backend, side: SideWork) -> None:
    @router.get("/v1/memory/stats")
    async def stats(whose: Whose) -> Response:
        memory = require_memory(backend.memory)
        return json_response(stats_json(await side.run(memory.stats, whose.to_namespace())))

    @router.get("/v1/memory/export", responses=LINES)
    async def export(whose: Whose) -> Response:
        rows = require_memory(backend.memory).export(whose.to_namespace())
        # The status goes out with the first lines: what is wrong from the beginning still gets its own.
        first = await side.run(_next_lines, rows)
        return StreamingResponse(_export_from(first, rows), media_type="application/x-ndjson")

    @router.delete("/v1/memory")
    async def forget(whose: Whose, conversation_id: Name | None = None) -> Response:
        memory, owner = require_memory(backend.memory), _named_owner(whose)
        return json_response(forgotten_json(await side.run(memory.forget, owner, conversation_id)))


def _conversation(memory: Memory, owner: str, conversation_id: str) -> Response:
    saved = memory.conversation(owner, conversation_id)
    if saved is None:
        raise NoSuchEntry("No such conversation is saved: GET /v1/memory/conversations lists those that are.")
    return json_response(conversation_json(saved))


def _fact(memory: Memory, owner: str, name: str) -> Fact:
    found = memory.fact(owner, name)
    if found is None:
        raise _no_fact(name)
    return found


def _set_fact(memory: Memory, owner: str, name: str, value: str) -> Fact:
    memory.set_fact(owner, name, value)
    return _fact(memory, owner, name)


def _no_fact(name: str) -> NoSuchEntry:
    return NoSuchEntry(f"No fact is called {name!r}: GET /v1/memory/facts lists those that there are.")


def _named_owner(whose: UserFields) -> str:
    """The owner, who must be named: a request without one must not forget anything."""
    if (whose.user_id, whose.llama_user_id, whose.user, whose.safety_identifier) == (None,) * 4:
        raise InvalidField("user_id", "is required; an empty one means everybody who gave no name.")
    return whose.to_namespace()


def _next_lines(rows: Iterator[Mapping[str, Json]]) -> bytes:
    """The next few, empty at the end."""
    lines, size = [], 0
    for row in islice(rows, _ROWS):
        lines.append(line(row).encode())
        size += len(lines[-1])
        if size >= _BYTES:
            break
    return b"".join(lines)


async def _export_from(lines: bytes, rows: Iterator[Mapping[str, Json]]) -> AsyncIterator[bytes]:
    """An error after the first lines is the last line."""
    try:
        while lines:
            yield lines
            lines = await asyncio.to_thread(_next_lines, rows)
    except EmberkeepError as error:
        yield line(failure_of(error).json()).encode()


# ── answers ──


def fact_json(fact: Fact) -> dict[str, Json]:
    return {"object": "memory.fact", **asdict(fact)}


def answer_json(answer_id: int) -> dict[str, Json]:
    return {"object": "memory.answer", "id": answer_id}


def conversations_json(conversations: Sequence[SavedConversation]) -> dict[str, Json]:
    return {"object": "list", "data": [_head_json(conversation) for conversation in conversations]}


def conversation_json(conversation: SavedConversation) -> dict[str, Json]:
    return {**_head_json(conversation), "messages": [message_json(message) for message in conversation.messages]}


def _head_json(conversation: SavedConversation) -> dict[str, Json]:
    return {
        "id": conversation.id,
        "object": "memory.conversation",
        "title": conversation.title,
        "model": conversation.model,
        "created": conversation.created,
        "updated": conversation.updated,
        "message_count": conversation.message_count,
    }


def stats_json(stats: Mapping[str, Json]) -> dict[str, Json]:
    """Without the size of the file, which depends on other users."""
    return {key: value for key, value in stats.items() if key not in ("bytes", "limit")}


def forgotten_json(forgotten: Forgotten) -> dict[str, Json]:
    return {"object": "memory.removed", "removed": asdict(forgotten)}
