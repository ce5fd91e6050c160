"""Where the user's messages come from: a terminal with editing and history, or any stream of lines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from emberkeep.files import private_folder

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


def plain_lines(source: TextIO) -> Iterator[str]:
    """One message per line."""
    return (line.rstrip("\n") for line in source)


def terminal_lines(history: Path) -> Iterator[str]:
    """Messages typed at a prompt until Ctrl-D, or Ctrl-C twice. A pasted text is one message."""
    session = _session(history)
    interrupted = False
    while True:
        try:
            line = session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt:
            if interrupted:
                return
            interrupted = True
            print("Ctrl-C again or Ctrl-D quits.")
            continue
        interrupted = False
        yield line


def _session(history: Path) -> PromptSession[str]:
    from prompt_toolkit import PromptSession

    return PromptSession(history=_history(history), key_bindings=_keys())


def _history(path: Path) -> History:
    """For this session only where the file cannot be written: a chat goes on without it."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        private_folder(path.parent)
        path.touch(mode=0o600)
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys
