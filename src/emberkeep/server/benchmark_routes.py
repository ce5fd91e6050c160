"""What `emberkeep bench` has measured on this machine: it keeps a file for each result, and here they are read."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep.errors import NoSuchEntry
from emberkeep.server.json_response import json_response, page_response
from emberkeep.server.routes import PageParameters, Routes, read_parameters
from emberkeep.server.side_work import SideWork
from emberkeep.types.request import Json

log = logging.getLogger(__name__)

_ID = re.compile("[0-9A-Za-z_-]{1,128}")
"""Without dots and slashes: no name leads out of the folder."""
_MOST_BYTES = 8 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, defer_build=True)


class Quantity(_Strict):
    """Something that was measured, perhaps several times."""

    median: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    unit: str
    samples: list[FiniteFloat]


class MeasuredTable(_Strict):
    title: str
    rows: list[dict[str, Quantity | int | str]]
    """Each with a `label`, and a value for some of the columns."""


class Picture(_Strict):
    title: str
    svg: str


class KeptResult(_Strict):
    """What clients rely on; a file has more."""

    name: str
    when: str
    command: list[Any]
    machine: dict[str, Any]
    versions: dict[str, Any]
    tables: list[MeasuredTable]
    notes: list[str]
    pictures: list[Picture]


def benchmark_routes(folder: Path, side: SideWork) -> Routes:
    routes = Routes()

    @routes.get("/v1/benchmarks", parameters=PageParameters)
    async def results(http: HttpRequest) -> Response:
        page = read_parameters(http, PageParameters)
        return await side.run(lambda: page_response(list(_newest_first(folder)), _head_json, page))

    @routes.get("/v1/benchmarks/{result_id}")
    async def result(http: HttpRequest) -> Response:
        return json_response(await side.run(_result, folder, http.path_params["result_id"]))

    return routes


def _newest_first(folder: Path) -> Iterator[dict[str, Json]]:
    """Those that can be read. Their names begin with when they were measured."""
    for path in sorted(folder.glob("*.json"), reverse=True):
        if _ID.fullmatch(path.stem):
            try:
                yield _read(path)
            except (OSError, ValueError, RecursionError) as error:
                log.warning("%s is no result of a benchmark, and is left out: %s", path, _first_line(error))


def _result(folder: Path, result_id: str) -> dict[str, Json]:
    """Raises NoSuchEntry."""
    try:
        if _ID.fullmatch(result_id):
            return _read(folder / f"{result_id}.json")
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s is no result of a benchmark: %s", result_id, _first_line(error))
    raise NoSuchEntry("No such result is kept: GET /v1/benchmarks lists those that are.")


def _read(path: Path) -> dict[str, Json]:
    """Raises OSError, ValueError or RecursionError."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("it is too large")
    told = json.loads(path.read_bytes())
    KeptResult.model_validate(told)
    json.dumps(told, allow_nan=False)  # numbers that no client could read
    return {**told, "id": path.stem, "object": "benchmark"}


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).partition("\n")[0]


def _head_json(told: dict[str, Json]) -> dict[str, Json]:
    """For a list."""
    return {name: told.get(name) for name in ("id", "object", "name", "when", "command", "emberkeep", "model")}
