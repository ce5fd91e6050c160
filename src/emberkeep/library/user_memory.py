"""Memory for ordinary Python: search it, tell it facts, look at saved conversations, take it along, forget it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.api.body import B, Body, Label, Name, validate
from emberkeep.api.fields import FactName, MaxConversations, MaxResults, Question, Remembered
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, InvalidField, MemoryOff
from emberkeep.memory.redaction import redact
from emberkeep.types.memory import Fact, Forgotten, Recollection, SavedConversation
from emberkeep.types.request import Json, Message, private_namespace

if TYPE_CHECKING:
    from emberkeep.memory.memory import Memory


class UserMemory:
    """Memory by user. Every method blocks and may be called from any thread.

    `user` and `namespace` are those of `chat`: what is remembered for one pair is never seen, changed or forgotten
    for another one. Raises MemoryFailed, and InvalidField with the argument's name.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def search(
        self,
        query: str,
        *,
        max_results: int = 5,
        user: str = "",
        namespace: str = "",
        conversation_id: str | None = None,
    ) -> list[Recollection]:
        """Archived turns and stored answers that fit `query`, the best first, of one conversation or of all."""
        asked = _validate(
            _SearchFields,
            query=query,
            max_results=max_results,
            user=user,
            namespace=namespace,
            conversation_id=conversation_id,
        )
        return self._memory.search(
            asked.owner, asked.query, max_results=asked.max_results, conversation=asked.conversation_id or None
        )

    def set_fact(self, name: str, value: str, *, user: str = "", namespace: str = "") -> None:
        """It replaces one of the same name."""
        told = _validate(_FactFields, name=name, value=value, user=user, namespace=namespace)
        check_fact(told.name, told.value)
        self._memory.set_fact(told.owner, told.name, told.value)

    def fact(self, name: str, *, user: str = "", namespace: str = "") -> Fact | None:
        named = _validate(_NameFields, name=name, user=user, namespace=namespace)
        return self._memory.fact(named.owner, named.name)

    def facts(self, *, user: str = "", namespace: str = "") -> list[Fact]:
        return self._memory.facts(_owner(user, namespace))

    def delete_fact(self, name: str, *, user: str = "", namespace: str = "") -> bool:
        """Returns whether there was one."""
        named = _validate(_NameFields, name=name, user=user, namespace=namespace)
        return self._memory.delete_fact(named.owner, named.name)

    def store_answer(self, question: str, answer: str, *, user: str = "", namespace: str = "") -> int:
        """Something for `search` to find, with the id that is returned. The same question replaces its answer."""
        told = _validate(_AnswerFields, question=question, answer=answer, user=user, namespace=namespace)
        return self._memory.store_answer(told.owner, told.question, told.answer)

    def conversations(self, *, user: str = "", namespace: str = "", limit: int = 50) -> list[SavedConversation]:
        """Those that were saved, the latest first, without their messages."""
        listed = _validate(_ListFields, limit=limit, user=user, namespace=namespace)
        return self._memory.conversations(listed.owner, listed.limit)

    def conversation(
        self, conversation_id: str, *, user: str = "", namespace: str = ""
    ) -> SavedConversation | None:
        named = _validate(_ConversationFields, conversation_id=conversation_id, user=user, namespace=namespace)
        return self._memory.conversation(named.owner, named.conversation_id)

    def save_messages(
        self,
        conversation_id: str,
        messages: Sequence[Message],
        *,
        model: str,
        user: str = "",
        namespace: str = "",
    ) -> None:
        """Add to a saved conversation, which begins with its first messages."""
        named = _validate(_ConversationFields, conversation_id=conversation_id, user=user, namespace=namespace)
        self._memory.save_messages(named.owner, named.conversation_id, messages, model=model)

    def replace_messages(
        self,
        conversation_id: str,
        messages: Sequence[Message],
        *,
        model: str,
        user: str = "",
        namespace: str = "",
    ) -> None:
        """Save a conversation in place of the one with that id."""
        named = _validate(_ConversationFields, conversation_id=conversation_id, user=user, namespace=namespace)
        self._memory.replace_messages(named.owner, named.conversation_id, messages, model=model)

    def forget(self, *, user: str, namespace: str = "", conversation_id: str | None = None) -> Forgotten:
        """Everything of a user, facts too, or one conversation. It is nowhere in the file afterwards."""
        if conversation_id is None:
            return self._memory.forget(_owner(user, namespace))
        named = _validate(_ConversationFields, conversation_id=conversation_id, user=user, namespace=namespace)
        return self._memory.forget(named.owner, named.conversation_id)

    def export(self, *, user: str | None = None, namespace: str = "") -> Iterator[dict[str, Json]]:
        """One object for everything that is remembered, for `import_`. Without a user: of all users."""
        return self._memory.export(_owner_or_all(user, namespace))

    def export_to(self, path: str | Path, *, user: str | None = None, namespace: str = "") -> None:
        """The same as lines of JSON in a new file. Raises EmberkeepError; an existing file is left alone."""
        write_lines(Path(path), self.export(user=user, namespace=namespace))

    def import_(self, rows: Iterable[Mapping[str, Json]]) -> int:
        """Import what was exported, each row for its own user; returns how much of it is new."""
        return self._memory.import_(rows)

    def import_from(self, path: str | Path) -> int:
        """The same from a file. Raises EmberkeepError."""
        return self.import_(read_lines(Path(path)))

    def stats(self, *, user: str | None = None, namespace: str = "") -> dict[str, Json]:
        """Without a user: of all users."""
        return self._memory.stats(_owner_or_all(user, namespace))


@contextmanager
def open_memory(config: Config) -> Iterator[UserMemory]:
    """Memory without a model; others may have it open too. Raises MemoryFailed."""
    from emberkeep.runtime import memory as configured

    memory = require_memory(configured.open_memory(config))
    try:
        yield UserMemory(memory)
    finally:
        memory.close()


def require_memory(memory: Memory | None) -> Memory:
    """Raises MemoryOff for None."""
    if memory is None:
        raise MemoryOff
    return memory


def check_fact(name: str, value: str) -> None:
    """Raises InvalidField for one that memory would refuse."""
    fact = f"{name}: {value}"
    if redact(fact) != fact:
        raise InvalidField("value", "memory does not keep secrets such as keys and passwords: leave it out.")


class _OwnerFields(Body):
    user: Label
    namespace: Label

    @property
    def owner(self) -> str:
        return private_namespace(self.user, self.namespace)


class _SearchFields(_OwnerFields):
    query: Question
    max_results: MaxResults
    conversation_id: Label | None


class _NameFields(_OwnerFields):
    name: FactName


class _FactFields(_NameFields):
    value: Remembered


class _AnswerFields(_OwnerFields):
    question: Remembered
    answer: Remembered


class _ListFields(_OwnerFields):
    limit: MaxConversations


class _ConversationFields(_OwnerFields):
    conversation_id: Name


def _validate(model: type[B], **given: object) -> B:
    return validate(model, given)


def _owner(user: str, namespace: str) -> str:
    return _validate(_OwnerFields, user=user, namespace=namespace).owner


def _owner_or_all(user: str | None, namespace: str) -> str | None:
    if user is None and namespace:
        raise InvalidField("namespace", 'goes with a user: give one ("" is everybody without a name).')
    return None if user is None else _owner(user, namespace)


# ── files with one JSON object per line ──


def write_lines(path: Path, rows: Iterable[Mapping[str, Json]]) -> None:
    """A new file that only its owner can read, whole or not at all. Raises EmberkeepError, and what `rows` raises;
    an existing file is left alone."""
    try:
        with open(path, "x", encoding="utf-8", opener=_private) as file, _whole(path):
            file.writelines(line(row) for row in rows)
            file.flush()
    except FileExistsError as error:
        raise EmberkeepError(f"{path} exists already: give another name.") from error
    except OSError as error:
        raise EmberkeepError(f"Cannot write {path}: {error.strerror or error}.") from error


def line(row: Mapping[str, Json]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> Iterator[dict[str, Json]]:
    """The file is open while it is iterated. Raises EmberkeepError."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                yield _parse_line(text, f"Line {number} of {path}")
    except UnicodeDecodeError as error:
        raise EmberkeepError(f"{path} is not valid UTF-8: give a file that was exported.") from error
    except OSError as error:
        raise EmberkeepError(f"Cannot read {path}: {error.strerror or error}.") from error


def _parse_line(text: str, where: str) -> dict[str, Json]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise EmberkeepError(f"{where} is not a JSON object: give a file that was exported.")
    return row


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
