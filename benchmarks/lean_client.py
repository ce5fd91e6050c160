"""One process of lean clients, or of a server that sends what lies ready.

Started as a file; needs nothing but Python. It is told its work as JSON in a first line: `host`, `port`, and the
bodies to post. What comes is counted, and not looked at before the end of a stream: a token costs one read.
"""

from __future__ import annotations

import json
import re
import selectors
import socket
import sys
from time import perf_counter
from typing import Any

PATH = "/v1/completions"
_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 12
"""The frame with the usage is in there."""
_COUNT = re.compile(rb'"completion_tokens": ?([0-9]+)')
_SMALLEST_BUFFER = 1 << 12
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Stream:
    """One answer as it comes."""

    def __init__(self, work: dict[str, Any], body: str, *, buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.connect((work["host"], work["port"]))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = f"POST {PATH} HTTP/1.1\r\nHost: {work['host']}:{work['port']}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body.encode())}\r\n\r\n"
        self._request = (head + body).encode()
        self._tail = b""
        self.sent = self.first = self.ended = 0.0
        self.reads = self.bytes = 0

    def ask(self) -> None:
        self.sent = perf_counter()
        self.socket.sendall(self._request)

    def read(self) -> bool:
        """Whether more may come. Blocks as long as nothing has."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            self.ended = perf_counter()
            self.socket.close()
            return False
        if not self.first and b"data: " in data:
            self.first = perf_counter()
        self.reads += 1
        self.bytes += len(data)
        self._tail = (self._tail + data)[-_TAIL_BYTES:]
        return True

    def told(self) -> dict[str, Any]:
        counts = _COUNT.findall(self._tail)
        return {
            "sent": self.sent,
            "first": self.first or self.ended,
            "ended": self.ended,
            "reads": self.reads,
            "bytes": self.bytes,
            "tokens": int(counts[-1]) if counts else 0,
            "tail": "" if counts else self._tail.decode(errors="replace"),
        }


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


def _connected(streams: list[Stream]) -> list[Stream]:
    """Tells that they are, and waits for a line."""
    _say("connected")
    sys.stdin.readline()
    return streams


def read(work: dict[str, Any]) -> None:
    """Says when all have their first token, and what came of them."""
    streams = _connected([Stream(work, body) for body in work["bodies"]])
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
            stream.ask()
        silent = set(streams)
        while selector.get_map():
            for key, _ in selector.select():
                stream = key.data
                descriptor = key.fd
                if not stream.read():
                    selector.unregister(descriptor)
                if silent and (stream.first or stream.ended):
                    silent.discard(stream)
                    if not silent:
                        _say("begun")
    _say([stream.told() for stream in streams])


def hold(work: dict[str, Any]) -> None:
    """Asks and never reads, until it is killed."""
    streams = _connected([Stream(work, body, buffer=_SMALLEST_BUFFER) for body in work["bodies"]])
    for stream in streams:
        stream.ask()
    sys.stdin.read()


def leave(work: dict[str, Any]) -> None:
    """Asks, leaves after so many `reads` and comes again, until it is killed."""
    with selectors.DefaultSelector() as selector:

        def come(body: str) -> None:
            stream = Stream(work, body)
            selector.register(stream.socket, selectors.EVENT_READ, (stream, body))
            stream.ask()

        _connected([])
        for body in work["bodies"]:
            come(body)
        while True:
            for key, _ in selector.select():
                stream, body = key.data
                descriptor = key.fd
                if not stream.read() or stream.reads == work["reads"]:
                    selector.unregister(descriptor)
                    stream.socket.close()
                    come(body)


def serve(work: dict[str, Any]) -> None:
    """Listens at a free port, which it tells, and sends every client of one crowd the same frames, one by one."""
    usage = json.dumps({"usage": {"completion_tokens": work["frames"]}})
    with socket.create_server((work["host"], 0), backlog=work["clients"]) as listener:
        _say(listener.getsockname()[1])
        clients = [listener.accept()[0] for _ in range(work["clients"])]
    for client in clients:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.recv(_READ_BYTES)
        client.sendall(_HEAD)
    frame = b"data: ".ljust(work["size"] - 2, b".") + b"\n\n"
    for _ in range(work["frames"]):
        for client in clients:
            client.sendall(frame)
    for client in clients:
        client.sendall(f"data: {usage}\n\n".encode())
        client.close()


if __name__ == "__main__":
    kinds = {each.__name__: each for each in (read, hold, leave, serve)}
    kinds[sys.argv[1]](json.loads(sys.stdin.readline()))
