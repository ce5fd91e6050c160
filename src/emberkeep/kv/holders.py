"""Everything in this process that holds what users sent. Who keeps any of it joins, and forgetting a user reaches
all who joined: first what is quick and could be stored again, then what is on disk and elsewhere."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Container
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any

from emberkeep.errors import EmberkeepError
from emberkeep.kv.disk.forgotten import of_user
from emberkeep.types.cache import Removed
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

Forget = Callable[[Container[str]], "Future[Any] | None"]
"""Drops everything of these owners. Quick, and does not call a store. Returns a future where another thread does
it."""
Erase = Callable[[str], Removed]
"""Leaves nothing of a user on disk or elsewhere. Blocks. Raises EmberkeepError where something may be left: that
is recorded, and tried again."""


@dataclass(frozen=True, slots=True)
class _Holder:
    name: str
    member: object
    forget: Forget


class Holders:
    """Safe to use from any thread. What belongs to a model leaves with it; the registry may outlive all models."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        """Held while something that lasts is opened: forgetting waits for it, and misses nothing."""
        self._holders: tuple[_Holder, ...] = ()
        self._lasting: tuple[tuple[object, Erase], ...] = ()
        self._changing = threading.Lock()

    def join(self, name: str, member: object, forget: Forget) -> None:
        """`name`: what is held, for the log. `member`: who leaves. Who joins first is told first."""
        with self._changing:
            self._holders = (*self._holders, _Holder(name, member, forget))

    def join_lasting(self, member: object, erase: Erase) -> None:
        with self._changing:
            self._lasting = (*self._lasting, (member, erase))

    def leave(self, member: object) -> None:
        """Everything that joined for it leaves. Idempotent."""
        with self._changing:
            self._holders = tuple(holder for holder in self._holders if holder.member is not member)
            self._lasting = tuple(lasting for lasting in self._lasting if lasting[0] is not member)

    @property
    def names(self) -> list[str]:
        return [holder.name for holder in self._holders]

    def drop(self, owners: Container[str]) -> list[Future[Any]]:
        """Drop what is quick, also where another process has forgotten them. Never raises: what failed is a failed
        future and a line in the log, and all others are told all the same."""
        futures: list[Future[Any]] = []
        for holder in self._holders:
            try:
                future = holder.forget(owners)
            except Exception as error:
                log.exception("something of a user who was forgotten may be left in: %s", holder.name)
                future = Future()
                future.set_exception(error)
            if future is not None:
                futures.append(future)
        return futures

    def forget(self, user: str) -> Removed:
        """Leave nothing of a user; "" stands for all requests without one. Blocks. Raises the first error of all,
        when everybody was asked."""
        errors: list[BaseException] = []
        for future in self.drop(of_user(user)):
            if error := future.exception():
                errors.append(error)
        with self.opening:
            lasting = self._lasting
        removed = [Removed(0, 0)]
        for _, erase in lasting:
            try:
                removed.append(erase(user))
            except EmberkeepError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return Removed(*(sum(column) for column in zip(*map(astuple, removed), strict=True)))
