"""Servers and names that want to be asked into a private network, or to be listened to without end."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from emberkeep.errors import ToolFailed
from emberkeep.tools.http_tools import HttpTools, Resolve
from helpers.raw_web_server import Loopback, answer, redirect


def refused(url: str, private: Sequence[str] = (), **how: Any) -> str:
    with pytest.raises(ToolFailed) as raised:
        asyncio.run(HttpTools(private, **how).http_get(url, timeout_s=5))
    return str(raised.value)


def names(*answers: list[str]) -> Resolve:
    """A resolver that answers so, one after the other, and then as it did last."""
    left = list(answers)

    async def resolve(host: str, port: int) -> list[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


SPELLINGS = [
    "127.0.0.1",
    "localhost",
    "LOCALHOST",
    "127.1",
    "127.0.1",
    "0",
    "0.0.0.0",
    "0x7f.1",
    "0x7f000001",
    "2130706433",
    "017700000001",
    "0177.0.0.1",
    "[::]",
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[fe80::1]",
    "169.254.169.254",
    "0xA9FEA9FE",
    "2852039166",
    "[::ffff:169.254.169.254]",
    "[fd00:ec2::254]",
    "10.0.0.1",
    "192.168.0.1",
    "172.16.0.1",
    "100.64.0.1",
    "198.18.0.1",
    "224.0.0.1",
    "255.255.255.255",
    "１２７.０.０.１",
    "127。0。0。1",
    "①②⑦.0.0.1",
]


@pytest.mark.parametrize("host", SPELLINGS, ids=ascii)
def test_no_spelling_of_a_private_address_is_reached(host: str) -> None:
    async def asking() -> int:
        async with Loopback({"/": answer(b"secret")}) as server:
            with pytest.raises(ToolFailed):
                await HttpTools([]).http_get(server.url("/", host), timeout_s=5)
            return server.connections

    assert asyncio.run(asking()) == 0


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.test/",
        "gopher://127.0.0.1:70/_x",
        "javascript:alert(1)",
        "//example.test/",
        "example.test",
        "http://",
        "http:///x",
        "",
        "http://[::1",
        "http://host:99999/",
        "http://exa mple.test/",
        "http://a\r\nb.test/",
    ],
)
def test_what_is_no_url_of_a_web_server_is_refused(url: str) -> None:
    refused(url, resolve=names(["127.0.0.1"]))


def test_credentials_in_a_url_are_refused_also_in_a_redirect() -> None:
    assert "leave it out" in refused("http://user:canary@example.test/")

    async def asking() -> str:
        async with Loopback({}) as server:
            server.answers = {"/": redirect(f"http://user:canary@{server.place}/next")}
            with pytest.raises(ToolFailed) as raised:
                await HttpTools([server.place]).http_get(server.url())
            return str(raised.value)

    assert "leave it out" in asyncio.run(asking())


@pytest.mark.parametrize(
    "to", ["http://127.0.0.1:{port}/", "http://[::ffff:127.0.0.1]:{port}/", "//0x7f.1:{port}/"]
)
@pytest.mark.parametrize("hops", [0, 3])
def test_no_redirect_leads_to_loopback(to: str, hops: int) -> None:
    async def asking() -> int:
        async with Loopback({"/": answer(b"secret")}) as inside, Loopback({}) as outside:
            chain = {f"/{i}": redirect(f"/{i + 1}") for i in range(hops)}
            outside.answers = {**chain, f"/{hops}": redirect(to.format(port=inside.port))}
            tools = HttpTools([f"outside.test:{outside.port}"], names(["127.0.0.1"]))
            with pytest.raises(ToolFailed, match="must not be reached"):
                await tools.http_get(outside.url("/0", "outside.test"))
            assert len(outside.received) == hops + 1
            return inside.connections

    assert asyncio.run(asking()) == 0


@pytest.mark.parametrize("to", ["file:///etc/passwd", "gopher://127.0.0.1/", "data:text/plain,x", "http://[::1"])
def test_a_redirect_to_something_else_is_refused(to: str) -> None:
    async def asking() -> None:
        async with Loopback({"/": redirect(to)}) as server:
            await HttpTools([server.place]).http_get(server.url())

    with pytest.raises(ToolFailed):
        asyncio.run(asking())


def test_redirects_come_to_an_end() -> None:
    async def asking() -> tuple[int, str]:
        async with Loopback({"/": redirect("/")}) as server:
            with pytest.raises(ToolFailed) as raised:
                await HttpTools([server.place]).http_get(server.url())
            return len(server.received), str(raised.value)

    count, said = asyncio.run(asking())
    assert count == 6
    assert "more than 5 times" in said


def test_a_name_that_means_something_else_the_second_time_gains_nothing() -> None:
    """The first answer is allowed and dialled; the second one is not asked for."""

    async def asking() -> tuple[int, int]:
        async with Loopback({"/": answer(b"mine")}) as first:
            second = Loopback({"/": answer(b"secret")}, "127.0.0.2")
            second_server = await asyncio.start_server(second._serve, "127.0.0.2", first.port)
            async with second_server:
                tools = HttpTools([f"rebind.test:{first.port}"], names(["127.0.0.1"], ["127.0.0.2"]))
                told = await tools.http_get(first.url("/", "rebind.test"))
            assert told["body"] == "mine"
            return first.connections, second.connections

    assert asyncio.run(asking()) == (1, 0)


def test_a_name_that_turns_private_with_a_redirect_is_refused() -> None:
    async def asking() -> int:
        async with Loopback({"/a": redirect("http://rebind.test:81/b"), "/b": answer(b"secret")}) as server:
            tools = HttpTools([f"rebind.test:{server.port}"], names(["127.0.0.1"], ["127.0.0.1"]))
            with pytest.raises(ToolFailed, match="must not be reached"):
                await tools.http_get(server.url("/a", "rebind.test"))
            return server.connections

    assert asyncio.run(asking()) == 1


@pytest.mark.parametrize(
    "answers", [["93.184.216.34", "127.0.0.1"], ["127.0.0.1", "93.184.216.34"], ["2606::1", "::1"]]
)
def test_one_private_address_among_public_ones_is_enough_to_refuse(answers: list[str]) -> None:
    assert "must not be reached" in refused("http://mixed.test/", resolve=names(answers))


def test_an_exception_for_one_port_is_none_for_another() -> None:
    async def asking() -> int:
        async with Loopback({"/": answer(b"secret")}) as server:
            with pytest.raises(ToolFailed, match="http_private"):
                await HttpTools([f"127.0.0.1:{server.port + 1}", "localhost"]).http_get(server.url())
            return server.connections

    assert asyncio.run(asking()) == 0


def test_names_that_cannot_be_found_are_said() -> None:
    async def nowhere(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    async def empty(host: str, port: int) -> list[str]:
        return []

    assert "cannot be found" in refused("http://missing.test/", resolve=nowhere)
    assert "has no address" in refused("http://missing.test/", resolve=empty)


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def asking() -> int:
        async with Loopback({"/": answer(b"mine")}) as server, Loopback({}) as proxy:
            for name in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"]:
                monkeypatch.setenv(name, proxy.url())
            assert (await HttpTools([server.place]).http_get(server.url()))["body"] == "mine"
            return proxy.connections

    assert asyncio.run(asking()) == 0


def spoken(talk: Callable[[asyncio.StreamWriter], Any], timeout_s: float = 5) -> Any:
    async def asking() -> Any:
        async with Loopback({"/": talk}) as server:
            return await HttpTools([server.place]).http_get(server.url(), timeout_s=timeout_s)

    return asyncio.run(asking())


@pytest.mark.parametrize(
    "head", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["", "head", "body"]
)
def test_a_server_that_says_a_byte_at_a_time_is_given_up(head: bytes) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        while not writer.is_closing():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.01)

    with pytest.raises(ToolFailed, match=r"took longer than 0\.3 s"):
        spoken(drip, timeout_s=0.3)


@pytest.mark.parametrize("length", [b"", b"Content-Length: 99999999999999\r\n"], ids=["none", "huge"])
def test_a_body_without_end_is_not_received_without_end(length: bytes) -> None:
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n")
        while sent < 1 << 30:
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    body = spoken(flood)["body"]
    assert body.endswith("x\n[only the first 2,097,152 bytes]")
    assert sent < 64 << 20


def test_headers_without_end_are_not_received_without_end() -> None:
    async def flood(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"X: " + b"x" * 60_000 + b"\r\n")
            await writer.drain()

    with pytest.raises(ToolFailed, match="cannot be asked"):
        spoken(flood)


def bomb(size: int) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    block = b"x" * (1 << 20)
    return b"".join(packer.compress(block) for _ in range(size >> 20)) + packer.flush()


def test_a_bomb_is_unpacked_only_as_far_as_it_is_shown() -> None:
    packed = bomb(1 << 26)

    async def throw(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(packed, Content_Encoding="gzip"))
        await writer.drain()

    assert spoken(throw)["body"].endswith("x\n[only the first 2,097,152 bytes]")


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress"])
def test_packing_that_was_not_asked_for_is_refused(encoding: str) -> None:
    async def throw(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(gzip.compress(gzip.compress(b"x")), Content_Encoding=encoding))
        await writer.drain()

    with pytest.raises(ToolFailed, match="packed as"):
        spoken(throw)


def test_broken_packing_is_one_sentence() -> None:
    async def throw(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"\x1f\x8b" + b"nonsense" * 20, Content_Encoding="gzip"))
        await writer.drain()

    with pytest.raises(ToolFailed, match="broken"):
        spoken(throw)
