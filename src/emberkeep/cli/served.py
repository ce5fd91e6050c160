"""The cache of a running server, over HTTP: only the server knows what it has in RAM and in the engine."""

from __future__ import annotations

from typing import Any

import httpx

from emberkeep.config import Config
from emberkeep.errors import EmberkeepError, NoSuchEntry
from emberkeep.server.presence import server_urls
from emberkeep.types import (
    CacheEntry,
    Divergence,
    EntryKind,
    Explanation,
    Json,
    LookupRecord,
    MissReason,
    Removed,
    Repair,
    Ttl,
    Verified,
)

HEALTH_S = 3.0
"""A server that takes longer to say that it is well is not asked for more."""
ANSWER_S = 60.0
"""Removing may delete many files. Verifying takes as long as it takes."""


class ServedStore:
    """What one server keeps. Every method blocks, and raises EmberkeepError."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        stats = self._ask("GET", "/v1/stats")
        self.model = str(stats["model"])
        self.folder: str | None = stats["store"]["folder"]
        """The name of its folder under `<data_dir>/kv`."""

    def entries(self) -> list[CacheEntry]:
        """Page by page: what moves from one to the next meanwhile is told once."""
        found: dict[str, CacheEntry] = {}
        offset, has_more = 0, True
        while has_more:
            page = self._ask("GET", "/v1/cache", params={"offset": offset})
            found |= {listed["id"]: _entry(listed) for listed in page["data"]}
            offset, has_more = offset + len(page["data"]), page["has_more"]
        return list(found.values())

    def stats(self) -> Json:
        return self._ask("GET", "/v1/stats")["store"]

    def pin(self, entry_id: str, pinned: bool) -> None:
        self._ask("POST", "/v1/cache/pin" if pinned else "/v1/cache/unpin", json={"id": entry_id})

    def remove(self, entry_id: str) -> Removed:
        return Removed(**self._ask("DELETE", f"/v1/cache/{entry_id}")["removed"])

    def remove_user(self, user: str) -> Removed:
        return Removed(**self._ask("DELETE", "/v1/cache", params={"user_id": user})["removed"])

    def gc(self) -> Removed:
        return Removed(**self._ask("POST", "/v1/cache/gc")["removed"])

    def text(self, entry_id: str, chars: int) -> tuple[str, int]:
        shown = self._ask("GET", f"/v1/cache/{entry_id}", params={"chars": chars})
        return shown["text"], shown["text_chars"]

    def explain(self, body: dict[str, Json]) -> Explanation:
        answer = self._ask("POST", "/v1/cache/explain", json=body)
        return Explanation(_lookup(answer), answer["explanation"])

    def verify(self, entry: CacheEntry, tokens: int) -> Verified:
        body = {"ids": [entry.id], "tokens": tokens}
        (result,) = self._ask("POST", "/v1/cache/verify", json=body, timeout=None)["data"]
        figures = ("reused", "compared", "agreed", "wide", "reproducible")
        return Verified(entry, *(result[name] for name in figures))

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, path: str, **more: Any) -> Json:
        try:
            response = self._http.request(method, path, **more)
            answer = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise EmberkeepError(f"The server at {self._http.base_url} did not answer: try again.") from error
        if response.is_success:
            return answer
        raise _refusal(response.status_code, answer["error"]["message"])


def served_store(config: Config) -> ServedStore | None:
    """That of the latest server on the data folder that answers; None without one. Raises EmberkeepError."""
    for url in server_urls(config.data_dir):
        http = _client(url, config.api_key)
        if _is_well(http):
            return ServedStore(http)
        http.close()
    return None


def _client(url: str, api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # It is on this machine: no proxy is in between, and loading certificates would take longer than the answer.
    return httpx.Client(base_url=url, headers=headers, trust_env=False, verify=False, timeout=ANSWER_S)


def _is_well(http: httpx.Client) -> bool:
    try:
        return http.get("/health", timeout=HEALTH_S).is_success
    except httpx.HTTPError:
        return False


def _refusal(status: int, message: str) -> EmberkeepError:
    if status == 401:
        return EmberkeepError(
            "The running server wants its API key: set EMBERKEEP_API_KEY, or api_key in the file."
        )
    return NoSuchEntry(message) if status == 404 else EmberkeepError(message)


# ── from JSON back to values ──


def _entry(listed: Json) -> CacheEntry:
    return CacheEntry(
        id=listed["id"],
        kind=EntryKind(listed["kind"]),
        name=listed["conversation_id"] or "",
        head=listed["head"],
        user=listed["user"] or "",
        is_shared=listed["shared"],
        tokens=listed["tokens"],
        bytes=listed["bytes"],
        warm_tokens=listed["tiers"]["warm"],
        cold_tokens=listed["tiers"]["cold"],
        idle_s=listed["last_used_s"],
        hits=listed["hits"],
        turns=listed["turns"],
        branches=listed["branches"],
        ttl=Ttl(listed["ttl"]),
        expires_in_s=listed["expires_in_s"],
        is_pinned=listed["pinned"],
        hot_tokens=listed["tiers"]["hot"],
        kv_bits=listed["kv_bits"],
        repair=Repair(listed["repair"]) if listed["repair"] else None,
    )


def _lookup(answer: Json) -> LookupRecord:
    reused, divergence = answer["reused"], answer["divergence"]
    return LookupRecord(
        prompt_tokens=answer["prompt_tokens"],
        hot_tokens=reused["hot"],
        warm_tokens=reused["warm"],
        cold_tokens=reused["cold"],
        moved_tokens=answer["moved_tokens"],
        repaired_tokens=answer["repaired_tokens"],
        is_approximate=answer["approximate"],
        reason=MissReason(answer["reason"]),
        divergence=Divergence(**{**divergence, "where": divergence["where"] or ""}) if divergence else None,
    )
