"""A namespace is private, is forgotten alone, and may have any name."""

from __future__ import annotations

import numpy as np

from emberkeep.types.lineage import Lineage, private_namespace
from helpers.kv_building import (
    LONG,
    PIECES,
    chunk_files,
    chunks_of,
    exported,
    file_of,
    load,
    new_store,
    only_on_disk,
    path_tokens,
    put,
    reopened,
)

ALICE = private_namespace("alice")
BOB = private_namespace("bob")


def test_namespaces_do_not_see_each_other(store):
    put(store, LONG, namespace=ALICE)
    assert load(store, LONG, namespace=BOB) == 0
    assert load(store, LONG) == 0


def test_readahead_stays_in_its_namespace(tmp_path):
    store = only_on_disk(tmp_path, LONG)
    assert store.readahead(Lineage(ALICE), b"".join(PIECES[t] for t in LONG), PIECES) == set()


def test_the_path_of_a_chunk_is_made_of_hex_digits_only(store, tmp_path):
    hostile = "../../../etc/passwd\0\n" + "x" * 400
    put(store, LONG[:128], namespace=hostile)
    store.flush()
    (path,) = chunk_files(tmp_path)
    assert path.name == f"{chunks_of(store)[0].key.hex()}.kv"
    assert np.array_equal(path_tokens(chunks_of(store)[0]), LONG[:128])


def test_forgetting_a_namespace_removes_its_files_and_no_others(store, tmp_path):
    put(store, LONG, namespace=ALICE)
    put(store, LONG[:300], namespace=BOB)
    store.flush()
    store.catalogue.forget_user("alice")
    assert load(store, LONG, namespace=ALICE) == 0
    assert load(store, LONG, namespace=BOB) == 300
    assert len(chunk_files(tmp_path)) == 3
    again = reopened(store, tmp_path)
    assert load(again, LONG, namespace=ALICE) == 0


def test_forgetting_also_removes_chunks_that_lost_their_parent(store, tmp_path):
    put(store, LONG, namespace=ALICE)
    store.flush()
    first = store.match(Lineage(ALICE), LONG[:128]).segments[0].chunk
    store.close()
    file_of(tmp_path, first.key).unlink()
    again = new_store(tmp_path)
    again.catalogue.forget_user("alice")
    assert chunk_files(tmp_path) == []


def test_a_running_sequence_goes_on_storing_after_its_namespace_was_forgotten(store):
    origin = store.origin(Lineage(ALICE))
    put(store, LONG[:128], namespace=ALICE)
    store.catalogue.forget_user("alice")
    cursor = store.advance(origin, LONG[:128])
    store.insert(cursor, LONG[:128], exported(LONG, 0, 128), (), fork=False)
    assert load(store, LONG, namespace=ALICE) == 128
