"""The commands inside a chat: a name, a line of help, a function of the chat and the rest of the line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from emberkeep.cli.conversation import Conversation
from emberkeep.cli.memory_table import NOTHING_FOUND, told
from emberkeep.types import Json, Recollection


class Chat(Protocol):
    @property
    def conversation(self) -> Conversation: ...

    def stats(self) -> Mapping[str, Json]: ...

    def search(self, query: str) -> Sequence[Recollection]: ...


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
        return f"There is no command /{name}: /help lists them; a message may begin with a slash after a space."
    return command.run(chat, argument.strip())


def _help(chat: Chat, argument: str) -> str:
    commands = [f"{command.usage:<16} {command.help}" for command in COMMANDS.values()]
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
    "clear": Command("/clear", "begin a new conversation", _clear),
    "quit": Command("/quit", "leave", _quit),
}
