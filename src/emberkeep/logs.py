"""The log of a command: one handler on stderr, whose lines never stand in the middle of an answer."""

from __future__ import annotations

import logging
import os
import sys
from contextvars import ContextVar

from emberkeep.text import strip_hidden

AUTO = "auto"
"""Servers log what an operator wants to know, other commands only what went wrong."""

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that is being answered, as its client knows it."""

_TALKATIVE = ("httpx", "httpx2")
"""Libraries that log whole URLs, in which some services expect their key."""


class LogLines(logging.Handler):
    """Writes lines to stderr, or holds them back while something else has begun a line on the terminal."""

    is_dim = False
    """A terminal shows what is no warning dimmed: beside an answer it is a remark."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[str] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            name = request_id.get()
            record.request = f" [{name}]" if name else ""
            line = self._shown(strip_hidden(self.format(record)), record.levelno)
            if self._held is None:
                print(line, file=sys.stderr, flush=True)
            else:
                self._held.append(line)
        except Exception:
            self.handleError(record)

    def _shown(self, line: str, level: int) -> str:
        is_plain = not self.is_dim or level >= logging.WARNING or "NO_COLOR" in os.environ
        return line if is_plain or not sys.stderr.isatty() else f"\033[2m{line}\033[0m"

    def hold_back(self) -> None:
        """Lines wait from now on, if they would come to the same terminal as what is printed."""
        if self._held is None and sys.stderr.isatty() and sys.stdout.isatty():
            with self.lock:  # type: ignore[union-attr]
                self._held = []

    def let_out(self) -> None:
        """Lines are written again, those that waited first."""
        if self._held is not None:
            with self.lock:  # type: ignore[union-attr]
                held, self._held = self._held, None
                for line in held:
                    print(line, file=sys.stderr, flush=True)


LINES = LogLines()


def begin_logging(level: str, *, is_server: bool = False) -> None:
    """From now on this process logs to stderr what is at least as grave as `level`. The latest call counts.

    Of other libraries only what is at least `info` is logged: at `debug` some of them tell what was said.
    """
    chosen = ("info" if is_server else "warning") if level == AUTO else level
    number = getattr(logging, chosen.upper())
    logging.getLogger().setLevel(max(number, logging.INFO))
    logging.getLogger("emberkeep").setLevel(number)
    for library in _TALKATIVE:
        logging.getLogger(library).setLevel(logging.WARNING)
    LINES.is_dim = not is_server
    LINES.setFormatter(logging.Formatter(_format(number, is_server=is_server)))
    logging.getLogger().addHandler(LINES)


def is_verbose() -> bool:
    """Whether more is logged than what went wrong."""
    return logging.getLogger("emberkeep").isEnabledFor(logging.INFO)


def _format(level: int, *, is_server: bool) -> str:
    if level >= logging.WARNING and not is_server:
        return "%(message)s"
    name = " %(name)s" if level <= logging.DEBUG else ""
    return f"%(asctime)s %(levelname)s{name}%(request)s %(message)s"
