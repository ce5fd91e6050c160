"""`emberkeep mcp serve`: tools and memory for other programs, over stdio and HTTP, without a model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from time import sleep

import httpx
import pytest
from mcp import Client, MCPError, StdioServerParameters
from mcp.types import INVALID_PARAMS
from starlette.testclient import TestClient

from emberkeep.config.settings import Config
from emberkeep.config.tables import McpServer
from emberkeep.mcp.server import McpHost
from emberkeep.runtime.parts import open_memory
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.request import Message
from helpers.mcp_servers import HOSTILE, alive, call, connected, offered
from helpers.waiting import eventually

pytestmark = pytest.mark.slow

ENV = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-06-18",
        "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"},
    },
}


def serve_command(folder, *flags):
    return ("-m", "emberkeep", "mcp", "serve", "--data-dir", str(folder), "--tools-root", str(folder), *flags)


def ours(folder, *flags, **settings):
    """This server for our own client."""
    return McpServer("ours", (sys.executable, *serve_command(folder, *flags)), env=ENV, **settings)


def sdk_client(folder, *flags):
    return Client(StdioServerParameters(command=sys.executable, args=list(serve_command(folder, *flags)), env=ENV))


@contextmanager
def http_server(folder, *flags, told=signal.SIGTERM, **env):
    """Its address. It has to end when it is told to."""
    command = [sys.executable, *serve_command(folder, "--http", "--port", "0", *flags)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **ENV, **env})
    try:
        assert process.stderr is not None
        found = next((m for line in process.stderr if (m := re.search(r"ready at (http://\S+)", line))), None)
        assert found is not None
        yield found[1]
        process.send_signal(told)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def remembered(tmp_path):
    """A data folder in which something is remembered."""
    memory = open_memory(Config(data_dir=tmp_path))
    assert memory is not None
    memory.set_fact("", "home", "Lyon")
    memory.save_messages("", "talk/1", [Message("user", "Hello there")], model="m")
    memory.close()
    return tmp_path


def test_our_own_client_uses_our_own_server(remembered, tmp_path):
    async def story():
        async with connected(tmp_path, ours(remembered)) as clients:
            told = await call(clients, "ours__set_fact", name="boat", value="Möwe")
            return offered(clients), told, await call(clients, "ours__get_fact", name="boat")

    names, told, read = asyncio.run(story())
    assert {"ours__search_memory", "ours__read_file"} <= set(names)
    assert not told.failed and "Möwe" in read.text


def test_what_is_found_in_memory_has_a_score(remembered, tmp_path):
    async def story():
        async with connected(tmp_path, ours(remembered)) as clients:
            await call(clients, "ours__remember", question="What is the boat called?", answer="Möwe")
            return await call(clients, "ours__search_memory", query="boat called")

    score, said, *_ = asyncio.run(story()).text.splitlines()
    assert 0.5 < float(score.removeprefix("score ")) <= 1
    assert said.endswith("What is the boat called?")


def test_dangerous_tools_have_to_be_enabled(tmp_path):
    async def names(*flags):
        async with connected(tmp_path, ours(tmp_path, *flags)) as clients:
            return {tool.name for tool in clients.tools("ours")}

    assert not {"run_command", "write_file"} & asyncio.run(names())
    assert {"write_file", "read_file"} <= asyncio.run(names("--enable-tools", "files"))


def test_tools_say_whether_they_only_read(remembered):
    async def story():
        async with sdk_client(remembered, "--enable-tools", "files,memory,http") as client:
            return {tool.name: tool.annotations for tool in (await client.list_tools()).tools}

    hints = asyncio.run(story())
    reading = {name for name, hint in hints.items() if hint.read_only_hint}
    files = {"read_file", "list_files", "file_exists"}
    assert files | {"search_memory", "get_fact", "list_facts", "http_get"} <= reading
    assert not {"write_file", "delete_file", "set_fact", "remember", "http_post"} & reading
    assert [hints[name].destructive_hint for name in ("delete_file", "set_fact", "http_get")] == [
        True,
        False,
        False,
    ]


def test_a_session_that_its_client_does_not_close_expires():
    app = McpHost(ToolBox((), ToolPolicy()), None, "").http_app(idle_s=0.05)
    with TestClient(app) as http:
        headers = {"Accept": "application/json, text/event-stream"}
        begun = http.post("/mcp", json=INITIALIZE, headers=headers)
        headers |= {"Mcp-Session-Id": begun.headers["mcp-session-id"]}
        ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}

        def is_gone() -> bool:
            # Asked after a pause: each request begins the time anew.
            return http.post("/mcp", json=ping, headers=headers).status_code == 404 or sleep(0.2)

        assert eventually(is_gone)


async def _look(client):
    """What every client can do with it."""
    tools = await client.list_tools()
    fact = await client.call_tool("get_fact", {"name": "home"})
    with pytest.raises(MCPError, match="did you mean get_fact") as wrong:
        await client.call_tool("get_fakt", {})
    resources = await client.list_resources()
    templates = await client.list_resource_templates()
    (talk,) = json.loads((await client.read_resource("memory://conversations")).contents[0].text)
    messages = json.loads((await client.read_resource(talk["uri"])).contents[0].text)["messages"]
    stats = json.loads((await client.read_resource("memory://stats")).contents[0].text)
    with pytest.raises(MCPError, match="There is no resource memory://nothing"):
        await client.read_resource("memory://nothing")
    assert "search_memory" in {tool.name for tool in tools.tools}
    assert "Lyon" in fact.content[0].text and not fact.is_error
    assert wrong.value.code == INVALID_PARAMS
    assert {r.uri for r in resources.resources} == {"memory://facts", "memory://conversations", "memory://stats"}
    assert templates.resource_templates[0].uri_template == "memory://conversations/{id}"
    assert (messages[0]["role"], messages[0]["content"]) == ("user", "Hello there")
    assert stats["facts"] == 1


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_sdks_client_uses_it_over_stdio(remembered, mode):
    async def story():
        client = sdk_client(remembered)
        client.mode = mode
        async with client:
            await _look(client)

    asyncio.run(story())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_sdks_client_uses_it_over_http(remembered, mode):
    async def story(url):
        async with Client(url, mode=mode) as client:
            await _look(client)

    with http_server(remembered) as url:
        asyncio.run(story(url))


def test_our_own_client_speaks_http_and_sends_its_key(remembered, tmp_path, monkeypatch):
    monkeypatch.setenv("MCP_TEST_KEY", "canary-key-123")

    async def story(url, **headers):
        async with connected(tmp_path, McpServer("far", url=url, headers=headers)) as clients:
            return await call(clients, "far__get_fact", name="home"), clients.states()

    with http_server(remembered, EMBERKEEP_API_KEY="canary-key-123") as url:
        read, _ = asyncio.run(story(url, Authorization="Bearer $MCP_TEST_KEY"))
        _, (refused,) = asyncio.run(story(url))
    assert "Lyon" in read.text
    assert refused.reason.startswith("it wants a token (HTTP status 401): Emberkeep does not sign in to servers")
    assert 'headers = { Authorization = "Bearer $TOKEN" }' in refused.reason


def test_a_server_that_went_away_fails_the_call_and_comes_back(remembered, tmp_path):
    async def story():
        with http_server(remembered) as url:
            port = url.split(":")[2].split("/")[0]
            clients = connected(tmp_path, McpServer("far", url=url, timeout_s=10))
            source = await clients.__aenter__()
            await call(source, "far__get_fact", name="home")
        gone = await call(source, "far__get_fact", name="home")
        with http_server(remembered, "--port", port):
            back = await call(source, "far__get_fact", name="home")
            await clients.__aexit__(None, None, None)
        return gone, back

    gone, back = asyncio.run(story())
    assert gone.failed and "far went away" in gone.text
    assert "Lyon" in back.text


def test_web_pages_and_other_names_are_refused(tmp_path):
    with http_server(tmp_path) as url:
        forged = [
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Origin": "http://localhost:3000"},
        ]
        base = {"Accept": "application/json, text/event-stream"}
        answers = [httpx.post(url, json=INITIALIZE, headers={**base, **headers}) for headers in (*forged, {})]
    assert [answer.status_code for answer in answers] == [403, 403, 403, 200]


def test_a_closed_terminal_ends_it_as_well(tmp_path):
    with http_server(tmp_path, told=signal.SIGHUP) as url:
        assert httpx.post(url, json=INITIALIZE).status_code < 500


def test_listening_beyond_this_machine_needs_a_key(tmp_path):
    command = [sys.executable, *serve_command(tmp_path, "--http", "--host", "0.0.0.0", "--port", "0")]
    env = {**os.environ, **ENV}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1 and "set --api-key" in ended.stderr


def test_memory_is_that_of_one_user(remembered, tmp_path):
    async def story():
        async with connected(tmp_path, ours(remembered, "--user", "alice")) as clients:
            facts = await call(clients, "mcp_read_resource", server="ours", uri="memory://facts")
            return facts, await call(clients, "ours__get_fact", name="home")

    facts, read = asyncio.run(story())
    assert facts.text == "[]" and "Lyon" not in read.text


def test_other_servers_are_passed_on_only_when_asked(tmp_path):
    pids = tmp_path / "pids"
    table = {"inner": {"command": [sys.executable, str(HOSTILE)], "env": {"PIDS": str(pids)}, "trusted": True}}
    config = tmp_path / "emberkeep.json"
    config.write_text(json.dumps({"mcp": {"servers": table}}))

    async def names(*flags):
        server = ours(tmp_path, *flags, "--config", str(config))
        async with connected(tmp_path, server) as clients:
            return {tool.name for tool in clients.tools("ours")}

    assert not any(name.startswith("inner__") for name in asyncio.run(names()))
    assert not pids.exists()
    assert "inner__echo" in asyncio.run(names("--with-mcp"))
    assert pids.read_text() and not alive([int(pid) for pid in pids.read_text().split()])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_though_its_input_is_open(tmp_path, number):
    command = [sys.executable, *serve_command(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **ENV}, **pipes) as process:
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        process.stdin.flush()
        assert b"emberkeep" in process.stdout.readline()
        process.send_signal(number)
        assert process.wait(20) == 128 + number


def test_without_memory_there_is_nothing_to_read(tmp_path):
    async def story():
        config = tmp_path / "off.json"
        config.write_text('{"memory": false}')
        async with sdk_client(tmp_path, "--config", str(config)) as client:
            return client.server_capabilities.resources

    assert asyncio.run(story()) is None
