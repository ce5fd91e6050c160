"""An answer as a stream: what the streams of all APIs have in common.

The token path is string concatenation around one escaped text: the JSON before and after it is built once.
"""

from __future__ import annotations

import json
from typing import Protocol

from emberkeep.api.errors import OPENAI_ERRORS, Failure, sse
from emberkeep.types.events import Event, Loading
from emberkeep.types.request import Json

MARKER = json.dumps("\0").encode()
"""Stands for a text in JSON that is written once, around many texts."""


class Frames(Protocol):
    """Stateful: one object per stream, fed in order."""

    media_type: str

    def frame(self, event: Event) -> bytes:
        """What to send for `event`; empty for what the stream does not show (yet)."""

    def end(self) -> bytes:
        """Everything after the last event, [DONE] included."""

    def idle(self) -> bytes:
        """What tells the client, after seconds of silence, that its answer is still to come; empty: nothing."""

    def failure(self, failure: Failure, request_id: str) -> bytes:
        """What a stream ends with that failed."""


class SseFrames:
    """Server-sent events: what they have in common."""

    media_type = "text/event-stream"

    def idle(self) -> bytes:
        return b": the answer is being computed\n\n"

    def failure(self, failure: Failure, request_id: str) -> bytes:
        return OPENAI_ERRORS.frame(failure, request_id)


class BlockFrames(SseFrames):
    """A stream of numbered blocks, one after the other: each is opened, filled piece by piece, and closed.

    Every event says its type twice, as Anthropic's and OpenAI's newer clients want it.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._around: list[bytes] = []
        """The JSON before, between and after what differs in the deltas of the open block."""

    def _event(self, kind: str, **fields: Json) -> bytes:
        return sse({"type": kind, **fields}, kind)

    def _beginning(self) -> bytes:
        """The events before the first block."""
        raise NotImplementedError

    def _begin(self) -> bytes:
        """`_beginning`, once."""
        if self._has_begun:
            return b""
        self._has_begun = True
        return self._beginning()

    def _open_delta(self, kind: str, **fields: Json) -> None:
        """Prepares the deltas of a block that is opened. What will differ is a marker in `fields`."""
        self._around = sse({"type": kind, **fields}, kind).split(MARKER)

    def _piece(self, text: str) -> bytes:
        """One delta."""
        return self._around[0] + json.dumps(text).encode() + self._around[1]


def loading_comment(event: Loading) -> bytes:
    """A comment and no event: clients read chunks of an answer only."""
    done = "" if event.fraction is None else f", {event.fraction:.0%}"
    return f": {json.dumps(event.model)} is being loaded{done}\n\n".encode()
