"""`emberkeep tools`: what a model can do here, how each tool is called, and calling one by hand."""

from __future__ import annotations

import asyncio
import difflib
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from emberkeep.cli.common import (
    ConfigFlag,
    DataDirFlag,
    DisableToolsFlag,
    EnableToolsFlag,
    JsonFlag,
    ToolsFromFlag,
    ToolsRootFlag,
    YesFlag,
    ask_first,
    complain,
    load_config,
)
from emberkeep.cli.tables import printable
from emberkeep.cli.tools_table import Row, as_json, print_tool, print_tools, read_arguments
from emberkeep.config import Config
from emberkeep.errors import EmberkeepError, NoSuchEntry
from emberkeep.types import Caller, ToolCall, private_namespace

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

app = typer.Typer(
    help="List the tools that models can call, show one, run one.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As `emberkeep tools list` has it.")]
_ALL_OUTPUT = 1 << 24


@app.command("list", epilog="Examples: emberkeep tools list, emberkeep tools list --all --json")
def list_tools(
    show_all: Annotated[bool, typer.Option("--all", help="Those that are switched off too.")] = False,
    json_: JsonFlag = False,
    enable_tools: EnableToolsFlag = None,
    disable_tools: DisableToolsFlag = None,
    tools_from: ToolsFromFlag = None,
    tools_root: ToolsRootFlag = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Every tool, its group, and whether a chat and a server use it."""
    settled = load_config(
        enable_tools=enable_tools,
        disable_tools=disable_tools,
        tools_from=tools_from,
        tools_root=tools_root,
        data_dir=data_dir,
        config=config,
    )
    rows = [row for row in _rows(settled) if show_all or row.in_chat or row.in_server]
    if json_:
        print(json.dumps([as_json(row) for row in rows], indent=2, ensure_ascii=False))
    elif rows:
        print_tools(rows)
    else:
        print("No tool is switched on: `emberkeep tools list --all` shows them.")


@app.command(epilog="Example: emberkeep tools show read_file")
def show(
    name: Name,
    json_: JsonFlag = False,
    tools_from: ToolsFromFlag = None,
    tools_root: ToolsRootFlag = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """What a tool does, its parameters, and how to call it by hand."""
    settled = load_config(tools_from=tools_from, tools_root=tools_root, data_dir=data_dir, config=config)
    rows = {row.name: row for row in _rows(settled)}
    if name not in rows:
        near = difflib.get_close_matches(name, rows, n=1)
        hint = f"did you mean {near[0]}?" if near else "`emberkeep tools list --all` shows them."
        raise NoSuchEntry(f"There is no tool {name!r}: {hint}")
    row = rows[name]
    if json_:
        print(json.dumps(as_json(row), indent=2, ensure_ascii=False))
    else:
        print_tool(row)


@app.command(
    epilog="Examples: emberkeep tools run file_exists path=notes.txt, emberkeep tools run get_fact name=home"
)
def run(
    name: Name,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[JSON | KEY=VALUE ...]", help="One object, or one by one.")
    ] = None,
    yes: YesFlag = False,
    user: Annotated[str, typer.Option("--user", help="For whom; memory is each user's own.")] = "",
    enable_tools: EnableToolsFlag = None,
    disable_tools: DisableToolsFlag = None,
    tools_from: ToolsFromFlag = None,
    tools_root: ToolsRootFlag = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Call a tool as a model would, and print the whole result. A dangerous one asks first."""
    settled = load_config(
        enable_tools=enable_tools,
        disable_tools=disable_tools,
        tools_from=tools_from,
        tools_root=tools_root,
        data_dir=data_dir,
        config=config,
    )

    async def called(box: ToolBox) -> str:
        return await _called(box, name, arguments or [], user, may_run=yes)

    text = _with_tools(replace(settled, tool_output=_ALL_OUTPUT), called)
    print(printable(text) if sys.stdout.isatty() else text)


async def _called(box: ToolBox, name: str, given: list[str], user: str, *, may_run: bool) -> str:
    """Raises EmberkeepError for whatever went wrong."""
    function = box.find(name)
    if function is None and any(known.name == name for known in box.known()):
        raise EmberkeepError(f"{name} is switched off by enable_tools or disable_tools: `emberkeep config show`.")
    arguments = read_arguments(given, function.definition.parameters if function else {})
    call = ToolCall("1", name, arguments)
    target = box.target(call)
    if target is not None and target.is_dangerous and not may_run:
        ask_first(f"Run {name} with {printable(arguments)}?")
    outcome = await box.run(call, Caller(private_namespace(user)))
    if outcome.failed:
        raise EmberkeepError(printable(outcome.text.removeprefix("Error: ")))
    if outcome.remark:
        complain(printable(outcome.remark))
    return outcome.text


def _rows(config: Config) -> list[Row]:
    from emberkeep.tools.toolbox import Choice

    async def known(box: ToolBox) -> list[Row]:
        chat, server = (Choice(config.enable_tools, config.disable_tools, asks) for asks in (True, False))
        return [
            Row(
                function.definition,
                function.group,
                function.is_dangerous,
                chat.takes(function),
                server.takes(function),
            )
            for function in box.known()
        ]

    return _with_tools(config, known)


def _with_tools(config: Config, work: Callable[[ToolBox], Awaitable[T]]) -> T:
    """Raises ConfigError."""
    from emberkeep.runtime.remembering import open_memory_or_none
    from emberkeep.runtime.tools import open_toolbox

    async def done() -> T:
        memory = open_memory_or_none(config)
        try:
            box = open_toolbox(config, memory=memory, asks=True)
            try:
                await box.start()
                return await work(box)
            finally:
                await box.close()
        finally:
            if memory is not None:
                memory.close()

    return asyncio.run(done())
