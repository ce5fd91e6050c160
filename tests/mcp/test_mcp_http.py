"""Servers at an address that misbehave, and servers that tell of changes to those who listen."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from mcp.server.mcpserver import Context, MCPServer

from emberkeep.config.tables import McpServer
from emberkeep.mcp.client import ServerStatus
from helpers.mcp_servers import Clock, call, connected, offered
from helpers.model_file_server import serving_with

pytestmark = pytest.mark.slow

NAMES = ("echo", "huge", "bomb", "deny", "redirect")
TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in NAMES]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "id" not in body:
            return self._send(202, b"")
        method, id_ = body["method"], body["id"]
        if method == "initialize":
            version = body["params"]["protocolVersion"]
            info = {"name": "far", "version": "1"}
            result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
        elif method == "tools/list":
            result = {"tools": TOOLS}
        elif method == "tools/call":
            return self._call(body["params"]["name"], id_)
        else:
            return self._answer(id_, error={"code": -32601, "message": "Method not found"})
        return self._answer(id_, result=result)

    def do_GET(self) -> None:
        self._send(405, b"")

    def _call(self, name: str, id_: object) -> None:
        if name == "huge":
            return self._answer(id_, result={"content": [{"type": "text", "text": "x" * (100 << 20)}]})
        if name == "bomb":
            packed = gzip.compress(b" " * (200 << 20), 1)
            return self._send(200, packed, {"Content-Encoding": "gzip"})
        if name == "deny":
            return self._send(500, b"no")
        if name == "redirect":
            return self._send(307, b"", {"Location": "http://127.0.0.1:9/elsewhere"})
        return self._answer(id_, result={"content": [{"type": "text", "text": "here"}]})

    def _answer(self, id_: object, **fields: object) -> None:
        self._send(200, json.dumps({"jsonrpc": "2.0", "id": id_, **fields}).encode())

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
        except OSError:  # it hung up, as it should
            self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def far() -> Iterator[McpServer]:
    with serving_with(_Handler) as url:
        yield McpServer("far", url=f"{url}/mcp", timeout_s=20)


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        ("huge", "it is longer than 16 MiB"),
        ("bomb", "it is compressed"),
        ("deny", "error response"),
        ("redirect", "not followed"),
    ],
)
def test_only_the_call_fails(tmp_path, tool, why):
    async def story(server):
        async with connected(tmp_path, server) as clients:
            failed = await call(clients, f"far__{tool}")
            return failed, await call(clients, "far__echo")

    with far() as server:
        failed, echoed = asyncio.run(story(server))
    assert failed.failed and why in failed.text
    assert echoed.text == "here"


def test_an_address_where_nothing_listens_is_a_state(tmp_path):
    async def story():
        async with connected(tmp_path, McpServer("far", url="http://127.0.0.1:9/mcp", timeout_s=10)) as clients:
            return clients.states(), await call(clients, "mcp_list_resources")

    (state,), listed = asyncio.run(story())
    assert state.status is ServerStatus.STOPPED and "ConnectError" in state.reason
    assert "started again if called in 1 s" in listed.text


def test_changes_of_tools_arrive_in_the_newest_protocol_too(tmp_path):
    """Which has no notifications but for those who listen."""
    import uvicorn

    told = MCPServer("told")

    @told.tool()
    async def grow(ctx: Context) -> str:
        """Get another tool."""

        def later() -> str:
            """It came later."""
            return ""

        if "later" not in {tool.name for tool in await told.list_tools()}:
            told.add_tool(later)
        await ctx.notify_tools_changed()
        return "grown"

    async def story():
        server = uvicorn.Server(uvicorn.Config(told.streamable_http_app(), port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0)
        port = server.servers[0].sockets[0].getsockname()[1]
        wanted = McpServer("told", url=f"http://127.0.0.1:{port}/mcp", tools=("grow", "later"))
        async with connected(tmp_path, wanted, clock=Clock()) as clients:
            before = offered(clients)
            async with asyncio.timeout(20):
                while offered(clients) == before:
                    await call(clients, "told__grow")
            after = offered(clients)
        server.should_exit = server.force_exit = True
        await serving
        return before, after

    before, after = asyncio.run(story())
    assert (before, after) == (["told__grow"], ["told__grow", "told__later"])
