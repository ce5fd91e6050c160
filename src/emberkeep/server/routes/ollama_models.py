"""Ollama's endpoints about models: which there are, what they are, which are loaded, getting and removing them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial

from pydantic import ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from emberkeep.api.body import Body, one_of
from emberkeep.api.errors import OLLAMA_ERRORS, failure_of
from emberkeep.api.ollama.answer import OllamaFrames
from emberkeep.backend.models import status_of
from emberkeep.config.settings import DEFAULT_MODEL
from emberkeep.errors import DownloadFailed, EmberkeepError, InvalidField, ModelNotFound, RequestError
from emberkeep.models.library import ModelLibrary, is_model_id
from emberkeep.models.spec import spec_of_ollama
from emberkeep.server.routes.base import LINES, Routes, Served
from emberkeep.server.routes.ollama import find_model, installed_name
from emberkeep.server.routes.ollama_cards import loaded_json, show_json, tag_json
from emberkeep.server.stream import while_connected
from emberkeep.types.request import Json

log = logging.getLogger(__name__)

_NOT_HERE = {
    "create": "make the GGUF file elsewhere, and `emberkeep models pull FILE` installs it",
    "push": "models are not published from here: upload the file to a hub",
    "blobs": "`emberkeep models pull FILE` on this machine installs a file",
}
"""What Ollama has and we have not, with the way out."""


class NamedBody(Body):
    model_config = ConfigDict(json_schema_extra=one_of("model", "name"))

    model: str | None = None
    name: str | None = None
    """What older clients say."""

    @property
    def wanted(self) -> str:
        """Raises InvalidField."""
        if not (self.model or self.name):
            raise InvalidField("model", "is required.")
        return self.model or self.name or ""


class ShowBody(NamedBody):
    verbose: bool | None = None


class PullBody(NamedBody):
    stream: bool | None = None


class CopyBody(Body):
    source: str
    destination: str


def routes(served: Served) -> Routes:
    routes = Routes()
    _add_reads(routes, served)
    _add_changes(routes, served)
    _add_pull(routes, served.library)
    _add_refusals(routes)
    return routes


def _add_reads(routes: Routes, served: Served) -> None:
    models, library, run = served.models, served.library, served.side.run

    @routes.get("/api/tags")
    async def tags() -> Json:
        return {"models": await run(lambda: [tag_json(backend.card, library) for backend in models.list()])}

    @routes.get("/api/ps")
    async def ps() -> Json:
        here = [(each.card, status_of(each)) for each in models.loaded() if not each.card.remote]
        return {"models": await run(lambda: [loaded_json(card, library, status) for card, status in here])}

    @routes.post("/api/show", example={"model": "default"})
    async def show(body: ShowBody) -> Json:
        return await run(show_json, find_model(models, body.wanted), library)


def _add_changes(routes: Routes, served: Served) -> None:
    library, run = served.library, served.side.run

    @routes.delete("/api/delete", example={"model": "name"})
    async def delete(body: NamedBody) -> Response:
        id = await run(_installed_id, library, body.wanted)
        with suppress(ModelNotFound, RequestError):  # not served, or served alone: then it stays in memory
            await served.models.unload(id)
        await run(library.remove, id)
        return Response()

    @routes.post("/api/copy", example={"source": "name", "destination": "other"})
    async def copy(body: CopyBody) -> Response:
        await run(_copy, library, body)
        return Response()


def _copy(library: ModelLibrary, body: CopyBody) -> None:
    name = spec_of_ollama(body.destination)
    if not is_model_id(name):
        raise InvalidField("destination", "use lower-case letters, digits, dots, dashes and underscores.")
    library.copy(_installed_id(library, body.source), name)


def _installed_id(library: ModelLibrary, name: str) -> str:
    """Raises ModelNotFound, in words that Ollama's clients look for."""
    id = installed_name(name)
    if not library.holds(id):
        raise ModelNotFound(f"model '{name[:200]}' not found: `emberkeep models list` shows what is installed.")
    return id


def _add_refusals(routes: Routes) -> None:
    async def refuse(http: HttpRequest) -> Json:
        name = http.url.path.split("/")[2]
        raise RequestError(f"/api/{name} is not served here: {_NOT_HERE[name]}.")

    routes.post("/api/create", "/api/push", "/api/blobs/{digest}", is_hidden=True)(refuse)
    routes.get("/api/blobs/{digest}", is_hidden=True)(refuse)


# ── pull ──

_PULLS = 2
"""At a time; others wait."""
_EVERY_S = 0.1
"""Progress is told no more often."""


def _add_pull(routes: Routes, library: ModelLibrary) -> None:
    threads = ThreadPoolExecutor(_PULLS, thread_name_prefix="emberkeep-pull")

    @routes.post("/api/pull", content=LINES, example={"model": "name"})
    async def pull(http: HttpRequest, body: PullBody) -> Json:
        spec = _pull_spec(library, body.wanted)
        lines = _pull(library, spec, threads)
        if body.stream is not False:
            return StreamingResponse(_as_bytes(lines), media_type=OllamaFrames.media_type)
        await while_connected(http, _all(lines))
        return _SUCCESS


_SUCCESS = {"status": "success"}


def _pull_spec(library: ModelLibrary, name: str) -> str:
    """What to pull. Raises RequestError for what clients may not have fetched, and ModelNotFound."""
    spec = spec_of_ollama(name)
    if spec.startswith("hf:"):
        installed_name(name)
    elif spec != DEFAULT_MODEL and not library.holds(spec):
        raise ModelNotFound(
            f"model '{name[:200]}' not found: pull {DEFAULT_MODEL} or hf.co/owner/repo:Q4_K_M; for files and "
            "other addresses use `emberkeep models pull` on the server's machine."
        )
    return spec


async def _pull(library: ModelLibrary, spec: str, threads: ThreadPoolExecutor) -> AsyncGenerator[Json]:
    """What happens while a model is fetched. Raises ModelError. Closing it gives the pull up: the next one resumes
    what was fetched so far."""
    yield {"status": "pulling manifest"}
    if library.holds(spec):
        yield _SUCCESS
        return
    reporter = _QueueReporter(spec)
    working = asyncio.get_running_loop().run_in_executor(threads, partial(_fetch, spec, library, reporter))
    working.add_done_callback(reporter.end)
    try:
        while (line := await reporter.told.get()) is not None:
            yield line
    finally:
        reporter.is_given_up = True
    working.result()
    yield {"status": "writing manifest"}
    yield _SUCCESS


def _fetch(spec: str, library: ModelLibrary, reporter: _QueueReporter) -> None:
    # Imported here: only this needs the HTTP client.
    from emberkeep.models.pull import pull

    pull(spec, library, reporter=reporter)


async def _all(lines: AsyncGenerator[Json]) -> None:
    async with aclosing(lines):
        async for _ in lines:
            pass


async def _as_bytes(lines: AsyncIterator[Json]) -> AsyncIterator[bytes]:
    """An error in the middle is the last line, as in Ollama."""
    try:
        async for line in lines:
            yield json.dumps(line).encode() + b"\n"
    except Exception as error:
        if not isinstance(error, EmberkeepError):
            log.exception("A pull failed.")
        yield OLLAMA_ERRORS.frame(failure_of(error), "")


class _QueueReporter:
    """Passes on to the loop what a pull says in its thread."""

    def __init__(self, spec: str) -> None:
        self.told: asyncio.Queue[Json] = asyncio.Queue()
        self.is_given_up = False
        self._loop = asyncio.get_running_loop()
        # Clients tell downloads apart by this; the digest of the file is not known before it is here.
        self._digest = f"sha256:{hashlib.sha256(spec.encode()).hexdigest()}"
        self._last, self._step = 0.0, ""

    def say(self, sentence: str) -> None:
        self._go_on()
        self._put({"status": sentence})

    def progress(self, step: str, done: int, total: int | None) -> None:
        self._go_on()
        now = time.monotonic()
        if step == self._step and done != total and now - self._last < _EVERY_S:
            return
        self._last, self._step = now, step
        if step.startswith("Checking"):
            self._put({"status": "verifying sha256 digest"})
        else:
            figures = {"digest": self._digest, "total": total or 0, "completed": done}
            self._put({"status": f"pulling {self._digest[7:19]}", **figures})

    def end(self, working: asyncio.Future[None]) -> None:
        """Its error is told to a client that is still there; of one that has left nobody else would ask for it."""
        if not working.cancelled():
            working.exception()
        self.told.put_nowait(None)

    def _put(self, line: Json) -> None:
        self._loop.call_soon_threadsafe(self.told.put_nowait, line)

    def _go_on(self) -> None:
        """Raises DownloadFailed."""
        if self.is_given_up:
            raise DownloadFailed("The pull was given up by its client: pull again to resume.")
