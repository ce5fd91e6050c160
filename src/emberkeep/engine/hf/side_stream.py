"""Copies that a CUDA device makes beside its steps.

    steps    | step 0 | step 1 .......... | step 2
    stores            | what step 0 made |
    loads             | for another sequence | which is in step 2

A stream does one thing after the other, and nothing is waited for between streams unless it is said: what is
copied here comes after everything that the device was told before, and `Mark` says what comes after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress

import torch


class Mark:
    """A moment in what a device does; without an event it has passed."""

    def __init__(self, event: torch.cuda.Event | None = None, device: torch.device | None = None) -> None:
        self._event = event
        self._device = device

    @property
    def has_passed(self) -> bool:
        """Raises what torch raises where the device has failed."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Blocks until then. Raises what torch raises where the device has failed."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self) -> None:
        """What the device is told from now on waits until then; this thread does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class SideStream:
    """Belongs to the engine's thread. Elsewhere than on CUDA everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: deque[tuple[Mark, object]] = deque()

    def run(self, work: Callable[[], None], held: object) -> Mark:
        """Let the device do `work` beside its steps, after everything that it was told so far; returns when it is
        done. Memory of the device that `work` allocates must not be used outside of this stream; `held`, memory of
        the host that it reads or writes, is held until then. Raises what `work` raises.
        """
        self.let_go()
        if self._stream is None:
            work()
            return Mark()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                work()
        except Exception:
            self._mark(self._stream, held).hold_back()  # a part of it may be under way
            raise
        return self._mark(self._stream, held)

    def let_go(self) -> None:
        """Of what was held for work that is done."""
        while self._held and self._held[0][0].has_passed:
            self._held.popleft()

    def close(self) -> None:
        """Blocks until everything is done. Never raises: a device that has failed does nothing more."""
        while self._held:
            with suppress(RuntimeError):
                self._held.popleft()[0].wait()

    def _mark(self, stream: torch.cuda.Stream, held: object) -> Mark:
        mark = Mark(stream.record_event(), self._device)
        self._held.append((mark, held))
        return mark
