"""What is stored, to JSON and back."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from emberkeep.api.answer import lookup_json
from emberkeep.api.stored import entry_from_json, entry_json, lookup_from_json
from emberkeep.types.cache import CacheEntry, EntryKind
from emberkeep.types.events import Divergence, LookupRecord, MissReason
from emberkeep.types.lineage import Repair
from emberkeep.types.request import Ttl

ENTRY = CacheEntry(
    id="c-1",
    kind=EntryKind.CONVERSATION,
    name="talk",
    head="You are helpful.",
    user="ada",
    is_shared=False,
    tokens=100,
    bytes=4096,
    warm_tokens=60,
    cold_tokens=100,
    idle_s=1.5,
    hits=3,
    turns=2,
    branches=1,
    ttl=Ttl.LONG,
    expires_in_s=60.0,
    is_pinned=True,
    hot_tokens=10,
    kv_bits=8,
    repair=Repair.CACHEBLEND,
)
LOOKUP = LookupRecord(100, 10, 20, 30, 5, 1, is_approximate=True, reason=MissReason.DIVERGED)


@pytest.mark.parametrize("entry", [ENTRY, replace(ENTRY, name="", user="", is_shared=True, repair=None)])
def test_an_entry_comes_back_as_it_was(entry: CacheEntry) -> None:
    assert entry_from_json(json.loads(json.dumps(entry_json(entry)))) == entry


@pytest.mark.parametrize(
    "divergence",
    [
        None,
        Divergence(7, "stored", "asked"),
        Divergence(7, "a", "b", "message 3"),
        Divergence(7, "a", "b", "message 3", ("ids", "numbers")),
    ],
)
def test_a_lookup_comes_back_as_it_was(divergence: Divergence | None) -> None:
    lookup = replace(LOOKUP, divergence=divergence)
    explained = {"prompt_tokens": lookup.prompt_tokens, **lookup_json(lookup)}
    assert lookup_from_json(json.loads(json.dumps(explained))) == lookup
