"""A conversation in the terminal: its messages, written to a file, saved turn by turn, and found again."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.cli.console import ago, complain, plural, show_table
from emberkeep.cli.model_setup import install_model
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, MemoryOff, ModelNotFound, NoSuchEntry
from emberkeep.types.memory import Recollection, SavedConversation
from emberkeep.types.request import Message

if TYPE_CHECKING:
    from emberkeep.library.emberkeep import Emberkeep
    from emberkeep.library.user_memory import UserMemory

LATEST = "latest"
LISTED = 50
ABBREVIATED = 1000
"""So many of the latest conversations are found by the beginning of their id."""

_RECAPPED = 4
_LONGEST = 600


class ChatHistory:
    def __init__(self, system: str = "", turns: Sequence[Message] = (), id: str | None = None) -> None:
        self.id = id or _new_id()
        self.system = system
        self._turns = list(turns)

    @classmethod
    def resume(cls, saved: SavedConversation, system: str = "") -> ChatHistory:
        """With the system message that it had, unless another one is given."""
        first = saved.messages[0] if saved.messages else None
        if first is None or first.role != "system":
            return cls(system, saved.messages, saved.id)
        return cls(system or first.content, saved.messages[1:], saved.id)

    @property
    def messages(self) -> Sequence[Message]:
        system = [Message("system", self.system)] if self.system else []
        return [*system, *self._turns]

    @property
    def turns(self) -> Sequence[Message]:
        return self._turns

    def add(self, *messages: Message) -> None:
        self._turns += messages

    def clear(self) -> None:
        """From now on this is another conversation, with the same system message."""
        self.id = _new_id()
        self._turns.clear()

    def save(self, path: Path) -> None:
        """As `write_messages`."""
        if not self._turns:
            raise EmberkeepError("There is nothing to save yet: say something first.")
        write_messages(self.messages, path)


def write_messages(messages: Sequence[Message], path: Path) -> None:
    """Write a new .md or .json file. Raises EmberkeepError; an existing file is left alone."""
    written = {".md": _markdown, ".json": _json}.get(path.suffix)
    if written is None:
        raise EmberkeepError(f"Cannot write {path}: give a name that ends in .md or .json.")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(written(messages))
    except FileExistsError as error:
        raise EmberkeepError(f"{path} exists already: give another name.") from error
    except OSError as error:
        raise EmberkeepError(f"Cannot write {path}: {error.strerror or error}.") from error


def _new_id() -> str:
    return secrets.token_hex(6)


def _json(messages: Sequence[Message]) -> str:
    from emberkeep.api.openai_chat import message_json

    return json.dumps({"messages": [message_json(m) for m in messages]}, indent=2, ensure_ascii=False) + "\n"


def _markdown(messages: Sequence[Message]) -> str:
    return "\n".join(map(_section, messages))


def _section(message: Message) -> str:
    calls = [f"Calls `{call.name}`:\n\n{_fence(call.arguments)}" for call in message.tool_calls]
    content = _fence(message.content) if message.role == "tool" else message.content
    head = f"## {message.role}" + (f" ({message.name})" if message.name else "")
    return "\n\n".join(part for part in (head, content, *calls) if part) + "\n"


def _fence(text: str) -> str:
    """A block of code, whatever fences the text has."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 0)
    return f"{fence}\n{text}\n{fence}"


# ── saved, and found again ──


class Journal:
    """What a chat remembers. `memory` is None where nothing can be remembered."""

    def __init__(self, memory: UserMemory | None, model: str = "", *, is_saving: bool = True) -> None:
        self._memory = memory
        self._model = model
        self._is_saving = is_saving
        self._saved_id = ""
        self._saved: Sequence[Message] = ()
        self._has_warned = False

    def knows(self, saved: SavedConversation) -> None:
        """So much of a conversation that goes on is saved already."""
        self._saved_id, self._saved = saved.id, saved.messages

    def save(self, conversation: ChatHistory) -> None:
        """Blocks until it is on disk. The first failure is a warning, and later turns bring what is missing."""
        if self._memory is None or not self._is_saving:
            return
        try:
            self._save(self._memory, conversation)
        except EmberkeepError as error:
            if not self._has_warned:
                complain(f"This conversation is not saved: {error}")
            self._has_warned = True

    def search(self, query: str) -> list[Recollection]:
        """Raises MemoryFailed."""
        if self._memory is None:
            raise MemoryOff
        return self._memory.search(query)

    def _save(self, memory: UserMemory, conversation: ChatHistory) -> None:
        messages = conversation.messages
        known = self._saved if conversation.id == self._saved_id else ()
        if list(messages[: len(known)]) == list(known):
            memory.save_messages(conversation.id, messages[len(known) :], model=self._model)
        else:  # the system message is another one
            memory.replace_messages(conversation.id, messages, model=self._model)
        self._saved_id, self._saved = conversation.id, messages


def open_journal(llm: Emberkeep, config: Config, *, is_saving: bool) -> Journal:
    """In the memory of a loaded model. Without one a chat goes on; that it could not be opened has been said."""
    from emberkeep.runtime.served_models import needs_local

    try:
        memory = llm.memory
    except MemoryOff:
        memory = None
    # What runs elsewhere is no model to load when the conversation goes on.
    model = _lasting_name(config) if needs_local(config) else ""
    return Journal(memory, model, is_saving=is_saving)


def find_saved(config: Config, wanted: str) -> SavedConversation:
    """The latest, or the one whose id begins so. Raises NoSuchEntry, MemoryFailed."""
    from emberkeep.library.user_memory import open_memory

    with open_memory(config) as memory:
        saved = memory.conversation(wanted)
        if saved is None:
            saved = memory.conversation(_full_id(memory.conversations(limit=ABBREVIATED), wanted))
    if saved is None:
        raise NoSuchEntry(f"The conversation {wanted!r} has just been removed.")
    return saved


def list_saved(config: Config) -> None:
    from emberkeep.library.user_memory import open_memory

    with open_memory(config) as memory:
        listed = memory.conversations(limit=LISTED + 1)
    if not listed:
        print("No conversation is saved here yet: `emberkeep chat` begins one.")
        return
    now = time.time()
    rows = (
        (saved.id, ago(now - saved.updated), f"{saved.message_count:,}", saved.title, Path(saved.model).name)
        for saved in listed[:LISTED]
    )
    show_table(("id", "last", "messages", "title", "model"), rows)
    older = f" These are the latest {LISTED}." if len(listed) > LISTED else ""
    print(f"\n`emberkeep chat --continue ID` goes on with one; the beginning of its id is enough.{older}")


def export_saved(config: Config, wanted: str, path: Path) -> None:
    saved = find_saved(config, wanted)
    write_messages(saved.messages, path)
    print(f"Saved {plural(len(saved.messages), 'message', 'messages')} to {path}.")


def with_its_model(config: Config, saved: SavedConversation) -> Config:
    """With the model of a conversation, which is pulled if it can be; as it is where that model is gone, or
    what answers runs elsewhere."""
    from emberkeep.runtime.served_models import needs_local

    if not needs_local(config):
        return config
    wanted = replace(config, model=saved.model or config.model)
    try:
        install_model(wanted)
    except ModelNotFound:
        return config
    return wanted


def is_same_model(config: Config, saved: SavedConversation) -> bool:
    return saved.model in ("", _lasting_name(config))


def _lasting_name(config: Config) -> str:
    from emberkeep.models.library import ModelLibrary

    return ModelLibrary(config.data_dir / "models").lasting_name(config.local_model)


def recap(turns: Sequence[Message]) -> str:
    """The end of a conversation, for a user who comes back to it."""
    shown = [message for message in turns if message.content and message.role != "tool"]
    lines = [f"> {_shorten(m.content)}" if m.role == "user" else _shorten(m.content) for m in shown[-_RECAPPED:]]
    return "\n".join(["…", *lines] if len(shown) > _RECAPPED else lines)


def _full_id(known: Sequence[SavedConversation], wanted: str) -> str:
    if wanted == LATEST:
        if not known:
            raise NoSuchEntry("No conversation is saved here yet: `emberkeep chat` begins one.")
        return known[0].id
    found = [saved.id for saved in known if saved.id.startswith(wanted)]
    if not found:
        raise NoSuchEntry(f"There is no conversation {wanted!r}: `emberkeep chat --list` lists them.")
    if len(found) > 1:
        raise EmberkeepError(f"{len(found)} conversations begin with {wanted!r}: give more of the id.")
    return found[0]


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
