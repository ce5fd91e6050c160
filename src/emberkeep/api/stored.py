"""What is stored and what is remembered, as JSON: over HTTP and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from emberkeep.types import CacheEntry, EntryText, Json, Recollection


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


def found_json(found: Sequence[Recollection]) -> dict[str, Json]:
    return {"object": "list", "data": [_recollection_json(one) for one in found]}


def _recollection_json(found: Recollection) -> dict[str, Json]:
    """Without the key, which means something only here."""
    told = {name: value for name, value in asdict(found).items() if name != "key"}
    return {**told, "conversation": found.conversation or None}
