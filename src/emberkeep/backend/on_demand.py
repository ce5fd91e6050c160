"""A model that is loaded when it is asked for, and unloaded when it is idle or another one needs its memory.

    unloaded -> loading -> loaded -> unloaded, or failed

What it had stored stays stored: the next request after it is loaded again goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from time import monotonic

from emberkeep import garbage
from emberkeep.backend.base import Backend, Embedder, ModelCard, Warmer, keep_warm, warm_prefix
from emberkeep.backend.limits import with_deadline
from emberkeep.backend.model_pool import ModelPool, ModelSource, Need
from emberkeep.backend.server_tools import ToolDesk
from emberkeep.errors import EmberkeepError, EngineError, Overloaded
from emberkeep.memory.memory import Memory
from emberkeep.types.cache import Warmed
from emberkeep.types.events import Events, Loading
from emberkeep.types.models import ModelState, ModelStatus, SpeculationStats, TimelineRecord
from emberkeep.types.request import Json, Request

log = logging.getLogger("emberkeep.backend")

_PROGRESS_S = 1.0
"""How often a request that waits is told so."""
_LEAST_S = 0.001
"""What a request has left at least when its model is loaded in the last moment: no time at all means no limit."""
_CLOSED = "The server is shutting down: try again in a moment."


class OnDemandBackend:
    """Belongs to the event loop. What only a loaded model can do is asked of that one: see `loaded`."""

    cache = tokenizer = experts = attention = None

    def __init__(self, source: ModelSource, pool: ModelPool, opened: Backend | None = None) -> None:
        """`opened`: it is loaded already."""
        self.name = source.name
        self.is_pinned = source.is_pinned
        self.stays = source.stays
        self.holders = source.holders
        self.last_used = monotonic()
        self._source = source
        self._pool = pool
        self._card = opened.card if opened else source.card
        self._backend = opened
        self._lock = threading.Lock()
        """Guards what other threads look at: the backend, whether it is leaving, and how many use it."""
        self._running = 0
        self._unused = asyncio.Event()
        self._unused.set()
        self._waiters: list[asyncio.Future[Backend]] = []
        self._loading: asyncio.Task[None] | None = None
        self._done: tuple[str, float | None] = "", None
        """What is being done to load it, and which part of it is done."""
        self._has_loaded = asyncio.Event()
        if opened is not None:
            self._has_loaded.set()
        self._failure: EmberkeepError | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._keep_alive_s = source.keep_alive_s
        self._needs: Need | None = None
        self._prefixes: tuple[Request, ...] = ()
        self._error = ""
        self._is_closed = False
        if source.needs is not None:
            pool.add(self)

    # ── answering ──

    async def generate(self, request: Request) -> Events:
        entered, began = self._enter(), monotonic()
        try:
            if not entered.done():
                limit_s = request.deadline_s or self._source.deadline_s
                async with aclosing(with_deadline(self._wait_for(entered), limit_s)) as events:
                    async for event in events:
                        yield event
                if limit_s:
                    request = replace(request, deadline_s=max(limit_s - (monotonic() - began), _LEAST_S))
            async with aclosing(entered.result().generate(request)) as events:
                async for event in events:
                    yield event
        finally:
            self._leave(entered, request.keep_alive_s)

    async def _wait_for(self, entered: asyncio.Future[Backend]) -> Events:
        """Tells now and then how far it is loaded, until it is."""
        while not entered.done():
            await asyncio.wait((entered,), timeout=_PROGRESS_S)
            if not entered.done():
                yield self._loading_event()

    def _loading_event(self) -> Loading:
        step, fraction = self._done
        return Loading(self.name, fraction, step)

    def _enter(self) -> asyncio.Future[Backend]:
        """Resolves to the loaded backend, which stays until `_leave`. Raises Overloaded."""
        loop = self._pool.loop = asyncio.get_running_loop()
        entered: asyncio.Future[Backend] = loop.create_future()
        if backend := self._try_enter():
            entered.set_result(backend)
            return entered
        if self._is_closed:
            raise Overloaded(_CLOSED)
        if len(self._waiters) >= self._source.waiting:
            raise Overloaded(f"Too many requests wait for {self.name} to be loaded: try again in a moment.", 5.0)
        self._waiters.append(entered)
        self._start_loading()
        return entered

    def _try_enter(self) -> Backend | None:
        """From any thread. None: it is not loaded, or about to be unloaded."""
        with self._lock:
            if self._backend is None or self._leaving is not None:
                return None
            self._running += 1
            self._unused.clear()
            return self._backend

    def _leave(self, entered: asyncio.Future[Backend], keep_alive_s: float | None = None) -> None:
        if entered in self._waiters:  # its client has left before the model was there; it goes on loading
            self._waiters.remove(entered)
        elif entered.done() and not entered.cancelled() and entered.exception() is None:
            if keep_alive_s is not None:
                self._keep_alive_s = keep_alive_s if keep_alive_s >= 0 else None
            self.last_used = monotonic()
            self._cancel_timer()
            with self._lock:
                self._running -= 1
            self._note_unused()

    def _note_unused(self) -> None:
        with self._lock:  # else a thread could enter between the look and the note
            if self._running or self._backend is None:
                return
            self._unused.set()
        if self._keep_alive_s is not None and self._pool.loop is not None and self._timer is None:
            self._timer = self._pool.loop.call_later(self._keep_alive_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        is_free = not self.is_pinned and not self.stays
        if not self._running and self._backend is not None and self._leaving is None and is_free:
            log.info("%s is unloaded: it was idle", self.name)
            self._start_leaving()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # ── loading ──

    async def load(self, keep_alive_s: float | None = None) -> None:
        """Returns when it is loaded; it stays for that long, as after a request. Raises what loading it raises."""
        async with self.used(keep_alive_s):
            pass

    def _start_loading(self) -> None:
        if self._loading is None and self._leaving is None:
            # A task of its own: a client that leaves does not end it, and a thread that loads cannot be stopped.
            self._loading = asyncio.create_task(self._load())

    async def _load(self) -> None:
        try:
            async with self._room():
                self._backend = await self._open()
                garbage.loaded()
                self._card = self._backend.card
                if self._is_essential:
                    self.name = self._card.id
                self._error = ""
                self._admit(self._backend)
                self._has_loaded.set()
                await self._look_up_needs()
        except Exception as error:
            self._note_failure(error)
            self._refuse(error)
        finally:
            self._loading, self._done = None, ("", None)
        self._note_unused()

    def _note_failure(self, error: Exception) -> None:
        self._error = str(error)
        self._needs = None  # its file may be another one the next time
        if self.starting is None:
            log.warning("%s cannot be loaded: %s", self.name, error)
        elif not self._is_closed:  # else it was given up
            self._failure = error if isinstance(error, EmberkeepError) else EngineError(f"{error!r}")

    def _room(self) -> AbstractAsyncContextManager[None]:
        # The first of all finds room, or fails: what it needs is not known before it is here.
        is_free = self._source.needs is None or self.starting is not None
        return nullcontext() if is_free else self._pool.room_for(self)

    async def _open(self) -> Backend:
        backend = await asyncio.to_thread(self._source.open, self._note_progress)
        await backend.start()
        keep_warm(backend, self._prefixes)
        return backend

    def _note_progress(self, step: str, done: int, total: int | None) -> None:
        self._done = step, done / total if total else None

    def _admit(self, backend: Backend) -> None:
        """All that wait use it from this moment on: it cannot be unloaded before they have."""
        entering, self._waiters = self._waiters, []
        with self._lock:
            self._running += len(entering)
            if entering:
                self._unused.clear()
        for entered in entering:
            entered.set_result(backend)

    def _refuse(self, error: Exception) -> None:
        refused, self._waiters = self._waiters, []
        for entered in refused:
            entered.set_exception(error)

    # ── unloading ──

    async def unload(self) -> None:
        """When what runs has finished; requests that come meanwhile wait until it is loaded again. One that stays
        does not leave."""
        if self.stays:
            return
        if self._loading is not None:
            await asyncio.wait((self._loading,))
        if self._backend is not None:
            self._start_leaving()
        if self._leaving is not None:
            await asyncio.wait((self._leaving,))

    def stay(self) -> None:
        if self._leaving is not None and self._running:
            self._leaving.cancel()

    def _start_leaving(self) -> None:
        with self._lock:
            if self._leaving is None:
                self._leaving = asyncio.create_task(self._unload())

    async def _unload(self) -> None:
        try:
            backend = await self._take()
            self._cancel_timer()
            if backend is not None:
                with suppress(EmberkeepError):
                    await asyncio.shield(backend.close())
                del backend
                if not self._is_closed:
                    asyncio.get_running_loop().call_soon(garbage.unloaded)  # when nothing here holds it
            self._needs = None
        finally:
            with self._lock:
                self._leaving = None
            if self._backend is not None:  # it stays
                self._admit(self._backend)
            elif self._waiters and not self._is_closed:
                self._start_loading()

    async def _take(self) -> Backend | None:
        """The backend, when nothing uses it: from now on nothing can. A thread may begin to before it is taken."""
        while True:
            await self._unused.wait()
            with self._lock:
                if not self._running:
                    backend, self._backend = self._backend, None
                    self._keep_alive_s = self._source.keep_alive_s  # what a request said was said of this loading
                    return backend

    # ── the pool ──

    @property
    def is_loaded(self) -> bool:
        return self._backend is not None

    @property
    def holds_memory(self) -> bool:
        """Loaded, or not closed yet."""
        return self._backend is not None or self._leaving is not None

    @property
    def is_busy(self) -> bool:
        return self._running > 0

    async def needs(self) -> Need:
        """Looked up once for each loading: its file may go or change while it is loaded."""
        if self._needs is None:
            assert self._source.needs is not None
            self._needs = await asyncio.to_thread(self._source.needs)
        return self._needs

    # ── about itself ──

    @property
    def card(self) -> ModelCard:
        card = self._card
        also = (name for name in (card.id, *card.also) if name != self.name)
        return replace(card, id=self.name, also=tuple(dict.fromkeys(also)))

    @property
    def status(self) -> ModelStatus:
        return ModelStatus(
            self._state,
            self._error,
            self._needs.total if self._needs else 0,
            self._running,
            len(self._waiters),
            0.0 if self._running else monotonic() - self.last_used,
            self._timer.when() - self._pool.loop.time() if self._timer and self._pool.loop else None,
            self.is_pinned,
        )

    @property
    def _state(self) -> ModelState:
        if self._loading is not None:
            return ModelState.LOADING
        if self._backend is not None:
            return ModelState.LOADED
        return ModelState.FAILED if self._error else ModelState.UNLOADED

    def stats(self) -> dict[str, Json]:
        """From any thread. Asking for them is no use of the model: it is unloaded all the same."""
        backend = self._try_enter()
        if backend is None:
            return {"model": self.name, "state": self._state}
        try:
            return {**backend.stats(), "model": self.name}
        finally:
            with self._lock:
                self._running -= 1
                is_unused = not self._running
            if is_unused and self._pool.loop is not None:
                self._pool.loop.call_soon_threadsafe(self._note_unused)

    def timeline(self) -> Sequence[TimelineRecord]:
        return self._backend.timeline() if self._backend else ()

    def health(self) -> dict[str, Json]:
        backend = self._backend
        if backend is not None:
            return {**backend.health(), "model": self.name}
        error = {"error": self._error} if self._error else {}
        return {"backend": self._card.remote or "local", "model": self.name, "state": self._state, **error}

    def failure(self) -> EmberkeepError | None:
        return self._backend.failure() if self._backend else self._failure

    @property
    def starting(self) -> Loading | None:
        """How far it is, while the server waits for it to be loaded for the first time."""
        return self._loading_event() if self._is_essential and not self._has_loaded.is_set() else None

    @property
    def _is_essential(self) -> bool:
        return self._source.give_up is not None

    async def ready(self) -> None:
        """Returns when it has been loaded once."""
        await self._has_loaded.wait()

    def speculation_stats(self) -> SpeculationStats | None:
        return self._backend.speculation_stats() if self._backend else None

    # ── life ──

    async def start(self) -> None:
        self._pool.loop = asyncio.get_running_loop()
        if self._is_essential and self._backend is None:
            self._start_loading()
        if self._backend is not None:
            await self._backend.start()
            await self._look_up_needs()

    async def _look_up_needs(self) -> None:
        """While its file is surely there."""
        if self._source.needs is not None:
            with suppress(EmberkeepError, OSError):
                await self.needs()

    async def close(self) -> None:
        """Waits for a model that is being loaded, because it must be closed too. The one that the server waits for
        is given up: the process ends."""
        if self.starting is not None and self._source.give_up is not None:
            self._source.give_up()
        self._is_closed = True
        self._cancel_timer()
        if self._leaving is not None and self._running:
            self._leaving.cancel()
        await asyncio.gather(*(task for task in (self._loading, self._leaving) if task), return_exceptions=True)
        self._refuse(Overloaded(_CLOSED))
        with self._lock:
            backend, self._backend = self._backend, None
        if backend is not None:
            await backend.close()

    # ── what some can do ──

    @property
    def embedder(self) -> Embedder | None:
        """None: it gives no vectors, or is not loaded."""
        return self._backend.embedder if self._backend else None

    async def warm(self, request: Request) -> Warmed:
        async with self.used() as backend:
            return await warm_prefix(backend, request)

    def keep_warm(self, prefixes: Sequence[Request]) -> None:
        """Also whenever it is loaded again."""
        self._prefixes = (*self._prefixes, *prefixes)
        if self._backend is not None:
            keep_warm(self._backend, prefixes)

    @property
    def warmer(self) -> Warmer:
        return self

    @property
    def host_tools(self) -> ToolDesk | None:
        return self._backend.host_tools if self._backend else None

    @property
    def memory(self) -> Memory | None:
        return self._backend.memory if self._backend else self._source.memory()

    @asynccontextmanager
    async def used(self, keep_alive_s: float | None = None) -> AsyncIterator[Backend]:
        """Loaded, and not unloaded in the block. Raises what loading it raises."""
        entered = self._enter()
        try:
            await asyncio.wait((entered,))
            yield entered.result()
        finally:
            self._leave(entered, keep_alive_s)
