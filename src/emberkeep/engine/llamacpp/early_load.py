"""Weights that llama.cpp loads while the rest of the program is imported, which takes about as long.

The `LlamaModel` of the same file takes them, if it is still the file of which the load began. Whatever fails
here is met again, and said, by who loads them then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from emberkeep.config.machine import resident_ram
from emberkeep.engine.llamacpp.c_api import Handle
from emberkeep.engine.llamacpp.model import ON_CPU, PlacementParams, Report, gpus, load_weights
from emberkeep.engine.llamacpp.shared_library import llama, silent, start_backend
from emberkeep.files import FileVersion

Tell = Callable[[str, int, int | None], None]
"""Told of the step that is done now how much is done, of how much."""

Prove = Callable[[Tell], tuple[str | None, bool]]
"""Chooses the library, and tries it and the weights out where no start has. Gives their digest, None where that
could not be found out, and whether they work here."""

_WATCHED = 1 << 30
"""Bytes of weights from which on it is told how far they are. Each word from llama.cpp to Python waits for what is
being imported: a small model, with 1,400 lines of log and 270 steps, took four times as long to load."""


class EarlyLoad:
    """Has begun when it is made."""

    def __init__(self, path: Path, versions: Sequence[FileVersion], prove: Prove) -> None:
        """`versions`: of all files of the model, as they were before anything else was asked about them. `prove`
        is called first, by another thread."""
        self.path = path
        self.resident_before = resident_ram() or 0
        self._versions = versions
        self._size = sum(version.size for version in versions)
        self._prove = prove
        self._is_proved = threading.Event()
        self._digest: str | None = None
        self.is_claimed = False
        self._latest: tuple[str, int, int | None] | None = None
        self._tell: Tell = lambda step, done, total: None
        self._report: Report = lambda fraction: None
        self._handle: Handle | None = None
        self._loading = threading.Lock()
        self._is_needless = False
        self._thread = threading.Thread(target=self._run, name="early load", daemon=True)
        self._thread.start()

    def proved(self, tell: Tell) -> str | None:
        """The digest of the weights, which were tried out; None where it has to be found, or is another by now.
        Blocks until it is known, and tells how far that is."""
        self._tell = tell
        if self._latest is not None:
            tell(*self._latest)
        self._is_proved.wait()
        return self._digest if self._is_the_same() else None

    def take(self, report: Report) -> Handle | None:
        """The weights, for good; None where they are not those of the file any more. Blocks until they are there,
        and tells `report` meanwhile how many of them are."""
        self._report = report
        self._thread.join()
        handle, self._handle = self._handle, None
        if handle and not self._is_the_same():
            llama().llama_model_free(handle)
            return None
        return handle

    def wait(self) -> None:
        """Until nothing is loaded, and nothing will be."""
        self._is_needless = True
        with self._loading:
            pass

    def _is_the_same(self) -> bool:
        try:
            return all(FileVersion.of(Path(version.path)) == version for version in self._versions)
        except OSError:
            return False

    def _run(self) -> None:
        works = False
        try:
            self._digest, works = self._prove(self._told)
        finally:
            self._is_proved.set()
        with self._loading:
            if works and not self._is_needless and self._is_the_same():
                self._load()

    def _told(self, step: str, done: int, total: int | None) -> None:
        self._latest = step, done, total
        self._tell(step, done, total)

    def _load(self) -> None:
        start_backend()  # a GPU's takes a third of a second
        if gpus():  # where weights go is planned by who takes them
            return
        report = (lambda fraction: self._report(fraction)) if self._size >= _WATCHED else None
        with silent():
            self._handle = load_weights(self.path, PlacementParams(ON_CPU, []), report)


_begun: list[EarlyLoad] = []


def begin(path: Path, versions: Sequence[FileVersion], prove: Prove) -> None:
    """Where there are GPUs only llama.cpp itself is brought up."""
    _begun.append(EarlyLoad(path, versions, prove))


def begun(path: Path) -> EarlyLoad | None:
    """What has begun to be loaded of `path`, once."""
    for early in _begun:
        if early.path == path and not early.is_claimed:
            early.is_claimed = True
            return early
    return None


def wait() -> None:
    """Until nothing is being loaded any more: a process that ends meanwhile may crash."""
    for early in _begun:
        early.wait()
