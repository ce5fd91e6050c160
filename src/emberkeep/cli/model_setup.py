"""Pulls and loads the configured model, and shows a person how far that is, on stderr."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, TextIO

from emberkeep.cli.console import console, printable
from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import Config

if TYPE_CHECKING:
    from emberkeep.library.emberkeep import Emberkeep
    from emberkeep.models.spec import Reporter

_EVERY_S = 0.1
_CLEARED = "\r\033[2K"
"""Back to the beginning of the line, of which nothing is left."""


def install_model(config: Config) -> None:
    """Pull the default model where it is configured and missing, and show it. Raises ModelError."""
    with pull_reporter() as reporter:
        ensure(config, reporter)


def ensure(config: Config, reporter: Reporter) -> None:
    """As `install_model`, shown by `reporter`."""
    from emberkeep.library.installation import ensure_model

    ensure_model(config, reporter)


def open_model(config: Config) -> Emberkeep:
    """Load a model that is here, with a word about it where a person waits. Raises ModelError, EngineError."""
    from emberkeep.library.emberkeep import Emberkeep
    from emberkeep.runtime.served_models import backend_names

    first = backend_names(config)[0]
    with console(stderr=True).status(f"Loading {config.local_model if first == 'local' else first} ..."):
        return Emberkeep.open(config)


@contextmanager
def pull_reporter() -> Iterator[Lines | StatusLine]:
    """A line that changes on a terminal, one line per step elsewhere."""
    reporter = StatusLine(sys.stderr) if sys.stderr.isatty() else Lines(sys.stderr)
    try:
        yield reporter
    finally:
        reporter.close()


class Lines:
    """A step is mentioned when it begins, until this is closed."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._step = ""
        self._is_closed = False

    def say(self, sentence: str) -> None:
        print(printable(sentence), file=self._output, flush=True)

    def progress(self, step: str, done: int, total: int | None) -> None:
        if step != self._step and not self._is_closed:
            self._step = step
            self.say(step)

    def close(self) -> None:
        self._is_closed = True


class StatusLine:
    """The current step and how far it is, in one line, until this is closed. Any thread may use it."""

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._step = ""
        self._began, self._shown_at = 0.0, -inf
        self._is_shown = self._is_closed = False
        self._lock = Lock()

    def say(self, sentence: str) -> None:
        with self._lock:
            self._clear()
            print(printable(sentence), file=self._output, flush=True)

    def progress(self, step: str, done: int, total: int | None) -> None:
        with self._lock:
            now = monotonic()
            if step != self._step:
                self._step, self._began, self._shown_at = step, now, -inf
            if now - self._shown_at >= _EVERY_S and not self._is_closed:
                self._shown_at, self._is_shown = now, True
                width = shutil.get_terminal_size().columns - 1
                line = f"{printable(step)}{_told(done, total, now - self._began)}"[:width]
                print(f"{_CLEARED}{line}", end="", file=self._output, flush=True)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._clear()

    def _clear(self) -> None:
        if self._is_shown:
            print(_CLEARED, end="", file=self._output, flush=True)
            self._is_shown = False


def _told(done: int, total: int | None, seconds: float) -> str:
    if not total:
        return " ..."
    speed = f", {readable_size(done / seconds)}/s" if done and seconds > 1 else ""
    return f"  {done / total:4.0%} of {readable_size(total)}{speed}"
