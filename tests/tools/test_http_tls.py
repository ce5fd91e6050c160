"""Certificates are for names: also when the connection goes to an address that was looked up before."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from emberkeep.errors import ToolFailed
from emberkeep.tools import http_tools
from emberkeep.tools.http_tools import HttpTools
from helpers.raw_web_server import Loopback, answer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


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


async def ask(host: str, context: ssl.SSLContext) -> tuple[Any, list[str | None]]:
    asked_for: list[str | None] = []
    context.sni_callback = lambda _, name, __: asked_for.append(name)

    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    server = Loopback({"/": answer(b"hello")})
    async with await asyncio.start_server(server._serve, "127.0.0.1", 0, ssl=context) as listening:
        port = listening.sockets[0].getsockname()[1]
        told = await HttpTools([host], resolve).http_get(f"https://{host}:{port}/", timeout_s=5)
    return told["body"], asked_for


def test_the_certificate_is_checked_for_the_name_and_the_server_is_told_it(certified: ssl.SSLContext) -> None:
    assert asyncio.run(ask("named.test", certified)) == ("hello", ["named.test"])


def test_a_certificate_for_another_name_is_refused(certified: ssl.SSLContext) -> None:
    with pytest.raises(ToolFailed, match="certificate"):
        asyncio.run(ask("other.test", certified))
