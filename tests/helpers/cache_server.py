"""A real server over the fake engine, with a store whose clock moves only when a test says so."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

import httpx

from emberkeep.backend.local import LocalBackend
from emberkeep.config.settings import Config
from emberkeep.engine.fake import CHATML, FakeEngine
from emberkeep.kv.policy import Keeping, StoreClock
from emberkeep.types.request import Json
from helpers.scheduling import PATIENCE, Unmeasured
from helpers.scripted_backend import fake_backend
from helpers.scripted_server import Running, running
from helpers.waiting import eventually

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}" + CHATML
)
SYSTEM = {"role": "system", "content": "You know the tides, the winds and the harbours of this coast. " * 4}
HOUR_S = 3600.0


@dataclass(slots=True)
class Clock:
    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass(frozen=True, slots=True)
class Served:
    client: httpx.Client
    server: Running
    backend: LocalBackend
    engine: FakeEngine
    clock: Clock = field(default_factory=Clock)

    def post(self, path: str, **body: Json) -> Json:
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, *messages: Json, **more: Json) -> Json:
        """An answer, once everything that follows from it is written down."""
        body = {"messages": messages, "max_tokens": 4, "temperature": 0, **more}
        answer = self.post("/v1/chat/completions", **body)
        self.settle()
        return answer

    def explain(self, *messages: Json, **more: Json) -> Json:
        return self.post("/v1/cache/explain", messages=messages, **more)

    def entries(self, **query: str | int) -> list[Json]:
        listed: list[Json] = self.client.get("/v1/cache", params=query).json()["data"]
        return listed

    def entry_of(self, conversation: str) -> Json:
        (entry,) = (entry for entry in self.entries() if entry["conversation_id"] == conversation)
        return entry

    def delete(self, path: str) -> Json:
        response = self.client.delete(path)
        assert response.status_code == 200, response.text
        return response.json()["removed"]

    def wait_until_left(self) -> None:
        """Wait until no request holds a slot; it releases its slot when its events are read no more."""
        assert eventually(lambda: not self.backend._permits._held)

    def settle(self) -> None:
        """Wait until the engine has nothing to do, and what it computed is on disk."""
        loop = self.backend.scheduler
        while loop.call(loop._is_busy).result(PATIENCE):
            pass
        self.backend._store.flush()


@contextmanager
def served(folder: Path, engine: FakeEngine | None = None, **settings: Json) -> Iterator[Served]:
    """`settings` are those of `Config`."""
    config = Config(data_dir=folder, **settings)
    engine, clock = engine or FakeEngine(), Clock()
    timed = partial(Keeping, clock=partial(StoreClock, monotonic=clock, wall=clock))
    with patch("emberkeep.runtime.parts.Keeping", timed):
        backend = fake_backend(config, engine, template=TEMPLATE)
    backend._store.costs.evaluate = Unmeasured()
    try:
        with running(backend, config) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            yield Served(client, server, backend, engine, clock)
    finally:
        asyncio.run(backend.close())


def send_raw(port: int, path: str, **body: Json) -> socket.socket:
    """A request whose answer is not waited for."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def tool(name: str, description: str = "Look it up in the almanac.") -> Json:
    return {"type": "function", "function": {"name": name, "description": description}}
