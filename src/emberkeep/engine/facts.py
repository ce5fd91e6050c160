"""What was learned of a model and a machine, remembered for the next start.

A fact stands in a file that is named by a hash over everything the fact depends on, such as the digest of the
weights, the versions of libraries and the kind of device. So another model, library or device finds nothing. The
file begins with a checksum of the rest: a damaged one says nothing either.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from emberkeep.files import private_folder, replace_file
from emberkeep.types.request import Json

log = logging.getLogger("emberkeep.engine")
_CHECKSUM_BYTES = 32
T = TypeVar("T")


def file_name(*about: object) -> str:
    return hashlib.sha256("\0".join(str(part) for part in about).encode()).hexdigest()


def facts_folder(engine: str) -> Path:
    """The folder of this user, whatever the data folder."""
    return platformdirs.user_cache_path("emberkeep", appauthor=False) / engine / "facts"


class Facts:
    """Facts about one subject. Any number of processes may share a folder."""

    def __init__(self, folder: Path | None, *about: object) -> None:
        """`about`: what the facts depend on. Without a folder nothing is remembered."""
        self._folder = folder
        self._about = about

    def read(self, what: str) -> bytes | None:
        """None where nothing is remembered, or it is damaged."""
        if self._folder is None:
            return None
        try:
            data = self._file(self._folder, what).read_bytes()
        except OSError:
            return None
        checksum, fact = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
        return fact if checksum == hashlib.sha256(fact).digest() else None

    def read_json(self, what: str, parse: Callable[[Any], T]) -> T | None:
        """As `read`; None also for what another version has written, at which `parse` raises ValueError, KeyError
        or TypeError."""
        fact = self.read(what)
        try:
            return None if fact is None else parse(json.loads(fact))
        except (ValueError, KeyError, TypeError):
            return None

    def remember(self, what: str, fact: bytes) -> None:
        """Where that is not possible it is learned again the next time."""
        if self._folder is None:
            return
        file = self._file(self._folder, what)
        try:
            replace_file(private_folder(file.parent) / file.name, hashlib.sha256(fact).digest() + fact)
        except OSError as error:
            log.debug("%s is not remembered: %s", what, error)

    def remember_json(self, what: str, fact: Json) -> None:
        self.remember(what, json.dumps(fact).encode())

    def forget(self, what: str) -> None:
        if self._folder is not None:
            with suppress(OSError):
                self._file(self._folder, what).unlink(missing_ok=True)

    def _file(self, folder: Path, what: str) -> Path:
        return folder / f"{file_name(what, *self._about)}.fact"


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
