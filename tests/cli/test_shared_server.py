from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from emberkeep.cli.doctor import CHECKS, Level
from emberkeep.cli.main import app
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError, StoreFailed
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.remote.link import RemoteLink
from emberkeep.kv.remote.tier import RemoteTier
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.types.lineage import private_namespace
from helpers.kv_building import FINGERPRINT, LONG, put
from helpers.valkey_server import ValkeyServer, running_valkey


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ValkeyServer]:
    with running_valkey(tmp_path, "--maxmemory", "100mb") as running:
        monkeypatch.setenv("EMBERKEEP_REMOTE", running.url)
        yield running


@pytest.fixture
def data(tmp_path: Path, server: ValkeyServer) -> Path:
    """A folder with state of two users, which is shared."""
    files = ChunkFiles(tmp_path / "data" / "kv", FINGERPRINT)
    link = RemoteLink(server.settings())
    store = KvStore(
        FINGERPRINT, Budgets(1 << 30, 1 << 30), files, shared=partial(RemoteTier, link), about={"model": "harbour"}
    )
    for user in ("alice", "bob"):
        put(store, LONG, namespace=private_namespace(user))
    store.flush()
    store.close()
    return tmp_path / "data"


def cache(*arguments: str, data: Path) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments, "--data-dir", str(data)])


def test_what_hosts_share_is_listed_by_model_and_user(data: Path, tmp_path: Path) -> None:
    listed = json.loads(cache("ls", "--tier", "remote", "--json", data=data).stdout)
    told = {(row["model"], row["user"], row["chunks"]) for row in listed}
    assert told == {("harbour", "alice", 8), ("harbour", "bob", 8)}
    assert "16 chunks" in cache("ls", "--tier", "remote", data=data).stdout
    elsewhere = json.loads(cache("ls", "--tier", "remote", "--json", data=tmp_path / "none").stdout)
    assert [(row["model"], row["user"]) for row in elsewhere] == [(None, None)] * 2


def test_a_user_who_is_removed_is_gone_there_too(data: Path, server: ValkeyServer) -> None:
    before = server.names()
    assert cache("rm", "--user", "alice", "--yes", data=data).exit_code == 0
    assert len(server.names() - {"ek1:forgotten"}) == len(before) // 2
    (left,) = json.loads(cache("ls", "--tier", "remote", "--json", data=data).stdout)
    assert left["user"] == "bob"


def test_where_it_cannot_be_removed_that_is_said(data: Path, server: ValkeyServer) -> None:
    server.kill()
    try:
        result = cache("rm", "--user", "alice", "--yes", data=data)
        assert isinstance(result.exception, StoreFailed)
        assert "Nothing of that user is left here" in str(result.exception)
        assert isinstance(cache("ls", "--tier", "remote", data=data).exception, StoreFailed)
    finally:
        server.start()


def test_without_a_server_there_is_nothing_to_list(tmp_path: Path) -> None:
    result = cache("ls", "--tier", "remote", data=tmp_path)
    assert isinstance(result.exception, ConfigError)
    assert "EMBERKEEP_REMOTE" in str(result.exception)


# ── the doctor ──


def test_the_doctor_asks_the_server_and_gives_advice(server: ValkeyServer) -> None:
    found = CHECKS["shared"](Config(remote=server.url))
    assert found.level is Level.WARN
    assert all(word in found.text for word in ("Valkey", "100 MiB", "allkeys-lru", "remote_key"))
    server.client.config_set("maxmemory-policy", "allkeys-lru")
    found = CHECKS["shared"](Config(remote=server.url, remote_key="secret"))
    assert found.level is Level.OK
    assert "encrypted" in found.text


def test_the_doctor_says_that_it_does_not_answer(server: ValkeyServer) -> None:
    server.kill()
    try:
        found = CHECKS["shared"](Config(remote=server.url))
    finally:
        server.start()
    assert found.level is Level.WARN
    assert "does not answer" in found.text


def test_the_doctor_needs_no_server() -> None:
    assert CHECKS["shared"](Config()).level is Level.OK
