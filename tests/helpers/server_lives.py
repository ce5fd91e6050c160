"""A server that tests share, and may end: the next one who needs it starts it again over the same folder."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from helpers.server_process import ServerProcess

_LAST_LINES = 80


class ServerLives:
    """Starts a process when one is needed and none runs; what is left is killed at the end of its `with` block."""

    def __init__(self, start: Callable[[], ServerProcess]) -> None:
        self._start = start
        self._lives: list[ServerProcess] = []

    @property
    def now(self) -> ServerProcess:
        """The process that runs; blocks until it is ready where it had to be started."""
        if not self._lives or self._lives[-1].has_ended:
            self._lives.append(self._start())
            assert self._lives[-1].url
        return self._lives[-1]

    @property
    def log(self) -> str:
        """The last lines of every life."""
        logs = (life.log.splitlines(keepends=True)[-_LAST_LINES:] for life in self._lives)
        return "─ another life ─\n".join("".join(lines) for lines in logs)

    def __enter__(self) -> ServerLives:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for life in self._lives:
            life.__exit__(kind, error, trace)
