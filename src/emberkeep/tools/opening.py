"""Every tool that runs in this process: ours, and those of users."""

from __future__ import annotations

from collections.abc import Sequence

from emberkeep.config import Config
from emberkeep.errors import ConfigError
from emberkeep.memory.memory import Memory
from emberkeep.tools.base import ToolFunction, tools_of
from emberkeep.tools.command import CommandTool
from emberkeep.tools.files import FileTools
from emberkeep.tools.http import HttpTools
from emberkeep.tools.jsons import JsonTools
from emberkeep.tools.pages import MORE
from emberkeep.tools.remembering import memory_tools
from emberkeep.tools.user import tools_in_file, tools_of_packages


def built_in(config: Config, memory: Memory | None) -> list[ToolFunction]:
    """Without a memory there are none over it. Runs users' files. Raises ConfigError."""
    ours = [
        FileTools(config.tools_root),
        CommandTool(config.tools_root, config.tool_timeout_s),
        HttpTools(config.http_private),
        JsonTools(),
    ]
    found = [function for owner in ours for function in tools_of(owner)]
    if memory is not None:
        found += memory_tools(memory)
    found += tools_of_packages()
    for path in config.tools_from:
        found += tools_in_file(path)
    _check_names(found)
    return found


def _check_names(functions: Sequence[ToolFunction]) -> None:
    """Raises ConfigError: who calls one must not get another."""
    seen = {MORE.name}
    for function in functions:
        if function.name in seen:
            raise ConfigError(f"There are two tools {function.name}: give one another name, @tool(name=...).")
        if "__" in function.name:
            raise ConfigError(f"{function.name} looks like the tool of an MCP server: use no __ in its name.")
        seen.add(function.name)
