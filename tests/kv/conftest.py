from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.kv.store import KvStore
from helpers.kv_building import check_ledger, new_store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KvStore]:
    """A store on disk whose ledger is right at the end."""
    store = new_store(tmp_path)
    yield store
    check_ledger(store)
    store.close()
