"""The commands inside a chat: a name, a line of help, a function of the chat and the rest of the line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from emberkeep.cli.chat_history import ChatHistory
from emberkeep.cli.console import align
from emberkeep.cli.memory import NOTHING_FOUND, describe
from emberkeep.cli.tools import gist
from emberkeep.errors import EmberkeepError
from emberkeep.types.memory import Recollection
from emberkeep.types.request import Json, Message
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.library.tool_session import ToolSession
    from emberkeep.mcp.answers import McpPrompt


class Chat(Protocol):
    @property
    def conversation(self) -> ChatHistory: ...

    def stats(self) -> Mapping[str, Json]: ...

    def search(self, query: str) -> Sequence[Recollection]: ...

    @property
    def acting(self) -> ToolSession | None: ...

    def say(self, *messages: Message) -> None: ...


class Quit(Exception):
    """The user has had enough."""


@dataclass(frozen=True, slots=True)
class Command:
    usage: str
    help: str
    run: Callable[[Chat, str], str]
    """Returns what to tell the user. Raises EmberkeepError."""


def run_command(chat: Chat, line: str) -> str:
    """Carry out a line beginning with a slash. Returns what to tell the user. Raises Quit, EmberkeepError."""
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        for prompt in _prompts(chat):
            if prompt.name == name:
                return _prompt(chat, prompt, argument)
        return f"There is no command /{name}: /help lists them; a message may begin with a slash after a space."
    return command.run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> str:
    commands = align([(command.usage, command.help) for command in COMMANDS.values()])
    prompts = align([(usage_of(prompt), prompt.description) for prompt in _prompts(chat)])
    keys = ["Alt-Enter begins a new line; Ctrl-C stops an answer; Ctrl-D quits."]
    return "\n".join(commands + prompts + keys)


def _stats(chat: Chat, argument: str) -> str:
    return "\n".join(_flat(chat.stats()))


def _flat(stats: Mapping[str, Json], prefix: str = "") -> Iterator[str]:
    for key, value in stats.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}: {value:,}" if type(value) is int else f"{prefix}{key}: {value}"


def _system(chat: Chat, argument: str) -> str:
    if argument:
        chat.conversation.system = argument
        return "The system message is set; it holds from the next message on."
    return chat.conversation.system or "There is no system message: /system TEXT sets one."


def _save(chat: Chat, argument: str) -> str:
    if not argument:
        return "Say where: /save talk.md or /save talk.json."
    path = Path(argument).expanduser()
    chat.conversation.save(path)
    return f"Saved {len(chat.conversation.messages)} messages to {path}."


def _memory(chat: Chat, argument: str) -> str:
    if not argument:
        return "Say what to look for: /memory the name of my boat."
    found = chat.search(argument)
    return "\n".join(map(describe, found)) or NOTHING_FOUND


def _tools(chat: Chat, argument: str) -> str:
    if chat.acting is None:
        return "This chat has no tools: begin it with --tools on."
    from emberkeep.tools.toolbox import ALL, ToolPolicy

    named = ToolPolicy((argument or ALL,))
    rows = [
        (function.name, function.group, "asks first" if function.is_dangerous else "", gist(function.definition))
        for function in chat.acting.functions()
        if named.takes(function)
    ]
    servers = [
        f"{state.name}: {state.status}. {state.reason}".rstrip()
        for state in chat.acting.servers()
        if argument in ("", "mcp", state.name)
    ]
    nothing = f"There is no tool, group or server {argument!r}: /tools lists them." if argument else "No tools."
    return "\n".join(align(rows) + servers) or nothing


def _prompts(chat: Chat) -> Sequence[McpPrompt]:
    return chat.acting.prompts() if chat.acting else ()


def usage_of(prompt: McpPrompt) -> str:
    arguments = (f"{one.name}=…" if one.is_required else f"[{one.name}=…]" for one in prompt.arguments)
    return " ".join([f"/{prompt.name}", *arguments])


def _prompt(chat: Chat, prompt: McpPrompt, line: str) -> str:
    """Fill a server's prompt and say it."""
    assert chat.acting is not None
    chat.say(chat.acting.prompt(prompt.name, _arguments(prompt, line)))
    return ""


def _arguments(prompt: McpPrompt, line: str) -> dict[str, str]:
    """One alone needs no name. Raises EmberkeepError."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise EmberkeepError(f"{usage_of(prompt)}: {error}.") from error
    if len(prompt.arguments) == 1 and "=" not in line and words:
        return {prompt.arguments[0].name: " ".join(words)}
    given = dict(word.partition("=")[::2] for word in words)
    required = {one.name for one in prompt.arguments if one.is_required}
    if not required <= set(given) <= {one.name for one in prompt.arguments}:
        raise EmberkeepError(f"These arguments do not fit: write {usage_of(prompt)}.")
    return given


def _clear(chat: Chat, argument: str) -> str:
    chat.conversation.clear()
    return "A new conversation begins."


def _quit(chat: Chat, argument: str) -> str:
    raise Quit


COMMANDS: Mapping[str, Command] = {
    "help": Command("/help", "this list", _help),
    "stats": Command("/stats", "what was evaluated, reused and stored", _stats),
    "system": Command("/system [TEXT]", "show or set the system message", _system),
    "save": Command("/save PATH", "write the conversation as .md or .json", _save),
    "memory": Command("/memory QUERY", "search what has left the context, now or before", _memory),
    "tools": Command("/tools [NAME]", "what the model can do here", _tools),
    "clear": Command("/clear", "begin a new conversation", _clear),
    "quit": Command("/quit", "leave", _quit),
}
