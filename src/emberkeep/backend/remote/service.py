"""A remote service: how it is reached, and its errors in our words."""

from __future__ import annotations

import logging
import re
import ssl
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import field
from email.utils import parsedate_to_datetime
from functools import cache
from time import time
from urllib.parse import urlsplit

import httpx

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

    def failure(self, status: int, said: str, retry_after: float | None = None) -> EmberkeepError:
        """The error that an HTTP status and what came with it mean."""
        why = self.quoted(said)
        if status in _REFUSED:
            return RemoteRefused(f"{self} refused the key ({status}){why}: check what is in {self._variable}.")
        if status == _LOOP:
            return RemoteLoop(f"{self} passes on what it is asked, and comes back to it: check its backends.")
        if status in _BUSY or status >= 500:
            return RemoteDown(f"{self} cannot answer now ({status}){why}: try again later.", retry_after)
        if status == 413 or (status in (400, 422) and _TOO_LONG.search(said)):
            return RemoteFull(f"The conversation is too long for {self}{why}: send less.")
        if status == 404:
            return RemoteError(f"{self} is not there (404){why}: `emberkeep api test` lists what is.")
        if 400 <= status < 500:
            return RequestError(f"{self} does not take this request ({status}){why}.")
        return RemoteError(f"{self} gave an answer that is none ({status}){why}.")

    def unreachable(self, error: BaseException) -> RemoteDown:
        reason = self.quoted(str(error) or type(error).__name__)
        return RemoteDown(f"{self} cannot be reached{reason}: check its address and the network.")

    def disconnected(self, error: BaseException, *, has_begun: bool) -> RemoteDown:
        """`has_begun`: a part of the answer is there already."""
        return self.broke_off() if has_begun else self.unreachable(error)

    def broke_off(self) -> RemoteDown:
        return RemoteDown(f"{self} broke off in the middle of its answer: try again.")

    def unreadable(self, error: Exception) -> RemoteError:
        return RemoteError(f"{self} gave an answer that cannot be read{self.quoted(str(error))}.")

    def declined(self, reason: str) -> RequestError:
        return RequestError(f"{self} declined to answer{self.quoted(reason)}: ask in another way.")

    def quoted(self, said: str) -> str:
        """In brackets, on one line, not too long, and never with the key, nor with what drives terminals. Nothing
        where nothing was said."""
        line = " ".join((said.replace(self.key, "***") if self.key else said).split()).rstrip(".")
        line = "".join(filter(str.isprintable, line))
        return f" ({line[:_LONGEST]}{'…' if len(line) > _LONGEST else ''})" if line else ""

    @property
    def _variable(self) -> str:
        return self.key_env or "the variable that holds it"


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


def required_key(remote: RemoteModel, key: str | None, usual_variable: str) -> str:
    """Raises RemoteRefused where there is none."""
    if key is None:
        raise RemoteRefused(f"{remote.name} needs a key: set {remote.api_key_env or usual_variable}.")
    return key


@cache
def ssl_context() -> ssl.SSLContext:
    """As httpx itself would make it. Made once, because reading the certificates is slow."""
    return httpx.create_ssl_context()


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds, where a response's headers say them."""
    if (milliseconds := _number(headers.get("retry-after-ms"))) is not None:
        return milliseconds / 1e3
    said = headers.get("retry-after")
    if (seconds := _number(said)) is not None or said is None:
        return seconds
    try:
        return max(0.0, parsedate_to_datetime(said).timestamp() - time())
    except ValueError:
        return None


def _number(text: str | None) -> float | None:
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
