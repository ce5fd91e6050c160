"""What one HTTP request asked for, what came of it, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from starlette.types import Scope

from emberkeep.api.errors import Failure
from emberkeep.types import Completed

_KEY = "emberkeep.account"
_TAKEN_ON = frozenset({"server_error", "upstream_error", "deadline"})
"""Types of failure of requests that were not refused."""


class Outcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"  # an error of ours, or of a service that was asked, or time ran out
    CANCELLED = "cancelled"  # the client left before the end
    REFUSED = "refused"  # by what was asked, by who asked, or for want of room


@dataclass(slots=True)
class Account:
    """Kept with the request's scope and filled in along its way."""

    prompts: int = 0
    bills: list[Completed] = field(default_factory=list)
    """One for every prompt that was answered."""
    failure: Failure | None = None
    """What the client got in place of an answer."""
    broken_off: bool = False
    """An answer that had begun ended with an error."""

    @property
    def outcome(self) -> Outcome | None:
        """Asked when the request has ended; None when it wanted no answer of the model and went well."""
        if self.broken_off or (self.failure and self.failure.type in _TAKEN_ON):
            return Outcome.FAILED
        if self.failure:
            return Outcome.REFUSED
        if len(self.bills) < self.prompts:
            return Outcome.CANCELLED
        return Outcome.FINISHED if self.prompts else None


def account_of(scope: Scope) -> Account:
    account: Account = scope.setdefault(_KEY, Account())
    return account
