"""The line to a shared Valkey or Redis server.

Every answer has a deadline. After a failure the line is cut: nobody asks any more until a probe, which no request
waits for, has been answered. What stands in the server can be sealed with a key that all hosts have.

    ek1:<store>:<user>:<block>      the chunk file of a block, a tail or a snapshot
    ek1:<store>:<user>:<block>:c    tokens of what follows that block, a few at most: the last block of a prompt is
                                    rarely whole
    ek1:<store>:<user>:<block>:s    the same for snapshots
    ek1:forgotten                   a stream of users who were forgotten: every host reads it before it writes
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from emberkeep.errors import ConfigError
from emberkeep.files import replace_file
from emberkeep.kv.disk.chunkfile import Damaged
from emberkeep.types.lineage import SHARED, Lineage
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from valkey import Valkey
    from valkey.client import Pipeline

log = logging.getLogger("emberkeep.kv")

T = TypeVar("T")
VERSION = "ek1"
FORGOTTEN = f"{VERSION}:forgotten"
FOLLOWERS, SNAPSHOTS = b":c", b":s"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0
_MOST_DAMAGED = 3
"""Values one after the other that are not what they should be: then nothing that comes from there is."""
_MOST_FORGOTTEN = 10_000
_SCAN_S = 120.0
_MOST_TRIES = 5


class Unreachable(Exception):
    """The server did not answer, not in time, or with an error. Its message says how."""


@dataclass(frozen=True, slots=True)
class RemoteSettings:
    url: str
    """valkey://, redis:// or, with TLS, valkeys:// or rediss://; with `user:password@` where they are needed."""
    key: str | None = None
    """Seals everything but sizes and times."""
    deadline_s: float = 0.5
    bytes_per_s: int = 256 << 20
    """The most that is written."""


class Breaker:
    """Closed, everything passes. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._pause = 0.0
        self._probe_at: float | None = None
        self._closed_at = clock()
        self._damaged = 0
        self.opened = 0
        """It was opened so often."""
        self.on_change: Callable[[str], None] = lambda event: None

    @property
    def is_open(self) -> bool:
        return self._probe_at is not None

    @property
    def wants_probe(self) -> bool:
        return self._probe_at is not None and self._clock() >= self._probe_at

    def trip(self, reason: str) -> None:
        """Something failed: nothing passes until a probe has. It takes longer each time, unless all went well for
        as long as the last pause was."""
        now = self._clock()
        if self._probe_at is not None and now < self._probe_at:
            return  # others who were waiting for it, too
        if self._probe_at is None:
            self.opened += 1
            self.on_change(f"is left alone: {reason}")
        went_well = self._probe_at is None and now - self._closed_at > self._pause
        self._pause = _FIRST_PAUSE_S if went_well else min(max(2 * self._pause, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._probe_at = now + self._pause

    def mend(self) -> None:
        if self._probe_at is not None:
            self.on_change("is back")
            self._closed_at = self._clock()
        self._probe_at, self._damaged = None, 0

    def received(self, damage: str | None) -> None:
        """A value, whole or not: what is wrong with it."""
        self._damaged = self._damaged + 1 if damage else 0
        if self._damaged >= _MOST_DAMAGED:
            self._damaged = 0
            self.trip(f"what comes from it is damaged ({damage})")


@dataclass(slots=True)
class LinkCounters:
    requests: int = 0
    failures: int = 0
    seconds: float = 0.0
    last_error: str | None = None


class RemoteLink:
    """Safe to use from any thread. Everything that asks the server blocks, until the deadline and as long as its
    bytes take on the slowest of lines, and raises Unreachable; at once while the breaker is open."""

    def __init__(self, settings: RemoteSettings) -> None:
        """Does not connect yet. Raises ConfigError."""
        self.settings = settings
        self.seal = KeySeal(settings.key) if settings.key else Seal()
        self.breaker, self.counters = Breaker(), LinkCounters()
        self._allowance = Allowance()
        self._client, self._errors = _open(settings, self._allowance)
        self._counting = threading.Lock()

    def close(self) -> None:
        self._client.close()

    def cut(self) -> None:
        """Let nothing wait any longer for what is being read."""
        self._client.connection_pool.disconnect()

    # ── names ──

    def name(self, store: str, lineage: Lineage, key: bytes) -> bytes:
        tag = self.tag(None if lineage.owner == SHARED else lineage.user)
        return f"{VERSION}:{store}:{tag}:{self.seal.digest(key, 32).hex()}".encode()

    def tag(self, user: str | None) -> str:
        """Stands for a user, and does not tell who it is; None: for what is shared."""
        if user is None:
            return "shared"
        return self.seal.digest(b"user " + user.encode("utf-8", "surrogatepass"), 12).hex()

    # ── asking ──

    def run(self, fill: Callable[[Pipeline], object], *, size: int = 0) -> list[Any]:
        """One round trip: the answers to the commands that `fill` puts into the pipeline. `size`: bytes of the
        values among them."""
        with self._asking(received=size), self._client.pipeline(transaction=False) as pipeline:
            fill(pipeline)
            return list(pipeline.execute()) if len(pipeline) else []

    def guarded(self, prepare: Callable[[Pipeline], T | None], size: int) -> T | None:
        """Change something only if no user was forgotten meanwhile. `prepare` is called with a pipeline that
        watches the record of who was, puts its commands behind `multi()`, and is called again where the record has
        changed. None, where it has nothing to write. `size`: bytes that it writes."""
        from valkey.exceptions import WatchError

        with self._asking(sent=size), self._client.pipeline(transaction=True) as pipeline:
            for _ in range(_MOST_TRIES):
                pipeline.watch(FORGOTTEN)
                done = prepare(pipeline)
                if done is None:
                    return None
                try:
                    pipeline.execute()
                    return done
                except WatchError as error:
                    if "changed" not in str(error):
                        raise  # the connection was lost, which the client calls the same
        raise Unreachable("many users are being forgotten")

    def ping(self) -> None:
        """Also while the breaker is open, which it closes."""
        with self._asking(is_probe=True):
            self._client.ping()
        self.breaker.mend()

    def about(self) -> dict[str, Any]:
        """The server's own words: version, memory, policy. Also while the breaker is open."""
        with self._asking(is_probe=True):
            return dict(self._client.info())

    def scan(self, pattern: str) -> Iterator[list[bytes]]:
        """Names that match, in parts; everything that is there from the beginning to the end is among them."""
        position, give_up = 0, monotonic() + _SCAN_S
        while monotonic() < give_up:
            with self._asking():
                position, names = self._client.scan(position, match=pattern, count=1000)
            yield list(names)
            if not position:
                return
        raise Unreachable("its names do not come to an end")

    # ── who was forgotten ──

    def forget(self, user: str) -> int:
        """Leave nothing of a user in any store; returns how many values went."""
        tag, gone = self.tag(user), 0

        def record(pipe: Pipeline) -> object:
            return pipe.xadd(FORGOTTEN, {"user": tag}, maxlen=_MOST_FORGOTTEN, approximate=True)

        # First the record: who writes after it looks there, and who wrote before it is found below. Until all is
        # removed another host may read it and believe that it is new: the next record tells it once more.
        for _ in range(_MOST_TRIES):
            try:
                self.run(record)
            except Unreachable:
                if self.breaker.is_open:
                    raise
                gone += self._remove_all(tag)  # a server that is full takes it when something has gone
                self.run(record)
            removed = self._remove_all(tag)
            gone += removed
            if not removed:
                break
        return gone

    def _remove_all(self, tag: str) -> int:
        listed = self.scan(f"{VERSION}:*:{tag}:*")
        return sum(self._remove(names) for names in listed if names)

    def _remove(self, names: list[bytes]) -> int:
        return sum(self.run(lambda pipe: [pipe.unlink(name) for name in names]))

    @contextmanager
    def _asking(self, *, is_probe: bool = False, sent: int = 0, received: int = 0) -> Iterator[None]:
        if self.breaker.is_open and not is_probe:
            raise Unreachable("it does not answer")
        self._allowance.begin(self.settings.deadline_s, sent=sent, received=received)
        begin, reason = perf_counter(), None
        try:
            yield
        except self._errors as error:
            from valkey.exceptions import ResponseError

            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            if not isinstance(error, ResponseError):  # that says what the server does not want
                self.breaker.trip(reason)
            raise Unreachable(reason) from error
        finally:
            with self._counting:
                self.counters.requests += 1
                self.counters.seconds += perf_counter() - begin
                if reason is not None:
                    self.counters.failures += 1
                    self.counters.last_error = reason


def _open(settings: RemoteSettings, allowance: Allowance) -> tuple[Valkey, tuple[type[Exception], ...]]:
    """The client, all of whose exchanges are bounded, and what it raises. Raises ConfigError."""
    try:
        from valkey import Valkey
        from valkey.backoff import NoBackoff
        from valkey.exceptions import ValkeyError
        from valkey.retry import Retry
    except ImportError:
        raise ConfigError('The remote tier needs more: pip install "emberkeep[valkey]".') from None
    secure = {"ssl_check_hostname": True} if settings.url.startswith(("rediss:", "valkeys:")) else {}
    try:
        client = Valkey.from_url(
            settings.url,
            socket_timeout=settings.deadline_s,
            socket_connect_timeout=settings.deadline_s,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            **secure,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"remote: {error}") from None

    class Bounded(client.connection_pool.connection_class):  # type: ignore[misc,name-defined]
        def _connect(self) -> BoundedSocket:
            return BoundedSocket(super()._connect(), allowance)

    client.connection_pool.connection_class = Bounded
    # Bytes that are no answer at all make the parser fail in its own ways, and so does a line that has been cut.
    odd = (ValueError, TypeError, LookupError, AttributeError, AssertionError, MemoryError)
    return client, (ValkeyError, OSError, *odd)


# ── sockets ──


_SPARE = 8 << 20
"""Bytes of an answer besides the values that it was asked for."""
_SLOWEST = 2e6
"""Bytes per second: a line that is slower is none."""
_PIECE = 256 << 10
"""So much is sent within the socket's own timeout, which is one for all that is sent at a time."""


class Allowance(threading.local):
    """What the exchange may take that this thread is in. Its methods raise OSError where it has taken more."""

    received = 0
    """Bytes that may still come."""
    until = 0.0

    def begin(self, seconds: float, *, sent: int, received: int) -> None:
        self.received = received + _SPARE
        self.until = monotonic() + seconds + (sent + received) / _SLOWEST

    def take(self, count: int) -> None:
        """So many bytes have come."""
        self.received -= count
        if self.received < 0:
            raise ConnectionAbortedError("it sends more than it was asked for")
        if monotonic() > self.until:
            raise TimeoutError("it takes too long")


class BoundedSocket:
    """A socket whose exchanges are bounded by an allowance."""

    def __init__(self, inner: socket.socket, allowance: Allowance) -> None:
        self._inner = inner
        self._allowance = allowance

    def recv_into(self, buffer: bytearray) -> int:
        count = self._inner.recv_into(buffer)
        self._allowance.take(count)
        return count

    def recv(self, size: int) -> bytes:
        data = self._inner.recv(size)
        self._allowance.take(len(data))
        return data

    def sendall(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for begin in range(0, len(view), _PIECE):
            self._allowance.take(0)
            self._inner.sendall(view[begin : begin + _PIECE])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


# ── who was forgotten ──

_READ_AT_ONCE = 256


class ForgottenLog:
    """Who was forgotten by any host, in order, and how far this one has followed. Safe to use from any thread."""

    def __init__(
        self, link: RemoteLink, let_go: Callable[[Callable[[str], bool]], None], folder: Path | None
    ) -> None:
        """`let_go` drops the users of whom a function is true, and raises OSError."""
        self._link = link
        self._let_go = let_go
        self._path = folder / "remote.json" if folder else None
        self._lock = threading.Lock()
        self._last = self._saved()

    def ask(self, pipe: Pipeline) -> Any:
        """Put the question into a pipeline, or ask it at once where that does so."""
        return pipe.xrange(FORGOTTEN, f"({self._last}", "+", count=_READ_AT_ONCE)

    def follow(self, ask: Callable[[], Any]) -> bool:
        """To the end, with as many questions as it takes; False where this host cannot."""
        while self._drop(entries := ask()):
            if len(entries) < _READ_AT_ONCE:
                return True
        return False

    def take(self, entries: Any) -> bool:
        """The answer: drop who was forgotten. Whether that was everybody."""
        return self._drop(entries) and len(entries) < _READ_AT_ONCE

    def _drop(self, entries: Any) -> bool:
        if not entries:
            return True
        tags = {fields.get(b"user", b"").decode("ascii", "replace") for _, fields in entries}
        with self._lock:
            try:
                self._let_go(lambda user: self._link.tag(user) in tags)
            except OSError as error:
                log.warning("a user who was forgotten elsewhere is not forgotten here yet: %s", error)
                return False
            self._last = entries[-1][0].decode()
            try:
                if self._path is not None:
                    replace_file(self._path, json.dumps({"forgotten": self._last}).encode())
            except OSError as error:
                log.warning("it cannot be kept who was forgotten elsewhere: %s", error)
        return True

    def _saved(self) -> str:
        try:
            return str(json.loads(self._path.read_text())["forgotten"]) if self._path else "0-0"
        except (OSError, ValueError, KeyError, TypeError):
            return "0-0"


# ── how names and values look in the server ──


class Seal:
    """Leaves them as they are: anyone who can read the server can read them."""

    def digest(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size).digest()

    def close(self, name: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
        """One value, which can be opened under that name alone."""
        return b"".join(parts)

    def open(self, name: bytes, value: bytes) -> bytes:
        """Raises Damaged."""
        return value


class KeySeal(Seal):
    """AES-256-GCM. A value belongs to its name: one that was swapped does not open."""

    def __init__(self, secret: str) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derived = HKDF(SHA256(), length=64, salt=None, info=b"emberkeep remote tier 1").derive(secret.encode())
        self._names, self._cipher, self._wrong = derived[32:], AESGCM(derived[:32]), InvalidTag

    def digest(self, data: bytes, size: int) -> bytes:
        return hashlib.blake2b(data, digest_size=size, key=self._names).digest()

    def close(self, name: bytes, parts: Sequence[bytes | memoryview]) -> bytes:
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, b"".join(parts), name)

    def open(self, name: bytes, value: bytes) -> bytes:
        try:
            return self._cipher.decrypt(value[:12], memoryview(value)[12:], name)
        except (self._wrong, ValueError):
            raise Damaged("it was not sealed with this key, or under another name") from None
