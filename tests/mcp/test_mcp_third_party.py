"""Servers that others wrote, as they are in the package registries.

Those for Node are skipped where they are not installed: `npm install @modelcontextprotocol/server-everything
@modelcontextprotocol/server-filesystem` somewhere, and name its `node_modules/.bin` in $EMBERKEEP_TEST_NODE_BIN.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from emberkeep.config.tables import McpServer
from emberkeep.types.request import Message
from helpers.mcp_servers import call, connected, offered

pytestmark = pytest.mark.slow


def program(name: str, *arguments: object) -> McpServer:
    """Skips the test where the program is not installed."""
    places = (str(Path(sys.executable).parent), os.environ.get("EMBERKEEP_TEST_NODE_BIN", ""), os.environ["PATH"])
    path = shutil.which(name, path=os.pathsep.join(places))
    if path is None:
        pytest.skip(f"{name} is not installed")
    return McpServer(name.removeprefix("mcp-server-"), (path, *map(str, arguments)))


def test_the_time_server_converts_and_refuses(tmp_path):
    async def story():
        async with connected(tmp_path, program("mcp-server-time")) as clients:
            zones = {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Tokyo"}
            converted = await call(clients, "time__convert_time", **zones)
            return converted, await call(clients, "time__convert_time", **{**zones, "time": "noon"})

    converted, refused = asyncio.run(story())
    assert json.loads(converted.text)["time_difference"] == "+9.0h"
    assert refused.failed and "Invalid time format" in refused.text


def test_the_git_server_reads_a_repository_and_asks_before_it_writes(tmp_path):
    for command in (["init", "-q"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q"]):
        extra = ["--allow-empty", "-m", "The first stone"] if "commit" in command else []
        subprocess.run(["git", *command, *extra], cwd=tmp_path, check=True)

    async def story():
        server = replace(program("mcp-server-git", "-r", tmp_path), trusted=("git_log",))
        async with connected(tmp_path / "pins", server) as clients:
            danger = {function.name: function.is_dangerous for function in clients.functions()}
            return danger, await call(clients, "git__git_log", repo_path=str(tmp_path))

    danger, log = asyncio.run(story())
    assert "The first stone" in log.text
    assert danger["git__git_commit"] and not danger["git__git_log"]


def test_the_filesystem_server_stays_in_its_folder(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (root / "note.txt").write_text("Hello from a file")

    async def story():
        async with connected(tmp_path, program("mcp-server-filesystem", root)) as clients:
            return (
                await call(clients, "filesystem__read_text_file", path=str(root / "note.txt")),
                await call(clients, "filesystem__read_text_file", path="/etc/hostname"),
            )

    read, refused = asyncio.run(story())
    assert read.text == "Hello from a file"
    assert refused.failed and "Access denied" in refused.text


def test_the_everything_server_has_tools_resources_and_prompts(tmp_path):
    async def story():
        async with connected(tmp_path, program("mcp-server-everything")) as clients:
            (first, *_) = await clients.resources("everything")
            return (
                offered(clients),
                await call(clients, "everything__get-sum", a=2, b=40),
                await call(clients, "everything__get-tiny-image"),
                await call(clients, "mcp_read_resource", server="everything", uri=first["uri"]),
                await clients.get_prompt("everything__args-prompt", {"city": "Lyon"}),
            )

    names, total, picture, resource, message = asyncio.run(story())
    assert len(names) >= 10
    assert "42" in total.text
    assert "[image/png, 3.9 KiB]" in picture.text
    assert resource.text.startswith("#")
    assert message == Message("user", "What's weather in Lyon?")


def test_the_everything_server_over_http_is_met_again_after_a_restart(tmp_path):
    server = program("mcp-server-everything")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def started():
        command, env = [*server.command, "streamableHttp"], {**os.environ, "PORT": str(port)}
        process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None and any("listening" in line for line in process.stderr)
        return process

    def stop(process):
        process.kill()
        process.communicate()

    async def story():
        running = started()
        try:
            async with connected(tmp_path, McpServer("far", url=f"http://127.0.0.1:{port}/mcp")) as clients:
                before = await call(clients, "far__echo", message="one")
                stop(running)
                running = started()
                lost = await call(clients, "far__echo", message="two")
                return before, lost, await call(clients, "far__echo", message="three")
        finally:
            stop(running)

    before, lost, after = asyncio.run(story())
    assert "one" in before.text and "three" in after.text
    assert lost.failed
