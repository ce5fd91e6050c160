"""An answer while it is being written."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from types import TracebackType

from emberkeep.library.results import Collector, Result
from emberkeep.types import Event, TextDelta


class Stream:
    """Iterating gives the answer's text piece by piece; `events` gives everything that happens.

    The request starts when the stream is first read. Leaving it early (`close`, the end of a `with` block, or
    dropping it) stops the request within one step. Raises the request's EmberkeepError while it is read.
    """

    def __init__(self, events: Generator[Event, None, None]) -> None:
        self._events = events
        self._collector: Collector | None = None

    def events(self) -> Iterator[Event]:
        collector = self._collector = self._collector or Collector()
        for event in self._events:
            collector.add(event)
            yield event

    def __iter__(self) -> Iterator[str]:
        return (event.text for event in self.events() if isinstance(event, TextDelta))

    @property
    def result(self) -> Result:
        """What has been read so far; complete once the stream is exhausted."""
        return (self._collector or Collector()).result()

    def close(self) -> None:
        self._events.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
