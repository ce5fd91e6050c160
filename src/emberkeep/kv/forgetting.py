"""Who was forgotten: one small record for every store under a root, which each process on it reads before it
serves or writes.

    forgetting              the record, with the lock held alone; then the files, of any process
    writing                 the lock held with others: the record, then a file's rename and its row

So a file is in its place before its user is in the record, and the process that forgets finds it; or its writer
finds the user in the record, and gives it up. The record holds digests under a salt of its own, and no name.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import threading
from collections.abc import Callable, Container
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, TypeVar

from emberkeep.errors import EmberkeepError
from emberkeep.files import locked, private_folder, replace_file
from emberkeep.kv.disk.index import Index
from emberkeep.kv.ledger import Transact
from emberkeep.kv.policy import ChunkRow
from emberkeep.types.cache import Removed
from emberkeep.types.lineage import SHARED, owner_of, user_of
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.kv")

RECORD = "forgotten.json"
LOCK = "forgotten.lock"

LIMIT = 1024
"""Users in the record. A process that has missed more than these gives up what it holds of any user."""
_MOST_UNFINISHED = 4 * LIMIT
_LARGEST = 1 << 20


class Whose:
    """The namespaces of some users, whatever their salts and marks. What is shared belongs to no user."""

    def __init__(self, is_one: Callable[[str], bool]) -> None:
        """`is_one`: of the users."""
        self._is_one = is_one

    def __contains__(self, namespace: object) -> bool:
        if not isinstance(namespace, str) or (owner := owner_of(namespace)) == SHARED:
            return False
        try:
            return self._is_one(user_of(owner))
        except (ValueError, LookupError, TypeError, RecursionError):
            return False  # no user's namespace looks like this


ALL_USERS = Whose(lambda user: True)
NO_USER = Whose(lambda user: False)


def of_user(user: str) -> Whose:
    """`user` "" stands for all who gave no name. It is kept for a while, so it holds a digest and not the name."""
    salt = secrets.token_hex(16)
    digest = _salted(salt, user)
    return Whose(lambda other: _salted(salt, other) == digest)


def _salted(salt: str, user: str) -> str:
    name = user.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(name, key=bytes.fromhex(salt), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Forgetting:
    seq: int
    digest: str
    is_done: bool
    """Nothing of what was there before is left in any file."""


@dataclass(frozen=True, slots=True)
class Record:
    id: str
    """Another one: the record was lost, and begun anew."""
    salt: str
    last: int = 0
    floor: int = 0
    """Who was forgotten up to this one is not listed any more."""
    listed: tuple[Forgetting, ...] = ()

    def whose(self, forgettings: list[Forgetting]) -> Whose:
        digests = {forgetting.digest for forgetting in forgettings}
        return Whose(lambda user: _salted(self.salt, user) in digests)

    def with_one(self, digest: str) -> Record:
        one = Forgetting(self.last + 1, digest, False)
        return replace(self, last=one.seq, listed=(*self.listed, one))._trimmed()

    def with_done(self, one: Forgetting) -> Record:
        """Marks those before it of the same user, too."""
        done = (
            replace(f, is_done=f.is_done or (f.digest == one.digest and f.seq <= one.seq)) for f in self.listed
        )
        return replace(self, listed=tuple(done))

    def _trimmed(self) -> Record:
        """What is not finished stays longer: a process has to finish it."""
        old, new = self.listed[:-LIMIT], self.listed[-LIMIT:]
        unfinished = [forgetting for forgetting in old if not forgetting.is_done][-_MOST_UNFINISHED:]
        dropped = [forgetting.seq for forgetting in old if forgetting not in unfinished]
        return replace(self, floor=max([self.floor, *dropped]), listed=(*unfinished, *new))


class ForgottenRecord:
    """What one process knows of the record. Safe to use from any thread. Methods block on disk, raise OSError."""

    def __init__(self, root: Path) -> None:
        """Everything that is in the record now is known: the store is about to be opened."""
        self._path = root / RECORD
        self._seen_version: tuple[int, ...] | None = self._version()
        known = self._read()
        self._seen_id, self._seen = (known.id, known.last) if known else ("", 0)
        self.going: Whose = _going(known)
        """Users who may have files left, as of the last time that the record was read."""
        self.owed: list[tuple[Forgetting, Whose]] = []
        """Those whose files this process could not all remove: it tries again, and until then enters nothing of
        theirs."""

    def held(self) -> AbstractContextManager[None]:
        """Until the block ends no process begins to forget. Several may hold it at once."""
        return self._locked(fcntl.LOCK_SH)

    def is_known(self) -> bool:
        """No user was forgotten since the record was last read. One system call."""
        return self._version() == self._seen_version

    def newly_forgotten(self) -> tuple[Whose | None, Callable[[], None]]:
        """Who was forgotten since the last time, and what to call when they are: until then this tells the same.

        `ALL_USERS`, where more were than are listed, or the record was begun anew.
        """
        version, record = self._version(), self._read()
        if record is None:
            return (ALL_USERS if self._seen_id else None), lambda: self._know(version, None)
        whose: Whose | None = None
        if self._seen_id not in ("", record.id) or (record.id == self._seen_id and self._seen < record.floor):
            whose = ALL_USERS
        elif new := [f for f in record.listed if record.id != self._seen_id or f.seq > self._seen]:
            whose = record.whose(new)
        return whose, lambda: self._know(version, record)

    def begin(self, user: str) -> Forgetting:
        """From now on, on every process, nothing of what is held of `user` is written or served any more."""
        with self._locked(fcntl.LOCK_EX):
            record = self._read() or Record(secrets.token_hex(8), secrets.token_hex(16))
            record = record.with_one(_salted(record.salt, user))
            self._write(record)
            return record.listed[-1]

    def done(self, forgetting: Forgetting) -> None:
        """No file has anything left of what there was of them."""
        with self._locked(fcntl.LOCK_EX):
            if record := self._read():
                self._write(record.with_done(forgetting))
        self.owed = [owed for owed in self.owed if owed[0].digest != forgetting.digest]

    def allowed(self, rows: list[ChunkRow]) -> list[ChunkRow]:
        """Leaves out those of users whose files could not all be removed yet."""
        owed = self.owed
        return [row for row in rows if not any(row.namespace in whose for _, whose in owed)] if owed else rows

    def owe(self, forgetting: Forgetting, whose: Whose) -> None:
        """Their files could not all be removed."""
        self.owed.append((forgetting, whose))

    def unfinished(self) -> list[tuple[Forgetting, Whose]]:
        """Returns those whose files a process began to remove and did not finish."""
        record = self._read()
        return [(f, record.whose([f])) for f in record.listed if not f.is_done] if record else []

    def _know(self, version: tuple[int, ...] | None, record: Record | None) -> None:
        id_, seq = (record.id, record.last) if record else ("", 0)
        if id_ == self._seen_id and seq < self._seen:
            return  # another thread knows more by now
        self._seen_id, self._seen = id_, seq
        self._seen_version = version
        self.going = _going(record)

    def _version(self) -> tuple[int, ...] | None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _read(self) -> Record | None:
        """None where there is none, or one that cannot be read: the next forgetting begins it anew."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                return _unpacked(json.loads(file.read(_LARGEST)))
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None

    def _write(self, record: Record) -> None:
        listed = [[one.seq, one.digest, one.is_done] for one in record.listed]
        packed = {"id": record.id, "salt": record.salt, "last": record.last, "floor": record.floor}
        replace_file(self._path, json.dumps({**packed, "forgotten": listed}).encode())

    def _locked(self, mode: int) -> AbstractContextManager[None]:
        return locked(private_folder(self._path.parent) / LOCK, mode)


def _going(record: Record | None) -> Whose:
    unfinished = [f for f in record.listed if not f.is_done] if record else []
    return record.whose(unfinished) if record and unfinished else NO_USER


def _unpacked(data: Any) -> Record:
    """Raises ValueError, LookupError, TypeError."""
    listed = tuple(Forgetting(int(seq), str(digest), bool(done)) for seq, digest, done in data["forgotten"])
    bytes.fromhex(data["salt"])
    return Record(str(data["id"]), str(data["salt"]), int(data["last"]), int(data["floor"]), listed)


T = TypeVar("T")


class Forgetter:
    """Drops the state of users that any process on this folder has forgotten. Safe to use from any thread; blocks
    on disk, if there is one."""

    def __init__(self, on_disk: tuple[ForgottenRecord, Index] | None, transact: Transact) -> None:
        self._on_disk = on_disk
        self._transact = transact
        self._noticing = threading.Lock()
        self.on_forget: Callable[[Container[str]], None] = lambda owners: None
        """Called for all who are forgotten, by any process. Must be quick, and must not call the store."""

    def notice(self) -> None:
        """Drop the state of users that were forgotten meanwhile. One system call if there are none.

        Raises OSError: then it is not known who was.
        """
        if self._on_disk is not None and not self._on_disk[0].is_known():
            with self._noticing:
                self._notice(*self._on_disk)

    def refresh(self) -> None:
        """Learn what other processes stored, and which users they forgot. Reads the index. Never raises."""
        if self._on_disk is None:
            return
        record, index = self._on_disk
        try:
            with self._noticing:  # else what was read might be entered after its user was let go
                self._notice(record, index)
                going = record.going
                rows = [row for row in record.allowed(index.new_rows()) if row.namespace not in going]
                self._transact(lambda ledger: ledger.adopt(rows))
        except OSError as error:
            log.warning("cannot read what others have stored: %s", error)

    def let_go(self, whose: Whose) -> None:
        """Drop everything of theirs that this process knows."""
        self._transact(lambda ledger: ledger.forget(whose))
        if self._on_disk is not None:
            self._on_disk[1].forget_untold(whose)
        self.on_forget(whose)

    def _notice(self, record: ForgottenRecord, index: Index) -> None:
        if record.is_known():
            return
        whose, known = record.newly_forgotten()
        if whose is ALL_USERS:
            # It cannot be told any more who was: what the others have left on disk is all that there is.
            self._transact(lambda ledger: ledger.forget(ALL_USERS, files_stay=True))
            index.forget_untold(ALL_USERS)
            rows, notes = record.allowed(index.new_rows(everything=True)), index.notes()
            self._transact(lambda ledger: ledger.adopt(rows))
            self._transact(lambda ledger: ledger.entries.restore(notes.entries))
            self.on_forget(ALL_USERS)
        elif whose is not None:
            self.let_go(whose)
        known()


# ── everything in this process that holds what users sent ──

Forget = Callable[[Container[str]], "Future[Any] | None"]
"""Drops everything of these owners. Quick, and does not call a store. Returns a future where another thread does
it."""
Erase = Callable[[str], Removed]
"""Leaves nothing of a user on disk or elsewhere. Blocks. Raises EmberkeepError where something may be left: that
is recorded, and tried again."""


class Holders:
    """Everything that holds what users sent: forgetting a user reaches all who joined, first what is quick and
    could be stored again, then what is on disk and elsewhere. Safe to use from any thread. What belongs to a model
    leaves with it; the registry may outlive all models."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        """Held while something that lasts is opened: forgetting waits for it, and misses nothing."""
        self._holders: tuple[tuple[str, object, Forget], ...] = ()
        self._lasting: tuple[tuple[object, Erase], ...] = ()
        self._changing = threading.Lock()

    def join(self, name: str, member: object, forget: Forget) -> None:
        """`name`: what is held, for the log. `member`: who leaves. Who joins first is told first."""
        with self._changing:
            self._holders = (*self._holders, (name, member, forget))

    def join_lasting(self, member: object, erase: Erase) -> None:
        with self._changing:
            self._lasting = (*self._lasting, (member, erase))

    def leave(self, member: object) -> None:
        """Everything that joined for it leaves. Idempotent."""
        with self._changing:
            self._holders = tuple(holder for holder in self._holders if holder[1] is not member)
            self._lasting = tuple(lasting for lasting in self._lasting if lasting[0] is not member)

    def drop(self, owners: Container[str]) -> list[Future[Any]]:
        """Drop what is quick, also where another process has forgotten them. Never raises: what failed is a failed
        future and a line in the log, and all others are told all the same."""
        futures: list[Future[Any]] = []
        for name, _, forget in self._holders:
            try:
                future = forget(owners)
            except Exception as error:
                log.exception("something of a user who was forgotten may be left in: %s", name)
                future = Future()
                future.set_exception(error)
            if future is not None:
                futures.append(future)
        return futures

    def forget(self, user: str) -> Removed:
        """Leave nothing of a user; "" stands for all requests without one. Blocks. Raises the first error of all,
        when everybody was asked."""
        errors = [error for future in self.drop(of_user(user)) if (error := future.exception())]
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
