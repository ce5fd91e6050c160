"""A web server on loopback that says exactly what a test wants, also what no web server should."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

Talk = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Received:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Loopback:
    """`answers`: for each path raw bytes, or a coroutine that writes. Use it as an async context."""

    def __init__(self, answers: Mapping[str, bytes | Talk], host: str = "127.0.0.1") -> None:
        self.answers = dict(answers)
        self.received: list[Received] = []
        self.connections = 0
        self._host = host

    async def __aenter__(self) -> Loopback:
        self._server = await asyncio.start_server(self._serve, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    @property
    def place(self) -> str:
        return f"{self._host}:{self.port}"

    def url(self, path: str = "/", host: str | None = None) -> str:
        return f"http://{host or self._host}:{self.port}{path}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            received = await _read(reader)
            self.received.append(received)
            answer = self.answers[received.path]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                await answer(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Received:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Received(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


def answer(body: bytes, kind: str = "text/plain", status: str = "200 OK", **headers: str) -> bytes:
    told = {"Content-Type": kind, "Content-Length": str(len(body)), **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 {status}\r\n{lines}\r\n".encode() + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return answer(b"", status=status, Location=to)
