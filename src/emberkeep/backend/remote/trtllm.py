"""TensorRT-LLM: its server's OpenAI endpoint, and its feed of what happens to KV blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace

import httpx

from emberkeep.backend.remote.base import Provider, RemoteAbout
from emberkeep.backend.remote.kv_evictions import OnRemoved, TurnTracker
from emberkeep.backend.remote.openai import TRTLLM, OpenAIProvider
from emberkeep.backend.remote.service import CONNECT_S, ssl_context
from emberkeep.types.events import Completed, Event, Events, TextDelta, ToolCallDelta, Usage
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Message, Request, ToolCall

log = logging.getLogger("emberkeep.remote")

_USUAL_URL = "http://127.0.0.1:8000"
_EVENTS = "/kv_cache_events"
_POLL_S = 1.0
_LONGEST_WAIT_S = 30.0
_ANSWER_S = 30.0
"""A server without events may take seconds to say so."""


def open_trtllm(remote: RemoteModel, key: str | None) -> Provider:
    """The server may need no key."""
    return TrtllmProvider(remote, key)


class TrtllmProvider:
    """From its first answer to `close` it polls the server's events, which are taken from the server by that: two
    that poll one server each see only some of them."""

    def __init__(self, remote: RemoteModel, key: str | None) -> None:
        root = (remote.base_url or _USUAL_URL).rstrip("/").removesuffix("/v1")
        self.on_removed: OnRemoved | None = None
        """Told which messages of a conversation have lost their state."""
        self._model = OpenAIProvider(replace(remote, base_url=f"{root}/v1"), key, TRTLLM)
        self._turns = TurnTracker(self._report)
        self._http = httpx.AsyncClient(
            base_url=root,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(_ANSWER_S, connect=CONNECT_S),
            verify=ssl_context(),
        )
        self._poller: asyncio.Task[None] | None = None
        self._polling = asyncio.Lock()  # events are worth something only in their order

    async def answer(self, request: Request) -> Events:
        if self._poller is None:
            self._poller = asyncio.create_task(self._keep_polling(), name="trtllm-events")
        said = _AnswerCollector()
        self._turns.begin(request)
        try:
            async with aclosing(self._model.answer(request)) as events:
                async for event in events:
                    said.add(event)
                    yield event
        finally:
            self._turns.end(request, said.answer, said.usage)

    async def about(self) -> RemoteAbout:
        return await self._model.about()

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            with suppress(asyncio.CancelledError):
                await self._poller
        await self._http.aclose()
        await self._model.close()

    async def poll(self) -> bool:
        """Take what has happened since the last time. False: this server does not tell. Raises httpx.HTTPError
        and ValueError."""
        async with self._polling:
            response = await self._http.post(_EVENTS)
            if response.is_client_error:
                log.info("TensorRT-LLM tells nothing of its KV cache (%s).", response.status_code)
                return False
            events = response.raise_for_status().json()
            self._turns.read_events(events if isinstance(events, list) else ())
            return True

    async def _keep_polling(self) -> None:
        wait_s = _POLL_S
        while True:
            try:
                if not await self.poll():
                    return
                wait_s = _POLL_S
            except (httpx.HTTPError, ValueError) as error:
                log.debug("The events of TensorRT-LLM's KV cache could not be read: %s", error)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            await asyncio.sleep(wait_s)

    def _report(self, request: Request, places: Sequence[int]) -> None:
        if self.on_removed is None:
            return
        try:
            self.on_removed(request, places)
        except Exception:
            log.exception("What TensorRT-LLM has evicted could not be archived.")


class _AnswerCollector:
    """Builds the whole answer from its events."""

    def __init__(self) -> None:
        self.usage = Usage()
        self._text: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._is_whole = False

    @property
    def answer(self) -> Message | None:
        """None until it is complete."""
        if not self._is_whole:
            return None
        return Message("assistant", "".join(self._text), tool_calls=tuple(self._calls.values()))

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self._text.append(event.text)
            case ToolCallDelta(call_index=place):
                self._calls[place] = event.added_to(self._calls.get(place))
            case Completed():
                self.usage, self._is_whole = event.usage, True
