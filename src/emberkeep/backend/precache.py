"""Having ready what will be asked for: declared prefixes, and those of conversations that are going on.

One thread of its own. Everything here is best effort: what fails is a line in the log.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from emberkeep.chat.messages import CacheKeys, cache_keys, label_of, stable_messages
from emberkeep.chat.prompt import PromptBuilder
from emberkeep.errors import EmberkeepError, RequestError
from emberkeep.kv.entries import entry_id
from emberkeep.sched.scheduler import Scheduler
from emberkeep.types.cache import Warmed
from emberkeep.types.events import Completed, Events
from emberkeep.types.lineage import SHARED, Lineage
from emberkeep.types.request import Request, Ttl
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.backend")

_BEFORE_EXPIRY = 0.8
"""The part of the short TTL after which an untouched prefix is warmed again."""

PrefixKey = tuple[Lineage, str]
"""Lineage and cache key."""


@dataclass(frozen=True, slots=True)
class KeepAlive:
    ttl: Mapping[Ttl, float]
    """Seconds."""
    sweep_s: float = 30.0
    """How often to look."""
    tracked: int = 16
    """Prefixes of conversations that are kept warm at most, besides the declared ones. None where what outlives
    its TTL is deleted: only requests make state live longer there."""


@dataclass(slots=True)
class _Prefix:
    request: Request
    lineage: Lineage
    is_declared: bool
    asked_at: float
    """When a request last used it."""
    warmed_at: float


class Precache:
    """The `Warmer` of a model that runs here. Everything but `warm` and `join` may be called from any thread, and
    returns at once."""

    def __init__(
        self,
        generate: Callable[[Request], Events],
        prepare: Callable[[Request], tuple[Request, Lineage]],
        prompts: PromptBuilder,
        scheduler: Scheduler,
        settings: KeepAlive,
    ) -> None:
        """`prepare`: a prefix as requests have it, with the tools that its model gets besides, and its
        lineage."""
        self._generate = generate
        self._prepare = prepare
        self._prompts = prompts
        self._scheduler = scheduler
        self._store = scheduler.store
        self._settings = settings
        self._prefixes: OrderedDict[PrefixKey, _Prefix] = OrderedDict()
        self._changed = threading.Condition()
        self._closing = False
        self._give_up: Callable[[], object] = _nothing
        """Stops what is being warmed just now."""
        self._thread = threading.Thread(target=self._run, name="precache", daemon=True)
        self._thread.start()

    async def warm(self, request: Request) -> Warmed:
        """Evaluate a prefix now. Raises RequestError; any other failure is in the log and the result's `error`."""
        prefix = replace(request, max_tokens=0, n=1, echo=False).decided(is_prefix=True, in_pieces=False)
        prefix, lineage = self._prepare(prefix)
        begin = monotonic()
        usage, error = None, None
        try:
            async for event in self._generate(prefix):
                usage = event.usage if isinstance(event, Completed) else usage
        except RequestError:
            raise
        except EmberkeepError as failure:
            log.warning("a prefix was not warmed: %s", failure)
            error = str(failure)
        name = entry_id(lineage, label_of(prefix))
        if error is None:
            with suppress(EmberkeepError):  # it is being closed
                # The answer is told a moment before the end of its turn is stored.
                await asyncio.wrap_future(self._scheduler.call(lambda: None))
        entry = await asyncio.to_thread(self._store.catalogue.entry, name)
        if entry is None and error is None:
            error = "It was evaluated, but there is no room to keep it: raise ram_budget."
        return Warmed(
            tokens=usage.prompt_tokens if usage else 0,
            cached_tokens=usage.cached_tokens if usage else 0,
            seconds=monotonic() - begin,
            entry_id=name,
            ttl=entry.ttl if entry else None,
            error=error,
        )

    def keep_warm(self, prefixes: Sequence[Request]) -> None:
        """Warm these now and keep them warm for good."""
        prepared = [self._prepare(prefix) for prefix in prefixes]
        with self._changed:
            for request, lineage in prepared:
                key = lineage, _name(cache_keys(request))
                self._prefixes[key] = _Prefix(request, lineage, True, monotonic(), float("-inf"))
            self._changed.notify_all()

    def seen(self, request: Request, lineage: Lineage, keys: CacheKeys) -> None:
        """A conversation goes on: its stable beginning stays warm while it is open."""
        if not self._settings.tracked:
            return
        prefix = replace(
            request,
            messages=stable_messages(request.messages),
            conversation_id=None,
            breakpoints=(),
            max_tokens=0,
            user=SHARED,  # no user asked for it: it counts against no user's limit
        ).decided(is_prefix=True)
        now, key = monotonic(), (lineage, _name(keys))
        with self._changed:
            known = self._prefixes.get(key) or _Prefix(prefix, lineage, False, now, now)
            known.asked_at = known.warmed_at = now
            self._prefixes[key] = known
            self._prefixes.move_to_end(key)
            passing = [key for key, known in self._prefixes.items() if not known.is_declared]
            for key in passing[: -self._settings.tracked]:
                del self._prefixes[key]

    def forget(self, owners: Container[str]) -> None:
        with self._changed:
            for key in [key for key in self._prefixes if key[0].owner in owners]:
                del self._prefixes[key]

    def stop(self) -> None:
        """No client waits for what is being warmed: it is given up, and what was computed of it is kept."""
        with self._changed:
            self._closing = True
            self._give_up()
            self._changed.notify_all()

    def join(self) -> None:
        """Blocks until nothing is being done any more. Call it when the loop is closed."""
        self._thread.join()

    # ── on its own thread ──

    def _run(self) -> None:
        while not self._closing:
            self.sweep()
            with self._changed:
                if not self._closing and not self._due():
                    self._changed.wait(self._settings.sweep_s)

    def sweep(self) -> None:
        """Warm what is about to fall out, then let go of what is not wanted any more."""
        for prefix in self._take_due():
            if self._closing:
                return
            self._refresh(prefix)
        try:
            for store in self._scheduler.stores:
                store.sweep()
            expired = self._store.catalogue.expired(self._scheduler.idle_entries())
            unnamed_s = self._settings.ttl[Ttl.SHORT] if self._store.keeping.expire else None
            if expired or unnamed_s is not None:
                self._scheduler.drop_idle(expired, unnamed_s)
        except EmberkeepError as error:
            log.debug("no sweep: %s", error)
        except Exception:
            log.exception("no sweep: the next one may fare better")

    def _due(self) -> list[_Prefix]:
        now = monotonic()
        late = now - _BEFORE_EXPIRY * self._settings.ttl[Ttl.SHORT]
        open_since = now - self._settings.ttl[Ttl.LONG]
        with self._changed:
            for key in [k for k, p in self._prefixes.items() if not p.is_declared and p.asked_at < open_since]:
                del self._prefixes[key]
            return [prefix for prefix in self._prefixes.values() if prefix.warmed_at <= late]

    def _take_due(self) -> list[_Prefix]:
        """Those that are due, for this sweep alone: none is warmed by two at a time."""
        with self._changed:
            due = self._due()
            for prefix in due:
                prefix.warmed_at = monotonic()
            return due

    def _refresh(self, prefix: _Prefix) -> None:
        """From the store if it is all there, so that no conversation loses its slot for it."""
        try:
            prompt = self._prompts.fit(self._prompts.build(prefix.request, prefix.lineage), prefix.request)
            has_snapshots = self._scheduler.engine.capabilities.kv_unit.has_snapshots
            label = label_of(prefix.request)
            stores = self._scheduler.stores
            if not all(s.touch(label, prefix.lineage, prompt.tokens, snapshots=has_snapshots) for s in stores):
                asyncio.run(self._warm_one(prefix.request))
        except asyncio.CancelledError:
            log.debug("a prefix was given up")
        except EmberkeepError as error:
            log.warning("a prefix was not warmed: %s", error)
        except Exception:
            log.exception("a prefix was not warmed")

    async def _warm_one(self, request: Request) -> None:
        loop, warming = asyncio.get_running_loop(), asyncio.ensure_future(self.warm(request))
        with self._changed:
            self._give_up = lambda: loop.call_soon_threadsafe(warming.cancel)
            if self._closing:
                self._give_up()
        try:
            warmed = await warming
        finally:
            with self._changed:
                self._give_up = _nothing
        if warmed.error is None:
            log.info("warmed %d tokens in %.1f s", warmed.tokens, warmed.seconds)


def _nothing() -> None:
    pass


def _name(keys: CacheKeys) -> str:
    return keys.stable or keys.entry
