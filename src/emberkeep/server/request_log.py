"""One line per request, written when it has ended."""

from __future__ import annotations

import logging
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberkeep.server.account import Account, account_of
from emberkeep.types import Completed, merge_usage

log = logging.getLogger(__name__)

_QUIET_PATHS = frozenset({"/health", "/metrics"})
"""Asked by machines every few seconds: told at the level debug."""
_BEFORE_NAMES = ("/v1/memory/facts/", "/v1/memory/conversations/")
"""What follows is a text of a user."""


class RequestLog:
    """ASGI. Nothing is added to a request whose line nobody would see."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        level = logging.DEBUG if scope["path"] in _QUIET_PATHS else logging.INFO
        if log.isEnabledFor(level):
            await self._logged(level, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _logged(self, level: int, scope: Scope, receive: Receive, send: Send) -> None:
        account = account_of(scope)
        exchange = _Exchange(receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        finally:
            log.log(level, "%s", _line(scope, exchange, account))


class _Exchange:
    """Sees the status go out and the client leave."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.status: int | None = None
        self.client_left = False
        self._is_sent = False

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = not self._is_sent  # after the last byte everybody leaves
        return message

    async def send(self, message: Message) -> None:
        if self.status is None:
            self.status = message["status"]
        self._is_sent = message["type"] == "http.response.body" and not message.get("more_body")
        await self._send(message)


def _line(scope: Scope, exchange: _Exchange, account: Account) -> str:
    # Quoted again, so that no path can look like a line of its own; without the query, which may hold secrets.
    line = f"{scope['method']} {quote(_without_name(scope['path']))[:200]} {exchange.status}"
    if account.bills and len(account.bills) == account.prompts:
        return f"{line}: {_figures(merge_usage(account.bills))}"
    if exchange.client_left:
        return f"{line}: the client left"
    return f"{line}: broken off" if account.prompts and exchange.status == 200 else line


def _without_name(path: str) -> str:
    return next((f"{before}..." for before in _BEFORE_NAMES if path.startswith(before)), path)


def _figures(bill: Completed) -> str:
    usage, timings = bill.usage, bill.timings
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} reused, "
        f"first token after {timings.ttft_ms:.0f} ms, "
        f"{usage.completion_tokens} tokens at {timings.predicted_per_second:.1f}/s"
    )
