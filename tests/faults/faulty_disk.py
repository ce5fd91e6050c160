"""A disk that fails at one system call, or from one on, as SQLite's own tests have it."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from emberkeep.kv.disk import index

_BY_PATH = ("open", "rename", "replace", "unlink", "mkdir", "rmdir", "stat", "lstat", "scandir", "listdir")
_BY_DESCRIPTOR = ("read", "pread", "preadv", "write", "fsync", "fstat")


class FaultyDisk:
    """Counts the system calls on files below `folder`, and what is asked of SQLite, in all threads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = str(folder)
        self._lock = threading.Lock()
        self._descriptors: set[int] = set()
        self._left = 0
        self._for_good = False
        self._error = 0
        self.calls = 0
        self.failed: str | None = None
        """The first call that did."""
        for name in _BY_PATH:
            monkeypatch.setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in _BY_DESCRIPTOR:
            monkeypatch.setattr(os, name, self._by_descriptor(name, getattr(os, name)))
        monkeypatch.setattr(os, "close", self._closing(os.close))
        monkeypatch.setattr(fcntl, "flock", self._by_descriptor("flock", fcntl.flock))
        monkeypatch.setattr(index, "_translated", self._by_index(index._translated))

    @contextmanager
    def failing(self, error: int, call: int, *, for_good: bool) -> Iterator[None]:
        """The `call`th system call within it fails, or all from there on."""
        with self._lock:
            self._left, self._error, self._for_good = call, error, for_good
            self.calls, self.failed = 0, None
        try:
            yield
        finally:
            with self._lock:
                self._left, self._error = 0, 0

    def _count(self, name: str) -> None:
        with self._lock:
            if not self._error:
                return
            self.calls += 1
            is_due = self.calls >= self._left if self._for_good else self.calls == self._left
            if is_due:
                self.failed = self.failed or name
                raise OSError(self._error, os.strerror(self._error))

    def _by_path(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(path: Any, *rest: Any, **more: Any) -> Any:
            is_ours = not isinstance(path, int) and os.fspath(path).startswith(self._folder)
            if is_ours:
                self._count(name)
            done = real(path, *rest, **more)
            if name == "open" and is_ours:
                self._descriptors.add(done)
            return done

        return run

    def _by_descriptor(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def run(descriptor: int, *rest: Any, **more: Any) -> Any:
            if descriptor in self._descriptors:
                self._count(name)
            return real(descriptor, *rest, **more)

        return run

    def _closing(self, real: Callable[[int], None]) -> Callable[[int], None]:
        def run(descriptor: int) -> None:
            self._descriptors.discard(descriptor)
            real(descriptor)

        return run

    def _by_index(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def run() -> Iterator[None]:
            with real():
                self._count("sqlite")
                yield

        return run
