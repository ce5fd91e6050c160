"""JSON that routes answer with: whole, and long lists page by page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from starlette.responses import Response

from emberkeep.server.routes import PageParameters
from emberkeep.types.request import Json

T = TypeVar("T")


def json_response(value: Json, status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, media_type="application/json")


def list_response(name: str, items: Iterable[Json], **more: Json) -> Response:
    """An object with a list under `name`, which may be long: each item is written by itself, so that other threads
    go on in between."""
    written = ", ".join(map(json.dumps, items))
    rest = "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in more.items())
    return Response(f"{{{json.dumps(name)}: [{written}]{rest}}}", media_type="application/json")


def page_response(
    items: Sequence[T], to_json: Callable[[T], Json], page: PageParameters, **more: Json
) -> Response:
    shown = items[page.offset : page.offset + page.limit]
    has_more = page.offset + len(shown) < len(items)
    return list_response("data", map(to_json, shown), object="list", has_more=has_more, **more)
