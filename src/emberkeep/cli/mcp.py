"""`emberkeep mcp`: servers whose tools are used here, and Emberkeep as such a server for other programs."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from emberkeep.cli.common import (
    ApiKeyFlag,
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
    console,
    load_config,
)
from emberkeep.cli.mcp_table import print_server, print_servers, print_waiting, server_json
from emberkeep.cli.tables import counted
from emberkeep.config import Config
from emberkeep.errors import EmberkeepError
from emberkeep.types import private_namespace

if TYPE_CHECKING:
    from emberkeep.mcp.client import McpClients

T = TypeVar("T")

_HTTP_PORT = "8765"
"""Not that of `emberkeep serve`, which may run beside it."""

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

app = typer.Typer(
    help="Use the tools of MCP servers, and be one.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="As its table [mcp.servers.NAME] has it.")]


@app.command("list", epilog="Example: emberkeep mcp list --json")
def list_servers(json_: JsonFlag = False, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Start every server of the settings, and tell what it offers or why it does not work."""
    settled = load_config(data_dir=data_dir, config=config)

    async def states(clients: McpClients) -> list[dict[str, object]]:
        return [server_json(state) for state in clients.states()]

    found = _with_servers(settled, states) if settled.mcp else []
    if json_:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif found:
        print_servers(found)
    else:
        print("No MCP server is in the settings: add a table [mcp.servers.NAME] to emberkeep.toml.")


@app.command(epilog="Example: emberkeep mcp show time")
def show(name: Name, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """What one server offers: tools, and which of them wait for approval; prompts; resources."""

    async def shown(clients: McpClients) -> None:
        await print_server(clients, name)

    _with_servers(load_config(data_dir=data_dir, config=config), shown, name)


@app.command(epilog="Example: emberkeep mcp approve time")
def approve(name: Name, yes: YesFlag = False, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Show what is new or changed in a server's tools, and use it from now on."""

    async def approved(clients: McpClients) -> None:
        waiting = print_waiting(clients, name)
        if not waiting:
            print(f"Nothing of {name} waits for approval.")
            return
        if not yes:
            ask_first(f"Use {counted(waiting, 'tool', 'tools')} of {name} as shown?")
        clients.approve(name)
        print(f"Approved {counted(waiting, 'tool', 'tools')} of {name}.")

    _with_servers(load_config(data_dir=data_dir, config=config), approved, name)


@app.command(epilog="Examples: emberkeep mcp serve, emberkeep mcp serve --http --enable-tools files,memory")
def serve(
    http: Annotated[bool, typer.Option("--http", help="Listen on an address instead of stdin.")] = False,
    host: Annotated[str, typer.Option("--host", help="With --http: the address.")] = "127.0.0.1",
    port: Annotated[str, typer.Option("--port", "-p", help="With --http: the port; 0 takes any.")] = _HTTP_PORT,
    api_key: ApiKeyFlag = None,
    user: Annotated[str, typer.Option("--user", help="Whose memory; without it, of those without a name.")] = "",
    with_mcp: Annotated[
        bool, typer.Option("--with-mcp", help="Pass on the tools of [mcp.servers.NAME] too.")
    ] = False,
    enable_tools: EnableToolsFlag = None,
    disable_tools: DisableToolsFlag = None,
    tools_from: ToolsFromFlag = None,
    tools_root: ToolsRootFlag = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Be an MCP server: tools and memory for editors, agents and other programs. No model is loaded.

    Dangerous tools are left out unless they are enabled. Without --http the program that starts this talks to it
    over stdin and stdout; the log goes to stderr.
    """
    settled = load_config(
        host=host,
        port=port,
        api_key=api_key,
        enable_tools=enable_tools,
        disable_tools=disable_tools,
        tools_from=tools_from or None,
        tools_root=tools_root,
        data_dir=data_dir,
        config=config,
    )
    logging.basicConfig(level=settled.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s")
    _serve(settled if with_mcp else replace(settled, mcp=()), private_namespace(user), http=http)


def _serve(config: Config, owner: str, *, http: bool) -> None:
    from emberkeep.mcp.server import McpHost
    from emberkeep.runtime import open_memory, open_toolbox

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
    log.setLevel(logging.ERROR)  # why a server did not start is told by whoever shows it
    try:
        return asyncio.run(story())
    except OSError as error:
        raise EmberkeepError(f"What was approved cannot be written: {error.strerror or error}.") from error
    finally:
        log.setLevel(level)
