"""The latest answers with calls or reasoning, as written: a client may send them back in other words."""

from __future__ import annotations

import threading
from collections.abc import Container

from emberkeep.latest import Latest, drop_owners
from emberkeep.session.view import View, as_written, read_history
from emberkeep.types.request import Message, Request

_MOST = 512
_MOST_CHARS = 1 << 16


class LatestAnswers:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._answers = Latest[tuple[str, bytes], Message](_MOST)
        self._lock = threading.Lock()

    def add(self, request: Request, answer: Message) -> None:
        size = len(answer.reasoning) + sum(len(call.arguments) for call in answer.tool_calls)
        if not 0 < size <= _MOST_CHARS:
            return
        key = read_history((*request.messages, answer), request.conversation_id).keys[-1]
        with self._lock:
            self._answers[request.namespace, key] = answer

    def forget(self, owners: Container[str]) -> None:
        with self._lock:
            drop_owners(self._answers, owners)

    def changed_in(self, owner: str, view: View) -> dict[int, Message]:
        """Spoken messages that the client sends otherwise than they were written, where that is not known yet."""
        history = view.history
        with self._lock:
            answers = {place: self._answers.get((owner, key)) for place, key in enumerate(history.keys)}
        return {
            place: answer
            for place, answer in answers.items()
            if answer is not None
            and place not in view.written
            and as_written(history.messages[history.spoken[place]], answer)
            != history.messages[history.spoken[place]]
        }
