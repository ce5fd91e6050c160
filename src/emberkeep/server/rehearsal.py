"""One request before the first: what the web framework does lazily is then done."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Scope

from emberkeep.config import Config


async def rehearse(app: ASGIApp, config: Config) -> None:
    """Ask for a chat without messages, which is refused before it reaches the backend."""
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
    if config.api_key is not None:
        headers.append((b"authorization", f"Bearer {config.api_key}".encode()))
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", config.port),
    }
    await app(scope, _body, _nowhere)


async def _body() -> Message:
    return {"type": "http.request", "body": b'{"messages": []}', "more_body": False}


async def _nowhere(message: Message) -> None:
    pass
