"""TensorRT-LLM: its server's OpenAI endpoint, and its feed of what happens to KV blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

import openai

from emberkeep.backend.remote.kv_evictions import OnRemoved, TurnTracker
from emberkeep.backend.remote.openai import OpenAIProvider
from emberkeep.types.events import Completed, Event, Events, TextDelta, ToolCallDelta, Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, Request, ToolCall

log = logging.getLogger("emberkeep.remote")

_POLL_S = 1.0
_LONGEST_WAIT_S = 30.0
_ANSWER_S = 30.0
"""A server without events may take seconds to say so."""


class TrtllmProvider(OpenAIProvider):
    """From its first answer to `close` it polls the server's events, which are taken from the server by that: two
    that poll one server each see only some of them."""

    def __init__(self, remote: RemoteModel, key: str | None) -> None:
        super().__init__(remote, key)
        self.on_removed: OnRemoved | None = None
        """Called with the messages of a conversation that have lost their state."""
        self._turns = TurnTracker(self._report)
        self.forget = self._turns.forget
        self._poller: asyncio.Task[None] | None = None
        self._polling = asyncio.Lock()  # events are worth something only in their order

    async def answer(self, request: Request) -> Events:
        if self._poller is None:
            self._poller = asyncio.create_task(self._keep_polling(), name="trtllm-events")
        events: list[Event] = []
        self._turns.begin(request)
        try:
            async with aclosing(super().answer(request)) as answer:
                async for event in answer:
                    events.append(event)
                    yield event
        finally:
            self._turns.end(request, *_whole(events))

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            with suppress(asyncio.CancelledError):
                await self._poller
        await super().close()

    async def poll(self) -> bool:
        """Take the events since the last time. False: this server has none. Raises openai.APIError and
        ValueError."""
        options: Any = {"headers": self._headers, "timeout": _ANSWER_S}
        async with self._polling:
            try:
                events: Any = await self._client.post(
                    self._beside("/kv_cache_events"), cast_to=object, options=options
                )
            except openai.APIStatusError as error:
                if error.status_code >= 500:
                    raise
                log.info("TensorRT-LLM tells nothing of its KV cache (%s).", error.status_code)
                return False
            self._turns.read_events(events if isinstance(events, list) else ())
            return True

    async def _keep_polling(self) -> None:
        wait_s = _POLL_S
        while True:
            try:
                if not await self.poll():
                    return
                wait_s = _POLL_S
            except (openai.APIError, ValueError) as error:
                log.debug("The events of TensorRT-LLM's KV cache could not be read: %s", error)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            await asyncio.sleep(wait_s)

    def _report(self, request: Request, places: Sequence[int]) -> None:
        try:
            if self.on_removed is not None:
                self.on_removed(request, places)
        except Exception:
            log.exception("What TensorRT-LLM has evicted could not be archived.")


def _whole(events: Sequence[Event]) -> tuple[Message | None, Usage]:
    """The answer and its usage; no answer if it did not come to its end."""
    if not events or not isinstance(events[-1], Completed):
        return None, Usage()
    calls: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, ToolCallDelta):
            calls[event.call_index] = event.added_to(calls.get(event.call_index))
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    return Message("assistant", text, tool_calls=tuple(calls.values())), events[-1].usage
