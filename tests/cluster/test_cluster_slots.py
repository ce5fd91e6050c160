from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import pytest

from emberkeep.cluster.slots import config_of_replica, forget_rest, take_slot
from emberkeep.config.settings import Config
from emberkeep.errors import StoreFailed
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.library.stores import ClosedStore, store_folders
from emberkeep.memory.memory import Memory
from emberkeep.types.lineage import private_namespace
from helpers.kv_building import FINGERPRINT, LONG, put


def test_replicas_never_have_the_same_folder_and_one_that_is_free_is_used_again(tmp_path: Path) -> None:
    first, second = take_slot(tmp_path, 2), take_slot(tmp_path, 2)
    assert first.folder != second.folder
    os.close(first.lock)  # as the end of its process does
    assert take_slot(tmp_path, 2).folder == first.folder
    assert take_slot(tmp_path, 2, patience_s=0.1).name == "2"


def test_a_replica_waits_for_the_folder_of_the_one_that_it_replaces(tmp_path: Path) -> None:
    _, second = take_slot(tmp_path, 2), take_slot(tmp_path, 2)
    ending = threading.Timer(0.3, os.close, [second.lock])
    ending.start()
    assert take_slot(tmp_path, 2).folder == second.folder
    ending.join()


def test_models_and_memory_are_shared_and_stored_state_is_not(tmp_path: Path) -> None:
    slots = [take_slot(tmp_path, 2) for _ in range(2)]
    (tmp_path / "models" / "a.gguf").touch()
    assert all((slot.folder / "models" / "a.gguf").exists() for slot in slots)
    memories = [Memory(slot.folder / "memory.sqlite3", limit_bytes=1 << 30) for slot in slots]
    memories[0].set_fact("ann", "boat", "blue")
    fact = memories[1].fact("ann", "boat")
    assert fact is not None
    assert fact.value == "blue"
    for memory in memories:
        memory.close()
    assert (tmp_path / "memory.sqlite3").is_file()


def filled_store(data_dir: Path) -> KvStore:
    files = ChunkFiles(data_dir / "kv", FINGERPRINT)
    store = KvStore(FINGERPRINT, Budgets(1 << 30, 1 << 30), files, about={"model": "fake"})
    put(store, LONG, namespace=private_namespace("ann"))
    put(store, LONG, namespace=private_namespace("bob"))
    return store


def users_in(data_dir: Path) -> set[str]:
    (folder,) = store_folders(data_dir, pytest.fail)
    with closing(ClosedStore(folder, Config().ttl.by_class())) as store:
        return {entry.user for entry in store.entries()}


def test_a_user_is_forgotten_in_folders_of_replicas_that_were_not_asked(tmp_path: Path) -> None:
    """Also where a server without a cluster has stored something, and where a replica is about to end."""
    asked, ending, free = [take_slot(tmp_path, 3) for _ in range(3)]
    for folder in (tmp_path, asked.folder, free.folder):
        filled_store(folder).close()
    filled_store(ending.folder).close()
    open_one = filled_store(ending.folder)
    os.close(free.lock)
    forget_rest(Config(data_dir=tmp_path), "ann", frozenset({asked.name}))
    open_one.close()
    assert [users_in(folder) for folder in (tmp_path, asked.folder, ending.folder, free.folder)] == [
        {"bob"},
        {"ann", "bob"},
        {"bob"},
        {"bob"},
    ]


def test_a_folder_that_cannot_be_looked_into_is_told(tmp_path: Path) -> None:
    slot = take_slot(tmp_path, 1)
    filled_store(slot.folder).close()
    (folder,) = store_folders(slot.folder, pytest.fail)
    (folder.path / "index.db").write_bytes(b"")
    with pytest.raises(StoreFailed, match="left out"):
        forget_rest(Config(data_dir=tmp_path), "ann", frozenset())


def test_what_is_for_all_replicas_is_shared_out(tmp_path: Path) -> None:
    config = Config(
        data_dir=tmp_path,
        replicas=(2, 4),
        ram_budget=4 << 30,
        disk_budget=8 << 30,
    )
    own = config_of_replica(config, take_slot(tmp_path, 4), 0, cores=16)
    assert (own.ram_budget, own.disk_budget, own.threads) == (1 << 30, 2 << 30, 4)
    assert own.data_dir == tmp_path / "replicas" / "0"


def test_each_replica_has_a_backend_of_its_own_where_several_are_named(tmp_path: Path) -> None:
    config = Config(data_dir=tmp_path, cluster_backends=("a", "b"))
    slot = take_slot(tmp_path, 1)
    given = [config_of_replica(config, slot, rank, cores=1).backend for rank in range(3)]
    assert given == ["a", "b", "a"]
