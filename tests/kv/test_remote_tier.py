"""Two hosts and one server that they share: each finds what the other has computed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest

from emberkeep.kv.disk.chunkfile import Description
from emberkeep.kv.lookups import BLOCK_TOKENS
from emberkeep.kv.remote.blocks import BlockPlaces, Place, blocks_of
from emberkeep.kv.remote.link import RemoteLink
from emberkeep.kv.remote.tier import RemoteTier
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.lineage import EXACT, SHARED, Lineage, Repair, private_namespace
from emberkeep.types.request import Ttl
from helpers.kv_building import FINGERPRINT, LONG, PLENTY, exported, new_store, prompt, put
from helpers.valkey_server import ValkeyServer, running_valkey
from helpers.waiting import eventually

ALICE, BOB = (Lineage(private_namespace(name)) for name in ("alice", "bob"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


@pytest.fixture(autouse=True)
def empty(server: ValkeyServer) -> None:
    server.client.flushall()


@contextmanager
def host(server: ValkeyServer, *, fingerprint: bytes = FINGERPRINT, **settings: object) -> Iterator[KvStore]:
    """A store of its own, in RAM."""
    link = RemoteLink(server.settings(**settings))
    store = KvStore(fingerprint, Budgets(PLENTY), shared=partial(RemoteTier, link))
    try:
        yield store
    finally:
        store.close()


def bring_in(store: KvStore, tokens: TokenArray, lineage: Lineage = EXACT) -> int:
    """Wait for what comes; returns up to where it is stored then."""
    arrival = store.bring_in(lineage, tokens, snapshots=False)
    if arrival is not None:
        arrival.done.result(30)
    return store.advance(store.origin(lineage), tokens).position


def remote(store: KvStore) -> dict[str, object]:
    told = store.stats()["remote"]
    assert isinstance(told, dict)
    return told


def check_payloads(store: KvStore, tokens: TokenArray, lineage: Lineage = EXACT) -> None:
    """What is stored is what an engine computes for these tokens."""
    match = store.match(lineage, tokens)
    for segment in match.segments:
        chunk = segment.chunk
        whole = np.concatenate([tokens[: chunk.start], chunk.tokens])
        assert chunk.payload == exported(whole, chunk.start, chunk.end)
    store.release(match)


def test_what_one_host_computed_another_finds_to_the_last_token(server: ValkeyServer) -> None:
    with host(server) as a, host(server) as b:
        put(a, LONG)
        a.flush()
        assert bring_in(b, LONG) == len(LONG)
        check_payloads(b, LONG)
        assert remote(b)["hits"] == 1


def test_a_prompt_that_goes_on_differently_finds_what_it_shares(server: ValkeyServer) -> None:
    other = prompt(900, seed=9, start=LONG[:700].tolist())
    with host(server) as a, host(server) as b:
        put(a, LONG)
        a.flush()
        assert bring_in(b, other) == 700
        check_payloads(b, other)


def test_blocks_have_the_same_names_whatever_a_host_cut_before(server: ValkeyServer) -> None:
    with host(server) as a, host(server) as b, host(server) as c:
        put(a, LONG)
        a.flush()
        names = server.names()
        put(b, LONG[:300], fork=True)  # here conversations part, and the next chunk begins at 300
        put(b, LONG, size=100)
        b.flush()
        full = {name for name in names if not name.endswith((":c", ":s"))}
        assert full <= server.names()
        assert bring_in(c, LONG) == len(LONG)
        check_payloads(c, LONG)


def test_another_model_finds_nothing(server: ValkeyServer) -> None:
    with host(server) as a, host(server, fingerprint=b"other") as b:
        put(a, LONG)
        a.flush()
        assert bring_in(b, LONG) == 0


def test_users_stay_apart_and_find_what_is_shared(server: ValkeyServer) -> None:
    shared, private = LONG[:512], LONG
    with host(server) as a, host(server) as b:
        put(a, shared, namespace=Lineage(SHARED))
        put(a, private, namespace=ALICE)
        a.flush()
        assert bring_in(b, private, BOB) == 512
        assert bring_in(b, private, ALICE) == len(private)
        assert b.advance(b.origin(BOB), private).position == 512
        check_payloads(b, private, ALICE)


def test_forgetting_leaves_nothing_of_a_user_there_and_on_no_host(server: ValkeyServer) -> None:
    with host(server) as a, host(server) as b:
        put(a, LONG, namespace=ALICE)
        put(a, LONG, namespace=BOB)
        a.flush()
        assert bring_in(b, LONG, ALICE) == bring_in(b, LONG, BOB) == len(LONG)
        before = server.names()
        a.catalogue.forget_user("alice")
        left = server.names()
        assert len(before - left) == len(before) // 2
        assert bring_in(b, LONG, BOB) == len(LONG)
        more = prompt(1200, seed=3, start=LONG.tolist())
        bring_in(b, more, BOB)  # asks, and reads with the answer who was forgotten
        assert b.advance(b.origin(ALICE), LONG).position == 0
        b.flush()
        assert server.names() <= left


def test_what_was_computed_before_another_host_forgot_is_not_written_after_it(server: ValkeyServer) -> None:
    with host(server) as a, host(server) as b:
        b.flush()
        a.catalogue.forget_user("alice")
        nothing = server.names()
        server.client.xtrim("ek1:forgotten", maxlen=10)
        put(b, LONG, namespace=BOB)
        b.flush()
        assert server.names() > nothing
        server.pause()
        try:
            put(b, LONG, namespace=ALICE)
        finally:
            server.go_on()
        a.catalogue.forget_user("alice")
        b.flush()
        tag = RemoteLink(server.settings()).tag("alice")
        assert eventually(lambda: not server.names(f"*:{tag}:*"))


def test_with_a_key_nothing_can_be_read_or_found_without_it(server: ValkeyServer) -> None:
    secret = "correct horse battery staple"
    with host(server, key=secret) as a, host(server, key=secret) as b:
        put(a, LONG, namespace=ALICE)
        a.flush()
        tokens = LONG[:16].astype("<i4").tobytes()
        for name in server.client.scan_iter():
            kind = server.client.type(name)
            values = [server.client.get(name)] if kind == b"string" else server.client.hvals(name)
            assert values
            assert not any(tokens in value or b"alice" in value for value in values)
        assert bring_in(b, LONG, ALICE) == len(LONG)
        check_payloads(b, LONG, ALICE)
    with host(server) as c, host(server, key="another") as d:
        assert bring_in(c, LONG, ALICE) == bring_in(d, LONG, ALICE) == 0


def test_a_value_that_was_swapped_damaged_or_cut_is_not_used(server: ValkeyServer) -> None:
    with host(server) as a:
        put(a, LONG)
        a.flush()
    values = [name for name in server.client.scan_iter() if server.client.type(name) == b"string"]
    whole = {name: server.client.get(name) for name in values}

    def swapped(name: bytes) -> bytes:
        return whole[values[(values.index(name) + 1) % len(values)]]

    def flipped(name: bytes) -> bytes:
        value = bytearray(whole[name])
        value[-5] ^= 1
        return bytes(value)

    for damage in (swapped, flipped, lambda name: whole[name][:-7], lambda name: b"x" * 100, lambda name: b""):
        for name in values:
            server.client.set(name, damage(name))
        with host(server) as b:
            assert bring_in(b, LONG) == 0


def test_state_lasts_as_long_as_it_is_wanted(server: ValkeyServer) -> None:
    with host(server) as a:
        cursor = put(a, LONG)
        a.flush()
        first = {name: server.client.ttl(name) for name in server.client.scan_iter()}
        assert all(250 < seconds <= 302 for seconds in first.values())
        a.turn_ended(Label(EntryKind.CONVERSATION, "one", "head", Ttl.EXTENDED), cursor)
        a.flush()
        later = [server.client.ttl(name) for name in first if not name.endswith((b":c", b":s"))]
        assert all(seconds > 80_000 for seconds in later)


def test_a_block_is_named_by_all_tokens_up_to_its_end() -> None:
    blocks = blocks_of(FINGERPRINT, EXACT, LONG)
    other = LONG.copy()
    other[200] += 1
    others = blocks_of(FINGERPRINT, EXACT, other)
    assert [a.key == b.key for a, b in zip(blocks, others, strict=True)] == [True, *[False] * 6]
    assert [block.start for block in blocks] == list(range(0, 896, BLOCK_TOKENS))


def test_another_user_model_or_way_to_be_approximate_has_other_names() -> None:
    names = [
        blocks_of(fingerprint, lineage, LONG)[0].key
        for fingerprint in (FINGERPRINT, b"other")
        for lineage in (EXACT, Lineage("alice"), Lineage("alice", 8))
    ]
    assert len(set(names)) == len(names)


def test_what_a_block_says_of_itself_is_a_chunk_files_description() -> None:
    for block in (*blocks_of(FINGERPRINT, EXACT, LONG), Place(FINGERPRINT, EXACT).snapshot(LONG[:30])):
        told = Description.unpack(block.pack())
        assert told.pack() == block.pack()


def test_chunks_of_any_tree_have_the_names_of_their_tokens() -> None:
    plain = {block.key for block in blocks_of(FINGERPRINT, EXACT, LONG)}
    for parts in ([], [300], [300, 356, 777], [1]):
        store = new_store(None)
        for end in parts:
            put(store, LONG[:end], fork=True)
        put(store, LONG)
        chunks = store.transact(lambda ledger: list(ledger.tree))
        places = BlockPlaces(FINGERPRINT)
        placed = [(chunk, places.of(chunk)) for chunk in chunks]
        for chunk, found in placed:
            assert (found is not None) == (chunk.start % BLOCK_TOKENS == 0)
            if found is not None:
                assert np.array_equal(found.tokens, LONG[chunk.start : chunk.end])
                assert len(chunk.tokens) < BLOCK_TOKENS or found.described.key in plain
        store.close()


def test_state_of_one_conversation_alone_has_no_name_for_others() -> None:
    store = new_store(None)
    put(store, LONG[:256], namespace=Lineage("alice", repair=Repair.SELECTIVE))
    put(store, LONG[:256], namespace=Lineage("alice", splice="one"))
    places = BlockPlaces(FINGERPRINT)
    assert store.transact(lambda ledger: [places.of(chunk) for chunk in ledger.tree]) == [None] * 4
