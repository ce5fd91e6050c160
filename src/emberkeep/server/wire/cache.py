"""The cache over HTTP: what is asked of it, and how its contents look in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from emberkeep.api.answer import lookup_json
from emberkeep.api.request import Body
from emberkeep.errors import InvalidField
from emberkeep.types import CacheEntry, Explanation, Json, Removed, Verified

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
