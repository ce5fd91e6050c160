"""The cache over HTTP: what is asked of it, and how its contents look in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from emberkeep.errors import InvalidField
from emberkeep.library.checking import Body, checked
from emberkeep.server.wire.chat import ChatBody
from emberkeep.server.wire.completions import CompletionBody
from emberkeep.server.wire.cost import lookup_json
from emberkeep.types import CacheEntry, EntryText, Explanation, Json, Removed, Request, Verified

SAMPLE = 4
TOKENS = 16


class EntryBody(Body):
    id: str


class VerifyBody(Body):
    ids: Annotated[list[str], Field(min_length=1, max_length=256)] | None = None
    sample: Annotated[int, Field(ge=1, le=256)] | None = None
    tokens: Annotated[int, Field(ge=1, le=256)] | None = None

    def check(self) -> None:
        """Raises InvalidField where fields contradict each other."""
        if self.ids is not None and self.sample is not None:
            raise InvalidField("sample", "goes without ids: leave one of them out.")


def asked_body(value: Mapping[str, Json]) -> ChatBody | CompletionBody:
    """The body of a chat or of a text completion. Raises InvalidField."""
    if value.get("prompt") is None:
        return checked(ChatBody, value)
    if value.get("messages") is not None:
        raise InvalidField("prompt", "goes without messages: leave one of them out.")
    return checked(CompletionBody, value)


def asked_request(body: ChatBody | CompletionBody) -> Request:
    """Raises InvalidField."""
    if isinstance(body, ChatBody):
        return body.to_request()
    requests = body.to_requests()
    if len(requests) > 1:
        raise InvalidField("prompt", "give one prompt: each is explained on its own.")
    return requests[0]


# ── answers ──


def totals_json(entries: Sequence[CacheEntry]) -> dict[str, Json]:
    return {
        "entries": len(entries),
        "tokens": sum(entry.tokens for entry in entries),
        "bytes": sum(entry.bytes for entry in entries),
    }


def entry_json(entry: CacheEntry) -> dict[str, Json]:
    return {
        "id": entry.id,
        "object": "cache.entry",
        "kind": entry.kind,
        "conversation_id": entry.name or None,
        "head": entry.head,
        "user": entry.user or None,
        "shared": entry.is_shared,
        "tokens": entry.tokens,
        "bytes": entry.bytes,
        "kv_bits": entry.kv_bits,
        "repair": entry.repair,
        "tiers": _tiers(entry),
        "tier": next((tier for tier, held in _tiers(entry).items() if held >= entry.tokens), "mixed"),
        "last_used_s": entry.idle_s,
        "hits": entry.hits,
        "turns": entry.turns,
        "branches": entry.branches,
        "ttl": entry.ttl,
        "expires_in_s": entry.expires_in_s,
        "pinned": entry.is_pinned,
    }


def _tiers(entry: CacheEntry) -> dict[str, int]:
    """Tokens by where their state is, the fastest place first."""
    return {"hot": entry.hot_tokens, "warm": entry.warm_tokens, "cold": entry.cold_tokens}


def shown_json(shown: EntryText, chars: int) -> dict[str, Json]:
    return {**entry_json(shown.entry), "text": _both_ends(shown.text, chars), "text_chars": len(shown.text)}


def _both_ends(text: str, chars: int) -> str:
    if len(text) <= chars:
        return text
    end = chars // 2
    return f"{text[: chars - end]}…{text[len(text) - end :]}"


def removed_json(removed: Removed) -> dict[str, Json]:
    return {
        "object": "cache.removed",
        "removed": {"entries": removed.entries, "tokens": removed.tokens, "bytes": removed.bytes},
    }


def explained_json(explanation: Explanation) -> dict[str, Json]:
    return {
        "object": "cache.explanation",
        "explanation": explanation.sentence,
        "prompt_tokens": explanation.lookup.prompt_tokens,
        **lookup_json(explanation.lookup),
    }


def verified_json(results: Sequence[Verified]) -> dict[str, Json]:
    return {
        "object": "list",
        "data": [_result_json(result) for result in results],
        "equal": all(result.is_equal for result in results),
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
