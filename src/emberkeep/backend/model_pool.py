"""Models that can be loaded, and which are at a time: those that memory has room for, the latest used first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import field
from typing import Protocol

from emberkeep.backend.base import Backend, ModelCard
from emberkeep.errors import EmberkeepError, Overloaded
from emberkeep.kv.forgetting import Holders
from emberkeep.memory.memory import Memory
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.backend")

PATIENCE_S = 120.0
"""How long a model waits for one that is busy to make room."""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory that a model takes, in bytes, as far as that can be told before it is loaded."""

    ram: int = 0
    gpu: int = 0

    @property
    def total(self) -> int:
        return self.ram + self.gpu


Report = Callable[[str, int, int | None], None]
"""Is told, from any thread, what is being done and how many bytes of how many are done; None: of how many is not
known."""


def tell_nobody(step: str, done: int, total: int | None) -> None:
    """A Report that nobody reads."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded, any number of times."""

    name: str
    card: ModelCard
    """What is known of it without loading it."""
    open: Callable[[Report], Backend]
    """Blocks. Raises EmberkeepError."""
    needs: Callable[[], Need] | None = None
    """Blocks for less than a second. Raises EmberkeepError. None: it runs elsewhere and needs none."""
    memory: Callable[[], Memory | None] = lambda: None
    """The one that it remembers in. Blocks the first time."""
    keep_alive_s: float | None = None
    """How long it stays loaded after a request that does not say. None: until its memory is needed."""
    is_pinned: bool = False
    waiting: int = 64
    """Most requests that may wait until it is loaded."""
    deadline_s: float | None = None
    """For requests that do not say: how long they may take, with the time that they wait for it."""
    give_up: Callable[[], None] | None = None
    """What lets `open` raise at once, where the server is of no use without this model: it is loaded when the
    server starts, and the server ends where that fails. None for all others."""
    stays: bool = False
    """It is never unloaded."""
    holders: Holders = field(default_factory=Holders)
    """Those that it joins whenever it is loaded."""


Fits = Callable[[Need, Sequence[Need]], bool]
"""Whether there is room for one more beside those that are loaded. Blocks for milliseconds."""


class Member(Protocol):
    """A model of the pool. Belongs to the event loop."""

    @property
    def name(self) -> str: ...

    @property
    def is_loaded(self) -> bool: ...

    @property
    def holds_memory(self) -> bool:
        """Loaded, or not closed yet."""

    @property
    def is_pinned(self) -> bool: ...

    @property
    def is_busy(self) -> bool: ...

    @property
    def last_used(self) -> float: ...

    async def needs(self) -> Need:
        """Raises EmberkeepError, OSError."""

    async def unload(self) -> None:
        """When what runs has finished; requests that come meanwhile wait until it is loaded again."""

    def stay(self) -> None:
        """Do not wait any longer to be unloaded."""


class ModelPool:
    """Loads one model at a time, and makes room for it. Belongs to the event loop."""

    def __init__(self, fits: Fits, patience_s: float = PATIENCE_S) -> None:
        self._fits = fits
        self._patience_s = patience_s
        self.loop: asyncio.AbstractEventLoop | None = None
        """The one that it belongs to, once that runs."""
        self._members: list[Member] = []
        self._turn = asyncio.Lock()

    def add(self, member: Member) -> None:
        self._members.append(member)

    @asynccontextmanager
    async def room_for(self, newcomer: Member) -> AsyncIterator[None]:
        """Waits for its turn and for room; load it in the block. One larger than all memory is loaded alone.

        Raises Overloaded where others neither may be unloaded nor finish in time.
        """
        async with self._turn:
            needs = await newcomer.needs()
            while not await self._has_room(needs, newcomer):
                leaving = self._next_to_leave(newcomer)
                if leaving is None:
                    break
                log.info("%s is unloaded: %s needs its memory", leaving.name, newcomer.name)
                await self._unload(leaving, newcomer)
            yield

    async def _has_room(self, needs: Need, newcomer: Member) -> bool:
        held = [await _held_by(member) for member in self._holders(newcomer)]
        return not held or await asyncio.to_thread(self._fits, needs, held)

    def _holders(self, newcomer: Member) -> list[Member]:
        return [member for member in self._members if member.holds_memory and member is not newcomer]

    def _next_to_leave(self, newcomer: Member) -> Member | None:
        """One that is being closed anyway; else the one that was not used for longest, rather an idle one than one
        that has to be waited for. None: all that could go have gone. Raises Overloaded where only pinned ones are
        left."""
        holders = self._holders(newcomer)
        free = [member for member in holders if not (member.is_pinned and member.is_loaded)]
        if holders and not free:
            pinned = ", ".join(member.name for member in holders)
            raise Overloaded(
                f"There is no memory for {newcomer.name} beside {pinned}, which stays loaded: pin fewer models, "
                "or raise model_memory."
            )
        return min(free, key=lambda member: (member.is_loaded, member.is_busy, member.last_used), default=None)

    async def _unload(self, leaving: Member, newcomer: Member) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await leaving.unload()
        except TimeoutError as error:
            leaving.stay()
            raise Overloaded(
                f"{newcomer.name} has no room while {leaving.name} is busy: try again when its answers are done."
            ) from error


async def _held_by(member: Member) -> Need:
    """Nothing, where it cannot be told any more: one whose file is gone must not keep all others from loading."""
    try:
        return await member.needs()
    except (EmberkeepError, OSError) as error:
        log.warning("how much memory %s takes cannot be told, and is not planned with: %s", member.name, error)
        return Need()
