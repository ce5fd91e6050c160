"""What is stored and what is remembered, as JSON and back: over HTTP and in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from emberkeep.types.cache import CacheEntry, EntryEnd, EntryKind, EntryText, TreeNode
from emberkeep.types.events import Divergence, LookupRecord, MissReason
from emberkeep.types.lineage import Repair
from emberkeep.types.memory import Recollection
from emberkeep.types.request import Json, Ttl

MAX_VERIFY_S = 600
"""How long one request may verify stored state."""


_NAMED_ALIKE = ("id", "kind", "head", "user", "tokens", "bytes", "kv_bits", "repair", "hits", "turns", "branches")
_ENTRY = {
    **{name: name for name in (*_NAMED_ALIKE, "ttl", "expires_in_s")},
    "conversation_id": "name",
    "shared": "is_shared",
    "last_used_s": "idle_s",
    "pinned": "is_pinned",
}
"""Fields of a `CacheEntry` by what they are called in JSON."""
_NODE = ("id", "parent", "start", "end", "branches", "below", "own_tokens", "tokens", "bytes", "chunks", "hits")
"""Fields of a `TreeNode` that JSON calls the same."""


def entry_json(entry: CacheEntry) -> dict[str, Json]:
    tiers = {"hot": entry.hot_tokens, "warm": entry.warm_tokens, "cold": entry.cold_tokens}  # the fastest first
    return {
        "object": "cache.entry",
        **{name: getattr(entry, field) for name, field in _ENTRY.items()},
        "conversation_id": entry.name or None,
        "user": entry.user or None,
        "tiers": tiers,
        "tier": next((tier for tier, held in tiers.items() if held >= entry.tokens), "mixed"),
    }


def entry_from_json(listed: Json) -> CacheEntry:
    """The inverse of `entry_json`. Raises LookupError, TypeError or ValueError for anything else."""
    fields = {field: listed[name] for name, field in _ENTRY.items()}
    fields |= {f"{tier}_tokens": listed["tiers"][tier] for tier in ("hot", "warm", "cold")}
    fields |= {"name": fields["name"] or "", "user": fields["user"] or ""}
    fields |= {"kind": EntryKind(fields["kind"]), "ttl": Ttl(fields["ttl"])}
    return CacheEntry(**{**fields, "repair": Repair(fields["repair"]) if fields["repair"] else None})


def node_json(node: TreeNode) -> dict[str, Json]:
    return {
        **{name: getattr(node, name) for name in _NODE},
        "tiers": {"hot": node.hot_tokens, "warm": node.warm_tokens, "cold": node.cold_tokens},
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


def _divergence(fields: Json) -> Divergence:
    where, volatile = fields["where"] or "", tuple(fields.get("volatile", ()))
    return Divergence(**{**fields, "where": where, "volatile": volatile})


def found_json(found: Sequence[Recollection]) -> dict[str, Json]:
    return {"object": "list", "data": [_recollection_json(one) for one in found]}


def _recollection_json(found: Recollection) -> dict[str, Json]:
    """Without the key, which means something only here."""
    fields = {name: value for name, value in asdict(found).items() if name not in ("key", "passage", "matches")}
    return {**fields, "conversation": found.conversation or None, "highlight": found.highlight}
