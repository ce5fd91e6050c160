"""The cache: what it holds, keeping and removing it, why a prompt was not reused, whether it is right; and
evaluating a prefix before a client waits for it (`/v1/warm`)."""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.api.answer import lookup_json
from emberkeep.api.body import INT32_MAX, WHOLE, Body, Label, one_of
from emberkeep.api.fields import OwnerFields
from emberkeep.api.kinds import KvBits
from emberkeep.api.openai_chat import BeginningList, ChatBody, TemplateArgs, ToolList, prefix_of_chats
from emberkeep.api.openai_completions import CompletionBody, read_chat_or_completion, to_one_request
from emberkeep.api.stored import MAX_VERIFY_S, entry_json, node_json, shown_json
from emberkeep.backend.base import Backend, cache_of, warm_prefix
from emberkeep.backend.models import loaded
from emberkeep.errors import InvalidField, Overloaded
from emberkeep.server.routes.base import (
    HELLO,
    RETRY_AFTER_S,
    OfModel,
    PageParameters,
    Parameters,
    Routes,
    Served,
    SideWork,
    json_response,
    list_response,
    page_response,
    register_path_part,
)
from emberkeep.server.stream import make_of_body, read_object, while_connected
from emberkeep.types.cache import CacheEntry, Explanation, Removed, Verified, Warmed
from emberkeep.types.events import Source, Sourced
from emberkeep.types.request import Json, Request, Ttl

SAMPLE = 4
TOKENS = 16
VERIFY_S = 60
SHOWN_CHARS = 2000
NODES = 1500
MAX_PARTS = 100_000

_ACTIONS = ("tree", "pin", "unpin", "gc", "explain", "verify")

Kind = Literal["conversation", "prefix"]


class EntriesParameters(PageParameters, OfModel):
    user_id: Label | None = None
    kind: Kind | None = None


class TreeParameters(OfModel):
    limit: Annotated[int, Field(ge=1, le=10_000)] = NODES
    at: Annotated[str, Field(max_length=64)] = ""


class EntryParameters(OfModel):
    entry_id: str
    chars: Annotated[int, Field(ge=0, le=INT32_MAX)] = SHOWN_CHARS


class UserParameters(Parameters):
    user_id: Label


class EntryBody(Body):
    id: str


class VerifyBody(Body):
    ids: Annotated[list[str], Field(min_length=1, max_length=256)] | None = None
    sample: Annotated[int, Field(ge=1, le=256), WHOLE] | None = None
    tokens: Annotated[int, Field(ge=1, le=256), WHOLE] | None = None
    seconds: Annotated[int, Field(ge=1, le=MAX_VERIFY_S), WHOLE] | None = None

    def check(self) -> None:
        """Raises InvalidField where fields contradict each other."""
        if self.ids is not None and self.sample is not None:
            raise InvalidField("sample", "goes without ids: leave one of them out.")


class SourcedTokens(Body):
    source: Annotated[Literal["hot", "warm", "cold", "remote", "moved", "evaluated"], Field(alias="from")]
    tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE]


class ShownPrompt(Body):
    with_prompt: bool | None = None
    sources: Annotated[list[SourcedTokens], Field(max_length=MAX_PARTS)] | None = None


class ExplainedChat(ChatBody, ShownPrompt):
    """A chat, and whether its prompt is shown, by where its state is or by what an answer has told."""


class ExplainedCompletion(CompletionBody, ShownPrompt):
    """The same for a text completion."""


# Not the names of actions: those are another mistake, with an error of its own.
register_path_part("entry_id", rf"(?!(?:{'|'.join(_ACTIONS)})$)[^/]+")


def routes(served: Served) -> Routes:
    routes = Routes()
    _add_reads(routes, served)
    _add_changes(routes, served)
    _add_checks(routes, served)
    _add_warm(routes, served)
    return routes


def _add_reads(routes: Routes, served: Served) -> None:
    models, run_on = served.models, served.side.run_on

    @routes.get("/v1/cache")
    async def entries(query: EntriesParameters) -> Response:
        return await run_on(_list_page, models.find(query.model), query)

    @routes.get("/v1/cache/tree")
    async def tree(query: TreeParameters) -> Response:
        return await run_on(_tree, models.find(query.model), query.limit, query.at)

    @routes.get("/v1/cache/{entry_id:entry_id}")
    async def entry(query: EntryParameters) -> Json:
        shown = await run_on(lambda loaded: cache_of(loaded).show(query.entry_id), models.find(query.model))
        return shown_json(shown, query.chars)


def _add_changes(routes: Routes, served: Served) -> None:
    models, run_on = served.models, served.side.run_on

    @routes.post("/v1/cache/pin")
    async def pin(query: OfModel, body: EntryBody) -> Json:
        return entry_json(await run_on(_pin, models.find(query.model), body.id, True))

    @routes.post("/v1/cache/unpin")
    async def unpin(query: OfModel, body: EntryBody) -> Json:
        return entry_json(await run_on(_pin, models.find(query.model), body.id, False))

    @routes.post("/v1/cache/gc")
    async def gc(query: OfModel) -> Json:
        return removed_json(await run_on(lambda loaded: cache_of(loaded).gc(), models.find(query.model)))

    @routes.delete("/v1/cache")
    async def remove_user(query: UserParameters) -> Json:
        if models.starting is not None:
            await models.load(None)  # before its store is open nobody knows what is in it
        return removed_json(await served.side.run(models.remove_user, query.user_id))

    @routes.delete("/v1/cache/{entry_id:entry_id}")
    async def remove(http: HttpRequest, query: OfModel) -> Json:
        entry_id = http.path_params["entry_id"]
        return removed_json(
            await run_on(lambda loaded: cache_of(loaded).remove(entry_id), models.find(query.model))
        )


def _add_checks(routes: Routes, served: Served) -> None:
    models, side = served.models, served.side

    @routes.post("/v1/cache/explain", bodies=(ExplainedChat, ExplainedCompletion), example=HELLO)
    async def explain(http: HttpRequest) -> Response:
        given = await read_object(http)
        body = await make_of_body(http, lambda: read_chat_or_completion(given, ExplainedChat, ExplainedCompletion))
        backend = models.find(body.model)
        request = await make_of_body(http, lambda: to_one_request(body))
        explanation = await side.run_on(lambda loaded: cache_of(loaded).explain(request), backend)
        return await side.run(lambda: json_response(explained_json(explanation, body)))

    verifying = asyncio.Semaphore()

    @routes.post("/v1/cache/verify", example={"sample": 1})
    async def verify(http: HttpRequest, query: OfModel, body: VerifyBody) -> Json:
        body.check()
        if verifying.locked():
            raise Overloaded(
                "Stored state is being verified already: try again when that has ended.", RETRY_AFTER_S
            )
        async with verifying:
            done, left = await while_connected(http, _verify_entries(models.find(query.model), side, body))
        return verified_json(done, left)


async def _verify_entries(backend: Backend, side: SideWork, body: VerifyBody) -> tuple[list[Verified], list[str]]:
    """What was verified, and the ids for which no time was left. One after the other, so that other requests wait
    little."""
    ids = body.ids
    if ids is None:
        latest = await side.run_on(lambda loaded: cache_of(loaded).entries(), backend)
        ids = [entry.id for entry in latest[: body.sample or SAMPLE]]
    done: list[Verified] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(body.seconds or VERIFY_S), loaded(backend) as real:
            for entry_id in ids:
                done.append(await cache_of(real).verify(entry_id, body.tokens or TOKENS))
    return done, ids[len(done) :]


def _pin(backend: Backend, entry_id: str, pinned: bool) -> CacheEntry:
    return cache_of(backend).pin(entry_id, pinned)


def _list_page(backend: Backend, asked: EntriesParameters) -> Response:
    entries = _select(cache_of(backend).entries(), asked.user_id, asked.kind)
    return page_response(entries, entry_json, asked, totals=totals_json(entries))


def _tree(backend: Backend, limit: int, at: str) -> Response:
    tree = cache_of(backend).tree(limit, at)
    totals = {"tokens": tree.tokens, "bytes": tree.bytes, "chunks": tree.chunks}
    return list_response("nodes", map(node_json, tree.nodes), object="cache.tree", totals=totals)


def _select(entries: Sequence[CacheEntry], user: str | None, kind: Kind | None) -> list[CacheEntry]:
    """Entries of a user and a kind. Shared entries belong to no user."""
    mine = [entry for entry in entries if user is None or (entry.user == user and not entry.is_shared)]
    return [entry for entry in mine if kind in (None, entry.kind)]


# ── answers ──


def totals_json(entries: Sequence[CacheEntry]) -> dict[str, Json]:
    return {
        "entries": len(entries),
        "tokens": sum(entry.tokens for entry in entries),
        "bytes": sum(entry.bytes for entry in entries),
    }


def removed_json(removed: Removed) -> dict[str, Json]:
    return {
        "object": "cache.removed",
        "removed": {"entries": removed.entries, "tokens": removed.tokens, "bytes": removed.bytes},
    }


def explained_json(explanation: Explanation, shown: ShownPrompt) -> dict[str, Json]:
    answer = {
        "object": "cache.explanation",
        "explanation": explanation.sentence,
        "prompt_tokens": explanation.lookup.prompt_tokens,
        **lookup_json(explanation.lookup),
    }
    if not shown.with_prompt:
        return answer
    given = [Sourced(Source(part.source), part.tokens) for part in shown.sources or ()]
    is_same = bool(given) and sum(part.tokens for part in given) == len(explanation.pieces)
    parts = given if is_same else explanation.lookup.sources
    return {**answer, "as_told": is_same, "prompt": _prompt_json(explanation.pieces, parts)}


def _prompt_json(pieces: Sequence[bytes], sources: Sequence[Sourced]) -> list[Json]:
    """The prompt's text, part by part. A character that two parts share belongs to the later one."""
    decoder, parts, at = getincrementaldecoder("utf-8")("replace"), [], 0
    for part in sources:
        end = at + part.tokens
        text = decoder.decode(b"".join(pieces[at:end]), final=end >= len(pieces))
        parts.append({"from": part.source, "tokens": part.tokens, "text": text})
        at = end
    return parts


def verified_json(results: Sequence[Verified], left: Sequence[str]) -> dict[str, Json]:
    return {
        "object": "list",
        "data": [_result_json(result) for result in results],
        "equal": all(result.is_equal for result in results),
        "left": left,
    }


def _result_json(result: Verified) -> dict[str, Json]:
    return {
        "id": result.entry.id,
        "object": "cache.verified",
        "reused": result.reused_tokens,
        "wide": result.wide_tokens,
        "narrow": result.narrow_tokens,
        "reproducible": result.reproducible_tokens,
        "compared": result.compared,
        "agreed": result.agreed,
        "equal": result.is_equal,
    }


# ── warming a prefix ──

_SYSTEM = {"role": "system", "content": "You answer in one sentence."}


class WarmBody(OwnerFields):
    model_config = ConfigDict(json_schema_extra=one_of("text", "messages", "tools"))

    model: str | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    messages: BeginningList | None = None
    tools: ToolList | None = None
    chat_template_kwargs: TemplateArgs | None = None
    ttl: Literal["short", "long", "extended"] | None = None
    kv_bits: KvBits | None = None
    ask_permission: bool | None = None

    def to_request(self) -> Request:
        """Raises InvalidField where fields contradict each other."""
        ttl = Ttl(self.ttl) if self.ttl else None
        base = replace(self.to_owned(), max_tokens=0, ttl=ttl, kv_bits=self.kv_bits)
        if self.text is None:
            chat = replace(
                base,
                template_args=self.chat_template_kwargs or {},
                asks_permission=bool(self.ask_permission),
            )
            return prefix_of_chats(chat, self.messages or [], self.tools or [])
        if self.messages or self.tools:
            raise InvalidField("text", "goes without messages and tools: leave one of them out.")
        return replace(base, prompt=self.text).decided(is_prefix=True)


def _add_warm(routes: Routes, served: Served) -> None:
    @routes.post("/v1/warm", example={"messages": [_SYSTEM]})
    async def warm(http: HttpRequest, body: WarmBody) -> Json:
        backend = served.models.find(body.model)
        request = await make_of_body(http, body.to_request)
        return warmed_json(await while_connected(http, warm_prefix(backend, request)))


def warmed_json(warmed: Warmed) -> dict[str, Json]:
    return {
        "object": "warm",
        "tokens": warmed.tokens,
        "cached_tokens": warmed.cached_tokens,
        "evaluated_tokens": warmed.tokens - warmed.cached_tokens,
        "seconds": warmed.seconds,
        "entry_id": warmed.entry_id,
        "ttl": warmed.ttl,
        "ready": warmed.error is None,
        "error": warmed.error,
    }
