"""Every tool that runs in this process: ours, those in files of users, and those that packages offer at the entry
point `emberkeep.tools`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError
from emberkeep.memory.memory import Memory
from emberkeep.signals import Leaving
from emberkeep.tools.command_tool import CommandTool
from emberkeep.tools.file_tools import FileTools
from emberkeep.tools.function import ToolFunction, as_tool, is_marked, tools_of
from emberkeep.tools.http_tools import HttpTools
from emberkeep.tools.json_tools import JsonTools
from emberkeep.tools.memory_tools import memory_tools
from emberkeep.tools.toolbox import MORE

log = logging.getLogger("emberkeep.tools")

ENTRY_POINTS = "emberkeep.tools"


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


def tools_in_file(path: Path) -> list[ToolFunction]:
    """Runs the file: it is as trusted as the command that names it. Its marked functions; if none is marked, its
    public ones. Raises ConfigError."""
    found = _tools_in(_run_file(path))
    if not found:
        raise ConfigError(f"{path} has no tools: mark a function in it with @tool.")
    return found


def tools_of_packages() -> list[ToolFunction]:
    """One that is broken is in the log, and the others are there."""
    found: list[ToolFunction] = []
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            found += _read_offer(point.load())
        except Leaving:
            raise
        except (Exception, SystemExit) as error:
            log.warning("the tools of %s (%s) cannot be used: %s", point.name, point.value, _say(error))
    return found


def _read_offer(offered: Any) -> list[ToolFunction]:
    """A module, a marked function, or a function that returns tools."""
    if inspect.ismodule(offered):
        return _tools_in(offered)
    if is_marked(offered):
        return [as_tool(offered)]
    if not callable(offered):
        raise ConfigError("it is neither a module nor a function.")
    made = [one if isinstance(one, ToolFunction) else as_tool(one) for one in offered()]
    if not made:
        raise ConfigError("it returned no tools.")
    return made


def _tools_in(module: ModuleType) -> list[ToolFunction]:
    if marked := tools_of(module):
        return marked
    return [
        as_tool(value)
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def _run_file(path: Path) -> ModuleType:
    """Raises ConfigError."""
    # By where it is: two files may have the same name.
    name = f"emberkeep_tools_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is no Python file: tools come from files that end in .py.")
    if not path.exists():
        raise ConfigError(f"There is no file {path}: --tools-from names Python files.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their types up there
    try:
        spec.loader.exec_module(module)
    except Leaving:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(f"The tools of {path} cannot be used{_line(error, path)}: {_say(error)}") from error
    return module


def _line(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f" (line {error.lineno})"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f" (line {lines[-1]})" if lines else ""


def _say(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error).partition("\n")[0]
    if isinstance(error, (ConfigError, OSError)):
        return text
    return f"{type(error).__name__}{f': {text}' if text else ''}."


def _check_names(functions: Sequence[ToolFunction]) -> None:
    """Raises ConfigError: a model that calls one must not get another."""
    seen = {MORE.name}
    for function in functions:
        if function.name in seen:
            raise ConfigError(f"There are two tools {function.name}: give one another name, @tool(name=...).")
        if "__" in function.name:
            raise ConfigError(f"{function.name} looks like the tool of an MCP server: use no __ in its name.")
        seen.add(function.name)
