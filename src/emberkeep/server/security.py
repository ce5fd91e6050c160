"""Who may talk to the server: Host, Origin and API key are checked before anything else happens.

A local server is reachable from every web page the user visits. A page cannot forge `Host` (which defeats DNS
rebinding) or `Origin` (which defeats cross-site requests), so both must be known.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from emberkeep.api.errors import Failure, Refused
from emberkeep.config import Config
from emberkeep.server.respond import failure_response

OPEN_PATHS = frozenset({"/health"})
LOOPBACK = ("localhost", "127.0.0.1", "::1")

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\[\]:/@\s]+))(?::[0-9]{1,5})?")


class SecurityMiddleware:
    """ASGI. Refuses in OpenAI's error shape; answers preflights of allowed origins itself."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self.app = app
        self._hosts = frozenset(name.lower() for name in (*LOOPBACK, config.host, *config.allowed_hosts))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in config.allowed_origins)
        self._key = config.api_key.encode() if config.api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._check_host(headers, scope)
            origin = self._checked_origin(headers)
        except Refused as refused:
            await failure_response(refused.failure)(scope, receive, send)
            return
        await self._admitted(scope, receive, _with_cors(send, origin) if origin else send, headers)

    async def _admitted(self, scope: Scope, receive: Receive, send: Send, headers: Headers) -> None:
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, send)
        elif scope["path"] in OPEN_PATHS or self._has_key(headers):
            await self.app(scope, receive, send)
        else:
            await failure_response(_NO_KEY)(scope, receive, send)

    def _check_host(self, headers: Headers, scope: Scope) -> None:
        name = _host_name(headers.getlist("host"))
        # The address that was dialled is no name, so nobody can have rebound it.
        dialled = (scope.get("server") or ("",))[0]
        if name not in self._hosts and name != dialled:
            raise _forbidden(
                "This Host is not served: use the server's own address, or add the name to allowed_hosts."
            )

    def _checked_origin(self, headers: Headers) -> str | None:
        """The origin if it is another one that may read answers; None if there is nothing to tell it."""
        origins = headers.getlist("origin")
        if not origins:
            return None
        origin = origins[0].lower()
        if len(origins) == 1 and origin in self._origins:
            return origins[0]
        if len(origins) == 1 and _same_origin(origin, headers["host"].lower()):
            return None
        raise _forbidden("This web page may not use the server: add its origin to allowed_origins.")

    def _has_key(self, headers: Headers) -> bool:
        if self._key is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # Header bytes are read as Latin-1; this gives them back as they were sent.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)


_NO_KEY = Failure(
    401,
    "authentication_error",
    "The API key is missing or wrong: send it as Authorization: Bearer KEY.",
    "invalid_api_key",
    headers={"WWW-Authenticate": "Bearer"},
)


def _forbidden(message: str) -> Refused:
    return Refused(Failure(403, "permission_error", message, "forbidden"))


def _host_name(values: list[str]) -> str | None:
    """The name without its port; None unless there is exactly one well-formed Host."""
    match = _HOST.fullmatch(values[0].lower()) if len(values) == 1 else None
    return match and (match[1] or match[2])


def _same_origin(origin: str, host: str) -> bool:
    return origin in (f"http://{host}", f"https://{host}")


def _preflight(headers: Headers) -> Response:
    asked: Iterable[tuple[str, str | None]] = (
        ("Access-Control-Allow-Methods", "GET, POST, PUT, DELETE"),
        ("Access-Control-Allow-Headers", headers.get("access-control-request-headers")),
        ("Access-Control-Max-Age", "600"),
    )
    return Response(status_code=204, headers={name: value for name, value in asked if value})


def _with_cors(send: Send, origin: str) -> Send:
    async def with_cors(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return with_cors
