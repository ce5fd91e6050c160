"""When Python looks for objects that hold each other and are of no use.

Everything waits meanwhile: in a process with torch a look at all objects takes 0.3 s. So a server does not look
at what stays, which is nearly all.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 10_000
"""After so many it looks at them."""


def begin() -> None:
    """What is there now stays. For processes of our own: others decide for themselves."""
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
    gc.enable()


def loaded() -> None:
    """What a model consists of has come, and stays. Without `begin` nothing is done."""
    if _has_begun():
        gc.freeze()


def unloaded() -> None:
    """What a model consisted of goes. Looks at everything, unless something is `kept`. Without `begin` nothing is
    done."""
    if _has_begun() and gc.isenabled():
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def _has_begun() -> bool:
    return gc.get_threshold()[0] == _NEW_OBJECTS


@contextmanager
def kept() -> Iterator[None]:
    """Nothing is looked for until it ends."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
