"""Of what stays nothing is looked through, and what is of no use any more goes all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from emberkeep import garbage


class Holder:
    """Holds itself: only a look at it shows that nobody else does."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threshold, was_on = gc.get_threshold(), gc.isenabled()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    (gc.enable if was_on else gc.disable)()


def test_what_was_loaded_is_not_looked_through() -> None:
    garbage.begin()
    before = gc.get_freeze_count()
    held = [Holder() for _ in range(100)]
    garbage.loaded()
    assert gc.get_freeze_count() >= before + len(held)


def test_what_a_model_leaves_goes_when_it_is_unloaded() -> None:
    garbage.begin()
    model = Holder()
    seen = weakref.ref(model)
    garbage.loaded()
    del model
    garbage.unloaded()
    assert seen() is None and gc.get_freeze_count()


def test_another_program_decides_for_itself() -> None:
    gc.set_threshold(700)
    garbage.loaded()
    assert not gc.get_freeze_count()
    gc.freeze()
    garbage.unloaded()
    assert gc.get_freeze_count()
