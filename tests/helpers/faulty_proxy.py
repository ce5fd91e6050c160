"""A line to a server that can be made to lie, to stall, to drip, or to break off in the middle of an answer."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import sleep
from typing import Literal

Fault = Literal["none", "garbage", "flipped", "cut", "stalled", "drip"]
FAULTS: tuple[Fault, ...] = ("garbage", "flipped", "cut", "stalled", "drip")


class FaultyProxy:
    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        """`port`: of the server on loopback to which it leads. `tls`: how clients are spoken to."""
        self._tls = tls
        self.fault: Fault = "none"
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._is_over = False
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._is_over = True
        for one in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    client = self._tls.wrap_socket(client, server_side=True) if self._tls else client
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                threading.Thread(target=self._copy, args=(client, server), daemon=True).start()
                threading.Thread(target=self._spoil, args=(server, client), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        _hang_up(source, target)

    def _spoil(self, source: socket.socket, target: socket.socket) -> None:
        """Answers on their way to the client."""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                fault = self.fault
                while fault == "stalled" and not self._is_over:
                    sleep(0.01)
                    fault = self.fault
                if fault == "garbage":
                    data = os.urandom(len(data))
                elif fault == "flipped":
                    data = data[:-7] + bytes([data[-7] ^ 0x10]) + data[-6:] if len(data) > 100 else data
                elif fault == "cut":
                    target.sendall(data[: len(data) // 2])
                    break
                elif fault == "drip":
                    for begin in range(0, len(data), 64):
                        target.sendall(data[begin : begin + 64])
                        sleep(0.05 if self.fault == "drip" and not self._is_over else 0)
                    continue
                target.sendall(data)
        _hang_up(source, target)


@contextmanager
def faulty_proxy(port: int, tls: ssl.SSLContext | None = None) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(port, tls)
    try:
        yield proxy
    finally:
        proxy.close()


def _hang_up(*ends: socket.socket) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
