"""The data folder of a replica: one of its own below the configured one, for as long as its process lives.

    <data_dir>/replicas/<slot>/    stored state, which the next replica that gets this slot goes on with
                        lock       held by the replica that has it
                        models     -> <data_dir>/models
                        memory.sqlite3 -> <data_dir>/memory.sqlite3, which several processes may use

A lock dies with its owner, so that two replicas never have the same slot, and none is lost with a replica.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic, sleep

from emberkeep.config.settings import Config
from emberkeep.errors import StoreFailed
from emberkeep.files import private_folder
from emberkeep.library.stores import ClosedStore, replica_folder, replica_folders, store_folders
from emberkeep.models.remotes import Remotes
from emberkeep.values import dataclass

_LOCK = "lock"
_HANDOVER_S = 10.0
"""For the process of a replica that has ended to be gone."""
_LOOK_S = 0.05
_SHARED = ("models", "memory.sqlite3")


@dataclass(frozen=True, slots=True)
class Slot:
    name: str
    folder: Path
    lock: int
    """A descriptor; it is never closed, but by the end of the process."""


def take_slot(data_dir: Path, most: int, patience_s: float = _HANDOVER_S) -> Slot:
    """The first that is free: those with the lowest numbers have the most stored. Blocks while all that `most`
    replicas need are taken; where none becomes free in time, there is one more. Raises OSError."""
    give_up = monotonic() + patience_s
    while monotonic() < give_up:
        if slot := _first_free(data_dir, range(most)):
            return slot
        sleep(_LOOK_S)
    slot = _first_free(data_dir, count())
    assert slot is not None
    return slot


def _first_free(data_dir: Path, numbers: Iterable[int]) -> Slot | None:
    for number in numbers:
        folder = private_folder(replica_folder(data_dir, str(number)))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        _link_shared(data_dir, folder)
        return Slot(str(number), folder, lock)
    return None


def forget_rest(config: Config, user: str, asked: frozenset[str]) -> None:
    """Leave nothing of a user in the folders of this machine whose replicas were not `asked`. Nobody has such a
    folder now, or a replica that has just begun or is about to end: it notices. Blocks. Raises OSError,
    StoreFailed."""
    held = {replica_folder(config.data_dir, name) for name in asked}
    broken: list[str] = []
    for folder in (config.data_dir, *replica_folders(config.data_dir)):
        for store in store_folders(folder, broken.append) if folder not in held else ():
            with closing(ClosedStore(store, config.ttl.by_class())) as closed:
                closed.remove_user(user)
    if broken:
        raise StoreFailed(broken[0])


def config_of_replica(config: Config, slot: Slot, rank: int, cores: int) -> Config:
    """The settings of one replica, with its share of what is said of all of them together. `rank`: its place among
    the replicas of all machines. Raises ConfigError."""
    replicas = config.replicas[1]
    return replace(
        config,
        data_dir=slot.folder,
        backends=Remotes(config).list(),
        backend=_backend(config, rank),
        ram_budget=config.ram_budget // replicas,
        disk_budget=config.disk_budget // replicas,
        threads=config.threads or max(1, cores // replicas),
    )


def _backend(config: Config, rank: int) -> str:
    """Who takes the place of a replica goes on with its service, which has the prompts of its conversations."""
    named = config.cluster_backends
    return named[rank % len(named)] if named else config.backend


def _link_shared(data_dir: Path, folder: Path) -> None:
    private_folder(data_dir / "models")
    for name in _SHARED:
        link = folder / name
        if not link.is_symlink():
            link.symlink_to(Path("..", "..", name))
