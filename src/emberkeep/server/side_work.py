"""Work beside the answers: it may take a while, and must hold up neither them nor the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from emberkeep.backend.base import Backend
from emberkeep.backend.models import loaded
from emberkeep.errors import Overloaded

P = ParamSpec("P")
T = TypeVar("T")

THREADS = 4
WAITING = 64
RETRY_AFTER_S = 1.0


class SideWork:
    """Has its own threads, because answers use those of the loop and must not wait for this work."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="emberkeep-side")
        self._here = 0

    async def run(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Raises what `work` raises, and Overloaded. If the client leaves, the work goes on to its end."""
        if self._here >= THREADS + WAITING:
            raise Overloaded("Too many requests of this kind wait: try again in a moment.", RETRY_AFTER_S)
        self._here += 1
        working = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **named))
        working.add_done_callback(self._ended)
        return await asyncio.shield(working)  # its place is free again when the thread has ended

    async def run_on(
        self, work: Callable[Concatenate[Backend, P], T], backend: Backend, *args: P.args, **named: P.kwargs
    ) -> T:
        """As `run`, with the model loaded: threads that waited for that would hold up all others. Raises what
        loading it raises, too."""
        return await asyncio.shield(self._run_loaded(work, backend, *args, **named))

    async def _run_loaded(
        self, work: Callable[Concatenate[Backend, P], T], backend: Backend, *args: P.args, **named: P.kwargs
    ) -> T:
        """The model stays until the thread has ended, whether or not the client waits for it."""
        async with loaded(backend) as real:
            return await self.run(work, real, *args, **named)

    def _ended(self, working: asyncio.Future[T]) -> None:
        self._here -= 1
