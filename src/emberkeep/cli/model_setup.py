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
def pull_reporter() -> Iterator[ProgressLine]:
    """A line that changes on a terminal, one line per step elsewhere."""
    reporter = ProgressLine(sys.stderr, is_changing=sys.stderr.isatty())
    try:
        yield reporter
    finally:
        reporter.close()


class ProgressLine:
    """The current step and how far it is, until this is closed: in one line that changes, or (not `is_changing`)
    as a line per step. Any thread may use it."""

    def __init__(self, output: TextIO, *, is_changing: bool) -> None:
        self._output = output
        self._is_changing = is_changing
        self._step = ""
        self._began, self._shown_at = 0.0, -inf
        self._is_shown = self._is_closed = False
        self._lock = Lock()

    def say(self, sentence: str) -> None:
        with self._lock:
            self._say(sentence)

    def progress(self, step: str, done: int, total: int | None) -> None:
        with self._lock:
            now, is_new = monotonic(), step != self._step
            if is_new:
                self._step, self._began, self._shown_at = step, now, -inf
            if self._is_closed:
                return
            if self._is_changing and now - self._shown_at >= _EVERY_S:
                self._shown_at, self._is_shown = now, True
                width = shutil.get_terminal_size().columns - 1
                line = f"{printable(step)}{_how_far(done, total, now - self._began)}"[:width]
                print(f"{_CLEARED}{line}", end="", file=self._output, flush=True)
            elif is_new and not self._is_changing:
                self._say(step)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._clear()

    def _say(self, sentence: str) -> None:
        self._clear()
        print(printable(sentence), file=self._output, flush=True)

    def _clear(self) -> None:
        if self._is_shown:
            print(_CLEARED, end="", file=self._output, flush=True)
            self._is_shown = False


def _how_far(done: int, total: int | None, seconds: float) -> str:
    if not total:
        return " ..."
    speed = f", {readable_size(done / seconds)}/s" if done and seconds > 1 else ""
    return f"  {done / total:4.0%} of {readable_size(total)}{speed}"
