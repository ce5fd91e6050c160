"""llama.cpp's shared library: which one is used, and how it is brought up.

It is one compiled on this machine, a ready-made one for GPUs or CPUs, or one that was named. Python packages that
carry one are never imported: only the shared library in them is opened.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from emberkeep.config.machine import cpu_facts
from emberkeep.engine.devices import DRIVERS
from emberkeep.engine.facts import Facts, facts_folder
from emberkeep.engine.llamacpp import c_api
from emberkeep.engine.llamacpp.prebuilt import CUDA, READY_MADE, VULKAN, build_for, cache_folder
from emberkeep.errors import EngineError
from emberkeep.files import Changed, remembered_digest
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.llamacpp")
AUTO, NATIVE = "auto", "native"
_KINDS = {AUTO: (NATIVE, CUDA, VULKAN, READY_MADE), CUDA: (CUDA, READY_MADE), VULKAN: (VULKAN, READY_MADE)}
"""What a choice stands for, the fastest first; others stand for themselves."""
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
    """`native`, `cuda`, `vulkan`, `ready-made` (for CPUs), or `named` for a path that the user gave."""
    path: Path

    def __str__(self) -> str:
        return f"{self.kind}, {self.path}"


def candidates(choice: str = AUTO) -> list[LibraryFile]:
    """What `choice` (a kind, auto, a path) stands for here, the fastest first; after one for GPUs that for CPUs.
    Raises EngineError."""
    if choice not in (*_KINDS, NATIVE, READY_MADE):
        path = Path(choice).expanduser()
        if not path.is_file():
            raise EngineError(f"There is no library at {path}: set llama_library to a file, or to auto.")
        return [LibraryFile("named", path.resolve())]
    found = list(_find_installed(choice))
    if not found:
        ways = [way for kind, way in _INSTALL.items() if kind in _KINDS.get(choice, (choice,))]
        raise EngineError(f"llama.cpp ({choice}) is not installed: {'; '.join(reversed(ways))}.")
    return found


def is_installed(choice: str = AUTO) -> bool:
    return any(_find_installed(choice))


def is_missing(choice: str) -> bool:
    """Whether `choice` stands for nothing that is here, and a start fetches it."""
    return choice in (*_KINDS, READY_MADE) and not is_installed(choice)


def _find_installed(choice: str) -> Iterator[LibraryFile]:
    for kind in _KINDS.get(choice, (choice,)):
        yield from (LibraryFile(kind, path) for path in _places(kind) if path)


def _places(kind: str) -> Iterator[Path | None]:
    if kind == NATIVE:
        yield _package_file("llama_cpp", f"lib/libllama{_SUFFIX}")
    elif kind in _KINDS[AUTO]:
        with suppress(EngineError):
            yield build_for(kind).library
    if kind == READY_MADE:
        yield _package_file("xllamacpp", "xllamacpp*.so")


def _package_file(package: str, pattern: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    return next((file for folder in folders for file in sorted(folder.glob(pattern))), None)


_used: list[LibraryFile] = []


def use_library(library: LibraryFile) -> None:
    """Let everything in this process run on `library`. Raises EngineError when another one is in use already."""
    if _used and _used[0] != library:
        raise EngineError(f"This process runs on {_used[0]} already: start another one for {library}.")
    _used[:] = [library]


def library_in_use() -> LibraryFile:
    """What `use_library` was told, else the first that the environment allows. Raises EngineError."""
    if not _used:
        use_library(candidates(os.environ.get("EMBERKEEP_LLAMA_LIBRARY", AUTO))[0])
    return _used[0]


@functools.cache
def llama() -> Any:
    """The C functions. Raises EngineError."""
    return c_api.bind(library_in_use().path)


def files(library: LibraryFile) -> list[Path]:
    """Everything that `library` consists of: ggml's parts stand beside it, if they are not inside."""
    beside = (path.resolve() for path in library.path.parent.iterdir() if "ggml" in path.name)
    return sorted({library.path.resolve(), *(path for path in beside if path.is_file())})


@functools.cache
def digest(library: LibraryFile) -> str:
    """The digest of all its files. Blocks the first time for as long as reading them takes. Raises EngineError."""
    return _digest_of(files(library))


@functools.cache
def loaded_digest() -> str:
    """The digest of what is computed with: the files of the library in use that this process has really opened.

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
        return digest(library_in_use())
    return _digest_of(sorted(path for path in mapped if _COMPUTING.search(path.name)))


def loader_variables() -> list[str]:
    """What of the environment decides which files are opened, and how llama.cpp computes."""
    names = sorted(name for name in os.environ if name.startswith(("LD_", "DYLD_", "GGML_", "LLAMA_")))
    return [f"{name}={os.environ[name]}" for name in names]


def own_switches() -> list[str]:
    """Those of `loader_variables` that are llama.cpp's own: with one of them it does not rotate what it quantises,
    and writes nowhere that it did."""
    return [each for each in loader_variables() if each.startswith(("GGML_", "LLAMA_"))]


def _digest_of(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        try:
            total.update(f"{path.name}\0{remembered_digest(path, cache_folder() / 'digests')}\0".encode())
        except OSError as error:
            raise EngineError(f"{path} cannot be read, {error.strerror}: install llama.cpp again.") from error
        except Changed as error:
            raise EngineError(str(error)) from error
    return total.hexdigest()


# ── bringing it up: backend, log, errors ──

_LEVELS = {2: logging.DEBUG, 3: logging.WARNING, 4: logging.ERROR}
_recent_errors: list[str] = []
_BUFFER = re.compile(r"(\S+)\s+(\S+) buffer size =\s*([\d.]+) MiB")


@dataclass(frozen=True, slots=True)
class Allocation:
    place: str
    """As `CPU`, `CPU_REPACK`, `CUDA0`, `CUDA_Host`."""
    kind: str
    """`model`, `KV`, `RS`, `compute`, `output`, `LoRA`."""
    size: int


_buffers: list[Allocation] = []


@c_api.LogCallback  # type: ignore[untyped-decorator]
def _on_log(level: int, text: bytes, _user_data: ctypes.c_void_p) -> None:
    line = text.decode("utf-8", "replace").rstrip()
    if level == 4 and line:
        _recent_errors.append(line)
        del _recent_errors[:-8]
    if found := _BUFFER.search(line):
        _buffers.append(Allocation(found[1], found[2], int(float(found[3]) * (1 << 20))))
    # llama.cpp tells the caller the same through return codes: its own words are for debugging.
    if level in _LEVELS and line and log.isEnabledFor(logging.DEBUG):
        log.debug("%s", line)


@contextmanager
def silent() -> Iterator[None]:
    """llama.cpp logs nothing: its lines are handed to a function of the C library that looks at no argument."""
    nobody = ctypes.cast(ctypes.CDLL(None).getpid, c_api.LogCallback)
    llama().llama_log_set(nobody, ctypes.c_void_p(0))
    try:
        yield
    finally:
        llama().llama_log_set(_on_log, ctypes.c_void_p(0))


_starting = threading.Lock()


def start_backend() -> None:
    """Bring llama.cpp up once per process. Its log goes to our debug log. Blocks while another thread does it."""
    with _starting:
        _start_backend()


@functools.cache
def _start_backend() -> None:
    llama().llama_log_set(_on_log, ctypes.c_void_p(0))
    if not llama().ggml_backend_dev_count():
        # Drivers first: those files would look for them in the current folder, too.
        for driver in DRIVERS:
            with suppress(OSError):
                ctypes.CDLL(driver)
        # Its backends are in files of their own, of which it chooses those that fit this CPU best.
        llama().ggml_backend_load_all_from_path(str(library_in_use().path.parent).encode())
    llama().llama_backend_init()


def take_errors() -> str:
    """What llama.cpp first complained about since the last call: what follows is its callers passing it on."""
    first = _recent_errors[0] if _recent_errors else ""
    _recent_errors.clear()
    # It begins with the name of a C function.
    return re.sub(r"^\w+: ", "", first).rstrip(".")


def take_buffers() -> list[Allocation]:
    """What llama.cpp said it allocated since the last call: only its log says so."""
    taken = list(_buffers)
    _buffers.clear()
    return taken


@contextmanager
def buffers_that_go() -> Iterator[None]:
    """What is allocated inside of it is not in `take_buffers`: it goes, or takes the place of what did."""
    count = len(_buffers)
    try:
        yield
    finally:
        del _buffers[count:]


def system_info() -> str:
    """llama.cpp's list of CPU features and backends it was built with."""
    start_backend()
    info: bytes = llama().llama_print_system_info()
    return info.decode().strip()


def version() -> str:
    release: bytes = llama().llama_version()
    return release.decode()


def build() -> tuple[str, ...]:
    """What says which code computes: also which of its kernels the library chose for this CPU, and what they were
    compiled with."""
    return version(), loaded_digest(), system_info(), platform.machine()


# ── what is known of it ──


def facts_about(*about: object, folder: Path | None = None) -> Facts:
    """With the library in use, and what they depend on besides. Raises EngineError where there is none."""
    return facts_of(library_in_use(), *about, folder=folder or facts_folder("llamacpp"))


def facts_of(library: LibraryFile, *about: object, folder: Path) -> Facts:
    """What was found out about a library on this CPU. Raises EngineError."""
    return Facts(folder, digest(library), *cpu_facts(instructions=True), *loader_variables(), *about)
