"""Which llama.cpp is used: one compiled on this machine, a ready-made one, or one that was named.

Python packages that carry one are never imported: only the shared library in them is opened.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emberkeep.engine.llamacpp import api
from emberkeep.engine.llamacpp.prebuilt import prebuilt
from emberkeep.errors import EngineError

AUTO = "auto"
NATIVE, READY_MADE = "native", "ready-made"
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_COMPUTING = re.compile(r"ggml|llama|blas")
"""Names of files whose code shapes what is computed."""
_INSTALL = {
    NATIVE: "`pip install 'emberkeep[native]'` compiles it",
    READY_MADE: "`emberkeep serve` fetches it, or `pip install 'emberkeep[xllamacpp]'`",
}


@dataclass(frozen=True, slots=True)
class LibraryFile:
    kind: str
    """`native`, `ready-made`, or `named` for a path that somebody gave."""
    path: Path

    def __str__(self) -> str:
        return f"{self.kind}, {self.path}"


def candidates(choice: str = AUTO) -> list[LibraryFile]:
    """What `choice` (auto, native, ready-made, a path) stands for here, the fastest first. Raises EngineError."""
    if choice not in (AUTO, NATIVE, READY_MADE):
        path = Path(choice).expanduser()
        if not path.is_file():
            raise EngineError(f"There is no library at {path}: set llama_library to a file, or to auto.")
        return [LibraryFile("named", path.resolve())]
    found = [each for each in _installed() if choice in (AUTO, each.kind)]
    if not found:
        ways = [way for kind, way in _INSTALL.items() if choice in (AUTO, kind)]
        raise EngineError(f"llama.cpp ({choice}) is not installed: {'; '.join(reversed(ways))}.")
    return found


def is_installed(choice: str = AUTO) -> bool:
    return any(choice in (AUTO, each.kind) for each in _installed())


def _installed() -> Iterator[LibraryFile]:
    if native := _package_file("llama_cpp", f"lib/libllama{_SUFFIX}"):
        yield LibraryFile(NATIVE, native)
    if (fetched := prebuilt()) and fetched.library:
        yield LibraryFile(READY_MADE, fetched.library)
    if ready_made := _package_file("xllamacpp", "xllamacpp*.so"):
        yield LibraryFile(READY_MADE, ready_made)


def _package_file(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((file for folder in folders for file in sorted(folder.glob(pattern))), None)


_used: list[LibraryFile] = []


def use(library: LibraryFile) -> None:
    """Let everything in this process run on `library`. Raises EngineError when another one is in use already."""
    if _used and _used[0] != library:
        raise EngineError(f"This process runs on {_used[0]} already: start another one for {library}.")
    _used[:] = [library]


def used() -> LibraryFile:
    """The one that was chosen with `use`, else the first that the environment allows. Raises EngineError."""
    if not _used:
        use(candidates(os.environ.get("EMBERKEEP_LLAMA_LIBRARY", AUTO))[0])
    return _used[0]


@functools.cache
def llama() -> Any:
    """The C functions. Raises EngineError."""
    return api.bind(used().path)


def files(library: LibraryFile) -> list[Path]:
    """Everything that `library` consists of: ggml's parts stand beside it, if they are not inside."""
    beside = (path.resolve() for path in library.path.parent.iterdir() if "ggml" in path.name)
    return sorted({library.path.resolve(), *(path for path in beside if path.is_file())})


@functools.cache
def digest(library: LibraryFile) -> str:
    """Of all its files. Blocks for as long as reading them takes (a tenth of a second). Raises EngineError."""
    return _digest_of(files(library))


@functools.cache
def loaded_digest() -> str:
    """Of what is computed with: the files of the library in use that this process has really opened.

    A variable of the loader can put others in the place of those beside it. Called when the library is up; blocks
    as `digest`. Raises EngineError.
    """
    try:
        mapped = {
            Path(line.split(None, 5)[5])
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/" in line
        }
    except OSError:
        return digest(used())
    return _digest_of(sorted(path for path in mapped if _COMPUTING.search(path.name)))


def loader_variables() -> list[str]:
    """What of the environment decides which files are opened, and how llama.cpp computes."""
    names = sorted(name for name in os.environ if name.startswith(("LD_", "DYLD_", "GGML_", "LLAMA_")))
    return [f"{name}={os.environ[name]}" for name in names]


def _digest_of(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                total.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
        except OSError as error:
            raise EngineError(f"{path} cannot be read, {error.strerror}: install llama.cpp again.") from error
    return total.hexdigest()
