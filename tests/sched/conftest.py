from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.engine.fake import FakeEngine
from helpers.kv_building import check_ledger
from helpers.scheduling import PROMPT, SLICE, Rig


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(cells=1 << 15)


@pytest.fixture
def rig(tmp_path: Path, engine: FakeEngine) -> Iterator[Rig]:
    """A loop in small slices over a store on disk whose ledger is right at the end."""
    with Rig(tmp_path, engine, prefill_slice=SLICE) as rig:
        yield rig
    check_ledger(rig.store)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """The folder of a store that has the state of PROMPT, and that of its answer."""
    with Rig(tmp_path) as rig:
        rig.run(PROMPT)
    return tmp_path
