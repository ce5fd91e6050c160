"""What was forgotten or removed does not come back by way of the server that hosts share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest
from valkey.client import Pipeline

from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.remote.link import FORGOTTEN, RemoteLink, RemoteSettings, Unreachable
from emberkeep.kv.remote.tier import RemoteTier
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.token_arrays import TokenArray
from emberkeep.types.cache import EntryKind, Label
from emberkeep.types.lineage import EXACT, Lineage, private_namespace
from emberkeep.types.request import Ttl
from helpers.kv_building import FINGERPRINT, LONG, PLENTY, prompt, put
from helpers.valkey_server import ValkeyServer, running_valkey
from helpers.waiting import eventually

ALICE, BOB = (Lineage(private_namespace(name)) for name in ("alice", "bob"))
KEPT = Label(EntryKind.CONVERSATION, "one", "head", Ttl.EXTENDED)


class Hosts:
    """Stores that share a server, each with a line of its own."""

    def __init__(self, server: ValkeyServer, opened: ExitStack) -> None:
        self.server = server
        self._opened = opened

    def new(self, folder: Path | None = None) -> tuple[KvStore, RemoteLink]:
        link = RemoteLink(self.server.settings())
        files = ChunkFiles(folder, FINGERPRINT) if folder else None
        store = KvStore(
            FINGERPRINT, Budgets(PLENTY, PLENTY if folder else 0), files, shared=partial(RemoteTier, link)
        )
        self._opened.callback(store.close)
        return store, link

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
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    (tmp_path / "valkey").mkdir()
    with running_valkey(tmp_path / "valkey") as server, ExitStack() as opened:
        yield Hosts(server, opened)


def bring_in(store: KvStore, tokens: TokenArray, lineage: Lineage) -> int:
    arrival = store.bring_in(lineage, tokens, snapshots=False)
    if arrival is not None:
        arrival.done.result(30)
    return held(store, lineage, tokens)


def held(store: KvStore, lineage: Lineage, tokens: TokenArray = LONG) -> int:
    return store.advance(store.origin(lineage), tokens).position


def test_what_another_host_has_read_while_it_was_being_removed_goes_too(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ours, link), (theirs, _) = hosts.new(), hosts.new()
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
    store, link = hosts.new()
    link.breaker.trip("away")
    put(store, LONG, namespace=ALICE.owner)
    hosts.record(*(f"user {number}" for number in range(700)), "alice")
    link.breaker.mend()
    store.flush()
    assert held(store, ALICE) == 0
    assert not hosts.of("alice")


def test_a_user_of_whom_only_a_request_runs_is_forgotten_too(hosts: Hosts) -> None:
    store, _ = hosts.new()
    told: list[bool] = []
    store.holders.join("all", store, lambda owners: told.append(ALICE.owner in owners))
    hosts.record("alice")
    bring_in(store, prompt(600, seed=9), BOB)
    assert eventually(lambda: told == [True])


def test_nothing_is_written_while_the_disk_does_not_let_go(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    store, link = hosts.new(tmp_path / "store")
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
    store, link = hosts.new()
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
    store, _ = hosts.new()
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
    (ours, _), (theirs, _) = hosts.new(), hosts.new()
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
                while (said := self.connection.recv(4096)) and b"EXEC" not in said:
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
