"""Thousands of clients, each with a connection, a user and a conversation of its own, leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import httpx
import pytest

from emberkeep.config.settings import Config
from emberkeep.server.middleware import Limits
from helpers.chance import seed, times
from helpers.scripted_server import WAIT_S, Running, ScriptedBackend, running
from helpers.waiting import eventually

pytestmark = pytest.mark.slow

CLIENTS = times(2000)
AT_ONCE = 16
LIMITS = Limits(connections=64, head_s=0.5, body_s=0.5, stalled_s=0.5, linger_s=0.2)


class Forgetful(ScriptedBackend):
    """Keeps no requests: what grows is the server's."""

    class _Nothing(list):  # type: ignore[type-arg]
        def append(self, _: object) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self.requests = self._Nothing()


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(Forgetful(), Config(), LIMITS) as server:
        yield server


def asked(number: int, **more: object) -> bytes:
    body = {
        "messages": [{"role": "user", "content": f"I am number {number}."}],
        "user_id": f"user-{number}",
        "conversation_id": f"conversation-{number}",
        "prompt_cache_key": f"key-{number}",
        "cache_salt": f"salt-{number}",
        **more,
    }
    raw = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {number}\r\nContent-Length: "
    return f"{head}{len(raw)}\r\n\r\n".encode() + raw


def nicely(connection: socket.socket, number: int) -> None:
    connection.sendall(asked(number))
    assert b"200 OK" in received(connection)


def in_a_stream(connection: socket.socket, number: int) -> None:
    connection.sendall(asked(number, stream=True))
    got = received(connection)
    assert b"200 OK" in got
    while b"[DONE]" not in got:
        got = received(connection)


class NoPlace(Exception):
    """On a busy machine, those who have left may still take up the server's places."""


def received(connection: socket.socket) -> bytes:
    got = connection.recv(1 << 16)
    if not got:
        raise ConnectionError
    if got.startswith(b"HTTP/1.1 503"):
        raise NoPlace
    return got


def and_leaves(connection: socket.socket, number: int) -> None:
    connection.sendall(asked(number, stream=True))


def half_of_it(connection: socket.socket, number: int) -> None:
    whole = asked(number)
    connection.sendall(whole[: random.Random(seed(number)).randrange(1, len(whole))])


def on_a_path_of_its_own(connection: socket.socket, number: int) -> None:
    connection.sendall(f"GET /path/{number}?q={number} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b"404" in received(connection)


def by_a_method_of_its_own(connection: socket.socket, number: int) -> None:
    connection.sendall(f"METHOD{number} / HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert b"400" in received(connection)


def for_a_model_of_its_own(connection: socket.socket, number: int) -> None:
    connection.sendall(asked(number, model=f"model-{number}"))
    assert b"404" in received(connection)


def from_a_host_of_its_own(connection: socket.socket, number: int) -> None:
    connection.sendall(asked(number).replace(b"localhost", b"host-%d" % number))
    assert b"403" in received(connection)


MANNERS: tuple[Callable[[socket.socket, int], None], ...] = (
    nicely,
    in_a_stream,
    and_leaves,
    half_of_it,
    on_a_path_of_its_own,
    by_a_method_of_its_own,
    for_a_model_of_its_own,
    from_a_host_of_its_own,
)


def ask(server: Running, number: int) -> None:
    """Who is told to come again comes again."""
    gives_up = monotonic() + WAIT_S
    while True:
        try:
            ask_once(server, number)
            return
        except NoPlace:
            assert monotonic() < gives_up
            sleep(0.1)


def ask_once(server: Running, number: int) -> None:
    with (
        suppress(ConnectionError),  # one of the impolite may have cost it its place
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection,
    ):
        MANNERS[number % len(MANNERS)](connection, number)


def ask_all(server: Running, numbers: range) -> None:
    def some(first: int) -> None:
        for number in numbers[first::AT_ONCE]:
            ask(server, number)

    with ThreadPoolExecutor(AT_ONCE) as clients:
        for _ in clients.map(some, range(AT_ONCE)):
            pass


def settled(server: Running) -> dict[str, int]:
    """What is held once all clients have left."""
    eventually(lambda: not server.connections and not server.tasks)
    figures = httpx.get(server.url + "/metrics", timeout=WAIT_S).text
    series = [line for line in figures.splitlines() if "refused_" not in line]  # a reason may be a new one
    eventually(lambda: not server.connections)
    gc.collect()
    alive = Counter(str(type(thing).__module__) for thing in gc.get_objects())
    return {
        "connections": server.connections,
        "requests": server.tasks,
        "tasks": len(asyncio.all_tasks(server.loop)),
        "descriptors": sum(1 for _ in Path("/dev/fd").iterdir()),
        "threads": threading.active_count(),
        "metric series": len(series),
        "reasons of refusals": figures.count("refused_total{"),
        "objects of the server": sum(n for module, n in alive.items() if module.startswith("emberkeep.server")),
        "objects of uvicorn": sum(n for module, n in alive.items() if module.startswith(("uvicorn", "httptools"))),
        "objects": len(gc.get_objects()),
    }


def test_one_shot_clients_leave_nothing_behind(server: Running) -> None:
    ask_all(server, range(CLIENTS // 2))  # what is made once, or imported, on first use
    before = settled(server)
    ask_all(server, range(CLIENTS // 2, 3 * CLIENTS // 2))
    after = settled(server)
    assert after.pop("reasons of refusals") < 20
    assert after.pop("objects") - before["objects"] < CLIENTS / 2
    grown = {name: (before[name], after[name]) for name in after if after[name] > before[name]}
    assert grown == {}
