"""Messages whose state a remote server has dropped: they are archived, so that they can be found."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from emberkeep.backend.remote.trtllm_turns import OnRemoved
from emberkeep.session.sessions import Sessions
from emberkeep.types import Message, Request

_MOST = 256


@runtime_checkable
class TellsLosses(Protocol):
    """A provider that hears what happens to its server's KV cache."""

    on_removed: OnRemoved | None


class Losses:
    """Belongs to the event loop."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._asked: OrderedDict[tuple[str, tuple[Message, ...]], Request] = OrderedDict()
        self._archiving: set[asyncio.Task[None]] = set()

    def seen(self, shown: Request, asked: Request) -> None:
        """What the server gets to see of what the client has asked."""
        self._asked[shown.namespace, shown.messages] = asked
        while len(self._asked) > _MOST:
            self._asked.popitem(last=False)

    def removed(self, request: Request, places: Sequence[int]) -> None:
        """An `OnRemoved`."""
        *shown, answer = request.messages
        asked = self._asked.get((request.namespace, tuple(shown)))
        if asked is None:
            return
        said = replace(asked, messages=(*asked.messages, answer))
        lost = _same_places(request.messages, said.messages, places)
        task = asyncio.create_task(asyncio.to_thread(self._sessions.lost, said, lost))
        self._archiving.add(task)
        task.add_done_callback(self._archiving.discard)

    async def close(self) -> None:
        await asyncio.gather(*self._archiving, return_exceptions=True)


def _same_places(shown: Sequence[Message], said: Sequence[Message], places: Sequence[int]) -> frozenset[int]:
    """Where messages that the model was shown stand in what was said; some were left out, some put in."""
    found: dict[int, int] = {}
    at = 0
    for place, message in enumerate(shown):
        rest = range(at, len(said))
        same = next((i for i in rest if said[i].role == message.role and _holds(message, said[i])), None)
        if same is not None:
            found[place], at = same, same + 1
    return frozenset(found[place] for place in places if place in found)


def _holds(shown: Message, said: Message) -> bool:
    """A notice or what was recalled may stand before its text."""
    return shown.tool_calls == said.tool_calls and shown.content.endswith(said.content)
