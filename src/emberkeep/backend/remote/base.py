"""The seam of remote backends: one vendor, one model, one request at a time into events.

What all of them share stands above it (`backend/remote/backend.py`): conversations, eviction, memory, retries.
What their SDKs raise becomes ours in one place, `Service`. A backend of your own is a factory of a `Provider`,
registered as an entry point of the group `emberkeep.backends`.
"""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, fields
from email.utils import parsedate_to_datetime
from functools import cache
from hashlib import sha256
from time import time
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx2

from emberkeep.errors import (
    EmberkeepError,
    InvalidField,
    RemoteDown,
    RemoteError,
    RemoteFull,
    RemoteLoop,
    RemoteRefused,
    RequestError,
)
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


log = logging.getLogger("emberkeep.remote")

CONNECT_S = 10.0

READ_S = 600.0
"""Longest time between two reads: a model that thinks sends nothing for minutes."""

_TOO_LONG = re.compile(
    r"too long|too many tokens|context.{0,20}(length|window|limit|size)|input token count|"
    r"exceeds? (the )?(maximum|model)|(maximum|sum of) prompt length",
    re.IGNORECASE,
)

_WRONG_KEY = re.compile(r"(incorrect|invalid) api key|api key (not|is not) valid|API_KEY_INVALID", re.IGNORECASE)
"""Some services call a request with a wrong key a bad one (400)."""

_DELAY = re.compile(r"retryDelay\W+(\d+(?:\.\d+)?)s")
"""Google's way to say when to come back."""

# In the middle of a stream the status is 200 already, and only a word says what is wrong. Others are 500.
_STATUSES = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "context_length_exceeded": 413,
    "exceed_context_size_error": 413,
    "prompt_too_large": 413,
    "request_too_large": 413,
}

_LONGEST = 300

_BUSY = frozenset({408, 409, 425, 429})

_REFUSED = frozenset({401, 402, 403})

_LOOP = 508


@dataclass(frozen=True, slots=True)
class Service:
    """A remote service. Its messages are repeated without the key."""

    model: str
    at: str
    """Its vendor, or the host of its address."""
    key_env: str | None = None
    key: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, remote: RemoteModel, vendor: str, key: str | None) -> Service:
        """Named by its vendor, or by its host if it has an address of its own."""
        # Without a user's name and password, which may stand before the host.
        host = urlsplit(remote.base_url).netloc.rpartition("@")[2] if remote.base_url is not None else ""
        return cls(remote.model, host or vendor, remote.api_key_env, key)

    def __str__(self) -> str:
        return f"{self.model} at {self.at}" if self.model else self.at

    @contextmanager
    def translate_errors(self, sdk: Any, *, is_reading: bool = False) -> Iterator[None]:
        """Raise our errors for those of `sdk`, which is `openai` or `anthropic`: both have the same tree.
        `is_reading`: an answer has begun."""
        # Without the cause: what the SDK's errors say may repeat the key.
        try:
            yield
        except (sdk.APIConnectionError, httpx2.HTTPError) as error:
            if is_reading:
                raise self.broke_off() from None
            cause = error.__cause__ or error
            why = self.quoted(str(cause) or type(cause).__name__)
            raise RemoteDown(f"{self} cannot be reached{why}: check its address and the network.") from None
        except sdk.APIError as error:
            raise self._sdk_failure(error) from None
        except (
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
        ) as error:  # SDKs check little of what they read
            raise RemoteError(f"{self} gave an answer that cannot be read{self.quoted(str(error))}.") from None

    def _sdk_failure(self, error: Any) -> EmberkeepError:
        response, body = getattr(error, "response", None), error.body
        while isinstance(body, list) and body:  # Google's
            body = body[0]
        if isinstance(body, Mapping):
            body = body.get("error", body)
        details: Mapping[str, Any] = body if isinstance(body, Mapping) else {"message": body}
        message = details.get("message")
        words = [str(details.get(name)) for name in ("code", "type")]
        known = [_STATUSES.get(word) or int(word) for word in words if word in _STATUSES or word.isdecimal()]
        status, wait_s = 413 if 413 in known else next(iter(known), 500), None
        if response is not None and not response.is_success:
            status = 413 if status == 413 else response.status_code
            delay = _DELAY.search(str(body))
            wait_s = float(delay[1]) if delay else retry_after(response.headers)
        return self.failure(status, message if isinstance(message, str) else "", wait_s)

    def failure(self, status: int, message: str, retry_after: float | None = None) -> EmberkeepError:
        """The error that an HTTP status and the message that came with it mean."""
        why = self.quoted(message)
        if status in _REFUSED or (status == 400 and _WRONG_KEY.search(message)):
            variable = self.key_env or "the variable that holds it"
            return RemoteRefused(f"{self} refused the key ({status}){why}: check what is in {variable}.")
        if status == _LOOP:
            return RemoteLoop(f"{self} passes on what it is asked, and comes back to it: check its backends.")
        if status in _BUSY or status >= 500:
            return RemoteDown(f"{self} cannot answer now ({status}){why}: try again later.", retry_after)
        if status == 413 or (status in (400, 422) and _TOO_LONG.search(message)):
            return RemoteFull(f"The conversation is too long for {self}{why}: send less.")
        if status == 404:
            return RemoteError(f"{self} is not there (404){why}: `emberkeep api test` lists what is.")
        if 400 <= status < 500:
            return RequestError(f"{self} does not take this request ({status}){why}.")
        return RemoteError(f"{self} gave an answer that is none ({status}){why}.")

    def broke_off(self) -> RemoteDown:
        return RemoteDown(f"{self} broke off in the middle of its answer: try again.")

    def declined(self, reason: str) -> RequestError:
        return RequestError(f"{self} declined to answer{self.quoted(reason)}: ask in another way.")

    def quoted(self, words: str) -> str:
        """The words in brackets, on one line, cut, and never with the key, nor with what drives terminals. No
        brackets for no words."""
        line = " ".join((words.replace(self.key, "***") if self.key else words).split()).rstrip(".")
        line = "".join(filter(str.isprintable, line))
        return f" ({line[:_LONGEST]}{'…' if len(line) > _LONGEST else ''})" if line else ""


@contextmanager
def translate_faults(name: str) -> Generator[None, None, None]:
    """What a provider raises that is none of ours is its own fault: RemoteError, so that another one is asked.

    Its words are in the log for debugging only: the key may be among them.
    """
    try:
        yield
    except EmberkeepError:
        raise
    except Exception as error:
        log.debug("%s failed", name, exc_info=error)
        raise RemoteError(
            f"{name} failed with {type(error).__name__}: --log-level debug tells more, another backend may answer."
        ) from error


def client_options(sdk: Any) -> dict[str, Any]:
    """What both SDKs' clients are opened with."""
    timeout = httpx2.Timeout(READ_S, connect=CONNECT_S)
    # A conversation is only for the host that it was sent to, not for one that this host redirects to.
    http = sdk.DefaultAsyncHttpxClient(verify=_ssl_context(), timeout=timeout, follow_redirects=False)
    return {"max_retries": 0, "timeout": timeout, "http_client": http}


@cache
def _ssl_context() -> ssl.SSLContext:
    """Made once, because reading the certificates is slow."""
    return httpx2.create_ssl_context()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, where a response's headers say them."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1e3
    value = headers.get("retry-after")
    if (seconds := _number(value)) is not None or value is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
