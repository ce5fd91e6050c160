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

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from emberkeep.errors import ConfigError
from emberkeep.kv.remote.blocks import KeySeal, Seal
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from valkey import Valkey
    from valkey.client import Pipeline
import json
from pathlib import Path
from typing import TYPE_CHECKING

from emberkeep.files import replace_file

if TYPE_CHECKING:
    from valkey.client import Pipeline

log = logging.getLogger("emberkeep.kv")

T = TypeVar("T")

VERSION = "ek1"
FORGOTTEN = f"{VERSION}:forgotten"
FOLLOWERS, SNAPSHOTS = b":c", b":s"
SLOTS = 16
"""What follows a block and is listed there. A new one takes the place of another: who finds nothing there
evaluates less than a block."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
_MOST_DAMAGED = 3
"""Values one after the other that are not what they should be: then nothing that comes from there is."""
_MOST_FORGOTTEN = 10_000
_SCANNED = 1000
_SCAN_S = 120.0
_MOST_PASSES = 5
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
        """Told when it opens and closes."""

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

    def whole(self) -> None:
        self._damaged = 0

    def damaged(self, reason: str) -> None:
        self._damaged += 1
        if self._damaged >= _MOST_DAMAGED:
            self._damaged = 0
            self.trip(f"what comes from it is damaged ({reason})")


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
        self.breaker = Breaker()
        self.counters = LinkCounters()
        self._client, self._errors = _open(settings)
        self._allowance = Allowance()
        bound(self._client, self._allowance)
        self._counting = threading.Lock()

    def close(self) -> None:
        self._client.close()

    def cut(self) -> None:
        """Let nothing wait any longer for what is being read."""
        self._client.connection_pool.disconnect()

    # ── names ──

    def name(self, store: str, user: str | None, key: bytes) -> bytes:
        """`user` None: what is shared."""
        return f"{VERSION}:{store}:{self.tag(user)}:{self.seal.digest(key, 32).hex()}".encode()

    def tag(self, user: str | None) -> str:
        """Stands for a user, and does not tell who it is."""
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
                position, names = self._client.scan(position, match=pattern, count=_SCANNED)
            yield list(names)
            if not position:
                return
        raise Unreachable("its names do not come to an end")

    def remove(self, names: Iterable[bytes]) -> int:
        listed = list(names)
        return sum(self.run(lambda pipe: [pipe.unlink(name) for name in listed]))

    # ── who was forgotten ──

    def forget(self, user: str) -> int:
        """Leave nothing of a user in any store; returns how many values went."""
        tag, gone = self.tag(user), 0
        # First the record: who writes after it looks there, and who wrote before it is found below. Until all is
        # removed another host may read it and believe that it is new: the next record tells it once more.
        for _ in range(_MOST_PASSES):
            gone += self._record(tag)
            removed = self._remove_all(tag)
            gone += removed
            if not removed:
                break
        return gone

    def _record(self, tag: str) -> int:
        """A server that is full takes it when something has gone; returns how many values had to."""

        def fill(pipe: Pipeline) -> object:
            return pipe.xadd(FORGOTTEN, {"user": tag}, maxlen=_MOST_FORGOTTEN, approximate=True)

        removed = 0
        try:
            self.run(fill)
        except Unreachable:
            if self.breaker.is_open:
                raise
            removed = self._remove_all(tag)
            self.run(fill)
        return removed

    def _remove_all(self, tag: str) -> int:
        return sum(self.remove(names) for names in self.scan(f"{VERSION}:*:{tag}:*") if names)

    @contextmanager
    def _asking(self, *, is_probe: bool = False, sent: int = 0, received: int = 0) -> Iterator[None]:
        if self.breaker.is_open and not is_probe:
            raise Unreachable("it does not answer")
        self._allowance.begin(self.settings.deadline_s, sent=sent, received=received)
        begin = perf_counter()
        try:
            yield
        except self._errors as error:
            reason = _reason_of(error)
            with self._counting:
                self.counters.failures += 1
                self.counters.last_error = reason
            if _is_broken(error):
                self.breaker.trip(reason)
            raise Unreachable(reason) from error
        finally:
            with self._counting:
                self.counters.requests += 1
                self.counters.seconds += perf_counter() - begin


def _open(settings: RemoteSettings) -> tuple[Valkey, tuple[type[Exception], ...]]:
    """The client, and what it raises. Raises ConfigError."""
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
    # Bytes that are no answer at all make the parser fail in its own ways, and so does a line that has been cut.
    odd = (ValueError, TypeError, LookupError, AttributeError, AssertionError, MemoryError)
    return client, (ValkeyError, OSError, *odd)


def _is_broken(error: Exception) -> bool:
    """The server did not answer, or no server did; else it said what it does not want."""
    from valkey.exceptions import AuthenticationError, BusyLoadingError, ResponseError

    if isinstance(error, (AuthenticationError, BusyLoadingError)):
        return True
    return not isinstance(error, ResponseError)


def _reason_of(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


# ── sockets ──


_SPARE = 8 << 20
"""Bytes of an answer besides the values that it was asked for."""
_SLOWEST = 2e6
"""Bytes per second: a line that is slower is none."""
_PIECE = 256 << 10
"""So much is sent within the socket's own timeout, which is one for all that is sent at a time."""


class Allowance(threading.local):
    """What the exchange may take that this thread is in."""

    received = 0
    """Bytes that may still come."""
    until = 0.0

    def begin(self, seconds: float, *, sent: int, received: int) -> None:
        """`sent` and `received`: bytes of values."""
        self.received = received + _SPARE
        self.until = monotonic() + seconds + (sent + received) / _SLOWEST

    def check_time(self) -> None:
        if monotonic() > self.until:
            raise TimeoutError("it takes too long")

    def take(self, count: int) -> None:
        """So many bytes have come. Raises OSError."""
        self.received -= count
        if self.received < 0:
            raise ConnectionAbortedError("it sends more than it was asked for")
        self.check_time()


class BoundedSocket:
    """Raises OSError where an exchange takes more than it may."""

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
            self._allowance.check_time()
            self._inner.sendall(view[begin : begin + _PIECE])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def bound(client: Valkey, allowance: Allowance) -> None:
    """All connections of a client that has none yet."""

    class Bounded(client.connection_pool.connection_class):  # type: ignore[misc]
        def _connect(self) -> BoundedSocket:
            return BoundedSocket(super()._connect(), allowance)

    client.connection_pool.connection_class = Bounded


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
            self._save()
        return True

    def _saved(self) -> str:
        try:
            return str(json.loads(self._path.read_text())["forgotten"]) if self._path else "0-0"
        except (OSError, ValueError, KeyError, TypeError):
            return "0-0"

    def _save(self) -> None:
        if self._path is None:
            return
        try:
            replace_file(self._path, json.dumps({"forgotten": self._last}).encode())
        except OSError as error:
            log.warning("it cannot be kept who was forgotten elsewhere: %s", error)
