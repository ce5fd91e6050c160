"""Memory: search it, facts and answers to tell it, saved conversations, taking it along, forgetting it.

Every route concerns one user and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from pydantic import ConfigDict
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response, StreamingResponse

from emberkeep.api.body import Label, Name
from emberkeep.api.errors import failure_of
from emberkeep.api.fields import FactName, MaxConversations, MaxResults, Question, Remembered, UserFields
from emberkeep.api.openai.messages import message_json
from emberkeep.api.stored import found_json
from emberkeep.backend.base import Backend
from emberkeep.errors import EmberkeepError, InvalidField, NoSuchEntry
from emberkeep.library.user_memory import check_fact, line, require_memory
from emberkeep.server.routes.base import LINES, PageParameters, Routes, Served, json_response, page_response
from emberkeep.server.side_work import SideWork
from emberkeep.types.memory import Fact, Forgotten, SavedConversation
from emberkeep.types.request import Json

if TYPE_CHECKING:
    from emberkeep.memory.memory import Memory

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


class Whose(UserFields):
    """In the query, where there is no body or not only there."""

    model_config = ConfigDict(strict=False)


class SearchParameters(Whose):
    query: Question
    max_results: MaxResults = 5
    conversation_id: Label | None = None


class FactParameters(Whose):
    name: FactName


class FactsParameters(PageParameters, Whose):
    pass


class ConversationsParameters(Whose):
    limit: MaxConversations = 50


class ConversationParameters(Whose):
    conversation_id: Name


class ForgetParameters(Whose):
    conversation_id: Name | None = None


def routes(served: Served) -> Routes:
    routes, backend, side = Routes(), served.models.default, served.side
    _add_search(routes, backend, side)
    _add_facts(routes, backend, side)
    _add_conversations(routes, backend, side)
    _add_whole_memory(routes, backend, side)
    return routes


def _add_search(routes: Routes, backend: Backend, side: SideWork) -> None:
    @routes.get("/v1/memory/search")
    async def search(query: SearchParameters) -> Json:
        memory = require_memory(backend.memory)
        owner, of = query.to_namespace(), query.conversation_id or None

        def found() -> Json:
            turns = memory.search(owner, query.query, max_results=query.max_results, conversation=of)
            return found_json(turns)

        return await side.run(found)

    example = {"question": "Where is the spare key?", "answer": "Under the blue pot."}

    @routes.post("/v1/memory/answers", example=example)
    async def store_answer(query: Whose, body: AnswerBody) -> Json:
        memory = require_memory(backend.memory)
        owner = one_owner(body, query)
        return answer_json(await side.run(memory.store_answer, owner, body.question, body.answer))


def _add_facts(routes: Routes, backend: Backend, side: SideWork) -> None:
    @routes.get("/v1/memory/facts")
    async def facts(query: FactsParameters) -> Json:
        memory = require_memory(backend.memory)
        owner = query.to_namespace()
        return await side.run(lambda: page_response(memory.facts(owner), fact_json, query))

    @routes.get("/v1/memory/facts/{name:any_text}")
    async def fact(query: FactParameters) -> Json:
        memory = require_memory(backend.memory)
        return fact_json(await side.run(_fact, memory, query.to_namespace(), query.name))

    @routes.put("/v1/memory/facts/{name:any_text}", example={"value": "Ada"})
    async def set_fact(query: FactParameters, body: FactBody) -> Json:
        memory = require_memory(backend.memory)
        check_fact(query.name, body.value)
        told = await side.run(_set_fact, memory, one_owner(body, query), query.name, body.value)
        return fact_json(told)

    @routes.delete("/v1/memory/facts/{name:any_text}")
    async def delete_fact(query: FactParameters) -> Json:
        memory = require_memory(backend.memory)
        if not await side.run(memory.delete_fact, query.to_namespace(), query.name):
            raise _no_fact(query.name)
        return forgotten_json(Forgotten(facts=1))


def _add_conversations(routes: Routes, backend: Backend, side: SideWork) -> None:
    @routes.get("/v1/memory/conversations")
    async def conversations(query: ConversationsParameters) -> Json:
        memory = require_memory(backend.memory)
        saved = await side.run(memory.conversations, query.to_namespace(), query.limit)
        return conversations_json(saved)

    @routes.get("/v1/memory/conversations/{conversation_id:any_text}")
    async def conversation(query: ConversationParameters) -> Json:
        memory = require_memory(backend.memory)
        return await side.run(_conversation, memory, query.to_namespace(), query.conversation_id)


def _add_whole_memory(routes: Routes, backend: Backend, side: SideWork) -> None:
    @routes.get("/v1/memory/stats")
    async def stats(query: Whose) -> Json:
        memory = require_memory(backend.memory)
        return stats_json(await side.run(memory.stats, query.to_namespace()))

    @routes.get("/v1/memory/export", content=LINES)
    async def export(query: Whose) -> Response:
        rows = require_memory(backend.memory).export(query.to_namespace())
        # The status goes out with the first lines: what is wrong from the beginning still gets its own.
        first = await side.run(_next_lines, rows)
        return StreamingResponse(_export_from(first, rows), media_type="application/x-ndjson")

    @routes.delete("/v1/memory")
    async def forget(query: ForgetParameters) -> Json:
        memory = require_memory(backend.memory)
        forgotten = await side.run(memory.forget, _named_owner(query), query.conversation_id)
        return forgotten_json(forgotten)


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
