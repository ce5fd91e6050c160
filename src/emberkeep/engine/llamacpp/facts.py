"""What facts about llama.cpp depend on: the bytes of the library, the kind of CPU, and the variables that
libraries read. So another library at the same path, or another CPU, finds nothing."""

from __future__ import annotations

from pathlib import Path

from emberkeep.config.machine import cpu_facts
from emberkeep.engine import facts
from emberkeep.engine.facts import Facts, facts_folder
from emberkeep.engine.llamacpp.shared_library import (
    LibraryFile,
    digest,
    library_in_use,
    loader_variables,
)


def file_name(library: LibraryFile, *more: str) -> str:
    """Of what was found out about a library on this kind of CPU, and `more` beside it. Raises EngineError."""
    return facts.file_name(*_about(library), *more)


def facts_about(*about: object, folder: Path | None = None) -> Facts:
    """With the library in use, and what they depend on besides. Raises EngineError where there is none."""
    return Facts(folder or facts_folder("llamacpp"), *_about(library_in_use()), *about)


def _about(library: LibraryFile) -> tuple[str, ...]:
    return (digest(library), *cpu_facts(instructions=True), *loader_variables())
