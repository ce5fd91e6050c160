"""Who answers: the backends of a Config, in the order in which they stand in for each other, and the models of a
server, loaded when they are asked for.

A conversation leaves this machine only for a model that its user has named: by `emberkeep api add`, in the
configuration file, or with `--backend`. A key that happens to be in the environment names none."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.backend.model_pool import ModelPool, ModelSource, Need, Report, tell_nobody
from emberkeep.backend.models import Models
from emberkeep.backend.on_demand import OnDemandBackend
from emberkeep.config.settings import Config, placed_by_itself
from emberkeep.errors import ConfigError, EmberkeepError, Overloaded
from emberkeep.models.library import InstalledModel, ModelFile, ModelLibrary, id_at
from emberkeep.models.remotes import Remotes
from emberkeep.models.spec import Reporter
from emberkeep.runtime.local_model import open_local
from emberkeep.runtime.parts import ModelParts
from emberkeep.runtime.placement import free_on_gpus, gpu_bytes, needed_memory, room_for_models, weight_bytes
from emberkeep.runtime.remote import RETRIES, named_backends, open_remote
from emberkeep.runtime.tools import server_tools
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Json
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep")

ALL = "all"
NONE = "none"


def open_models(config: Config) -> Models:
    """The model that a server is started with, loaded, and the others. Blocks. Raises as `open_backend`.

    One that is served alone is never unloaded.
    """
    if not serves_others(config):
        return Models(open_backend(config), aliases=_aliases(config))
    parts = ModelParts(config, stays=True)
    try:
        first = open_backend(config, parts)
    except BaseException:
        parts.close()
        raise
    pool = ModelPool(room_for_models(config, free_on_gpus))
    default = OnDemandBackend(_first_source(config, parts, first.card), pool, first)
    return Models(default, ServedModels(config, parts, pool, default), _aliases(config))


def begin_models(config: Config, prepare: Callable[[Reporter], None], reporter: Reporter) -> Models:
    """As `open_models`, without waiting for a model that runs here: a thread has begun to load it.

    `prepare` is called by that thread first, and makes sure that the model is here. `reporter` is told how far it
    is. Raises as `open_backend`.
    """
    if backend_names(config) != [LOCAL]:
        prepare(reporter)
        return open_models(config)
    has_others, name = serves_others(config), _first_name(config)
    parts = ModelParts(config, stays=has_others)

    def open_first(report: Report) -> Backend:
        both = _BothReporters(reporter, report)
        prepare(both)
        both.progress(f"Loading {name}", 0, None)
        return open_backend(config, parts, both.progress)

    card, opening = ModelCard(name, 0, 0), EarlyOpening(open_first)
    pool = ModelPool(room_for_models(config, free_on_gpus))
    source = replace(_first_source(config, parts, card), open=opening, give_up=opening.give_up)
    if not has_others:
        default = OnDemandBackend(replace(source, needs=None, is_pinned=False, stays=True), pool)
        return Models(default, aliases=_aliases(config))
    default = OnDemandBackend(source, pool)
    return Models(default, ServedModels(config, parts, pool, default), _aliases(config))


class EarlyOpening:
    """Opens a backend; the first time it has begun to before it is asked."""

    def __init__(self, open: Callable[[Report], Backend]) -> None:
        self._open = open
        self._report: Report = tell_nobody
        self._latest: tuple[str, int, int | None] = "", 0, None
        """What was told before anyone listened."""
        self._first: Future[Backend] | None = Future()
        # A daemon: a process that is told to end does not wait for it.
        threading.Thread(target=self._fulfil, args=(self._first,), name="loading", daemon=True).start()

    def _fulfil(self, first: Future[Backend]) -> None:
        with suppress(InvalidStateError):  # it was given up meanwhile
            try:
                first.set_result(self._open(self._tell))
            except Exception as error:
                first.set_exception(error)

    def __call__(self, report: Report) -> Backend:
        """Blocks. Raises what opening raises."""
        first, self._report = self._first, report
        if first is None:
            return self._open(report)
        report(*self._latest)
        try:
            return first.result()
        finally:
            self._first = None

    def give_up(self) -> None:
        """Who waits for the first opening waits no longer."""
        if self._first is not None:
            with suppress(InvalidStateError):
                self._first.set_exception(Overloaded("The server is shutting down: try again in a moment."))

    def _tell(self, step: str, done: int, total: int | None) -> None:
        self._latest = step, done, total
        self._report(step, done, total)


@dataclass(frozen=True, slots=True)
class _BothReporters:
    """A Reporter that tells another one and `report`."""

    reporter: Reporter
    report: Report

    def say(self, sentence: str) -> None:
        self.reporter.say(sentence)

    def progress(self, step: str, done: int, total: int | None) -> None:
        self.reporter.progress(step, done, total)
        self.report(step, done, total)


def _first_name(config: Config) -> str:
    try:
        return _library(config).resolve(config.local_model).id
    except EmberkeepError:  # it has to be pulled first
        return config.local_model


def serves_others(config: Config) -> bool:
    """Whether more models than one answer. Who names a model or a backend, and no others, wants that one."""
    if config.models:
        return config.models != (NONE,)
    return config.model is None and config.backend == AUTO


def _aliases(config: Config) -> Mapping[str, str]:
    return {alias.name: alias.model for alias in config.aliases}


def _source(
    config: Config, parts: ModelParts, card: ModelCard, open_model: Callable[[Report], Backend], **more: Any
) -> ModelSource:
    return ModelSource(
        card.id,
        card,
        open_model,
        memory=parts.memory,
        holders=parts.holders,
        waiting=config.queue + config.parallel,
        deadline_s=config.deadline_s,
        **more,
    )


def _first_source(config: Config, parts: ModelParts, card: ModelCard) -> ModelSource:
    """It stays loaded until its memory is needed."""
    return _source(
        config,
        parts,
        card,
        lambda report: open_backend(config, parts),
        needs=partial(_needed, config, config.local_model) if needs_local(config) else None,
        is_pinned=card.id in config.pinned,
    )


def _needed(config: Config, name: str) -> Need:
    return needed_memory(config, _library(config).resolve(name), gpu_bytes)


def _library(config: Config) -> ModelLibrary:
    return ModelLibrary(config.data_dir / "models")


class ServedModels:
    """A ModelCatalogue of installed models and registered remote ones. Any thread may call `list`; the rest is for
    the event loop."""

    def __init__(self, config: Config, parts: ModelParts, pool: ModelPool, default: OnDemandBackend) -> None:
        """`default`: the one that is no other."""
        self._config = placed_by_itself(config)
        self._parts = parts
        self._pool = pool
        self._default = default
        self._named = {_name_of(config, name): name for name in config.models if name != ALL}
        """Where each of them is."""
        self._takes_all = ALL in config.models or not config.models
        self._adding = threading.Lock()
        self._found: dict[str, OnDemandBackend] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def find(self, name: str) -> OnDemandBackend | None:
        if name == self._default.name or not self._is_served(name):
            return None
        return self._found.get(name) or self._add(name)

    def names(self) -> Sequence[str]:
        return self._names(_library(self._config).ids)

    def list(self) -> Sequence[OnDemandBackend]:
        usable = self._names(lambda: [model.id for model in _library(self._config).list()])
        return [backend for name in usable if (backend := self.find(name))]

    def _names(self, installed: Callable[[], Sequence[str]]) -> Sequence[str]:
        every = {*installed(), *self._remotes()} if self._takes_all else set()
        return sorted({*every, *self._named} - {self._default.name})

    def opened(self) -> Sequence[OnDemandBackend]:
        return list(self._found.values())

    async def start(self) -> None:
        self._sweeping = asyncio.create_task(self._sweep())
        self._sweeping.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    async def close(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for backend in self._found.values():
            with suppress(EmberkeepError):
                await backend.close()
        await asyncio.to_thread(self._parts.close)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.sweep_s)
            try:
                await asyncio.to_thread(self._parts.sweep)
            except Exception:
                log.exception("stored state of models that are not loaded was not looked after")

    def _is_served(self, name: str) -> bool:
        if name in self._named:
            return True
        return self._takes_all and (_library(self._config).holds(name) or name in self._remotes())

    def _add(self, name: str) -> OnDemandBackend | None:
        try:
            source = self._source(name)
        except EmberkeepError as error:
            log.warning("%s is not served: %s", name, error)
            return None
        with self._adding:
            if name not in self._found:
                self._found[name] = OnDemandBackend(source, self._pool)
            return self._found[name]

    def _source(self, name: str) -> ModelSource:
        """Raises EmberkeepError."""
        remote = self._remotes().get(name)
        return self._remote_source(remote) if remote else self._local_source(name, self._named.get(name, name))

    def _remotes(self) -> dict[str, RemoteModel]:
        return {remote.name: remote for remote in Remotes(self._config).list()}

    def _remote_source(self, remote: RemoteModel) -> ModelSource:
        also = (remote.model,) if remote.model else ()
        card = ModelCard(remote.name, 0, remote.ctx or 0, owned_by=remote.backend, also=also, remote=remote.name)
        return _source(
            self._config,
            self._parts,
            card,
            lambda report: open_remote(self._config, remote, self._parts, open_tools=server_tools),
        )

    def _local_source(self, name: str, where: str) -> ModelSource:
        config = replace(self._config, model=where)
        model = _library(config).resolve(where)
        return _source(
            config,
            self._parts,
            ModelCard(name, int(model.path.stat().st_mtime), 0, details=_facts(model)),
            lambda report: open_local(config, self._parts, report),
            needs=partial(_needed, config, where),
            keep_alive_s=None if name in config.pinned else config.unload_after_s,
            is_pinned=name in config.pinned,
        )


def _name_of(config: Config, model: str) -> str:
    """What clients call a model: a path is none of their business. Raises ConfigError."""
    if model in {remote.name for remote in Remotes(config).list()} or _library(config).holds(model):
        return model
    return id_at(Path(model))


def _facts(model: ModelFile) -> dict[str, Json]:
    """What can be told without reading it."""
    if isinstance(model, InstalledModel):
        return {"quantisation": model.record.quantisation, "size": model.record.size}
    return {"size": weight_bytes(model.path)}


# ── one model, and others in its place ──


AUTO = "auto"
LOCAL = "local"
_TRTLLM = "trtllm"


def open_backend(config: Config, parts: ModelParts | None = None, report: Report = tell_nobody) -> Backend:
    """The first backend that can be opened, with the others behind it. Blocks while a model is loaded.

    `parts`: those that they share with other models.
    Raises ConfigError, ModelError, EngineError, RemoteError.
    """
    chain = _chain(config)
    if config.draft_model is not None and None not in chain:
        raise ConfigError(
            "A draft model drafts for a model that runs here, and --backend names none: leave speculation out, or "
            "add local to the backends."
        )
    # Where another one stands in at once, the first is not waited for.
    parts = parts or ModelParts(config)
    retries = RETRIES if len(chain) == 1 else 0
    links = [_link(config, one, parts, report, retries) for one in chain]
    return links[0].open() if len(links) == 1 else FallbackBackend(links)


def backend_names(config: Config) -> list[str]:
    """Those that may answer, in their order. Raises ConfigError."""
    return [LOCAL if one is None else one.name for one in _chain(config)]


def needs_local(config: Config) -> bool:
    """A model that runs here may be asked. Raises ConfigError."""
    return None in _chain(config)


def may_do_without_local(config: Config) -> bool:
    """Another one can stand in for it. Raises ConfigError."""
    return len(_chain(config)) > 1


def _chain(config: Config) -> list[RemoteModel | None]:
    """None stands for the model that runs here."""
    remotes = Remotes(config)
    if config.backend == AUTO:
        return _automatic(remotes)
    return [None if name == LOCAL else _named(config, remotes, name) for name in named_backends(config)]


def _automatic(remotes: Remotes) -> list[RemoteModel | None]:
    listed = remotes.list()
    if not listed:
        return [None]
    from emberkeep.backend.remote.vendors import has_key

    first = [remote for remote in listed if remote.backend == _TRTLLM]
    others = [remote for remote in listed if remote.backend != _TRTLLM and has_key(remote, os.environ)]
    return [*first, None, *others]


def _named(config: Config, remotes: Remotes, name: str) -> RemoteModel:
    from emberkeep.backend.remote.vendors import vendor_names

    known = {remote.name: remote for remote in remotes.list()}
    if name in known:
        return known[name]
    if name in vendor_names():
        return RemoteModel(name, name, config.model or "", config.base_url, ctx=config.ctx)
    listed = ", ".join(["local", *known, *vendor_names()])
    raise ConfigError(f"There is no backend {name!r}: choose from {listed}, or add one with `emberkeep api add`.")


def _link(config: Config, remote: RemoteModel | None, parts: ModelParts, report: Report, retries: int) -> Link:
    if remote is None:
        return Link(LOCAL, partial(open_local, config, parts, report))
    return Link(remote.name, partial(open_remote, config, remote, parts, open_tools=server_tools, retries=retries))
