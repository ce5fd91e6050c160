"""Recorded conversations: of people with a model, and of agents.

A file is a JSON list, has one object per line, or is one object. Each is a conversation:

    {"messages": [{"role": "system", "content": "..."}, ...], "tools": [...]}       OpenAI's form
    [{"role": "user", "content": "..."}, ...]                                       the same without more
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}    ShareGPT's form
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

_TOLD = ("user", "tool")
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Of ShareGPT; others mean the same there as elsewhere."""
_WRONG = "give a JSON object with messages or conversations, a list of these, or one in each line."


@dataclass(frozen=True, slots=True)
class Session:
    """What was recorded."""

    name: str
    system: str
    told: tuple[str, ...]
    """What the model is told in each turn: by the user, or as the result of a tool."""
    tools: tuple[Json, ...] = ()
    answers: tuple[str, ...] = ()
    """What it answered to each then; one less than `told` where the recording ends before the answer."""


def read_sessions(path: Path) -> list[Session]:
    """Those of a file, or of every `*.json` in a folder. Those in which nobody asks are left out. Blocks. Raises
    EmberkeepError, OSError."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    sessions = [session for file in files for session in _of_file(file) if session.told]
    if not sessions:
        raise EmberkeepError(f"{path} has no recorded session in which somebody asks: give one that has some.")
    return sessions


def read_entries(path: Path) -> list[Json]:
    """The objects of a JSON list, of a file with one per line, or the only one. Raises EmberkeepError, OSError."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = _lines(path, text)
    return whole if isinstance(whole, list) else [whole]


def _lines(path: Path, text: str) -> list[Json]:
    entries = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                entries.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                wrong = f"{path.name}, line {number} is not JSON, and the file as a whole is not"
                raise EmberkeepError(f"{wrong} ({error}): give JSON, or JSON lines.") from error
    return entries


def session_of(entry: Json, name: str) -> Session:
    """Raises KeyError, TypeError, ValueError, AttributeError for what is none."""
    recorded = {"messages": entry} if isinstance(entry, list) else entry
    said = recorded["messages"] if "messages" in recorded else recorded["conversations"]
    system, told, answers = "", list[str](), list[str]()
    for role, text in [_said(message) for message in said]:
        if role in _TOLD and len(told) > len(answers):
            # Several messages before the model speaks are one, and so are several of its own.
            told[-1] += f"\n\n{text}"
        elif role in _TOLD:
            told.append(text)
        elif role == "assistant" and len(told) > len(answers):
            answers.append(text)
        elif role == "assistant" and answers:
            answers[-1] += f"\n\n{text}"
        elif role in ("system", "developer"):
            system += f"\n\n{text}" if system else text
    return Session(
        str(recorded.get("name") or recorded.get("id") or name),
        system,
        tuple(told),
        tuple(recorded.get("tools") or ()),
        tuple(answers),
    )


def message_text(message: Json) -> str:
    """What a message says, the calls in it as JSON. Raises KeyError, TypeError, AttributeError."""
    if isinstance(message, str):
        return message
    content = message.get("content", message.get("value")) or ""
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part.get("type") == "text")
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join([content, *calls] if content else calls)


def _said(message: Mapping[str, Json]) -> tuple[str, str]:
    role = str(message["role"] if "role" in message else message["from"])
    return _ROLES.get(role, role), message_text(message)


def _of_file(file: Path) -> list[Session]:
    entries = read_entries(file)
    if entries and all(isinstance(entry, dict) and ("role" in entry or "from" in entry) for entry in entries):
        entries = [entries]
    try:
        if not entries:
            raise ValueError("it is empty")
        names = [file.stem] if len(entries) == 1 else [f"{file.stem} {n}" for n in range(1, len(entries) + 1)]
        return [session_of(entry, name) for entry, name in zip(entries, names, strict=True)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EmberkeepError(f"{file} is no recorded session: {_WRONG}") from error
