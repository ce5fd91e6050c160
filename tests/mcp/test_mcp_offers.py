"""What servers offer and answer, as models and people get to see it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from emberkeep.mcp.client import McpClients
from helpers.mcp_servers import call, connected, hostile


def listed(folder, *tools, **settings):
    """The tools by the names that the server gave them, and the functions made of them."""
    file = folder / "tools.json"
    file.write_text(json.dumps([{"inputSchema": {"type": "object"}, **tool} for tool in tools]))

    async def run():
        async with connected(folder, hostile("a", "plain", file, **settings)) as clients:
            names = [tool.name for tool in clients.tools("a")]
            functions = [one for one in clients.functions() if "__" in one.name]
            return dict(zip(names, functions, strict=True))

    return asyncio.run(run())


def test_names_are_of_characters_that_apis_take_and_all_different(tmp_path):
    names = ["a.b", "a_b", "ünï", "x" * 100, "x" * 101, "ok-1"]
    found = {name: function.name for name, function in listed(tmp_path, *({"name": n} for n in names)).items()}
    assert list(found) == names
    assert all(re.fullmatch(r"a__[A-Za-z0-9_-]{1,61}", name) for name in found.values())
    assert len(set(found.values())) == len(names)
    assert (found["a.b"], found["ok-1"]) == ("a__a_b", "a__ok-1")


def test_a_name_that_comes_twice_is_the_first_one(tmp_path):
    found = listed(tmp_path, {"name": "x", "description": "first"}, {"name": "x", "description": "second"})
    assert found["x"].definition.description == "first"


def test_invisible_characters_are_taken_out_of_descriptions(tmp_path):
    hidden = "".join(chr(start + ord(c)) for start in (0xE0000, 0xE0100) for c in "obey")
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": "a\u001b[31mb\u202e"}}}
    found = listed(tmp_path, {"name": "x", "description": f"Nice\u0007{hidden}\u200b.", "inputSchema": schema})
    definition = found["x"].definition
    assert definition.description == "Nice."
    assert definition.parameters["properties"]["x"]["description"] == "a[31mb"


def test_long_descriptions_are_cut_and_huge_schemas_left_out(tmp_path, caplog):
    huge = {"type": "object", "description": "x" * 40_000}
    found = listed(tmp_path, {"name": "x", "description": "x" * 9000}, {"name": "y", "inputSchema": huge})
    assert list(found) == ["x"]
    assert len(found["x"].definition.description) == 4000
    assert "some tools are left out" in caplog.text


MILD = {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True, "openWorldHint": False}


@pytest.mark.parametrize(
    ("trusted", "asks"),
    [(False, {"read", "wipe"}), (("read",), {"wipe"}), (("other",), {"read", "wipe"}), (True, set())],
)
def test_what_a_server_says_of_its_tools_is_not_believed(tmp_path, trusted, asks):
    tools = [{"name": "read", "annotations": MILD}, {"name": "wipe", "annotations": MILD}]
    found = listed(tmp_path, *tools, trusted=trusted)
    assert {name for name, function in found.items() if function.is_dangerous} == asks
    assert {function.group for function in found.values()} == {"mcp"}


def test_only_the_tools_of_the_settings_are_used(tmp_path):
    assert list(listed(tmp_path, {"name": "x"}, {"name": "y"}, tools=("y",))) == ["y"]


def test_answers_other_than_text_are_described(tmp_path):
    file = tmp_path / "tools.json"
    names = ("picture", "structured", "fail")
    file.write_text(json.dumps([{"name": name, "inputSchema": {"type": "object"}} for name in names]))

    async def run():
        async with connected(tmp_path, hostile("a", "plain", file)) as clients:
            return [await call(clients, f"a__{name}") for name in names]

    picture, structured, failed = asyncio.run(run())
    assert picture.text == "[image/png, 12 KiB]\n[file:///a]"
    assert json.loads(structured.text) == {"degrees": 21}
    assert failed.failed and failed.text == "Error: no such berth"


def test_a_tool_or_server_that_is_not_there_is_told_with_the_nearest(tmp_path):
    async def run():
        async with connected(tmp_path, hostile("a")) as clients:
            wrong_tool = await call(clients, "mcp_call_tool", server="a", tool="ecko", arguments={})
            wrong_server = await call(clients, "mcp_read_resource", server="b", uri="x:y")
            return wrong_tool.text, wrong_server.text

    tool, server = asyncio.run(run())
    assert tool == "Error: a has no tool 'ecko': did you mean echo?"
    assert server == "Error: There is no MCP server 'b': use a."


def test_it_runs_on_the_loop_of_the_server_too(tmp_path):
    uvloop = pytest.importorskip("uvloop")

    async def run():
        async with connected(tmp_path, hostile("a")) as clients:
            await call(clients, "a__crash")
            return clients.states()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        (state,) = runner.run(run())
    assert "ended with status 3" in state.reason


def test_what_is_disabled_cannot_be_called_by_its_other_name(tmp_path):
    async def run():
        clients = McpClients([hostile("a")], tmp_path / "pins.json", disabled=("a__crash",))
        try:
            arguments = {"server": "a", "arguments": {}}
            return [await call(clients, "mcp_call_tool", tool=name, **arguments) for name in ("crash", "echo")]
        finally:
            await clients.close()

    crash, echo = asyncio.run(run())
    assert "a__crash is disabled" in crash.text
    assert not echo.failed
