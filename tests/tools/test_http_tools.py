from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from emberkeep.errors import ToolFailed
from emberkeep.tools.function import tools_of
from emberkeep.tools.http_tools import HttpTools
from helpers.raw_web_server import Loopback, answer, redirect


def asked(server: Loopback, ask: Callable[[HttpTools], Awaitable[Any]]) -> Any:
    async def asking() -> Any:
        async with server:
            return await ask(HttpTools([server.place]))

    return asyncio.run(asking())


def test_all_of_them_are_dangerous() -> None:
    assert all(function.is_dangerous for function in tools_of(HttpTools([])))
    assert [function.name for function in tools_of(HttpTools([]))] == [
        "http_get",
        "http_post",
        "http_put",
        "http_delete",
    ]


def test_status_headers_and_body_are_told() -> None:
    server = Loopback(
        {"/x": answer("grün".encode(), "text/plain; charset=utf-8", "404 Not Found", ETag='"1"', X_Other="no")}
    )
    told = asked(server, lambda tools: tools.http_get(server.url("/x"), {"X-Mine": "yes"}))
    assert told == {
        "status": 404,
        "headers": {"content-type": "text/plain; charset=utf-8", "content-length": "5", "etag": '"1"'},
        "body": "grün",
    }
    assert server.received[0].headers["x-mine"] == "yes"


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    ("body", "sent", "kind"), [("text ü", "text ü".encode(), None), ({"a": [1]}, b'{"a":[1]}', "application/json")]
)
def test_text_is_sent_as_it_is_and_objects_as_json(method: str, body: Any, sent: bytes, kind: str | None) -> None:
    server = Loopback({"/": answer(b"ok")})
    asked(server, lambda tools: getattr(tools, f"http_{method.lower()}")(server.url(), body))
    (received,) = server.received
    assert (received.method, received.body, received.headers.get("content-type")) == (method, sent, kind)


def test_delete_deletes() -> None:
    server = Loopback({"/": answer(b"", status="204 No Content")})
    assert asked(server, lambda tools: tools.http_delete(server.url()))["status"] == 204
    assert server.received[0].method == "DELETE"


def test_packed_text_is_unpacked_and_binary_is_only_said() -> None:
    server = Loopback(
        {
            "/gzip": answer(gzip.compress(b"packed"), Content_Encoding="gzip"),
            "/latin": answer("grün".encode("latin-1"), "text/html; charset=iso-8859-1"),
            "/odd": answer(b"plain", "text/html; charset=zlib"),
            "/image": answer(b"\x89PNG\0\0\0\0", "image/png"),
        }
    )

    async def all_of(tools: HttpTools) -> list[str]:
        return [(await tools.http_get(server.url(path)))["body"] for path in server.answers]

    assert asked(server, all_of) == ["packed", "grün", "plain", "[binary (image/png), 8 bytes: not shown]"]


@pytest.mark.parametrize(
    ("status", "method"),
    [("301 Moved", "GET"), ("302 Found", "GET"), ("303 See Other", "GET"), ("307 T", "POST"), ("308 P", "POST")],
)
def test_redirects_are_followed_with_the_right_method(status: str, method: str) -> None:
    server = Loopback({"/a": redirect("/b", status), "/b": answer(b"there")})
    told = asked(server, lambda tools: tools.http_post(server.url("/a"), "data"))
    assert told["body"] == "there"
    assert told["url"] == server.url("/b")
    assert (server.received[1].method, server.received[1].body) == (method, b"data" if method == "POST" else b"")


def test_what_was_meant_for_one_site_is_not_told_another() -> None:
    async def asking() -> tuple[Any, Any]:
        async with Loopback({"/": answer(b"other")}) as other, Loopback({}) as server:
            server.answers = {"/same": redirect("/go"), "/go": redirect(other.url())}
            secret = {"Authorization": "canary", "Cookie": "canary", "X-Api-Key": "canary", "Accept": "text/html"}
            await HttpTools([server.place, other.place]).http_get(server.url("/same"), secret)
            return server.received[1].headers, other.received[0].headers

    same, other = asyncio.run(asking())
    assert same["authorization"] == same["x-api-key"] == "canary"
    assert "canary" not in str(other)
    assert other["accept"] == "text/html"


def test_cookies_are_not_kept() -> None:
    server = Loopback(
        {"/a": answer(b"", status="302 Found", Location="/b", Set_Cookie="a=1; Path=/"), "/b": answer(b"x")}
    )

    async def twice(tools: HttpTools) -> None:
        await tools.http_get(server.url("/a"))
        await tools.http_get(server.url("/b"))

    asked(server, twice)
    assert all("cookie" not in received.headers for received in server.received)


def test_the_name_stays_the_host_while_the_address_is_dialled() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def asking() -> str:
        async with Loopback({"/": answer(b"x")}) as server:
            await HttpTools(["named.test"], resolve).http_get(server.url("/", "named.test"))
            return server.received[0].headers["host"]

    assert asyncio.run(asking()).startswith("named.test:")


def test_another_address_is_tried_when_one_does_not_answer() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["::1", "127.0.0.2", "127.0.0.1"]

    async def asking() -> Any:
        async with Loopback({"/": answer(b"x")}) as server:
            return await HttpTools(["named.test"], resolve).http_get(server.url("/", "named.test"))

    assert asyncio.run(asking())["body"] == "x"


@pytest.mark.parametrize(
    "name", ["Host", "content-length", "Transfer-Encoding", "Connection", "Proxy-Authorization"]
)
def test_headers_of_the_connection_cannot_be_chosen(name: str) -> None:
    with pytest.raises(ToolFailed, match="cannot be chosen"):
        asyncio.run(HttpTools([]).http_get("http://example.test", {name: "x"}))


def test_a_body_that_is_too_large_is_not_sent() -> None:
    with pytest.raises(ToolFailed, match="send less"):
        asyncio.run(HttpTools([]).http_post("http://example.test", "x" * ((16 << 20) + 1)))


def test_a_refused_connection_is_one_sentence() -> None:
    async def asking() -> Any:
        async with Loopback({}) as server:
            place, url = server.place, server.url()
        return await HttpTools([place]).http_get(url)

    with pytest.raises(ToolFailed, match="cannot be asked"):
        asyncio.run(asking())


def test_an_answer_that_is_no_http_is_one_sentence() -> None:
    server = Loopback({"/": b"SSH-2.0-OpenSSH_9.0\r\n\r\n"})
    with pytest.raises(ToolFailed, match="cannot be asked"):
        asked(server, lambda tools: tools.http_get(server.url()))


def test_results_are_json() -> None:
    server = Loopback({"/": answer(b"\xff\xfe\xfa" * 3, "text/plain")})
    json.dumps(asked(server, lambda tools: tools.http_get(server.url())))
