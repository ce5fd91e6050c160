"""A small HTTP server in the event loop of a test: it says what it is told, and notices who leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(frozen=True)
class Reply:
    """A whole answer; a body that is text is sent as it is."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stream:
    """Server-sent events. `end`: with a proper last chunk, by breaking the connection, or never."""

    events: Sequence[str]
    end: str = "whole"


class LoopbackServer:
    """Answers with what `reply` returns; a subclass speaks a vendor's language."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.was_left = asyncio.Event()
        """A client has gone before the end of its answer."""
        self._server: asyncio.Server | None = None

    def reply(self, asked: Asked) -> Reply | Stream:
        raise NotImplementedError

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> LoopbackServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (asked := await _read(reader)) is not None:
                self.asked.append(asked)
                reply = self.reply(asked)
                if isinstance(reply, Reply):
                    _write(writer, reply)
                elif not await self._stream(reader, writer, reply):
                    break
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.was_left.set()
        except asyncio.CancelledError:
            pass  # the test has ended
        finally:
            writer.close()

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, stream: Stream) -> bool:
        """False: the connection is of no use any more."""
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for event in stream.events:
            data = event.encode()
            writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            await writer.drain()
        if stream.end == "whole":
            writer.write(b"0\r\n\r\n")
            return True
        if stream.end == "never" and not await reader.read(1):
            self.was_left.set()
        return False


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    method, path, _ = first.split(" ", 2)
    return Asked(method, path, headers, json.loads(data) if data else None)


def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    is_text = isinstance(reply.body, str)
    data = reply.body.encode() if is_text else json.dumps(reply.body).encode()
    kind = "text/html" if is_text else "application/json"
    lines = [f"HTTP/1.1 {reply.status} Reason", f"content-type: {kind}", f"content-length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in reply.headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
