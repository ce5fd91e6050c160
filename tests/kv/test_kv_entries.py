"""Conversations and prefixes over the chunks: what is listed, pinned, removed, and what outlives what."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.policy import Keeping, StoreClock
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.events import MissReason
from emberkeep.types.lineage import EXACT, SHARED, Lineage, private_namespace
from emberkeep.types.request import Ttl
from helpers.kv_building import (
    CHUNK_BYTES,
    FINGERPRINT,
    LONG,
    PIECES,
    PLENTY,
    Time,
    check_ledger,
    chunk_files,
    chunks_of,
    load,
    prompt,
    put,
)

ALICE = private_namespace("alice")
BOB = private_namespace("bob")


def label(name: str, kind: EntryKind = EntryKind.CONVERSATION, **more) -> Label:
    return Label(kind, f"id:{name}", f"about {name}", name=name, **more)


def turn(store: KvStore, tokens, name: str, namespace: str = "", **more) -> str:
    """One turn of a conversation, as the scheduler would leave it behind; its entry's id."""
    tokens = np.array(tokens, np.int32)
    store.release(store.match(Lineage(namespace), tokens))
    put(store, tokens, namespace=namespace)
    entry = store.turn_ended(label(name, **more), store.advance(store.origin(Lineage(namespace)), tokens))
    assert entry is not None
    return entry.id


@pytest.fixture
def time() -> Time:
    return Time()


def opened(folder: Path | None, time: Time, **more) -> KvStore:
    files = ChunkFiles(folder, FINGERPRINT) if folder else None
    budgets = Budgets(more.pop("ram", PLENTY), more.pop("disk", PLENTY))
    clock = lambda saved: StoreClock(saved, monotonic=time, wall=time)  # noqa: E731
    keeping = replace(more.pop("keeping", Keeping()), clock=clock)
    return KvStore(FINGERPRINT, budgets, files, keeping=keeping, **more)


@pytest.fixture
def store(tmp_path: Path, time: Time):
    store = opened(tmp_path, time)
    yield store
    check_ledger(store)
    store.close()


def listed(store: KvStore) -> dict[str, int]:
    return {entry.name: entry.tokens for entry in store.catalogue.entries()}


# ── listing ──


def test_an_entry_tells_what_a_person_asks(store, time):
    turn(store, LONG[:300], "travel", ALICE)
    time.pass_(60)
    load(store, LONG[:300], namespace=ALICE)
    (entry,) = store.catalogue.entries()
    assert (entry.kind, entry.name, entry.head, entry.user) == ("conversation", "travel", "about travel", "alice")
    assert (entry.tokens, entry.warm_tokens, entry.hits, entry.turns, entry.branches) == (300, 300, 1, 1, 1)
    assert (entry.idle_s, entry.ttl, entry.expires_in_s) == (60, Ttl.LONG, 3540)
    assert entry.bytes >= 3 * CHUNK_BYTES - 84 * CHUNK_BYTES // 128  # also of what was not written yet
    store.flush()
    assert store.catalogue.entries()[0].cold_tokens == 300


def test_the_latest_used_comes_first(store, time):
    for name, seed in (("one", 1), ("two", 2), ("three", 3)):
        turn(store, prompt(150, seed=seed), name)
        time.pass_(5)
    turn(store, prompt(150, seed=1), "one")
    assert [entry.name for entry in store.catalogue.entries()] == ["one", "three", "two"]


def test_turns_of_one_conversation_are_one_entry_that_counts_its_branches_and_shows_the_latest(store):
    for length in (200, 400, 600):
        turn(store, LONG[:length], "travel")
        store.flush()
    (entry,) = store.catalogue.entries()
    assert (entry.tokens, entry.turns, entry.branches) == (600, 3, 1)
    turn(store, [*LONG[:200], *prompt(60, seed=7)], "travel")
    (entry,) = store.catalogue.entries()
    assert (entry.tokens, entry.branches) == (260, 2)


def test_entries_survive_a_restart_with_their_turns_and_ttl(store, tmp_path, time):
    turn(store, LONG[:300], "travel", ttl=Ttl.EXTENDED)
    turn(store, LONG[:400], "travel")
    store.close()
    time.pass_(100)
    again = opened(tmp_path, time)
    (entry,) = again.catalogue.entries()
    assert (entry.name, entry.tokens, entry.turns, entry.ttl) == ("travel", 400, 2, Ttl.EXTENDED)
    assert entry.expires_in_s == 86_400 - 100


def test_what_has_lost_its_name_is_still_listed_and_can_be_removed(store, tmp_path, time):
    turn(store, LONG[:300], "travel")
    store.close()
    (database,) = tmp_path.glob("*/index.db")
    database.write_bytes(b"not a database")
    again = opened(tmp_path, time)
    (entry,) = again.catalogue.entries()
    assert (entry.name, entry.head, entry.tokens, entry.kind) == ("", "", 300, "prefix")
    assert entry.expires_in_s > 0
    removed = again.catalogue.remove(entry.id)
    assert removed is not None and removed.tokens == 44


# ── time ──


@pytest.mark.parametrize("has_disk", [True, False])
def test_an_idle_conversation_leaves_ram_where_it_can_come_back_from_disk(tmp_path, time, has_disk):
    store = opened(tmp_path if has_disk else None, time)
    turn(store, LONG[:400], "travel")
    store.flush()
    time.pass_(3599)
    assert store.sweep() == 0
    time.pass_(2)
    assert store.sweep() == (4 if has_disk else 0)
    assert (store.held_bytes()[0] == 0) == has_disk
    assert load(store, LONG[:400]) == 400


def test_gc_removes_what_has_expired_and_nothing_else(store, time, tmp_path):
    turn(store, LONG[:256], "old", ttl=Ttl.SHORT)
    turn(store, prompt(300, seed=5), "new", ttl=Ttl.EXTENDED)
    store.flush()
    time.pass_(301)
    removed = store.catalogue.gc()
    assert (removed.entries, removed.tokens) == (1, 256)
    assert listed(store) == {"new": 300}
    assert len(chunk_files(tmp_path)) == 3
    cursor = store.advance(store.origin(EXACT), LONG)
    assert store.why_gone(cursor, LONG) is MissReason.EXPIRED


def test_a_shared_beginning_lives_as_long_as_the_longest_that_needs_it(store, time):
    turn(store, LONG[:300], "short", ttl=Ttl.SHORT)
    turn(store, [*LONG[:256], *prompt(50, seed=8)], "long", ttl=Ttl.LONG)
    time.pass_(400)
    store.catalogue.gc()
    assert listed(store) == {"long": 306}
    assert load(store, np.array([*LONG[:256], *prompt(50, seed=8)], np.int32)) == 306


def test_a_machine_whose_clock_jumps_loses_nothing(tmp_path, time):
    wall, budgets = Time(), Budgets(PLENTY, PLENTY)
    keeping = Keeping(clock=lambda saved: StoreClock(saved, monotonic=time, wall=wall))
    store = KvStore(FINGERPRINT, budgets, ChunkFiles(tmp_path, FINGERPRINT), keeping=keeping)
    turn(store, LONG[:300], "travel")
    for jump in (1e9, -3e9):
        wall.pass_(jump)
        assert store.catalogue.gc().entries == 0
    store.close()
    # By the real clock, decades away from the one that was saved.
    assert listed(KvStore(FINGERPRINT, budgets, ChunkFiles(tmp_path, FINGERPRINT)))


# ── turns ──


def test_a_branch_left_alone_for_four_turns_leaves_ram(store):
    turn(store, LONG[:500], "travel")
    store.flush()
    kept = [*LONG[:200], *prompt(60, seed=7)]
    for more in range(1, 4):
        turn(store, [*kept, *prompt(20 * more, seed=8)], "travel")
    assert store.stats()["evictions"]["warm"]["turns"] == 0
    turn(store, [*kept, *prompt(80, seed=8)], "travel")
    assert store.stats()["evictions"]["warm"]["turns"] == 2  # [256, 384) and the tail: the rest is still used
    assert load(store, LONG[:500]) == 500  # from disk


# ── pins ──


def test_a_pinned_entry_is_not_evicted_and_does_not_expire(tmp_path, time):
    store = opened(tmp_path, time, disk=12 * CHUNK_BYTES)
    pinned = turn(store, LONG[:512], "pinned", ttl=Ttl.SHORT)
    assert store.catalogue.pin(pinned, True)
    for seed in range(20):
        turn(store, prompt(512, seed=100 + seed), f"other {seed}")
        store.flush()
    time.pass_(1e5)
    store.catalogue.gc()
    assert load(store, LONG[:512]) == 512
    assert listed(store) == {"pinned": 512}


def test_a_pin_survives_a_restart_and_can_be_taken_back(store, tmp_path, time):
    pinned = turn(store, LONG[:512], "pinned", ttl=Ttl.SHORT)
    store.catalogue.pin(pinned, True)
    store.close()
    time.pass_(1e5)
    again = opened(tmp_path, time)
    assert again.catalogue.gc().entries == 0
    again.catalogue.pin(pinned, False)
    assert again.catalogue.gc().entries == 1


def test_taking_one_pin_back_leaves_what_another_holds(store, time):
    one = turn(store, LONG[:300], "one", ttl=Ttl.SHORT)
    two = turn(store, [*LONG[:256], *prompt(50, seed=8)], "two", ttl=Ttl.SHORT)
    store.catalogue.pin(one, True)
    store.catalogue.pin(two, True)
    store.catalogue.pin(one, False)
    time.pass_(1000)
    store.catalogue.gc()
    assert listed(store) == {"two": 306}


# ── removing ──


def test_removing_an_entry_leaves_what_others_share_with_it(store, tmp_path):
    one = turn(store, LONG[:500], "one")
    turn(store, [*LONG[:256], *prompt(50, seed=8)], "two")
    store.flush()
    removed = store.catalogue.remove(one)
    assert removed is not None and removed.tokens == 500 - 256
    assert listed(store) == {"two": 306}
    assert load(store, LONG[:500]) == 256
    assert len(chunk_files(tmp_path)) == 3
    assert store.why_gone(store.advance(store.origin(EXACT), LONG), LONG) is MissReason.REMOVED


@pytest.mark.parametrize(("removed", "tokens"), [("longer", 100), ("shorter", 0)])
def test_of_two_that_end_in_one_chunk_the_longer_takes_the_text_with_it(store, removed, tokens):
    turns = {"longer": turn(store, LONG[:100], "longer"), "shorter": turn(store, LONG[:60], "shorter")}
    assert store.catalogue.remove(turns[removed]).tokens == tokens
    assert load(store, LONG) == 100 - tokens
    assert listed(store) == ({} if tokens else {"longer": 100})


def test_removing_what_is_not_there_says_so(store):
    assert store.catalogue.remove("0123456789ab") is None
    assert store.catalogue.pin("0123456789ab", True) is False


def test_deleting_a_user_leaves_the_others_and_no_trace(store, tmp_path):
    for namespace in (ALICE, BOB, "", private_namespace("alice", "salt")):
        turn(store, LONG[:300], f"of {namespace}", namespace)
    store.flush()
    removed = store.catalogue.forget_user("alice")
    assert (removed.entries, removed.tokens) == (2, 600)
    assert {entry.user for entry in store.catalogue.entries()} == {"bob", ""}
    assert load(store, LONG[:300], namespace=ALICE) == 0
    assert load(store, LONG[:300], namespace=BOB) == 300
    assert len(chunk_files(tmp_path)) == 6
    store.close()
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"alice" not in everything.replace(b'about of ["alice', b"")


# ── what is shared ──


def test_a_shared_prefix_is_for_all_users_and_what_follows_it_is_not(store):
    put(store, LONG[:256], namespace=SHARED)
    for namespace in (ALICE, BOB):
        assert load(store, LONG, namespace=namespace) == 256
    cursor = store.advance(store.origin(Lineage(ALICE)), LONG)
    assert cursor.position == 256
    put(store, LONG[:400], namespace=ALICE)
    assert load(store, LONG, namespace=ALICE) == 400
    assert load(store, LONG, namespace=BOB) == 256
    assert load(store, LONG, namespace=SHARED) == 256
    assert store.stats()["warm"]["tokens"] == 400  # the prefix is stored once


def test_a_private_tail_below_a_shared_prefix_survives_a_restart_in_private(store, tmp_path, time):
    put(store, LONG[:256], namespace=SHARED)
    put(store, LONG[:400], namespace=ALICE)
    store.close()
    again = opened(tmp_path, time)
    assert load(again, LONG, namespace=ALICE) == 400
    assert load(again, LONG, namespace=BOB) == 256
    removed = again.catalogue.forget_user("alice")
    assert removed.tokens == 144
    assert load(again, LONG, namespace=ALICE) == 256


def test_one_users_text_does_not_become_anothers_tokens(store):
    put(store, LONG[:256], namespace=SHARED)
    put(store, LONG[:400], namespace=ALICE, sampled=((0, 128),))
    text = b"".join(PIECES[token] for token in LONG[256:400])
    for namespace, expected in ((ALICE, 144), (BOB, 0)):
        cursor = store.advance(store.origin(Lineage(namespace)), LONG[:256])
        ids, _ = store.replay(cursor, text, 0, {len(text)}, PIECES)
        assert len(ids) == expected
    assert not len(store.stored_after(store.advance(store.origin(Lineage(BOB)), LONG)))
    assert len(store.stored_after(store.advance(store.origin(Lineage(ALICE)), LONG[:300])))


def test_an_operator_can_see_that_another_user_has_it(store):
    put(store, LONG[:400], namespace=ALICE)
    elsewhere = store.catalogue.elsewhere(BOB, LONG)
    assert elsewhere is not None
    assert (elsewhere.user, elsewhere.tokens) == ("alice", 400)
    assert store.catalogue.elsewhere(ALICE, LONG) is None


# ── what is gone ──


def test_what_was_evicted_is_remembered_with_its_hits(tmp_path, time):
    store = opened(tmp_path, time, disk=14 * CHUNK_BYTES)
    turn(store, LONG[:512], "old")
    for _ in range(3):
        load(store, LONG[:512])
    for seed in range(6):
        turn(store, prompt(512, seed=50 + seed), f"{seed}")
        for _ in range(5):
            load(store, prompt(512, seed=50 + seed))
        store.flush()
    reached = store.advance(store.origin(EXACT), LONG)
    assert reached.position < 512
    assert store.why_gone(reached, LONG) is MissReason.EVICTED
    store.close()
    again = opened(tmp_path, time)
    reached = again.advance(again.origin(EXACT), LONG)
    assert again.why_gone(reached, LONG) is MissReason.EVICTED
    put(again, LONG[:512])
    assert again.why_gone(again.advance(again.origin(EXACT), LONG), LONG) is None
    back = [chunk.hits for chunk in chunks_of(again) if chunk.came_back]
    assert back and min(back) == 3


def test_a_prompt_that_ends_inside_what_is_gone_is_explained_and_another_at_its_place_is_not(store):
    store.catalogue.remove(turn(store, LONG[:100], "one"))
    origin, other = store.origin(EXACT), prompt(256, seed=77)
    assert store.why_gone(origin, LONG[:90]) is MissReason.REMOVED
    assert store.why_gone(origin, LONG[:10]) is None  # too little to know it by
    assert store.why_gone(origin, other) is None


# ── how much is written ──


def test_beyond_the_daily_budget_only_what_is_reused_is_written(tmp_path, time):
    # Two files, whether they are written one by one or together, when their sizes are estimated.
    keeping = Keeping(writes_per_day=7 * CHUNK_BYTES // 2)
    store = opened(tmp_path, time, keeping=keeping)
    put(store, LONG[:512])
    store.flush()
    assert len(chunk_files(tmp_path)) == 2
    assert store.stats()["cold"]["unwritten_chunks"] == 2
    assert load(store, LONG[:512]) == 512  # they are in RAM, and proven now
    store.flush()
    assert len(chunk_files(tmp_path)) == 4
    assert store.stats()["cold"]["unwritten_chunks"] == 0


def test_the_budget_is_counted_over_restarts(tmp_path, time):
    keeping = Keeping(writes_per_day=3 * CHUNK_BYTES)
    store = opened(tmp_path, time, keeping=keeping)
    put(store, LONG[:256])
    store.close()
    again = opened(tmp_path, time, keeping=keeping)
    assert again.stats()["cold"]["written_today_bytes"] > 2 * CHUNK_BYTES
    put(again, prompt(256, seed=9))
    again.flush()
    assert len(chunk_files(tmp_path)) == 2


def test_what_was_evicted_unused_is_not_written_again_before_it_is_reused(tmp_path, time):
    store = opened(tmp_path, time, disk=14 * CHUNK_BYTES)
    put(store, LONG[:512])
    store.flush()
    for seed in range(3):
        put(store, prompt(512, seed=60 + seed))
        load(store, prompt(512, seed=60 + seed))
        store.flush()
    files = len(chunk_files(tmp_path))
    reached = store.advance(store.origin(EXACT), LONG[:512]).position
    put(store, LONG[:512])
    store.flush()
    assert reached < 512
    assert len(chunk_files(tmp_path)) <= files
    assert store.stats()["cold"]["unwritten_chunks"] > 0
