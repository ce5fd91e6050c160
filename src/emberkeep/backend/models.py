"""The models that answer here, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple
from typing import Protocol

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.on_demand import OnDemandBackend
from emberkeep.errors import EmberkeepError, ModelNotFound, RequestError
from emberkeep.types.cache import Removed
from emberkeep.types.events import Loading
from emberkeep.types.models import ModelStatus

DEFAULT_NAME = "default"
_NAMED = 32
"""Most names that one sentence lists."""
_ANY = "*"
_LATEST = ":latest"
"""Ollama's clients write it behind every name that has no other tag."""


class ModelCatalogue(Protocol):
    """Models besides the default one. They come and go while the server runs."""

    def find(self, name: str) -> Backend | None:
        """Looks at a file at most. None: there is none of that name."""

    def names(self) -> Sequence[str]:
        """All their names, in order. Looks into a folder at most."""

    def list(self) -> Sequence[Backend]:
        """By name. Reads a file for each: call it outside the event loop."""

    def opened(self) -> Sequence[Backend]:
        """Those that were asked for. Does not block."""

    async def start(self) -> None: ...

    async def close(self) -> None:
        """Close all models, and then what they share."""


class LoadedModels:
    """A ModelCatalogue of models that are there as long as the server is."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends

    def find(self, name: str) -> Backend | None:
        return next((each for each in self._backends if is_called(each.card, name)), None)

    def names(self) -> Sequence[str]:
        return [backend.card.id for backend in self._backends]

    def list(self) -> Sequence[Backend]:
        return self._backends

    def opened(self) -> Sequence[Backend]:
        return self._backends

    async def start(self) -> None:
        for backend in self._backends:
            await backend.start()

    async def close(self) -> None:
        for backend in self._backends:
            await backend.close()


class Models:
    """Every request names its model, or means the default one. Belongs to the event loop."""

    def __init__(
        self,
        default: Backend,
        others: ModelCatalogue | Sequence[Backend] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """The alias `*` is the model that every name means which no model has."""
        self.default = default
        self.has_others = bool(others)
        self._others = LoadedModels(others) if isinstance(others, Sequence) else others
        self._aliases = aliases or {}
        self._for_any = (_ANY,) if _ANY in self._aliases else ()

    def find(self, name: str | None) -> Backend:
        """The backend of the model that a client calls `name`; the default one where it names none. Raises
        ModelNotFound."""
        if not name or name == DEFAULT_NAME:
            return self.default
        for wanted in dict.fromkeys((name, name.removesuffix(_LATEST), *self._for_any)):
            known = self._aliases.get(wanted, wanted)
            if is_called(self.default.card, known):
                return self.default
            if found := self._others.find(known):
                return found
        raise ModelNotFound(f"The model {name[:100]!r} is not served here: {self.choices()}.")

    def choices(self) -> str:
        """Which names a client may use, as the end of a sentence. Looks into a folder at most."""
        others = self._others.names()
        if not others:
            return f"use {self.default.card.id!r} or 'default', or see GET /v1/models"
        names = [self.default.card.id, *others, *(alias for alias in self._aliases if alias != _ANY)]
        more = f" or one of {len(names) - _NAMED} more of GET /v1/models" if len(names) > _NAMED else ""
        return f"use one of {', '.join(map(repr, names[:_NAMED]))}{more}"

    def list(self) -> Sequence[Backend]:
        """The default one first. Reads files: call it outside the event loop."""
        return (self.default, *self._others.list())

    def loaded(self) -> Sequence[Backend]:
        """Those that could answer at once, the default one first. Does not block."""
        others = (self.default, *self._others.opened())
        return [backend for backend in others if not isinstance(backend, OnDemandBackend) or backend.is_loaded]

    def aliases_of(self, backend: Backend) -> Sequence[str]:
        return [alias for alias, model in self._aliases.items() if model == backend.card.id]

    def remove_user(self, user: str) -> Removed:
        """Remove everything of one user, of all models; "" stands for all requests without a user. Blocks: call it
        outside the event loop. Raises EmberkeepError where something may be left."""
        registries = {id(each.holders): each.holders for each in (self.default, *self._others.opened())}
        removed = [astuple(holders.forget(user)) for holders in registries.values()]
        return Removed(*map(sum, zip(*removed, strict=True)))

    async def load(self, name: str | None) -> Backend:
        """Returns when it is loaded. Raises ModelNotFound, and what loading it raises."""
        backend = self.find(name)
        if isinstance(backend, OnDemandBackend):
            await backend.load()
        return backend

    async def unload(self, name: str | None) -> Backend:
        """Returns when it is unloaded: after the requests that it answers now. Raises ModelNotFound, and
        RequestError for one that is served alone."""
        backend = self.find(name)
        if not isinstance(backend, OnDemandBackend) or backend.stays:
            raise RequestError(
                f"{backend.card.id} is the only model of this server, and stays: stop the server, or start it "
                "with --models all.",
                "model",
            )
        await backend.unload()
        return backend

    def failure(self) -> EmberkeepError | None:
        """Why one of them can never answer again, so that a new process is needed; None while all can."""
        failures = (backend.failure() for backend in (self.default, *self._others.opened()))
        return next((failure for failure in failures if failure), None)

    @property
    def starting(self) -> Loading | None:
        """How far the default one is, while the server waits for it to be loaded for the first time."""
        return self.default.starting if isinstance(self.default, OnDemandBackend) else None

    async def ready(self) -> None:
        """Returns when the default one has been loaded once."""
        if isinstance(self.default, OnDemandBackend):
            await self.default.ready()

    async def start(self) -> None:
        """Never raises."""
        await self.default.start()
        await self._others.start()

    async def close(self) -> None:
        """Take no new work, finish or fail what runs, and write what is not yet on disk."""
        await self.default.close()
        await self._others.close()


@asynccontextmanager
async def loaded(backend: Backend, keep_alive_s: float | None = None) -> AsyncIterator[Backend]:
    """The model itself, loaded, for what only a loaded one can do. It is not unloaded in the block, and stays
    after it as after a request that says for how long. One that runs elsewhere has nothing to be loaded for.
    Raises what loading it raises."""
    if not isinstance(backend, OnDemandBackend) or backend.card.remote:
        yield backend
        return
    async with backend.used(keep_alive_s) as real:
        yield real


def is_called(card: ModelCard, name: str) -> bool:
    return name == card.id or name in card.also


def status_of(backend: Backend) -> ModelStatus:
    """One that is not loaded on demand is there as long as the server is."""
    return backend.status if isinstance(backend, OnDemandBackend) else ModelStatus()
