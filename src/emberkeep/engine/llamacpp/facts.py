"""What was learned of a library, a model and a machine, remembered for the next start.

A fact stands in a file that is named by a hash over everything the fact depends on: the bytes of the library, the
kind of CPU, the variables that libraries read, and what the caller adds, such as the digest of the weights. So
another library at the same path, another CPU or another model find nothing. The file begins with a checksum of
the rest: a damaged one says nothing either.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from pathlib import Path

from emberkeep.config import cpu_facts
from emberkeep.engine.llamacpp.shared_library import (
    LibraryFile,
    cache_folder,
    digest,
    library_in_use,
    loader_variables,
)
from emberkeep.files import private_folder, replace_file

log = logging.getLogger("emberkeep.engine")

_CHECKSUM_BYTES = 32


def file_name(library: LibraryFile, *more: str) -> str:
    """Of what was found out about a library on this kind of CPU, and `more` beside it. Raises EngineError."""
    facts = (digest(library), *cpu_facts(instructions=True), *loader_variables(), *more)
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


class Facts:
    """Facts about one subject, with the library in use. Any number of processes may share a folder."""

    def __init__(self, *about: object, folder: Path | None = None) -> None:
        """`about`: what the facts depend on besides library and CPU."""
        self._about = tuple(str(part) for part in about)
        self._folder = folder

    def read(self, what: str) -> bytes | None:
        """None where nothing is remembered, or it is damaged. Raises EngineError where there is no library."""
        try:
            data = self._file(what).read_bytes()
        except OSError:
            return None
        checksum, fact = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
        return fact if checksum == hashlib.sha256(fact).digest() else None

    def remember(self, what: str, fact: bytes) -> None:
        """Where that is not possible it is learned again the next time. Raises as `read`."""
        file = self._file(what)
        try:
            replace_file(private_folder(file.parent) / file.name, hashlib.sha256(fact).digest() + fact)
        except OSError as error:
            log.debug("%s is not remembered: %s", what, error)

    def forget(self, what: str) -> None:
        with suppress(OSError):
            self._file(what).unlink(missing_ok=True)

    def _file(self, what: str) -> Path:
        folder = self._folder or cache_folder() / "facts"
        return folder / f"{file_name(library_in_use(), what, *self._about)}.fact"
