"""One program, started, watched and ended: its output read to the end, whatever it does."""

from __future__ import annotations

import os
import selectors
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from signal import Signals

from emberkeep.signals import with_default_signals
from emberkeep.tools.processes import Family, Mark
from emberkeep.tools.texts import decoded

_KEPT = 32 << 10
FLOOD = 64 << 20
_CHUNK = 64 << 10
_LOOK_S = 0.05
_GRACE_S = 2.0
_SHORT_GRACE_S = 0.4
"""When nobody waits for the answer any more."""


class Ending(Enum):
    BY_ITSELF = "by itself"
    TIMEOUT = "timeout"
    FLOOD = "flood"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Order:
    argv: list[str]
    folder: Path
    environment: Mapping[str, str]
    stdin: bytes
    timeout_s: float
    signal: Signals
    """Sent first when it has to end."""


@dataclass(frozen=True, slots=True)
class Ran:
    ending: Ending
    status: int
    """As subprocess has it: minus the signal that ended it."""
    stdout: str
    stderr: str
    seconds: float
    is_gone: bool
    """Nothing that it started is left."""


def run(order: Order, stop: threading.Event) -> Ran:
    """Blocks until the program and all that it started have ended. `stop` ends it early. Raises OSError."""
    begin = time.monotonic()
    with _started(order) as (program, family):
        watch = _Watch(program, order.stdin, stop)
        ending = watch.until(begin + order.timeout_s)
        if ending is not Ending.BY_ITSELF:
            family.send(order.signal)
            watch.until(time.monotonic() + (_SHORT_GRACE_S if stop.is_set() else _GRACE_S), to_the_end=True)
        # Also what a program left behind that ended as it should: nobody would ever end it.
        is_gone = family.kill()
        program.wait()
        watch.read_rest()
    seconds = time.monotonic() - begin
    return Ran(ending, program.returncode, watch.stdout.text, watch.stderr.text, seconds, is_gone)


@contextmanager
def _started(order: Order) -> Iterator[tuple[subprocess.Popen[bytes], Family]]:
    mark = Mark()
    program = subprocess.Popen(
        with_default_signals(mark.applied(order.argv)),
        bufsize=0,
        cwd=order.folder,
        env={**order.environment, **mark.environment},
        stdin=subprocess.PIPE if order.stdin else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    family = Family(program.pid, mark)
    try:
        yield program, family
    finally:
        if program.returncode is None:
            family.kill()
        with program:  # closes its pipes
            pass


class _Kept:
    """The beginning and the end of a stream."""

    def __init__(self) -> None:
        self.size = 0
        self._head = b""
        self._tail = b""

    def add(self, data: bytes) -> None:
        self.size += len(data)
        room = _KEPT - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-_KEPT:]

    @property
    def text(self) -> str:
        left_out = self.size - len(self._head) - len(self._tail)
        note = f"\n[{left_out:,} bytes left out]\n".encode() if left_out else b""
        text = decoded(self._head + note + self._tail)
        return f"[binary, {self.size:,} bytes: not shown]" if text is None else text


class _Watch:
    def __init__(self, program: subprocess.Popen[bytes], stdin: bytes, stop: threading.Event) -> None:
        self.stdout, self.stderr = _Kept(), _Kept()
        self._program = program
        self._stop = stop
        self._unsent = memoryview(stdin)
        self._files = selectors.DefaultSelector()
        for pipe, kept in ((program.stdout, self.stdout), (program.stderr, self.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._files.register(pipe, selectors.EVENT_READ, kept)
        if program.stdin is not None:
            os.set_blocking(program.stdin.fileno(), False)
            self._files.register(program.stdin, selectors.EVENT_WRITE)

    def until(self, deadline: float, *, to_the_end: bool = False) -> Ending:
        """Why the watch ended; `to_the_end`: only when the program has, or the time is up."""
        while self._program.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return Ending.TIMEOUT
            if not to_the_end and self._stop.is_set():
                return Ending.CANCELLED
            if not to_the_end and self.stdout.size + self.stderr.size > FLOOD:
                return Ending.FLOOD
            self._wait(min(left, _LOOK_S))
        return Ending.BY_ITSELF

    def read_rest(self) -> None:
        """What is in the pipes now. Not to their end: one that could not be killed may hold them open."""
        while any(self._attend(key) for key, _ in self._files.select(0)):
            continue
        self._files.close()

    def _wait(self, seconds: float) -> None:
        if not self._files.get_map():
            with suppress(subprocess.TimeoutExpired):
                self._program.wait(seconds)
            return
        for key, _ in self._files.select(seconds):
            self._attend(key)

    def _attend(self, key: selectors.SelectorKey) -> bool:
        """Whether something came; a stream that has ended is closed."""
        return self._received(key) if isinstance(key.data, _Kept) else self._sent(key)

    def _received(self, key: selectors.SelectorKey) -> bool:
        try:
            data = os.read(key.fd, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            key.data.add(data)
        else:
            self._files.unregister(key.fileobj)
        return bool(data)

    def _sent(self, key: selectors.SelectorKey) -> bool:
        try:
            self._unsent = self._unsent[os.write(key.fd, self._unsent[:_CHUNK]) :]
        except BlockingIOError:
            return False
        except BrokenPipeError:  # it does not want more
            self._unsent = self._unsent[:0]
        if not self._unsent:
            self._files.unregister(key.fileobj)
            assert self._program.stdin is not None
            self._program.stdin.close()
        return False
