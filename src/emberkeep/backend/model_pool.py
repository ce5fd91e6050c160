"""Which models are loaded at a time: those that memory has room for, the latest used ones first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from emberkeep.errors import EmberkeepError, Overloaded
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
