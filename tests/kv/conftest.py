from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(autouse=True)
def _stores_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test may leave its stores open: they are checked and closed behind it."""
    still_open: list[KvStore] = []
    open_, close = KvStore.__init__, KvStore.close

    def opened(store: KvStore, *args: Any, **kwargs: Any) -> None:
        open_(store, *args, **kwargs)
        still_open.append(store)

    def closed(store: KvStore) -> None:
        if store in still_open:
            still_open.remove(store)
        close(store)

    monkeypatch.setattr(KvStore, "__init__", opened)
    monkeypatch.setattr(KvStore, "close", closed)
    yield
    for store in still_open[::-1]:
        check_ledger(store)
        close(store)
