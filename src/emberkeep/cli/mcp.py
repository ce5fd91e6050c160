"""`emberkeep mcp`: servers whose tools are used here, and Emberkeep as such a server for other programs."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from textwrap import indent
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from emberkeep.cli.commands import JsonFlag, YesFlag, command_group, with_settings
from emberkeep.cli.console import ask_first, complain, console, plural, printable, show_table
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError
from emberkeep.logs import begin_logging, is_verbose
from emberkeep.types.lineage import private_namespace
from emberkeep.types.request import Json

if TYPE_CHECKING:
    from emberkeep.mcp.answers import ListedTool, McpPrompt
    from emberkeep.mcp.client import McpClients, ServerState

T = TypeVar("T")

_HTTP_PORT = "8765"
"""Not that of `emberkeep serve`, which may run beside it."""
_APPROVED = "approved"

EXAMPLES = """\b
Examples:
  emberkeep mcp list                           every server of the settings, and whether it works
  emberkeep mcp show time                      its tools, prompts and resources
  emberkeep mcp approve time                   use its tools as they are now
  emberkeep mcp serve                          our tools and memory, for a program that starts this
  emberkeep mcp serve --http                   the same at http://127.0.0.1:8765/mcp

\b
Servers are tables in emberkeep.toml:
  [mcp.servers.time]
  command = ["mcp-server-time"]
  trusted = true                               its tools run without asking; or a list of their names
"""

app = command_group("Use the tools of MCP servers, and be one.", EXAMPLES)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As its table [mcp.servers.NAME] has it.")]


@app.command("list", epilog="Example: emberkeep mcp list --json")
@with_settings("data_dir", "config")
def list_servers(config: Config, json_: JsonFlag = False) -> None:
    """Start every server of the settings, and tell what it offers or why it does not work."""

    async def states(clients: McpClients) -> list[dict[str, object]]:
        return [server_json(state) for state in clients.states()]

    found = _with_servers(config, states) if config.mcp else []
    if json_:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif found:
        show_table(("server", "status", "tools", "prompts", ""), map(_cells, found))
    else:
        print("No MCP server is in the settings: add a table [mcp.servers.NAME] to emberkeep.toml.")


@app.command("show", epilog="Example: emberkeep mcp show time")
@with_settings("data_dir", "config")
def show_server(config: Config, name: Name) -> None:
    """What one server offers: tools, and which of them wait for approval; prompts; resources."""

    _with_servers(config, lambda clients: print_server(clients, name), name)


@app.command(epilog="Example: emberkeep mcp approve time")
@with_settings("data_dir", "config")
def approve(config: Config, name: Name, yes: YesFlag = False) -> None:
    """Show what is new or changed in a server's tools, and use it from now on."""

    async def approve_tools(clients: McpClients) -> None:
        waiting = print_waiting(clients, name)
        if not waiting:
            print(f"Nothing of {name} waits for approval.")
            return
        if not yes:
            ask_first(f"Use {plural(waiting, 'tool', 'tools')} of {name} as shown?")
        clients.approve(name)
        print(f"Approved {plural(waiting, 'tool', 'tools')} of {name}.")

    _with_servers(config, approve_tools, name)


@app.command(epilog="Examples: emberkeep mcp serve, emberkeep mcp serve --http --enable-tools files,memory")
@with_settings(
    *("host", "port", "api_key", "user", "with_mcp"),
    *("enable_tools", "disable_tools", "tools_from", "tools_root", "data_dir", "config"),
)
def serve(
    config: Config,
    http: Annotated[bool, typer.Option("--http", help="Listen on an address instead of stdin.")] = False,
    host: Annotated[str, typer.Option("--host", help="With --http: the address.")] = "127.0.0.1",
    port: Annotated[str, typer.Option("--port", "-p", help="With --http: the port; 0 takes any.")] = _HTTP_PORT,
    user: Annotated[str, typer.Option("--user", help="Whose memory; without it, of those without a name.")] = "",
    with_mcp: Annotated[
        bool, typer.Option("--with-mcp", help="Pass on the tools of [mcp.servers.NAME] too.")
    ] = False,
) -> None:
    """Be an MCP server: tools and memory for editors, agents and other programs. No model is loaded.

    Dangerous tools are left out unless they are enabled. Without --http the program that starts this talks to it
    over stdin and stdout; the log goes to stderr.
    """
    begin_logging(config.log_level, is_server=True)
    _serve(config if with_mcp else replace(config, mcp=()), private_namespace(user), http=http)


def _serve(config: Config, owner: str, *, http: bool) -> None:
    from emberkeep.mcp.server import McpHost
    from emberkeep.runtime.parts import open_memory
    from emberkeep.runtime.tools import open_toolbox

    memory = open_memory(config)
    try:
        host = McpHost(open_toolbox(config, memory=memory, asks=False), memory, owner)
        if http:
            from emberkeep.server.lifecycle import serve_mcp

            serve_mcp(host, config)
        else:
            if sys.stdin.isatty():
                complain("This speaks MCP with the program that starts it: --http listens instead. Ctrl-C stops.")
            host.serve_stdio()
    finally:
        if memory is not None:
            memory.close()


def _with_servers(config: Config, use: Callable[[McpClients], Awaitable[T]], only: str | None = None) -> T:
    """Starts the servers, or `only` one, and stops them again. Raises EmberkeepError."""
    from emberkeep.mcp.client import open_clients

    async def story() -> T:
        clients = open_clients(config)
        try:
            with console(stderr=True).status("Starting MCP servers ..."):
                await clients.start_wholly(only)
            return await use(clients)
        finally:
            await clients.close()

    log = logging.getLogger("emberkeep.mcp")
    level = log.level
    if not is_verbose():
        log.setLevel(logging.ERROR)  # the command itself tells why a server did not start
    try:
        return asyncio.run(story())
    except OSError as error:
        raise EmberkeepError(f"What was approved cannot be written: {error.strerror or error}.") from error
    finally:
        log.setLevel(level)


# ── as a person reads servers ──


def server_json(state: ServerState) -> dict[str, Json]:
    return {
        "name": state.name,
        "status": str(state.status),
        "reason": state.reason,
        "about": state.about,
        "tools": {name: str(standing) for name, standing in state.tools.items()},
        "prompts": state.prompts,
    }


def _cells(server: dict[str, Json]) -> tuple[str, ...]:
    waiting = sum(standing != _APPROVED for standing in server["tools"].values())
    remark = f"{waiting} to approve" if waiting else server["reason"] or server["about"]
    return server["name"], server["status"], str(len(server["tools"])), str(server["prompts"]), remark


async def print_server(clients: McpClients, name: str) -> None:
    """Raises NoSuchEntry, and EmberkeepError where the server does not work."""
    _check(clients, name)
    _print_tools(clients, name)
    prompts = [(one.name, _arguments(one), _line(one.description)) for one in clients.prompts()]
    resources = [
        (found["uri"], found.get("type", ""), _line(found.get("description", found["name"])))
        for found in await clients.resources(name)
    ]
    show_table(("prompt", "arguments", ""), prompts)
    show_table(("resource", "type", ""), resources)


def _arguments(prompt: McpPrompt) -> str:
    return ", ".join(one.name if one.is_required else f"[{one.name}]" for one in prompt.arguments)


def print_waiting(clients: McpClients, name: str) -> int:
    """The tools that are new or changed, all that models are told of them; returns how many.

    Raises as `print_server`.
    """
    _check(clients, name)
    standings = _standings(clients, name)
    waiting = [tool for tool in clients.tools(name) if standings[tool.name] != _APPROVED]
    for tool in waiting:
        definition = tool.definition
        parameters = json.dumps(definition.parameters, indent=2, ensure_ascii=False)
        remarks = [standings[tool.name], _runs(clients, name, tool), _claim(tool)]
        print(f"{definition.name} ({', '.join(filter(None, remarks))})")
        print(printable(indent(f"{definition.description}\n{parameters}", "  ")), end="\n\n")
    return len(waiting)


def _print_tools(clients: McpClients, name: str) -> None:
    standings = _standings(clients, name)
    rows = (
        (
            *(tool.definition.name, standings[tool.name], _runs(clients, name, tool), _claim(tool)),
            _line(tool.definition.description),
        )
        for tool in clients.tools(name)
    )
    show_table(("tool", "", "runs", "claims", ""), rows)


def _runs(clients: McpClients, name: str, tool: ListedTool) -> str:
    return "trusted" if clients.trusts(name, tool.name) else "asks first"


def _claim(tool: ListedTool) -> str:
    """What it says of itself, unchecked."""
    return "says that it only reads" if tool.is_read_only else ""


def _standings(clients: McpClients, name: str) -> dict[str, str]:
    tools = next(state.tools for state in clients.states() if state.name == name)
    return {tool: str(standing) for tool, standing in tools.items()}


def _check(clients: McpClients, name: str) -> None:
    clients.tools(name)
    state = next(state for state in clients.states() if state.name == name)
    if state.reason:
        raise EmberkeepError(f"{name} does not work: {state.reason}.")


def _line(text: str) -> str:
    return text.strip().partition("\n")[0]
