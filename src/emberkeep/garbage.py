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
    """What a model consists of has come, and stays. Looks at everything where another one went before. Without
    `begin` nothing is done."""
    if gc.get_threshold()[0] == _NEW_OBJECTS:
        if not gc.get_freeze_count():
            gc.collect()
        gc.freeze()


def unloaded() -> None:
    """What a model consisted of may go."""
    gc.unfreeze()


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
