"""Many requests at once: results in order, and what goes wrong with one of them in its own place."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from emberkeep.errors import EmberkeepError, Overloaded, RateLimited
from emberkeep.library.results import Collector, Result
from emberkeep.types.events import Events
from emberkeep.types.request import Request


class Batch:
    """Belongs to the event loop. The scheduler puts what is under way into its steps together, and lets those wait
    whose beginning another one is about to evaluate."""

    def __init__(self, generate: Callable[[Request], Events], requests: Sequence[Request]) -> None:
        self._generate = generate
        self._waiting = deque(enumerate(requests))
        self._results: dict[int, Result] = {}
        self._under_way = 0

    async def run(self, at_once: int) -> list[Result]:
        """With so many of them under way, or as many as are let in beside other callers'."""
        tasks = [asyncio.create_task(self._work()) for _ in range(min(at_once, len(self._waiting)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        return [self._results[place] for place in sorted(self._results)]

    async def _work(self) -> None:
        while self._waiting:
            place, request = self._waiting.popleft()
            self._under_way += 1
            collector = Collector()
            try:
                await self._answer(request, collector)
                self._results[place] = collector.result()
            except (Overloaded, RateLimited) as error:
                if self._under_way > 1:  # another of ours ends, and goes on with it
                    self._waiting.appendleft((place, request))
                    return
                self._results[place] = replace(collector.result(), error=error)
            except EmberkeepError as error:
                self._results[place] = replace(collector.result(), error=error)
            finally:
                self._under_way -= 1

    async def _answer(self, request: Request, collector: Collector) -> None:
        async with aclosing(self._generate(request)) as events:
            async for event in events:
                collector.add(event)
