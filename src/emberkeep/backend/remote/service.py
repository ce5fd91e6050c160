"""A remote service: how its SDK reaches it, and its errors in our words."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from email.utils import parsedate_to_datetime
from functools import cache
from time import time
from typing import Any
from urllib.parse import urlsplit

import httpx2

from emberkeep.errors import (
    EmberkeepError,
    RemoteDown,
    RemoteError,
    RemoteFull,
    RemoteLoop,
    RemoteRefused,
    RequestError,
)
from emberkeep.types.models import RemoteModel
from emberkeep.values import dataclass

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
        known = (_STATUSES.get(word) or int(word) for word in words if word in _STATUSES or word.isdecimal())
        status, wait_s = next(known, 500), None
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
