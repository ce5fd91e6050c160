"""Memory for ordinary Python: search it, tell it facts, look at saved conversations, take it along, forget it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.api.body import Body, Label, Name, validate
from emberkeep.api.kinds import FactName, MaxConversations, MaxResults, Question, Remembered
from emberkeep.config.settings import Config
from emberkeep.errors import InvalidField, MemoryOff
from emberkeep.files import read_lines, write_lines
from emberkeep.types.lineage import private_namespace
from emberkeep.types.memory import Fact, Forgotten, Recollection, SavedConversation
from emberkeep.types.request import Json, Message

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
        # No conversation may be called "": it is as good as none.
        within = {} if conversation_id in (None, "") else {"conversation_id": conversation_id}
        checked = _check(query=query, max_results=max_results, user=user, namespace=namespace, **within)
        conversation = checked.conversation_id or None
        return self._memory.search(
            checked.owner, checked.query, max_results=checked.max_results, conversation=conversation
        )

    def set_fact(self, name: str, value: str, *, user: str = "", namespace: str = "") -> None:
        """It replaces one of the same name."""
        checked = _check(name=name, value=value, user=user, namespace=namespace)
        self._memory.set_fact(checked.owner, checked.name, checked.value)

    def fact(self, name: str, *, user: str = "", namespace: str = "") -> Fact | None:
        checked = _check(name=name, user=user, namespace=namespace)
        return self._memory.fact(checked.owner, checked.name)

    def facts(self, *, user: str = "", namespace: str = "") -> list[Fact]:
        return self._memory.facts(_owner(user, namespace))

    def delete_fact(self, name: str, *, user: str = "", namespace: str = "") -> bool:
        """Returns whether there was one."""
        checked = _check(name=name, user=user, namespace=namespace)
        return self._memory.delete_fact(checked.owner, checked.name)

    def store_answer(self, question: str, answer: str, *, user: str = "", namespace: str = "") -> int:
        """Something for `search` to find, with the id that is returned. The same question replaces its answer."""
        checked = _check(question=question, answer=answer, user=user, namespace=namespace)
        return self._memory.store_answer(checked.owner, checked.question, checked.answer)

    def conversations(self, *, user: str = "", namespace: str = "", limit: int = 50) -> list[SavedConversation]:
        """Those that were saved, the latest first, without their messages."""
        checked = _check(limit=limit, user=user, namespace=namespace)
        return self._memory.conversations(checked.owner, checked.limit)

    def conversation(
        self, conversation_id: str, *, user: str = "", namespace: str = ""
    ) -> SavedConversation | None:
        checked = _check(conversation_id=conversation_id, user=user, namespace=namespace)
        return self._memory.conversation(checked.owner, checked.conversation_id)

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
        checked = _check(conversation_id=conversation_id, user=user, namespace=namespace)
        self._memory.save_messages(checked.owner, checked.conversation_id, messages, model=model)

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
        checked = _check(conversation_id=conversation_id, user=user, namespace=namespace)
        self._memory.replace_messages(checked.owner, checked.conversation_id, messages, model=model)

    def forget(self, *, user: str, namespace: str = "", conversation_id: str | None = None) -> Forgotten:
        """Everything of a user, facts too, or one conversation. It is nowhere in the file afterwards."""
        if conversation_id is None:
            return self._memory.forget(_owner(user, namespace))
        checked = _check(conversation_id=conversation_id, user=user, namespace=namespace)
        return self._memory.forget(checked.owner, checked.conversation_id)

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
    from emberkeep.runtime import parts as configured

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


class _Arguments(Body):
    user: Label = ""
    namespace: Label = ""
    name: FactName = ""
    value: Remembered = ""
    question: Remembered = ""
    answer: Remembered = ""
    query: Question = ""
    max_results: MaxResults = 5
    limit: MaxConversations = 50
    conversation_id: Name = ""

    @property
    def owner(self) -> str:
        return private_namespace(self.user, self.namespace)


def _check(**given: object) -> _Arguments:
    return validate(_Arguments, given)


def _owner(user: str, namespace: str) -> str:
    return _check(user=user, namespace=namespace).owner


def _owner_or_all(user: str | None, namespace: str) -> str | None:
    if user is None and namespace:
        raise InvalidField("namespace", 'goes with a user: give one ("" is everybody without a name).')
    return None if user is None else _owner(user, namespace)
