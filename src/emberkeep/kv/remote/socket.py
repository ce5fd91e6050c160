"""A socket to the shared server on which every exchange is bounded: in time, however the bytes come, and in what
comes, whatever was announced."""

from __future__ import annotations

import socket
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from valkey import Valkey

_SPARE = 8 << 20
"""Bytes of an answer besides the values that it was asked for."""
_SLOWEST = 2e6
"""Bytes per second: a line that is slower is none."""
_PIECE = 256 << 10
"""That is sent within the socket's own timeout, which is one for all that is sent at a time."""


class Allowance(threading.local):
    """What the exchange may take that this thread is in."""

    received = 0
    """Bytes that may still come."""
    until = 0.0

    def begin(self, seconds: float, *, sent: int, received: int) -> None:
        """`sent` and `received`: bytes of values."""
        self.received = received + _SPARE
        self.until = monotonic() + seconds + (sent + received) / _SLOWEST

    def check_time(self) -> None:
        if monotonic() > self.until:
            raise TimeoutError("it takes too long")

    def take(self, count: int) -> None:
        """So many bytes have come. Raises OSError."""
        self.received -= count
        if self.received < 0:
            raise ConnectionAbortedError("it sends more than it was asked for")
        self.check_time()


class BoundedSocket:
    """Raises OSError where an exchange takes more than it may."""

    def __init__(self, inner: socket.socket, allowance: Allowance) -> None:
        self._inner = inner
        self._allowance = allowance

    def recv_into(self, buffer: bytearray) -> int:
        count = self._inner.recv_into(buffer)
        self._allowance.take(count)
        return count

    def recv(self, size: int) -> bytes:
        data = self._inner.recv(size)
        self._allowance.take(len(data))
        return data

    def sendall(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), _PIECE):
            self._allowance.check_time()
            self._inner.sendall(view[begin : begin + _PIECE])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def bound(client: Valkey, allowance: Allowance) -> None:
    """All connections of a client that has none yet."""

    class Bounded(client.connection_pool.connection_class):  # type: ignore[misc]
        def _connect(self) -> BoundedSocket:
            return BoundedSocket(super()._connect(), allowance)

    client.connection_pool.connection_class = Bounded
