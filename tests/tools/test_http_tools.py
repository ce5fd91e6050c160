from __future__ import annotations

import asyncio
import gzip
import json
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkeep.errors import ConfigError, ToolFailed
from emberkeep.tools import http_tools
from emberkeep.tools.function import tools_of
from emberkeep.tools.http_tools import Exceptions, HttpTools, is_public
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


# ── addresses ──


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "93.184.216.34", "2606:4700::1111", "64:ff9b::5db8:d822", "100.63.1.1"]
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.254"),
        *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.8", "192.0.2.1", "192.88.99.1"),
        *("192.168.1.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255"),
        *("240.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("::ffff:169.254.169.254", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "100::1"),
        *("2001::1", "2001:db8::1", "2002:7f00:1::", "2002:a00:1::", "3fff::1", "fc00::1", "fd00:ec2::254"),
        *("fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "5f00::1"),
    ],
)
def test_all_others_are_not(address: str) -> None:
    assert not is_public(address)


@given(st.ip_addresses(v=4))
def test_an_address_is_judged_alike_in_every_dress(address: object) -> None:
    assert is_public(f"::ffff:{address}") == is_public(f"64:ff9b::{address}") == is_public(str(address))


@given(st.ip_addresses())
def test_what_python_calls_private_is_never_public(address: object) -> None:
    if address.is_private or address.is_multicast or address.is_loopback or address.is_link_local:  # type: ignore[attr-defined]
        assert not is_public(str(address))


def test_exceptions_are_hosts_with_or_without_a_port() -> None:
    exceptions = Exceptions.of(["nas.local", "LOCALHOST:8080", "[::1]:9000", "fd00::5"])
    assert exceptions.have("nas.local", 80) and exceptions.have("NAS.local", 9999)
    assert exceptions.have("localhost", 8080) and not exceptions.have("localhost", 80)
    assert exceptions.have("::1", 9000) and not exceptions.have("::1", 80)
    assert exceptions.have("fd00::5", 443)
    assert not exceptions.have("evil-nas.local", 80)


@pytest.mark.parametrize("entry", ["", ":80", "host:", "host:port", "http://host", "10.0.0.0/8"])
def test_an_exception_that_is_no_host_is_an_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="http_private"):
        Exceptions.of([entry])


# ── certificates are for names: also when the connection goes to an address that was looked up before ──

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """A server's context for `named.test`, which our side trusts."""
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=named.test"
    files = ["-addext", "subjectAltName=DNS:named.test", "-keyout", "key", "-out", "certificate"]
    subprocess.run([*make.split(), *files], cwd=tmp_path, check=True, capture_output=True)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "certificate"))
    monkeypatch.setattr(http_tools, "_certificates", lambda: trusting)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    return context


async def ask_for(host: str, context: ssl.SSLContext) -> tuple[Any, list[str | None]]:
    asked_for: list[str | None] = []
    context.sni_callback = lambda _, name, __: asked_for.append(name)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    server = Loopback({"/": answer(b"hello")})
    async with await asyncio.start_server(server._serve, "127.0.0.1", 0, ssl=context) as listening:
        port = listening.sockets[0].getsockname()[1]
        told = await HttpTools([host], resolve).http_get(f"https://{host}:{port}/", timeout_s=5)
    return told["body"], asked_for


@needs_openssl
def test_the_certificate_is_checked_for_the_name_and_the_server_is_told_it(certified: ssl.SSLContext) -> None:
    assert asyncio.run(ask_for("named.test", certified)) == ("hello", ["named.test"])


@needs_openssl
def test_a_certificate_for_another_name_is_refused(certified: ssl.SSLContext) -> None:
    with pytest.raises(ToolFailed, match="certificate"):
        asyncio.run(ask_for("other.test", certified))
