"""Ollama's endpoints about models: which there are, what they are, which are loaded, getting and removing them.

What is not known of a model that runs elsewhere stays empty."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import lru_cache, partial
from pathlib import Path

from pydantic import ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from emberkeep.api.body import Body, one_of
from emberkeep.api.errors import OLLAMA_ERRORS, failure_of
from emberkeep.api.ollama_answer import OllamaFrames, timestamp
from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.embedder import EmbeddingBackend
from emberkeep.backend.models import status_of
from emberkeep.config.settings import DEFAULT_MODEL
from emberkeep.errors import DownloadFailed, EmberkeepError, InvalidField, ModelError, ModelNotFound, RequestError
from emberkeep.models.gguf import SkippedArray, Value, read_header
from emberkeep.models.library import InstalledModel, ModelLibrary, is_model_id
from emberkeep.models.profile import ModelProfile, embedding_profile, profile_of
from emberkeep.models.spec import spec_of_ollama
from emberkeep.server.routes.base import LINES, Routes, Served
from emberkeep.server.routes.ollama import find_model, installed_name
from emberkeep.server.stream import while_connected
from emberkeep.types.models import ModelStatus
from emberkeep.types.request import Json
from emberkeep.values import dataclass

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
        while (line := await reporter.lines.get()) is not None:
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
        self.lines: asyncio.Queue[Json] = asyncio.Queue()
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
        self.lines.put_nowait(None)

    def _put(self, line: Json) -> None:
        self._loop.call_soon_threadsafe(self.lines.put_nowait, line)

    def _go_on(self) -> None:
        """Raises DownloadFailed."""
        if self.is_given_up:
            raise DownloadFailed("The pull was given up by its client: pull again to resume.")


# ── models as Ollama describes them ──

_FOREVER_S = 100 * 365 * 86400
"""Until a model expires that is never unloaded."""
_LONGEST_LIST = 64
"""The most values of one key that are shown."""
_FILLS_IN = ("tokenizer.ggml.fim_pre_token_id", "tokenizer.ggml.prefix_token_id")
"""Keys of models that were trained to fill in the middle."""
_THINKS = re.compile(r"enable_thinking|<think>|reasoning_content|reasoning_effort|thinking")


def tag_json(card: ModelCard, library: ModelLibrary) -> dict[str, Json]:
    """Blocks."""
    return _Known.of(card, library).tag()


def loaded_json(card: ModelCard, library: ModelLibrary, status: ModelStatus) -> dict[str, Json]:
    """A model in memory. Blocks."""
    known = _Known.of(card, library)
    size = known.size
    left_s = _FOREVER_S if status.expires_s is None else status.expires_s
    layers, on_gpu = card_number(card, "layers"), card_number(card, "gpu_layers")
    return {
        **known.tag(),
        "expires_at": timestamp(time.time_ns() + int(left_s * 1e9)),
        "size_vram": size * min(on_gpu, layers) // layers if layers else 0,
        "context_length": card.context,
    }


def show_json(backend: Backend, library: ModelLibrary) -> dict[str, Json]:
    """Blocks."""
    card = backend.card
    known = _Known.of(card, library)
    template = known.profile.chat_template if known.profile else None
    source = known.installed.record.source if known.installed else card.id
    parameters = f"num_ctx {card.context}" if card.context else ""
    info = known.info()
    return {
        "modelfile": f"FROM {source}\n" + (f"PARAMETER {parameters}\n" if parameters else ""),
        "parameters": parameters,
        "template": template or "",
        "details": known.details(),
        "model_info": info,
        "capabilities": _capabilities(backend, known, template or "", info),
        "modified_at": known.modified_at,
    }


def _capabilities(backend: Backend, known: _Known, template: str, info: Mapping[str, Json]) -> list[str]:
    is_embedding = isinstance(backend, EmbeddingBackend)
    if known.installed is not None:
        is_embedding = embedding_profile(known.installed.path) is not None
    can = {
        "completion": not is_embedding,
        "tools": not is_embedding and backend.card.calls_tools,
        "insert": any(key in info for key in _FILLS_IN),
        "thinking": _THINKS.search(template) is not None,
        "embedding": is_embedding or backend.embedder is not None,
    }
    return [name for name, is_so in can.items() if is_so]


@dataclass(frozen=True, slots=True)
class _Known:
    """A model's card, and what is known of its file."""

    card: ModelCard
    installed: InstalledModel | None
    profile: ModelProfile | None

    @classmethod
    def of(cls, card: ModelCard, library: ModelLibrary) -> _Known:
        try:
            installed = library.get(card.id)
            return cls(card, installed, _profile(installed.path, installed.path.stat().st_mtime_ns))
        except (ModelError, OSError):
            return cls(card, None, None)

    @property
    def size(self) -> int:
        return self.installed.record.size if self.installed else 0

    @property
    def modified_at(self) -> str:
        seconds = self.installed.record.pulled_at if self.installed else self.card.created
        return timestamp(seconds * 10**9)

    def tag(self) -> dict[str, Json]:
        name = self.card.id if ":" in self.card.id else f"{self.card.id}:latest"
        digest = self._detail("weights_sha256") or (self.installed.record.sha256 if self.installed else None)
        return {
            "name": name,
            "model": name,
            "modified_at": self.modified_at,
            "size": self.size,
            "digest": digest or hashlib.sha256(name.encode()).hexdigest(),  # clients show its first 12 characters
            "details": self.details(),
        }

    def details(self) -> dict[str, Json]:
        family = self.profile.architecture if self.profile else self._detail("architecture") or ""
        parameters = self.profile.parameters if self.profile else card_number(self.card, "parameters")
        is_folder = self.installed is not None and self.installed.is_folder
        return {
            "parent_model": "",
            "format": "" if self.card.remote else "safetensors" if is_folder else "gguf",
            "family": family,
            "families": [family] if family else [],
            "parameter_size": _short_count(parameters),
            "quantization_level": self.profile.quantisation
            if self.profile
            else self._detail("quantisation") or "",
        }

    def info(self) -> dict[str, Json]:
        """The metadata of the file, without its vocabulary."""
        if self.installed is None or self.profile is None:
            return self._card_info()
        counted = {"general.parameter_count": self.profile.parameters}
        if self.installed.is_folder:
            return {**_folder_info(self.profile), **counted}
        metadata = read_header(self.installed.path).metadata
        shown = {key: _shown(value) for key, value in metadata.items() if key != "tokenizer.chat_template"}
        return {**shown, **counted}

    def _card_info(self) -> dict[str, Json]:
        family = self._detail("architecture") or "unknown"
        context = card_number(self.card, "trained_context") or self.card.context
        return {"general.architecture": family, f"{family}.context_length": context}

    def _detail(self, name: str) -> Json:
        return (self.card.details or {}).get(name)


def card_number(card: ModelCard, name: str) -> int:
    """0 for what the card does not tell."""
    value = (card.details or {}).get(name)
    return value if isinstance(value, int) else 0


@lru_cache(maxsize=256)
def _profile(path: Path, changed: int) -> ModelProfile:
    """`changed`: when the file was, so that a new one is read."""
    return profile_of(path)


def _folder_info(profile: ModelProfile) -> Mapping[str, Json]:
    family = profile.architecture
    return {
        "general.architecture": family,
        f"{family}.context_length": profile.context_length,
        f"{family}.block_count": profile.layers,
        f"{family}.attention.key_length": profile.key_length,
        f"{family}.attention.value_length": profile.value_length,
        f"{family}.vocab_size": profile.vocab_size,
    }


def _shown(value: Value) -> Json:
    """None for a list that is too long."""
    if isinstance(value, SkippedArray) or (isinstance(value, tuple) and len(value) > _LONGEST_LIST):
        return None
    return list(value) if isinstance(value, tuple) else value


def _short_count(parameters: int) -> str:
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= unit:
            return f"{parameters / unit:.4g}{letter}"
    return str(parameters) if parameters else ""
