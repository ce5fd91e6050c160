"""These routes search, fill, list, export and forget a user's memory.

Each concerns one user and no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from pydantic import ConfigDict
from starlette.responses import Response, StreamingResponse

from emberkeep.api.body import Label, Name
from emberkeep.api.errors import failure_of
from emberkeep.api.fields import UserFields
from emberkeep.api.kinds import FactName, MaxConversations, MaxResults, Question, Remembered
from emberkeep.api.openai_chat import message_json
from emberkeep.api.stored import found_json
from emberkeep.backend.base import Backend
from emberkeep.errors import EmberkeepError, InvalidField, NoSuchEntry
from emberkeep.files import line
from emberkeep.library.user_memory import require_memory
from emberkeep.server.routes.base import (
    LINES,
    PageParameters,
    Routes,
    Served,
    SideWork,
    json_response,
    page_response,
    register_path_part,
)
from emberkeep.types.memory import Fact, Forgotten, SavedConversation
from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.memory.memory import Memory

T = TypeVar("T")

_ROWS = 256
_BYTES = 1 << 20
"""An export sends so much at a time: whichever is reached first."""


class FactBody(UserFields):
    value: Remembered


class AnswerBody(UserFields):
    question: Remembered
    answer: Remembered


def one_owner(body: UserFields, query: UserFields) -> str:
    """The owner that the query or the body names. Raises InvalidField if they differ."""
    in_body, in_query = body.to_namespace(), query.to_namespace()
    if in_body and in_query and in_body != in_query:
        raise InvalidField("user_id", "the query and the body name different users: name one.")
    return in_body or in_query


register_path_part("any_text", r"[\s\S]+")  # with slashes and line breaks, as names of facts have


class OwnerParameters(UserFields):
    """Names the user in the query, also beside a body."""

    model_config = ConfigDict(strict=False)


class SearchParameters(OwnerParameters):
    query: Question
    max_results: MaxResults = 5
    conversation_id: Label | None = None


class FactParameters(OwnerParameters):
    name: FactName


class FactsParameters(PageParameters, OwnerParameters):
    pass


class ConversationsParameters(OwnerParameters):
    limit: MaxConversations = 50


class ConversationParameters(OwnerParameters):
    conversation_id: Name


class ForgetParameters(OwnerParameters):
    conversation_id: Name | None = None


def routes(served: Served) -> Routes:
    routes, backend, side = Routes(), served.models.default, served.side

    ask = Asker(backend, side)
    _add_search(routes, ask)
    _add_facts(routes, ask)
    _add_whole_memory(routes, ask)

    @routes.get("/v1/memory/export", content=LINES)
    async def export(query: OwnerParameters) -> Response:
        rows = require_memory(backend.memory).export(query.to_namespace())
        # The status goes out with the first lines: an error before them still gets its own.
        first = await side.run(_next_lines, rows)
        return StreamingResponse(_export_from(first, rows), media_type="application/x-ndjson")

    return routes


@dataclass(frozen=True, slots=True)
class Asker:
    backend: Backend
    side: SideWork

    async def __call__(self, work: Callable[[Memory], T]) -> T:
        """Runs `work` off the loop. Raises MemoryOff, Overloaded, and what `work` raises."""
        return await self.side.run(work, require_memory(self.backend.memory))


def _add_search(routes: Routes, ask: Asker) -> None:
    @routes.get("/v1/memory/search")
    async def search(query: SearchParameters) -> Json:
        owner, only, most = query.to_namespace(), query.conversation_id or None, query.max_results
        return await ask(
            lambda memory: found_json(memory.search(owner, query.query, max_results=most, conversation=only))
        )

    example = {"question": "Where is the spare key?", "answer": "Under the blue pot."}

    @routes.post("/v1/memory/answers", example=example)
    async def store_answer(query: OwnerParameters, body: AnswerBody) -> Json:
        id_ = await ask(lambda memory: memory.store_answer(one_owner(body, query), body.question, body.answer))
        return {"object": "memory.answer", "id": id_}


def _add_facts(routes: Routes, ask: Asker) -> None:
    @routes.get("/v1/memory/facts")
    async def facts(query: FactsParameters) -> Response:
        return await ask(lambda memory: page_response(memory.facts(query.to_namespace()), fact_json, query))

    @routes.get("/v1/memory/facts/{name:any_text}")
    async def fact(query: FactParameters) -> Json:
        found = await ask(lambda memory: memory.fact(query.to_namespace(), query.name))
        if found is None:
            raise _no_fact(query.name)
        return fact_json(found)

    @routes.put("/v1/memory/facts/{name:any_text}", example={"value": "Ada"})
    async def set_fact(query: FactParameters, body: FactBody) -> Json:
        return fact_json(await ask(lambda memory: memory.set_fact(one_owner(body, query), query.name, body.value)))

    @routes.delete("/v1/memory/facts/{name:any_text}")
    async def delete_fact(query: FactParameters) -> Json:
        if not await ask(lambda memory: memory.delete_fact(query.to_namespace(), query.name)):
            raise _no_fact(query.name)
        return forgotten_json(Forgotten(facts=1))


def _add_whole_memory(routes: Routes, ask: Asker) -> None:
    @routes.get("/v1/memory/conversations")
    async def conversations(query: ConversationsParameters) -> Json:
        saved = await ask(lambda memory: memory.conversations(query.to_namespace(), query.limit))
        return {"object": "list", "data": [_head_json(conversation) for conversation in saved]}

    @routes.get("/v1/memory/conversations/{conversation_id:any_text}")
    async def conversation(query: ConversationParameters) -> Response:
        return await ask(lambda memory: _conversation(memory, query.to_namespace(), query.conversation_id))

    @routes.get("/v1/memory/stats")
    async def stats(query: OwnerParameters) -> Json:
        figures = await ask(lambda memory: memory.stats(query.to_namespace()))
        # Without the size of the file, which depends on other users.
        return {key: value for key, value in figures.items() if key not in ("bytes", "limit")}

    @routes.delete("/v1/memory")
    async def forget(query: ForgetParameters) -> Json:
        return forgotten_json(await ask(lambda memory: memory.forget(_named_owner(query), query.conversation_id)))


def _conversation(memory: Memory, owner: str, conversation_id: str) -> Response:
    saved = memory.conversation(owner, conversation_id)
    if saved is None:
        raise NoSuchEntry("No such conversation is saved: GET /v1/memory/conversations lists those that are.")
    messages = [message_json(message) for message in saved.messages]
    return json_response({**_head_json(saved), "messages": messages})


def _no_fact(name: str) -> NoSuchEntry:
    return NoSuchEntry(f"No fact is called {name!r}: GET /v1/memory/facts lists those that there are.")


def _named_owner(query: UserFields) -> str:
    """The owner, who must be named: a request without one must not forget anything."""
    if (query.user_id, query.llama_user_id, query.user, query.safety_identifier) == (None,) * 4:
        raise InvalidField("user_id", "is required; an empty one means everybody who gave no name.")
    return query.to_namespace()


def _next_lines(rows: Iterator[Mapping[str, Json]]) -> bytes:
    """The next lines, or none."""
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


# ── JSON ──


def fact_json(fact: Fact) -> dict[str, Json]:
    return {"object": "memory.fact", **asdict(fact)}


def _head_json(conversation: SavedConversation) -> dict[str, Json]:
    names = ("title", "model", "created", "updated", "message_count")
    fields = {name: getattr(conversation, name) for name in names}
    return {"id": conversation.id, "object": "memory.conversation", **fields}


def forgotten_json(forgotten: Forgotten) -> dict[str, Json]:
    return {"object": "memory.removed", "removed": asdict(forgotten)}
