"""One line per request, written when it has ended."""

from __future__ import annotations

import logging
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberkeep.server.account import Account, account_of
from emberkeep.server.wire.cost import total
from emberkeep.types import Completed

log = logging.getLogger(__name__)

_QUIET_PATHS = frozenset({"/health", "/metrics"})
"""Asked by machines every few seconds: told at the level debug."""


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

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self.client_left = True
        return message

    async def send(self, message: Message) -> None:
        if self.status is None:
            self.status = message["status"]
        await self._send(message)


def _line(scope: Scope, exchange: _Exchange, account: Account) -> str:
    # Quoted again, so that no path can look like a line of its own; without the query, which may hold secrets.
    line = f"{scope['method']} {quote(scope['path'])[:200]} {exchange.status}"
    if account.bills and len(account.bills) == account.prompts:
        return f"{line}: {_figures(total(account.bills))}"
    if exchange.client_left:
        return f"{line}: the client left"
    return f"{line}: broken off" if account.prompts and exchange.status == 200 else line


def _figures(bill: Completed) -> str:
    usage, timings = bill.usage, bill.timings
    return (
        f"{usage.prompt_tokens} prompt tokens, {usage.cached_tokens} reused, "
        f"first token after {timings.ttft_ms:.0f} ms, "
        f"{usage.completion_tokens} tokens at {timings.predicted_per_second:.1f}/s"
    )
