"""What one template rendering may cost: a deadline, and a number of characters built on the way.

Templates come out of model files, so they are foreign code. Nothing here interrupts anything: operations of the
sandbox that loop or grow pay first, and the one that cannot pay raises, with a sentence that says why. Those that
nobody thought of are stopped from outside, with the process that they run in (`render_pool`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jinja2.exceptions import SecurityError

MAX_SECONDS = 2.0
MORE_SECONDS_PER_MESSAGE = 0.01
"""Some templates look at all messages again for each message."""
MAX_CHARS = 256 << 20
"""Built in total; a template that appends to one string message by message builds far more than it writes."""
MAX_OUTPUT = 32 << 20

_running = threading.local()


class OutOfBudget(SecurityError):
    """The template takes too long or builds too much."""


@contextmanager
def budget(seconds: float) -> Iterator[None]:
    """Let this thread's sandbox operations spend for the length of the block."""
    _running.deadline = time.monotonic() + seconds
    _running.chars = MAX_CHARS
    try:
        yield
    finally:
        del _running.deadline, _running.chars


def spend(chars: int = 0) -> None:
    """Pay for `chars` characters (or list items) about to be built. Raises OutOfBudget."""
    _running.chars -= chars
    if _running.chars < 0:
        raise OutOfBudget("it builds more text than is allowed")
    if time.monotonic() > _running.deadline:
        raise OutOfBudget("it takes too long")


def spend_on(value: object) -> None:
    """Pay for the text of `value`, walking all of it.

    A few shared lists nested in each other have a text of exponential length, and are walked by one
    uninterruptible call when they are printed, compared or hashed: so they are walked here first.
    """
    if isinstance(value, str):
        spend(len(value))
        return
    spend(1)
    if isinstance(value, Mapping):
        for key, item in value.items():
            spend_on(key)
            spend_on(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            spend_on(item)
