"""Two hosts and one server that they share: each finds what the other has computed, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import numpy as np
import pytest
from valkey.client import Pipeline

from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.lookups import BLOCK_TOKENS
from emberkeep.kv.remote.blocks import BlockPlaces, blocks_of
from emberkeep.kv.remote.link import FORGOTTEN, RemoteLink, RemoteSettings, Unreachable
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


class Hosts:
    """Stores that share a server, each with a line of its own."""

    def __init__(self, server: ValkeyServer, opened: ExitStack) -> None:
        self.server = server
        self._opened = opened

    def new(self, folder: Path | None = None, *, fingerprint: bytes = FINGERPRINT, **settings: object) -> KvStore:
        """In RAM, if there is no folder."""
        link = RemoteLink(self.server.settings(**settings))
        files = ChunkFiles(folder, fingerprint) if folder else None
        budgets = Budgets(PLENTY, PLENTY if folder else 0)
        store = KvStore(fingerprint, budgets, files, shared=partial(RemoteTier, link))
        self._opened.callback(store.close)
        return store

    def of(self, user: str) -> set[str]:
        """What the server has of a user."""
        return self.server.names(f"*:{RemoteLink(self.server.settings()).tag(user)}:*")

    def record(self, *users: str) -> None:
        """As if other hosts had forgotten them."""
        link, pipe = RemoteLink(self.server.settings()), self.server.client.pipeline()
        for user in users:
            pipe.xadd(FORGOTTEN, {"user": link.tag(user)})
        pipe.execute()


@pytest.fixture
def hosts(server: ValkeyServer) -> Iterator[Hosts]:
    server.client.config_set("maxmemory", 0)
    server.client.flushall()
    with ExitStack() as opened:
        yield Hosts(server, opened)


def link_of(store: KvStore) -> RemoteLink:
    assert isinstance(store.shared, RemoteTier)
    return store.shared.link


def bring_in(store: KvStore, tokens: TokenArray, lineage: Lineage = EXACT) -> int:
    """Wait for what comes; returns up to where it is stored then."""
    arrival = store.bring_in(lineage, tokens, snapshots=False)
    if arrival is not None:
        arrival.done.result(30)
    return held(store, lineage, tokens)


def held(store: KvStore, lineage: Lineage, tokens: TokenArray = LONG) -> int:
    return store.advance(store.origin(lineage), tokens).position


def check_payloads(store: KvStore, tokens: TokenArray, lineage: Lineage = EXACT) -> None:
    """What is stored is what an engine computes for these tokens."""
    match = store.match(lineage, tokens)
    for segment in match.segments:
        chunk = segment.chunk
        whole = np.concatenate([tokens[: chunk.start], chunk.tokens])
        assert chunk.payload == exported(whole, chunk.start, chunk.end)
    store.release(match)


def test_what_one_host_computed_another_finds_to_the_last_token(hosts: Hosts) -> None:
    a, b = hosts.new(), hosts.new()
    put(a, LONG)
    a.flush()
    assert bring_in(b, LONG) == len(LONG)
    check_payloads(b, LONG)
    assert b.stats()["remote"]["hits"] == 1  # type: ignore[index]


def test_a_prompt_that_goes_on_differently_finds_what_it_shares(hosts: Hosts) -> None:
    other = prompt(900, seed=9, start=LONG[:700].tolist())
    a, b = hosts.new(), hosts.new()
    put(a, LONG)
    a.flush()
    assert bring_in(b, other) == 700
    check_payloads(b, other)


def test_blocks_have_the_same_names_whatever_a_host_cut_before(hosts: Hosts) -> None:
    a, b, c = hosts.new(), hosts.new(), hosts.new()
    put(a, LONG)
    a.flush()
    names = hosts.server.names()
    put(b, LONG[:300], fork=True)  # here conversations part, and the next chunk begins at 300
    put(b, LONG, size=100)
    b.flush()
    full = {name for name in names if not name.endswith((":c", ":s"))}
    assert full <= hosts.server.names()
    assert bring_in(c, LONG) == len(LONG)
    check_payloads(c, LONG)


def test_another_model_finds_nothing(hosts: Hosts) -> None:
    a, b = hosts.new(), hosts.new(fingerprint=b"other")
    put(a, LONG)
    a.flush()
    assert bring_in(b, LONG) == 0


def test_users_stay_apart_and_find_what_is_shared(hosts: Hosts) -> None:
    shared, private = LONG[:512], LONG
    a, b = hosts.new(), hosts.new()
    put(a, shared, namespace=Lineage(SHARED))
    put(a, private, namespace=ALICE)
    a.flush()
    assert bring_in(b, private, BOB) == 512
    assert bring_in(b, private, ALICE) == len(private)
    assert b.advance(b.origin(BOB), private).position == 512
    check_payloads(b, private, ALICE)


def test_forgetting_leaves_nothing_of_a_user_there_and_on_no_host(hosts: Hosts) -> None:
    a, b = hosts.new(), hosts.new()
    put(a, LONG, namespace=ALICE)
    put(a, LONG, namespace=BOB)
    a.flush()
    assert bring_in(b, LONG, ALICE) == bring_in(b, LONG, BOB) == len(LONG)
    before = hosts.server.names()
    a.catalogue.forget_user("alice")
    left = hosts.server.names()
    assert len(before - left) == len(before) // 2
    assert bring_in(b, LONG, BOB) == len(LONG)
    more = prompt(1200, seed=3, start=LONG.tolist())
    bring_in(b, more, BOB)  # asks, and reads with the answer who was forgotten
    assert b.advance(b.origin(ALICE), LONG).position == 0
    b.flush()
    assert hosts.server.names() <= left


def test_what_was_computed_before_another_host_forgot_is_not_written_after_it(hosts: Hosts) -> None:
    a, b = hosts.new(), hosts.new()
    b.flush()
    a.catalogue.forget_user("alice")
    nothing = hosts.server.names()
    hosts.server.client.xtrim("ek1:forgotten", maxlen=10)
    put(b, LONG, namespace=BOB)
    b.flush()
    assert hosts.server.names() > nothing
    hosts.server.pause()
    try:
        put(b, LONG, namespace=ALICE)
    finally:
        hosts.server.go_on()
    a.catalogue.forget_user("alice")
    b.flush()
    tag = RemoteLink(hosts.server.settings()).tag("alice")
    assert eventually(lambda: not hosts.server.names(f"*:{tag}:*"))


def test_with_a_key_nothing_can_be_read_or_found_without_it(hosts: Hosts) -> None:
    secret = "correct horse battery staple"
    a, b = hosts.new(key=secret), hosts.new(key=secret)
    put(a, LONG, namespace=ALICE)
    a.flush()
    tokens = LONG[:16].astype("<i4").tobytes()
    for name in hosts.server.client.scan_iter():
        kind = hosts.server.client.type(name)
        values = [hosts.server.client.get(name)] if kind == b"string" else hosts.server.client.hvals(name)
        assert values
        assert not any(tokens in value or b"alice" in value for value in values)
    assert bring_in(b, LONG, ALICE) == len(LONG)
    check_payloads(b, LONG, ALICE)
    c, d = hosts.new(), hosts.new(key="another")
    assert bring_in(c, LONG, ALICE) == bring_in(d, LONG, ALICE) == 0


def test_a_value_that_was_swapped_damaged_or_cut_is_not_used(hosts: Hosts) -> None:
    a = hosts.new()
    put(a, LONG)
    a.flush()
    values = [name for name in hosts.server.client.scan_iter() if hosts.server.client.type(name) == b"string"]
    whole = {name: hosts.server.client.get(name) for name in values}

    def swapped(name: bytes) -> bytes:
        return whole[values[(values.index(name) + 1) % len(values)]]

    def flipped(name: bytes) -> bytes:
        value = bytearray(whole[name])
        value[-5] ^= 1
        return bytes(value)

    for damage in (swapped, flipped, lambda name: whole[name][:-7], lambda name: b"x" * 100, lambda name: b""):
        for name in values:
            hosts.server.client.set(name, damage(name))
        b = hosts.new()
        assert bring_in(b, LONG) == 0


def test_state_lasts_as_long_as_it_is_wanted(hosts: Hosts) -> None:
    a = hosts.new()
    cursor = put(a, LONG)
    a.flush()
    first = {name: hosts.server.client.ttl(name) for name in hosts.server.client.scan_iter()}
    assert all(250 < seconds <= 302 for seconds in first.values())
    a.turn_ended(Label(EntryKind.CONVERSATION, "one", "head", Ttl.EXTENDED), cursor)
    a.flush()
    later = [hosts.server.client.ttl(name) for name in first if not name.endswith((b":c", b":s"))]
    assert all(seconds > 80_000 for seconds in later)


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


# ── what was forgotten or removed does not come back ──

KEPT = Label(EntryKind.CONVERSATION, "one", "head", Ttl.EXTENDED)


def test_what_another_host_has_read_while_it_was_being_removed_goes_too(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = hosts.new(), hosts.new()
    link = link_of(ours)
    put(ours, LONG, namespace=ALICE.owner)
    ours.flush()
    scan, is_scanning, go_on = link.scan, threading.Event(), threading.Event()

    def slow_scan(pattern: str) -> Iterator[list[bytes]]:
        is_scanning.set()
        go_on.wait()
        return scan(pattern)

    monkeypatch.setattr(link, "scan", slow_scan)
    forgetting = threading.Thread(target=ours.catalogue.forget_user, args=("alice",))
    forgetting.start()
    is_scanning.wait()
    bring_in(theirs, prompt(600, seed=9), BOB)  # by which it reads the record
    assert bring_in(theirs, LONG, ALICE) > 0
    go_on.set()
    forgetting.join()
    bring_in(theirs, prompt(600, seed=10), BOB)
    assert held(theirs, ALICE) == 0
    assert held(ours, ALICE) == 0
    assert not hosts.of("alice")


def test_a_host_that_was_away_reads_of_all_who_were_forgotten_before_it_writes(hosts: Hosts) -> None:
    store = hosts.new()
    link = link_of(store)
    link.breaker.trip("away")
    put(store, LONG, namespace=ALICE.owner)
    hosts.record(*(f"user {number}" for number in range(700)), "alice")
    link.breaker.mend()
    store.flush()
    assert held(store, ALICE) == 0
    assert not hosts.of("alice")


def test_a_user_of_whom_only_a_request_runs_is_forgotten_too(hosts: Hosts) -> None:
    store = hosts.new()
    reached: list[bool] = []
    store.holders.join("all", store, lambda owners: reached.append(ALICE.owner in owners))
    hosts.record("alice")
    bring_in(store, prompt(600, seed=9), BOB)
    assert eventually(lambda: reached == [True])


def test_nothing_is_written_while_the_disk_does_not_let_go(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    store = hosts.new(tmp_path / "store")
    link = link_of(store)
    link.breaker.trip("away")
    users = [f"user {number}" for number in range(4)]
    for user in users:
        put(store, LONG, namespace=private_namespace(user))
    hosts.record(*users)

    def refuse(*_: object) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("emberkeep.kv.disk.tier.DiskTier.forget", refuse)
    link.breaker.mend()
    store.flush()
    for user in users:
        assert held(store, Lineage(private_namespace(user))) == 0
        assert not hosts.of(user)


def test_a_server_that_is_full_forgets(hosts: Hosts) -> None:
    store = hosts.new()
    link = link_of(store)
    put(store, prompt(4000, seed=3), namespace=ALICE.owner)
    store.flush()
    used = hosts.server.client.info("memory")["used_memory"]
    hosts.server.client.config_set("maxmemory", used - (8 << 10))
    assert hosts.of("alice")
    store.catalogue.forget_user("alice")
    assert not hosts.of("alice")
    hosts.server.client.config_set("maxmemory", 1)
    put(store, LONG, namespace=BOB.owner)
    store.flush()
    asked = link.counters.requests
    assert not eventually(lambda: link.counters.requests > asked + 10, 1)  # it is not asked again and again


def test_what_was_removed_while_nothing_could_be_written_is_removed_later(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emberkeep.kv.remote.writer._PAUSE_S", 0.2)
    store = hosts.new()
    entry = store.turn_ended(KEPT, put(store, LONG))
    store.flush()
    assert entry is not None
    hosts.server.client.execute_command("REPLICAOF", "127.0.0.1", "1")  # as in a failover
    store.catalogue.remove(entry.id)
    store.flush()
    assert hosts.server.names()
    hosts.server.client.execute_command("REPLICAOF", "NO", "ONE")
    assert eventually(lambda: not hosts.server.names())


def test_where_others_look_for_a_tail_lasts_as_long_as_the_tail(hosts: Hosts) -> None:
    ours, theirs = hosts.new(), hosts.new()
    tokens = LONG[:300]
    end = put(ours, tokens)
    ours.flush()
    ours.turn_ended(KEPT, end)
    ours.flush()
    client = hosts.server.client
    assert min(client.ttl(name) for name in hosts.server.names("*:c")) > 80_000
    assert bring_in(theirs, tokens, EXACT) == 300


def test_a_line_that_is_cut_is_told_as_one(hosts: Hosts) -> None:
    hosts.server.client.set("big", bytes(30 << 20))
    link = RemoteLink(hosts.server.settings())
    for number in range(20):
        link.breaker.mend()
        cutting = threading.Timer(0.001 * number, link.cut)
        cutting.start()
        with suppress(Unreachable):
            link.run(lambda pipe: pipe.get("big"), size=30 << 20)
        cutting.join()
    link.close()


def test_a_batch_is_not_sent_again_and_again_where_the_line_is_lost() -> None:
    class Closing(StreamRequestHandler):
        """Agrees to everything, and leaves when it is to be done."""

        def handle(self) -> None:
            with suppress(OSError):
                while (command := self.connection.recv(4096)) and b"EXEC" not in command:
                    self.connection.sendall(b"+OK\r\n")

    tries = 0

    def prepare(pipe: Pipeline) -> bool:
        nonlocal tries
        tries += 1
        pipe.multi()
        pipe.set("x", "a")
        return True

    with ThreadingTCPServer(("127.0.0.1", 0), Closing) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        link = RemoteLink(RemoteSettings(f"valkey://127.0.0.1:{server.server_address[1]}", deadline_s=5.0))
        with pytest.raises(Unreachable):
            link.guarded(prepare, 1 << 20)
        link.close()
        server.shutdown()
    assert tries == 1
