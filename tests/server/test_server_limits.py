"""What a client may take before it is answered, and what becomes of one that takes more."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from emberkeep.config.settings import Config
from emberkeep.server import http_server
from emberkeep.server.middleware import Drain, Limits, RequestGate, affordable
from emberkeep.types.events import TextDelta
from helpers.scripted_server import HANG, WAIT_S, Running, ScriptedBackend, running, says
from helpers.waiting import eventually

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
MIB = 1 << 20

HASTY = Limits(
    head_s=0.4,
    body_s=0.4,
    stalled_s=0.6,
    linger_s=0.4,
    bytes_per_s=64 * MIB,
    unsent_bytes=256 << 10,
    connections=24,
)
"""Short, so that the tests are quick."""


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    with running(ScriptedBackend(), Config(), HASTY) as server:
        yield server


@pytest.fixture
def backend(hasty: Running) -> ScriptedBackend:
    hasty.backend.reset()
    return hasty.backend


@pytest.fixture
def connect(hasty: Running) -> Iterator[Callable[[], socket.socket]]:
    with ExitStack() as until_the_end:

        def connected() -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", hasty.port), timeout=WAIT_S)
            return until_the_end.enter_context(connection)

        yield connected


def post(body: dict[str, object], path: str = CHAT) -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw


def send(connection: socket.socket, *parts: bytes) -> None:
    """As far as it goes: who is refused may find the door closed before the last byte."""
    with suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)


def drip(connection: socket.socket, begun: bytes) -> None:
    """Goes on, a byte at a time, until there is an answer."""
    connection.sendall(begun)
    while not select.select([connection], [], [], 0.02)[0]:
        connection.sendall(b"x")


def read_until(connection: socket.socket, expected: bytes) -> bytes:
    received = bytearray()
    while expected not in received[-(1 << 16) :]:
        part = connection.recv(1 << 16)
        assert part, bytes(received[-1000:])
        received += part
    return bytes(received)


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            received += part
    return received


def refusal(connection: socket.socket) -> tuple[int, str]:
    """The status and the code of the last answer on a connection that the server ends."""
    head, _, body = until_closed(connection).rpartition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.rpartition(b"HTTP/1.1 ")[2][:3]), error["code"]


def is_well(server: Running) -> bool:
    return httpx.get(server.url + "/health", timeout=WAIT_S).status_code == 200


# ── heads ──


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1"
UPLOAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
LARGE = [b"a" * MIB] * 8
MANY = b"".join(b"X-%d: a\r\n" % i for i in range(20_000))


@pytest.mark.parametrize(
    "head",
    [
        [b"GET /health?", *LARGE],
        [GET, b"X-Long: ", *LARGE],
        [GET, MANY, b"\r\n"],
        [CHUNKED, b"\r\n{\r\n0\r\n", MANY],
        [CHUNKED, b"\r\n{\r\n0\r\nX: ", *LARGE],
        [CHUNKED, b";", *LARGE],
        [b"\r\n" * (MIB // 2)] * 8,
    ],
    ids=["target", "header", "headers", "trailers", "trailer", "chunk extension", "line breaks"],
)
def test_a_head_that_is_too_large_is_431(
    hasty: Running, connect: Callable[[], socket.socket], head: list[bytes]
) -> None:
    connection = connect()
    send(connection, *head)
    assert refusal(connection) == (431, "headers_too_large")
    assert is_well(hasty)


def test_what_is_within_the_limits_is_taken(hasty: Running) -> None:
    headers = {f"X-{i}": "a" * 250 for i in range(100)}
    url = f"{hasty.url}/health?{'a' * 60_000}"
    assert httpx.get(url, headers=headers, timeout=WAIT_S).status_code == 200


def test_a_large_body_after_a_small_one_is_no_head(hasty: Running) -> None:
    with httpx.Client(base_url=hasty.url, timeout=WAIT_S) as client:
        for size in (10, 10_000_000, 10, 20_000_000, 10):
            expected = 413 if size > HASTY.body_bytes else 200
            assert client.post(CHAT, json={**BODY, "pad": "a" * size}).status_code == expected


def test_every_limit_counts_per_request(hasty: Running) -> None:
    with httpx.Client(base_url=hasty.url, headers={"X": "a" * 20_000}, timeout=WAIT_S) as client:
        for _ in range(10):
            assert client.post("/tokenize", json={"content": "a" * 10_000}).status_code == 200


@pytest.mark.parametrize(
    ("begun", "code"),
    [(GET, "head_timeout"), (b"GET /hea", "head_timeout"), (b"\r\n", "head_timeout"), (UPLOAD, "body_timeout")],
)
def test_a_request_that_does_not_end_is_408(
    hasty: Running, connect: Callable[[], socket.socket], begun: bytes, code: str
) -> None:
    connection = connect()
    connection.sendall(begun)
    assert is_well(hasty)
    assert refusal(connection) == (408, code)


@pytest.mark.parametrize(
    ("begun", "code"), [(GET + b"X: ", "head_timeout"), (CHUNKED + b";", "body_timeout")], ids=["head", "body"]
)
def test_a_request_that_comes_byte_by_byte_is_408(
    connect: Callable[[], socket.socket], begun: bytes, code: str
) -> None:
    connection = connect()
    drip(connection, begun)
    assert refusal(connection) == (408, code)


def test_a_connection_without_a_request_is_closed(connect: Callable[[], socket.socket]) -> None:
    assert until_closed(connect()) == b""


def test_a_connection_that_was_used_may_rest_longer_than_a_head_takes(
    connect: Callable[[], socket.socket],
) -> None:
    connection = connect()
    connection.sendall(GET_HEALTH)
    read_until(connection, b"org/tiny")
    connection.settimeout(3 * HASTY.head_s)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(WAIT_S)
    connection.sendall(GET_HEALTH)
    assert b"200 OK" in connection.recv(1 << 16)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01 a TLS hello\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        CHUNKED.removesuffix(b"1") + b"zz\r\n",
    ],
    ids=["TLS", "a proxy", "no chunk"],
)
def test_what_is_no_http_is_400_counted_and_no_warning(
    hasty: Running, connect: Callable[[], socket.socket], caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    def counted() -> float:
        text = httpx.get(hasty.url + "/metrics", timeout=WAIT_S).text
        label = 'emberkeep_requests_refused_total{reason="bad_http"} '
        return sum(float(line.removeprefix(label)) for line in text.splitlines() if line.startswith(label))

    before = counted()
    connection = connect()
    connection.sendall(sent)
    assert refusal(connection) == (400, "bad_http")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert counted() == before + 1


# ── bodies ──


def test_a_body_that_is_no_longer_wanted_ends_the_connection(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    send(connection, b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n\r\n")
    assert b"404" in connection.recv(1 << 16)
    deadline = time.monotonic() + WAIT_S
    with suppress(ConnectionError):
        while time.monotonic() < deadline:
            connection.sendall(b" " * 1000)
            time.sleep(0.01)
    assert time.monotonic() < deadline


def test_a_refused_body_that_still_comes_to_its_end_leaves_the_connection_usable(
    connect: Callable[[], socket.socket],
) -> None:
    connection = connect()
    connection.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n12345")
    read_until(connection, b"}}")
    connection.sendall(b"67890" + GET_HEALTH)
    assert b"200 OK" in connection.recv(1 << 16)


def test_a_compressed_body_is_refused_as_such(hasty: Running) -> None:
    response = httpx.post(
        hasty.url + CHAT, content=b"\x1f\x8b", headers={"Content-Encoding": "gzip"}, timeout=WAIT_S
    )
    assert (response.status_code, response.json()["error"]["code"]) == (415, "compressed_body")
    assert "gzip" in response.json()["error"]["message"]


def test_a_body_in_tiny_chunks_holds_nobody_up(hasty: Running, connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    send(connection, CHUNKED, *(b"\r\n \r\n1" * 10_000 for _ in range(20)))
    assert is_well(hasty)


def test_bodies_together_have_a_limit() -> None:
    limits = Limits(bodies_bytes=3 * MIB)
    large = {**BODY, "user": "x", "pad": "a" * MIB}
    backend = ScriptedBackend([HANG, *says("Hello")])
    with running(backend, Config(), limits) as server, ExitStack() as until_the_end:
        for count in range(2):
            holding = until_the_end.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            holding.sendall(post(large))
            assert eventually(lambda expected=count + 1: len(backend.requests) == expected)
        refused = httpx.post(server.url + CHAT, json=large, timeout=WAIT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert is_well(server)
        backend.release.set()
        assert eventually(lambda: server.tasks == 0)
        assert httpx.post(server.url + CHAT, json=large, timeout=WAIT_S).status_code == 200


# ── many connections ──


def test_of_requests_that_come_at_once_one_begins_at_a_time_and_others_go_on_in_between() -> None:
    happened: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        happened.append("request")

    async def stream() -> None:
        while happened.count("request") < 5:
            happened.append("token")
            await asyncio.sleep(0)

    async def crowd() -> None:
        gate = RequestGate(app, Drain(), Limits())
        scope = {"type": "http", "method": "GET", "path": CHAT, "headers": []}
        requests = (gate(scope, nothing, nothing) for _ in range(5))
        await asyncio.gather(stream(), *requests)

    async def nothing(*_: object) -> Message:
        return {}

    asyncio.run(crowd())
    assert "".join(happened).count("requestrequest") == 0
    assert happened.count("request") == 5


def test_connections_that_ask_nothing_give_way_and_the_log_says_so(
    hasty: Running, connect: Callable[[], socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    http_server.warn_of_crowd.cache_clear()
    silent = [connect() for _ in range(4 * HASTY.connections)]
    assert is_well(hasty)
    assert hasty.connections <= HASTY.connections + 1
    assert until_closed(silent[0]) == b""
    assert f"{HASTY.connections} connections are open" in caplog.text


def test_uploads_that_do_not_end_give_way(hasty: Running, connect: Callable[[], socket.socket]) -> None:
    for _ in range(2 * HASTY.connections):
        connect().sendall(UPLOAD)
    assert is_well(hasty)
    assert httpx.post(hasty.url + CHAT, json=BODY, timeout=WAIT_S).status_code == 200


def test_when_all_connections_are_busy_others_are_told_and_health_answers(
    hasty: Running, backend: ScriptedBackend, connect: Callable[[], socket.socket]
) -> None:
    backend.reset(HANG, *says("Hello"))
    busy = [connect() for _ in range(HASTY.connections)]
    for connection in busy:
        connection.sendall(post(BODY))
    assert eventually(lambda: len(backend.requests) == HASTY.connections)
    refused = httpx.post(hasty.url + CHAT, json=BODY, timeout=WAIT_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.headers["retry-after"] == "1"
    assert is_well(hasty)
    backend.release.set()
    for connection in busy:
        assert b"200 OK" in connection.recv(1 << 16)


def test_there_are_never_more_than_half_of_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert affordable(1000) == 128
    assert affordable(100) == 100
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert affordable(1000) == 1000


# ── requests sent ahead, and other protocols ──


@pytest.mark.parametrize(
    "ahead",
    [GET_HEALTH, GET_HEALTH * 20_000, post({"content": "a" * 300_000}, "/tokenize"), b"no request at all\r\n\r\n"],
    ids=["one", "a flood", "a large one", "nonsense"],
)
def test_what_is_sent_ahead_is_not_answered_and_leaves_the_answer_before_it_whole(
    hasty: Running, backend: ScriptedBackend, connect: Callable[[], socket.socket], ahead: bytes
) -> None:
    backend.reset(TextDelta(0, "Hel"), HANG, *says("lo"))
    connection = connect()
    connection.sendall(post({**BODY, "stream": True}))
    assert backend.hanging.wait(WAIT_S)
    send(connection, ahead)
    assert is_well(hasty)
    backend.release.set()
    received = until_closed(connection)
    assert received.count(b"HTTP/1.1") == 1
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_sends_ahead_and_leaves_stops_its_work(
    backend: ScriptedBackend, connect: Callable[[], socket.socket]
) -> None:
    backend.reset(HANG)
    connection = connect()
    connection.sendall(post(BODY))
    assert backend.hanging.wait(WAIT_S)
    connection.sendall(GET_HEALTH)
    connection.close()
    assert backend.stopped_early.wait(WAIT_S)


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_a_wish_for_another_protocol_is_answered_without(
    connect: Callable[[], socket.socket], caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    connection = connect()
    wish = f"Connection: Upgrade\r\nUpgrade: {protocol}\r\nContent-Length".encode()
    connection.sendall(post({"content": "ab"}, "/tokenize").replace(b"Content-Length", wish))
    read_until(connection, b"[97, 98]")
    connection.sendall(GET_HEALTH)
    assert b"200 OK" in connection.recv(1 << 16)
    assert caplog.records == []


def test_http_1_0_is_answered_and_closed(connect: Callable[[], socket.socket]) -> None:
    connection = connect()
    connection.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert b"200 OK" in until_closed(connection)


# ── slow readers ──

LONG = [TextDelta(0, "x" * 1000) for _ in range(12_000)]
"""Far more than the buffers of two sockets hold."""


def test_a_client_that_reads_a_byte_now_and_then_loses_its_answer_and_its_slot(
    hasty: Running, backend: ScriptedBackend, connect: Callable[[], socket.socket]
) -> None:
    backend.reset(*LONG, *says("end"))
    connection = connect()
    connection.sendall(post({**BODY, "stream": True}))
    while not backend.stopped_early.wait(0.02):
        assert connection.recv(1)
    assert is_well(hasty)
    assert eventually(lambda: hasty.tasks == 0)
    assert b"[DONE]" not in until_closed(connection)


def test_a_client_that_hurries_after_a_pause_gets_all(
    backend: ScriptedBackend, connect: Callable[[], socket.socket]
) -> None:
    backend.reset(*LONG, *says("end"))
    connection = connect()
    connection.sendall(post({**BODY, "stream": True}))
    time.sleep(HASTY.stalled_s / 4)
    received = read_until(connection, b"[DONE]")
    assert received.count(b"x" * 1000) == len(LONG)


def test_an_answer_that_is_not_fetched_does_not_keep_a_closing_connection(
    hasty: Running, backend: ScriptedBackend, connect: Callable[[], socket.socket]
) -> None:
    backend.reset(TextDelta(0, "x" * 20_000_000), *says("end"))
    connection = connect()
    connection.sendall(post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert connection.recv(1) == b"H"
    assert eventually(lambda: hasty.connections == 0)


def test_an_upload_that_stalls_is_not_waited_for_when_the_server_stops() -> None:
    with (
        running(ScriptedBackend(), Config(), Limits(body_s=60, drain_s=60)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection,
    ):
        connection.sendall(UPLOAD)
        assert eventually(lambda: server.tasks == 1)
        server.stop()
        assert refusal(connection) == (503, "overloaded")
        server.thread.join(WAIT_S)
        assert not server.thread.is_alive()
