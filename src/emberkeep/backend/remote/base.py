"""The seam of remote backends: one vendor, one model, one request at a time into events.

What all of them share stands above it (`backend/remote/backend.py`): conversations, eviction, memory, retries.
A backend of your own is a factory of a `Provider`, registered as an entry point of the group `emberkeep.backends`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from emberkeep.errors import RemoteError
from emberkeep.types.events import Events
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Request
from emberkeep.values import dataclass


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
"""With the key, where there is one. Does not connect. Raises RemoteRefused without a key that is needed, and
ConfigError."""


async def first_model(provider: Provider, none_served: str) -> str:
    """The name of the first model that is served. Raises RemoteError with `none_served`, and as `about`."""
    served = (await provider.about()).models
    if not served:
        raise RemoteError(none_served)
    return served[0]
