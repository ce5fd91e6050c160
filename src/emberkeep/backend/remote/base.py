"""The seam of remote backends: one vendor, one model, one request at a time into events.

What all of them share stands above it (`backend/remote/backend.py`): conversations, eviction, memory, retries.
A backend of your own is a factory of a `Provider`, registered as an entry point of the group `emberkeep.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from hashlib import sha256
from typing import Protocol, TypeVar

from emberkeep.errors import InvalidField
from emberkeep.latest import Latest
from emberkeep.types.events import Events
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Json, JsonFormat, Request, Sampling
from emberkeep.values import dataclass

T = TypeVar("T")

_USUAL = Sampling()
_KEPT = 1024


@dataclass(frozen=True, slots=True)
class RemoteAbout:
    """What a service says about itself."""

    models: tuple[str, ...] = ()
    context: int | None = None
    """Tokens of the model that is used; None where it does not say."""


class Provider(Protocol):
    """Belongs to the event loop. Its SDK's own retries are off: they are made above, the same for all."""

    def answer(self, request: Request) -> Events:
        """The events of one chat: text, reasoning and tool calls as they come, `Finished`, then one `Completed`
        of which only `usage` is set (prompt tokens with the cached ones, completion tokens with the reasoning).

        `messages` is what the model shall see; `prompt` is None and `n` is 1; `conversation_id` or `cache_key` is
        what prompt caches may be keyed by. Raises RemoteDown (unreachable, 408, 409, 429, 5xx), RemoteRefused
        (401, 403, no key), RemoteFull (too long), RequestError (what else is wrong with the request), RemoteError.
        Closing the iterator closes the connection.
        """

    async def about(self) -> RemoteAbout:
        """Asks the service; cheap, costs no tokens. Raises as `answer`."""

    async def close(self) -> None: ...


OpenProvider = Callable[[RemoteModel, str | None], Provider]
"""Opens one with the key, where there is one. Does not connect. Raises ConfigError."""


# ── what the vendors' wire formats share ──


def chosen_sampling(sampling: Sampling, accepted: Collection[str]) -> dict[str, Json]:
    """The fields that the user has chosen, of those that a vendor accepts: for the others it has defaults."""
    values = {one.name: getattr(sampling, one.name) for one in fields(Sampling) if one.name in accepted}
    return {name: value for name, value in values.items() if value != getattr(_USUAL, name)}


def json_format(request: Request) -> JsonFormat | None:
    """The JSON that the answer must be. Raises InvalidField for other formats: vendors have no others."""
    wanted = request.format
    if wanted is None or isinstance(wanted, JsonFormat):
        return wanted
    raise InvalidField(wanted.param, "needs a model that runs here: this one can be asked for JSON only.")


def anonymous_id(user: str) -> str | None:
    """A hash of the user's name: a vendor can tell users apart without learning their names."""
    return sha256(user.encode()).hexdigest()[:32] if user else None


class Keepsakes(Latest[str, T]):
    """What a vendor wants back with the history and the client does not have, by tool call id; the latest ones."""

    def __init__(self) -> None:
        super().__init__(_KEPT)
