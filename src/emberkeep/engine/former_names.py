"""By which fingerprint an engine's state is stored, where an earlier version has stored it by another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

MOST_THREADS = 1024
"""That could ever be set."""

Stored = Callable[[Iterable[bytes]], bytes | None]
"""Tells which of these fingerprints has a store, of several the latest used one; None: none of them."""


def known_as(own: bytes, with_threads: Callable[[int], bytes], stored: Stored | None) -> bytes:
    """`own`, or the fingerprint of before that has a store: `with_threads` gives the one with a number of threads.

    Their number was a part of it, until it was measured that they change no more than the shape of a step does.
    """
    if stored is None:
        return own
    former = (with_threads(threads) for threads in range(1, MOST_THREADS + 1))
    return stored(chain([own], former)) or own
