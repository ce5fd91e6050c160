"""The commands inside a chat: a name, a line of help, a function of the chat and the rest of the line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from emberkeep.cli.conversation import Conversation
from emberkeep.cli.memory_table import NOTHING_FOUND, told
from emberkeep.errors import EmberkeepError
from emberkeep.types import Json, Message, Recollection

if TYPE_CHECKING:
    from emberkeep.library.acting import Acting
    from emberkeep.mcp.listing import McpPrompt


class Chat(Protocol):
    @property
    def conversation(self) -> Conversation: ...

    def stats(self) -> Mapping[str, Json]: ...

    def search(self, query: str) -> Sequence[Recollection]: ...

    @property
    def acting(self) -> Acting | None: ...

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
    prompts = chat.acting.prompts() if command is None and chat.acting else []
    if any(prompt.name == name for prompt in prompts):
        return _prompt(chat, next(prompt for prompt in prompts if prompt.name == name), argument)
    if command is None:
        return f"There is no command /{name}: /help lists them; a message may begin with a slash after a space."
    return command.run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> str:
    commands = [f"{command.usage:<16} {command.help}" for command in COMMANDS.values()]
    prompts = chat.acting.prompts() if chat.acting else []
    commands += [f"{usage_of(prompt):<16} {prompt.description}" for prompt in prompts]
    keys = ["Alt-Enter begins a new line; Ctrl-C stops an answer; Ctrl-D quits."]
    return "\n".join(commands + keys)


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
    return "\n".join(map(told, found)) or NOTHING_FOUND


def _tools(chat: Chat, argument: str) -> str:
    if chat.acting is None:
        return "This chat has no tools: begin it with --tools on."
    found = [function for function in chat.acting.functions() if argument in ("", function.group, function.name)]
    lines = [
        f"{function.name:<24} {function.group:<8} {'asks first' if function.is_dangerous else '':<11}"
        f"{function.definition.description.partition('. ')[0]}"
        for function in found
    ]
    lines += [f"{state.name}: {state.status}. {state.reason}".rstrip() for state in chat.acting.servers()]
    return "\n".join(lines) or "There is no such tool or group: /tools lists them."


def usage_of(prompt: McpPrompt) -> str:
    return " ".join([f"/{prompt.name}", *(f"{argument.name}=…" for argument in prompt.arguments)])


def _prompt(chat: Chat, prompt: McpPrompt, line: str) -> str:
    """Fill a server's prompt and say it; one argument needs no name."""
    assert chat.acting is not None
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise EmberkeepError(f"{usage_of(prompt)}: {error}.") from error
    if len(prompt.arguments) == 1 and "=" not in line and words:
        given = {prompt.arguments[0].name: " ".join(words)}
    else:
        given = dict(word.partition("=")[::2] for word in words)
    chat.say(*chat.acting.prompt(prompt.name, given))
    return ""


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
    "tools": Command("/tools [GROUP]", "what the model can do here", _tools),
    "clear": Command("/clear", "begin a new conversation", _clear),
    "quit": Command("/quit", "leave", _quit),
}
