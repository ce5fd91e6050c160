"""What several models share, while one of them is being opened."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from emberkeep.config.settings import Config
from emberkeep.engine.fake import FakeEngine
from emberkeep.kv.disk.index import INDEX
from emberkeep.kv.forgetting import RECORD
from emberkeep.kv.store import KvStore
from emberkeep.kv.tree import store_name
from emberkeep.runtime import parts
from emberkeep.runtime.parts import ModelParts, open_store, open_vectors, stored_by
from emberkeep.types.hygiene import HygieneAction, HygieneRule
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Message, Request, Sampling, Tool
from helpers.scripted_backend import end_of, fake_backend, read_events, settle

WAIT_S = 60.0

ONE, OTHER = b"one".ljust(32), b"other".ljust(32)


class SlowDisk:
    """Stores are opened when they may be."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.may_open = threading.Event(), threading.Event()
        patch.setattr(parts, "open_store", self._open)

    def _open(self, *args: Any, **named: Any) -> KvStore:
        self.begun.set()
        assert self.may_open.wait(WAIT_S)
        return open_store(*args, **named)


def test_who_asks_for_the_memory_does_not_wait_for_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, disk = ModelParts(Config(data_dir=tmp_path), stays=True), SlowDisk(monkeypatch)
    memory = shared.memory()
    assert memory is not None
    with ThreadPoolExecutor() as pool:
        opening = pool.submit(shared.store, ONE, {})
        assert disk.begun.wait(WAIT_S)
        try:
            assert pool.submit(shared.memory).result(1) is memory
            pool.submit(shared.sweep).result(1)
        finally:
            disk.may_open.set()
        opening.result()
    shared.close()


def test_the_memory_is_opened_once(tmp_path: Path) -> None:
    shared = ModelParts(Config(data_dir=tmp_path), stays=True)
    with ThreadPoolExecutor() as pool:
        memories = {id(memory) for memory in pool.map(lambda _: shared.memory(), range(8))}
    assert len(memories) == 1
    shared.close()


def test_a_store_that_is_being_opened_is_not_missed_when_a_user_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, disk = ModelParts(Config(data_dir=tmp_path), stays=True), SlowDisk(monkeypatch)
    with ThreadPoolExecutor() as pool:
        pool.submit(shared.store, ONE, {})
        assert disk.begun.wait(WAIT_S)
        forgetting = pool.submit(shared.holders.forget, "ann")
        assert not wait([forgetting], timeout=0.05).done
        disk.may_open.set()
        forgetting.result()
    assert (tmp_path / "kv" / RECORD).exists()
    shared.close()


def test_a_store_at_rest_is_taken_again_and_one_in_use_is_not(tmp_path: Path) -> None:
    shared = ModelParts(Config(data_dir=tmp_path), stays=True)
    one, other, twin = shared.store(ONE, {}), shared.store(OTHER, {}), shared.store(ONE, {})
    assert len({id(store) for store in (one, other, twin)}) == 3
    shared.close_store(one)
    assert shared.store(ONE, {}) is one
    shared.close()


def test_state_that_takes_no_room_by_the_token_leaves_it_to_the_draft_model(tmp_path: Path) -> None:
    shared = ModelParts(Config(data_dir=tmp_path), stays=True)
    stores = shared.store(ONE, {}, 0.0), shared.store(OTHER, {}, 1.0, is_draft=True)
    assert [store.ram_room() > 0 for store in stores] == [False, True]
    shared.close()


@pytest.mark.parametrize(("user", "is_kept"), [("ann", True), ("", False)])
def test_vectors_are_forgotten_though_no_model_that_embeds_is_loaded(
    tmp_path: Path, user: str, is_kept: bool
) -> None:
    config = Config(data_dir=tmp_path)
    vectors = open_vectors(config)
    assert vectors is not None
    vectors.add({b"key": b"vector"})
    shared = ModelParts(config, stays=True)
    shared.store(ONE, {})
    shared.holders.forget(user)
    assert bool(vectors.find([b"key"])) == is_kept
    vectors.close()
    shared.close()


def test_where_nothing_was_embedded_forgetting_writes_no_vectors(tmp_path: Path) -> None:
    shared = ModelParts(Config(data_dir=tmp_path), stays=True)
    shared.store(ONE, {})
    shared.holders.forget("")
    assert not (tmp_path / "vectors.db").exists()
    shared.close()


def test_where_a_ttl_is_a_promise_no_vectors_are_on_disk(tmp_path: Path) -> None:
    before = open_vectors(Config(data_dir=tmp_path))
    assert before is not None
    before.add({b"key": b"vector"})
    before.close()
    config = Config(data_dir=tmp_path, expire=True)
    store = open_store(config, ONE, {})
    assert open_vectors(config) is None
    assert not list(tmp_path.glob("vectors.db*"))
    assert store.keeping.expire
    store.close()


def test_where_a_ttl_is_a_promise_stores_of_models_that_are_not_loaded_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[Path] = []
    monkeypatch.setattr(parts.UnusedStores, "_expire", lambda self, path: swept.append(path))
    open_store(Config(data_dir=tmp_path), OTHER, {}).close()
    store = open_store(Config(data_dir=tmp_path, expire=True), ONE, {})
    store.sweep()
    assert swept == [tmp_path / "kv" / store_name(OTHER)]
    store.close()


# ── stores of before ──
def stored(folder: Path, *fingerprints: bytes) -> Config:
    """The configuration of a folder with a store for each, the latest used one last."""
    config = Config(data_dir=folder, ram_budget=1 << 20)
    for seconds, fingerprint in enumerate(fingerprints, start=1):
        open_store(config, fingerprint, {}).close()
        os.utime(folder / "kv" / store_name(fingerprint) / INDEX, (seconds, seconds))
    return config


def test_of_several_stores_the_latest_used_one_is_told(tmp_path: Path) -> None:
    find = stored_by(stored(tmp_path, ONE, OTHER))
    assert find is not None
    assert find([ONE, b"none".ljust(32), OTHER]) == OTHER
    assert find([ONE]) == ONE
    assert find([b"none".ljust(32)]) is None


def test_in_an_empty_folder_no_store_is_looked_for(tmp_path: Path) -> None:
    assert stored_by(Config(data_dir=tmp_path)) is None


def test_hosts_that_share_state_agree_on_its_name(tmp_path: Path) -> None:
    config = stored(tmp_path, ONE)
    assert stored_by(replace(config, remote="valkey://127.0.0.1:1")) is None
    assert stored_by(replace(config, disk_budget=0)) is None


BUILD = HygieneRule("build", r"^Build \d+$", action=HygieneAction.FREEZE)

TOOLS = (Tool("b"), Tool("a"), Tool("c"))


@pytest.fixture(params=[0, 1 << 30])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    """Without a disk, and with one."""
    return Config(data_dir=tmp_path, hygiene=(BUILD,), disk_budget=request.param)


@pytest.fixture
def shared_parts(config: Config) -> Iterator[ModelParts]:
    shared = ModelParts(config, stays=True)
    yield shared
    shared.close()


def ask(
    config: Config, shared_parts: ModelParts, build: int, tools: tuple[Tool, ...], model: str = "one"
) -> set[str]:
    """The rules that changed something for a model that is loaded and unloaded for it."""
    request = Request(
        messages=(Message("system", f"Build {build}"), Message("user", "What is left to do?")),
        tools=tools,
        sampling=Sampling(temperature=0),
        max_tokens=2,
        user="ann",
        namespace=private_namespace("ann"),
    )
    backend = fake_backend(config, FakeEngine(weights=model), name=model, parts=shared_parts)
    try:
        _, completed = end_of(read_events(backend, request))
        settle(backend)
    finally:
        asyncio.run(backend.close())
    return set(completed.hygiene)


@pytest.mark.parametrize("model", ["one", "another"])
def test_what_a_client_sent_first_outlives_the_model(config: Config, shared_parts: ModelParts, model: str) -> None:
    assert ask(config, shared_parts, 1, TOOLS) == set()
    assert ask(config, shared_parts, 2, TOOLS[::-1], model) == {"build", "tool-order"}


def test_a_user_is_forgotten_though_no_model_is_loaded(config: Config, shared_parts: ModelParts) -> None:
    ask(config, shared_parts, 1, TOOLS)
    shared_parts.holders.forget("bob")
    assert ask(config, shared_parts, 2, TOOLS[::-1]) == {"build", "tool-order"}
    shared_parts.holders.forget("ann")
    assert ask(config, shared_parts, 2, TOOLS[::-1]) == set()


@pytest.mark.parametrize("config", [1 << 30], indirect=True)
def test_a_user_whom_another_process_forgets_is_forgotten_though_no_model_is_loaded(
    config: Config, shared_parts: ModelParts
) -> None:
    ask(config, shared_parts, 1, TOOLS)
    elsewhere = open_store(config, b"another".ljust(32), {})
    elsewhere.catalogue.forget_user("ann")
    elsewhere.close()
    shared_parts.sweep()
    assert ask(config, shared_parts, 2, TOOLS[::-1]) == set()
