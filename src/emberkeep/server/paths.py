"""Two courtesies before the router: HEAD is asked wherever GET is, and a slash at the end makes no difference."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class PathMiddleware:
    """ASGI. The web server itself leaves out the body of an answer to HEAD."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            # A changed copy: a redirect would cost clients that do not follow it their answer.
            scope = {**scope, "method": method, "path": _without_slashes(scope)}
        await self.app(scope, receive, send)


def _without_slashes(scope: Scope) -> str:
    """An encoded slash (%2F) at the end belongs to the name that is asked for."""
    path: str = scope["path"]
    sent: bytes = scope.get("raw_path") or path.encode()
    return path[: len(path) - (len(sent) - len(sent.rstrip(b"/")))] or "/"
