"""What is stored and what is remembered, as JSON and back: over HTTP and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from emberkeep.types.cache import CacheEntry, EntryEnd, EntryKind, EntryText, TreeNode
from emberkeep.types.events import Divergence, LookupRecord, MissReason
from emberkeep.types.memory import Recollection
from emberkeep.types.request import Json, Repair, Ttl

MAX_VERIFY_S = 600
"""Of one request to verify stored state."""


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
    """Tokens by the tier that holds their state, the fastest tier first."""
    return {"hot": entry.hot_tokens, "warm": entry.warm_tokens, "cold": entry.cold_tokens}


def entry_from_json(listed: Json) -> CacheEntry:
    """The inverse of `entry_json`. Raises LookupError, TypeError or ValueError for anything else."""
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


def node_json(node: TreeNode) -> dict[str, Json]:
    return {
        "id": node.id,
        "parent": node.parent,
        "start": node.start,
        "end": node.end,
        "branches": node.branches,
        "below": node.below,
        "own_tokens": node.own_tokens,
        "tokens": node.tokens,
        "tiers": {"hot": node.hot_tokens, "warm": node.warm_tokens, "cold": node.cold_tokens},
        "bytes": node.bytes,
        "chunks": node.chunks,
        "hits": node.hits,
        "pinned": node.is_pinned,
        "user": node.user or None,
        "shared": node.is_shared,
        "exact": node.is_exact,
        "entries": [_end_json(end) for end in node.entries],
        "more_entries": node.more_entries,
    }


def _end_json(end: EntryEnd) -> dict[str, Json]:
    return {
        "id": end.id,
        "kind": end.kind,
        "head": end.head,
        "position": end.position,
        "latest": end.is_latest,
        "pinned": end.is_pinned,
    }


def shown_json(shown: EntryText, chars: int) -> dict[str, Json]:
    return {**entry_json(shown.entry), "text": _both_ends(shown.text, chars), "text_chars": len(shown.text)}


def _both_ends(text: str, chars: int) -> str:
    if len(text) <= chars:
        return text
    end = chars // 2
    return f"{text[: chars - end]}…{text[len(text) - end :]}"


def lookup_from_json(explained: Json) -> LookupRecord:
    """What an explanation tells of a lookup."""
    reused, divergence = explained["reused"], explained["divergence"]
    return LookupRecord(
        prompt_tokens=explained["prompt_tokens"],
        hot_tokens=reused["hot"],
        warm_tokens=reused["warm"],
        cold_tokens=reused["cold"],
        remote_tokens=reused["remote"],
        moved_tokens=explained["moved_tokens"],
        repaired_tokens=explained["repaired_tokens"],
        is_approximate=explained["approximate"],
        reason=MissReason(explained["reason"]),
        divergence=_divergence(divergence) if divergence else None,
    )


def _divergence(told: Json) -> Divergence:
    return Divergence(**{**told, "where": told["where"] or "", "volatile": tuple(told.get("volatile", ()))})


def found_json(found: Sequence[Recollection]) -> dict[str, Json]:
    return {"object": "list", "data": [_recollection_json(one) for one in found]}


def _recollection_json(found: Recollection) -> dict[str, Json]:
    """Without the key, which means something only here."""
    told = {name: value for name, value in asdict(found).items() if name not in ("key", "passage", "matches")}
    return {**told, "conversation": found.conversation or None, "highlight": found.highlight}
