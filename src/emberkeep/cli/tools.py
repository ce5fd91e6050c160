"""`emberkeep tools`: what a model can do here, how each tool is called, and calling one by hand."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from emberkeep.cli.commands import JsonFlag, YesFlag, command_group, with_settings
from emberkeep.cli.console import ask_first, complain, printable, show_table
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError, EmberkeepError, NoSuchEntry
from emberkeep.text import did_you_mean
from emberkeep.types.events import Caller
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Json, Tool, ToolCall
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.tools.toolbox import ToolBox

T = TypeVar("T")

EXAMPLES = """\b
Examples:
  emberkeep tools list                         name, group, where it is used, what it does
  emberkeep tools show read_file               its parameters, and how to call it
  emberkeep tools run list_files               call it as a model would
  emberkeep tools run read_file path=notes.txt limit=20
  emberkeep tools run json_query '{"text": "[1, 2]", "path": "$[0]"}'
  emberkeep tools list --tools-from mine.py    with functions of a file of yours

\b
Servers of [mcp.servers.NAME] are started for it, and stopped again.
"""

app = command_group("List the tools that models can call, show one, run one.", EXAMPLES)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `emberkeep tools list` has it.")]
_EXAMPLES: Mapping[str, Json] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True, slots=True)
class ToolRow:
    definition: Tool
    group: str
    is_dangerous: bool
    in_chat: bool
    in_server: bool

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def chat(self) -> str:
        return ("asks" if self.is_dangerous else "yes") if self.in_chat else "no"

    @property
    def server(self) -> str:
        return "yes" if self.in_server else "no"


@app.command("list", epilog="Examples: emberkeep tools list, emberkeep tools list --all --json")
@with_settings("enable_tools", "disable_tools", "tools_from", "tools_root", "data_dir", "config")
def list_tools(
    config: Config,
    show_all: Annotated[bool, typer.Option("--all", help="Those that are switched off too.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Every tool, its group, and whether a chat and a server use it."""
    rows = [row for row in _rows(config) if show_all or row.in_chat or row.in_server]
    if json_:
        print(json.dumps([as_json(row) for row in rows], indent=2, ensure_ascii=False))
    elif rows:
        cells = ((row.name, row.group, row.chat, row.server, gist(row.definition)) for row in rows)
        show_table(("tool", "group", "in chat", "in a server", "what it does"), cells)
    else:
        print("No tool is switched on: `emberkeep tools list --all` shows them.")


@app.command("show", epilog="Example: emberkeep tools show read_file")
@with_settings("tools_from", "tools_root", "data_dir", "config")
def show_tool(config: Config, name: Name, json_: JsonFlag = False) -> None:
    """What a tool does, its parameters, and how to call it by hand."""
    rows = {row.name: row for row in _rows(config)}
    if name not in rows:
        hint = did_you_mean(name, rows, "`emberkeep tools list --all` shows them.")
        raise NoSuchEntry(f"There is no tool {name!r}: {hint}")
    row = rows[name]
    if json_:
        print(json.dumps(as_json(row), indent=2, ensure_ascii=False))
    else:
        print_tool(row)


@app.command(
    epilog="Examples: emberkeep tools run file_exists path=notes.txt, emberkeep tools run get_fact name=home"
)
@with_settings("enable_tools", "disable_tools", "tools_from", "tools_root", "data_dir", "config")
def run(
    config: Config,
    name: Name,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[JSON | KEY=VALUE ...]", help="One object, or one by one.")
    ] = None,
    yes: YesFlag = False,
    user: Annotated[str, typer.Option("--user", help="The user it runs for; memory is each user's own.")] = "",
) -> None:
    """Call a tool as a model would, and print the whole result. A dangerous one asks first."""

    async def call(box: ToolBox) -> str:
        return await _call(box, name, arguments or [], user, may_run=yes)

    text = _with_tools(config, call, whole=True)
    print(printable(text) if sys.stdout.isatty() else text)


async def _call(box: ToolBox, name: str, given: list[str], user: str, *, may_run: bool) -> str:
    """Raises EmberkeepError for whatever went wrong."""
    from emberkeep.backend.tool_loop import log_outcome

    function = box.find(name)
    if function is None and any(known.name == name for known in box.known()):
        raise EmberkeepError(f"{name} is switched off by enable_tools or disable_tools: `emberkeep config show`.")
    arguments = read_arguments(given, function.definition.parameters if function else {})
    call = ToolCall("1", name, arguments)
    target = box.target(call)
    if target is not None and target.is_dangerous and not may_run:
        ask_first(f"Run {name} with {printable(arguments)}?")
    outcome = await box.run(call, Caller(private_namespace(user)))
    log_outcome(outcome)
    if outcome.failed:
        raise EmberkeepError(printable(outcome.text.removeprefix("Error: ")))
    if outcome.remark:
        complain(printable(outcome.remark))
    return outcome.text


def _rows(config: Config) -> list[ToolRow]:
    from emberkeep.tools.toolbox import ToolPolicy

    async def list_known(box: ToolBox) -> list[ToolRow]:
        chat, server = (ToolPolicy(config.enable_tools, config.disable_tools, asks) for asks in (True, False))
        return [
            ToolRow(
                function.definition,
                function.group,
                function.is_dangerous,
                chat.takes(function),
                server.takes(function),
            )
            for function in box.known()
        ]

    return _with_tools(config, list_known)


def _with_tools(config: Config, work: Callable[[ToolBox], Awaitable[T]], *, whole: bool = False) -> T:
    """`whole`: results are not divided into pages. Raises ConfigError."""
    from emberkeep.runtime.parts import open_memory_or_none
    from emberkeep.runtime.tools import open_toolbox

    async def done() -> T:
        memory = open_memory_or_none(config)
        try:
            box = open_toolbox(config, memory=memory, asks=True, whole=whole)
            try:
                await box.start()
                return await work(box)
            finally:
                await box.close()
        finally:
            if memory is not None:
                memory.close()

    return asyncio.run(done())


# ── as a person reads tools, and writes arguments ──


def as_json(row: ToolRow) -> dict[str, Json]:
    return {
        "name": row.name,
        "group": row.group,
        "dangerous": row.is_dangerous,
        "chat": row.in_chat,
        "server": row.in_server,
        "description": row.definition.description,
        "parameters": row.definition.parameters,
    }


def gist(tool: Tool) -> str:
    """The first sentence of what a tool says about itself."""
    return f"{tool.description.partition('. ')[0].rstrip('.')}."


def print_tool(row: ToolRow) -> None:
    danger = ", dangerous" if row.is_dangerous else ""
    where = f"in chat: {row.chat}, in a server: {row.server}"
    print(f"{printable(row.name)} (group {printable(row.group)}{danger}; {where})")
    print(f"\n{printable(row.definition.description)}\n")
    print(printable(json.dumps(row.definition.parameters, indent=2, ensure_ascii=False)))
    print(f"\nExample: {printable(_example(row.definition))}")


def _example(tool: Tool) -> str:
    properties = tool.parameters.get("properties", {})
    given = {name: _value(properties.get(name, {})) for name in tool.parameters.get("required", ())}
    written = [shlex.quote(json.dumps(given, ensure_ascii=False))] if given else []
    return " ".join(["emberkeep tools run", tool.name, *written])


def _value(schema: Mapping[str, Json]) -> Json:
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("anyOf"):
        return _value(schema["anyOf"][0])
    if schema.get("type") == "integer":
        return schema.get("minimum", 1)
    return _EXAMPLES.get(str(schema.get("type")), "...")


def read_arguments(given: Sequence[str], parameters: Mapping[str, Json]) -> str:
    """An object as text. A value of `KEY=VALUE` is JSON where the tool takes no text. Raises ConfigError."""
    if len(given) == 1 and given[0].lstrip().startswith("{"):
        return given[0]
    pairs: dict[str, Json] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (name and equals):
            raise ConfigError(f"{one!r} is no argument: write KEY=VALUE, or all of them as one JSON object.")
        pairs[name] = _read(value, parameters.get("properties", {}).get(name, {}))
    return json.dumps(pairs)


def _read(value: str, schema: Mapping[str, Json]) -> Json:
    if schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
