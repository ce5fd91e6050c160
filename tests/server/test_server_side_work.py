"""What is asked beside answers holds up neither them nor `/health`, and has an end."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from emberkeep.api.body import MAX_VALUES
from emberkeep.backend.base import Backend
from emberkeep.backend.models import Models
from emberkeep.config.settings import Config
from emberkeep.server.routes.base import PAGE, THREADS, WAITING, SideWork
from emberkeep.server.routes.llama_server import MAX_CHARS, MAX_PIECES, MAX_TOKENS
from emberkeep.types.cache import CacheEntry
from emberkeep.types.memory import Fact
from emberkeep.types.request import Json, Ttl
from helpers.on_demand_models import Loadable, pool_of
from helpers.scripted_server import WAIT_S, Running, ScriptedBackend, running
from helpers.several_models import serving
from helpers.waiting import eventually

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}
ENTRIES = 20_000
MIB = 1 << 20


def entry(number: int) -> CacheEntry:
    return CacheEntry(
        id=f"{number:016x}",
        kind="conversation",
        name="",
        head="Hello",
        user=f"user-{number}",
        is_shared=False,
        tokens=10,
        bytes=100,
        warm_tokens=10,
        cold_tokens=0,
        idle_s=1.0,
        hits=0,
        turns=1,
        branches=0,
        ttl=Ttl.LONG,
        expires_in_s=60.0,
        is_pinned=False,
    )


class LargeMemory:
    """Its export is sent in many parts."""

    def __init__(self) -> None:
        self.exported = 0

    def facts(self, owner: str) -> list[Fact]:
        return [Fact(f"name {number:06}", "value", 0.0) for number in range(2 * PAGE)]

    def export(self, owner: str) -> Iterator[dict[str, Json]]:
        for _ in range(100):
            self.exported += 1
            yield {"kind": "turn", "user_text": "x" * MIB}


class SlowBackend(ScriptedBackend):
    """Its figures and its tokenizer wait until they are let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.memory = LargeMemory()  # type: ignore[assignment]
        entries = [entry(number) for number in range(ENTRIES)]
        self.cache = SimpleNamespace(entries=lambda: entries)

    def stats(self) -> dict[str, Json]:
        self._wait()
        return super().stats()

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self._wait()
        return [ord(letter) for letter in text]

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        return [b"x"] * len(tokens)

    def _wait(self) -> None:
        self.waiting.release()
        assert self.go_on.wait(WAIT_S)


@pytest.fixture(scope="module")
def slow() -> Iterator[Running]:
    with running(SlowBackend(), Config()) as server:
        yield server


@pytest.fixture
def backend(slow: Running) -> Iterator[SlowBackend]:
    assert isinstance(slow.backend, SlowBackend)
    slow.backend.go_on.clear()
    yield slow.backend
    slow.backend.go_on.set()


@pytest.fixture
def http(slow: Running) -> Iterator[httpx.Client]:
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=slow.url, timeout=WAIT_S, limits=limits) as client:
        yield client


@pytest.mark.parametrize("path", ["/v1/stats", "/metrics"])
def test_figures_that_wait_for_a_lock_hold_up_no_request(
    backend: SlowBackend, http: httpx.Client, path: str
) -> None:
    with ThreadPoolExecutor() as pool:
        figures = pool.submit(http.get, path)
        assert backend.waiting.acquire(timeout=WAIT_S)
        assert http.get("/health").status_code == 200
        assert http.post(CHAT, json=BODY).status_code == 200
        backend.go_on.set()
        assert figures.result().status_code == 200


def test_a_flood_of_texts_to_tokenize_is_refused_and_answers_go_on(
    backend: SlowBackend, http: httpx.Client
) -> None:
    most = THREADS + WAITING
    with ThreadPoolExecutor(most + 1) as pool:
        asked = [pool.submit(http.post, "/tokenize", json={"content": "a"}) for _ in range(most + 1)]
        refused = next(as_completed(asked, timeout=WAIT_S)).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        assert http.get("/health").status_code == 200
        assert http.post(CHAT, json=BODY).status_code == 200
        backend.go_on.set()
        assert sorted(one.result().status_code for one in asked) == [200] * most + [503]


def test_the_cache_is_listed_in_pages(backend: SlowBackend, http: httpx.Client) -> None:
    first = http.get("/v1/cache").json()
    assert (len(first["data"]), first["has_more"], first["totals"]["entries"]) == (PAGE, True, ENTRIES)
    last = http.get("/v1/cache", params={"offset": ENTRIES - 1, "limit": 10}).json()
    assert ([item["id"] for item in last["data"]], last["has_more"]) == ([f"{ENTRIES - 1:016x}"], False)
    assert http.get("/v1/cache", params={"limit": PAGE + 1}).json()["error"]["param"] == "limit"


def test_facts_are_listed_in_pages(backend: SlowBackend, http: httpx.Client) -> None:
    first = http.get("/v1/memory/facts").json()
    assert (len(first["data"]), first["has_more"]) == (PAGE, True)
    rest = http.get("/v1/memory/facts", params={"offset": PAGE}).json()
    assert (rest["data"][0]["name"], len(rest["data"]), rest["has_more"]) == (f"name {PAGE:06}", PAGE, False)


def test_an_export_that_is_not_read_is_not_prepared(backend: SlowBackend, slow: Running) -> None:
    memory = backend.memory
    assert isinstance(memory, LargeMemory)
    with socket.create_connection(("127.0.0.1", slow.port), timeout=WAIT_S) as connection:
        connection.sendall(b"GET /v1/memory/export HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1) == b"H"
        assert httpx.get(slow.url + "/health", timeout=WAIT_S).status_code == 200
        assert memory.exported < 50


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"content": "a" * (MAX_CHARS + 1)}, "content"),
        ("/detokenize", {"tokens": [1] * (MAX_TOKENS + 1)}, "tokens"),
        ("/tokenize", {"content": "a" * (MAX_PIECES + 1), "with_pieces": True}, "with_pieces"),
    ],
)
def test_what_is_tokenized_has_an_end(
    backend: SlowBackend, http: httpx.Client, path: str, body: Json, param: str
) -> None:
    backend.go_on.set()
    error = http.post(path, json=body).json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize("value", [b"[],", b"1,", b'{"a": 1},', b'"a",', b'"\\"",'])
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(
    backend: SlowBackend, http: httpx.Client, value: bytes
) -> None:
    response = http.post(CHAT, content=b'{"messages": [' + value * MAX_VALUES + b"1]}")
    assert response.status_code == 400
    assert f"{MAX_VALUES:,} values" in response.json()["error"]["message"]


def test_a_text_may_have_as_many_commas_as_it_likes(backend: SlowBackend, http: httpx.Client) -> None:
    text = 'a, "b" [c] {d} \\ \n' * (MAX_VALUES // 2)
    assert http.post(CHAT, json={"messages": [{"role": "user", "content": text}]}).status_code == 200
    assert backend.last.messages[0].content == text


PROMPT = {"model": "slow", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/tokenize", {"model": "slow", "content": "a"}),
        ("POST", "/detokenize", {"model": "slow", "tokens": [97]}),
        ("POST", "/apply-template", PROMPT),
        ("POST", "/completion", {"model": "slow", "prompt": [97, "b"]}),
        ("GET", "/props?model=slow", None),
        ("POST", "/v1/messages/count_tokens", PROMPT),
        ("POST", "/v1/responses/input_tokens", {"model": "slow", "input": "hi"}),
        ("GET", "/v1/cache?model=slow", None),
        ("POST", "/v1/cache/gc?model=slow", None),
    ],
)
def test_calls_that_wait_until_a_model_is_loaded_hold_up_no_others(
    tmp_path: Path, method: str, path: str, body: Json
) -> None:
    model = Loadable("slow", pool_of(1))
    model.may_load.clear()
    models = Models(ScriptedBackend(), [model.backend])
    with serving(Config(data_dir=tmp_path), models) as client, ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(client.request, method, path, json=body) for _ in range(THREADS)]
        try:
            assert eventually(lambda: model.backend.status.waiting == THREADS)
            assert client.post("/tokenize", json={"content": "a"}).json() == {"tokens": [97]}
        finally:
            model.may_load.set()
        assert [each.result().status_code for each in waiting] == [200] * THREADS


def test_a_model_stays_until_the_work_with_it_has_ended() -> None:
    async def story() -> None:
        model, side, may_end = Loadable("small", pool_of(1)), SideWork(), threading.Event()
        begun = threading.Event()

        def work(backend: Backend) -> None:
            begun.set()
            assert may_end.wait(WAIT_S)
            assert not model.latest.closed

        asked = asyncio.create_task(side.run_on(work, model.backend))
        await asyncio.to_thread(begun.wait, WAIT_S)
        asked.cancel()  # its client has left
        leaving = asyncio.create_task(model.backend.unload())
        await asyncio.sleep(0.02)
        assert not model.latest.closed
        may_end.set()
        await leaving
        assert model.latest.closed

    asyncio.run(story())
