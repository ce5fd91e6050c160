"""The data folders of a cluster and of its replicas, each of which has one for as long as its process lives.

    <data_dir>/cluster.json        the address of the Ray on which the cluster of this folder runs
               cluster.token       what processes show each other that belong to it
               cluster.lock        held by the process that has started it
               replicas/<slot>/    stored state, which the next replica that gets this slot goes on with
                        lock       held by the replica that has it
                        models     -> <data_dir>/models
                        memory.sqlite3 -> <data_dir>/memory.sqlite3, which several processes may use

A lock dies with its owner, so that two replicas never have the same slot, and none is lost with a replica.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic, sleep

from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, StoreFailed
from emberkeep.files import private_folder, replace_file
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


# ── Ray's environment: quiet, and closed to all who lack the token; Ray reads it when it is imported ──

_ADDRESS, _TOKEN, _CLUSTER_LOCK = "cluster.json", "cluster.token", "cluster.lock"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a replica without GPUs sees none
}


def prepare_start(config: Config) -> None:
    """For a Ray that is about to be started, which asks for the token by itself. Raises OSError."""
    path = private_folder(config.data_dir) / _TOKEN
    replace_file(path, secrets.token_hex(32).encode())
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # of another Ray; they would open this one
        os.environ.pop(name, None)
    os.environ.update({**_QUIET, "RAY_AUTH_TOKEN_PATH": str(path)})


def prepare_join(config: Config) -> None:
    """For the Ray of this data folder; one that the configuration names has a token of its own, or none."""
    os.environ.update(_QUIET)
    if config.cluster_address is None and (config.data_dir / _TOKEN).exists():
        os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(config.data_dir / _TOKEN)})


@contextmanager
def alone_on(data_dir: Path) -> Iterator[None]:
    """No other process starts a cluster on this folder until the block ends. Raises EmberkeepError, OSError."""
    lock = os.open(
        private_folder(data_dir) / _CLUSTER_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise EmberkeepError(
            f"A cluster runs on {data_dir} already: `emberkeep cluster update` gives it other settings."
        ) from error
    finally:
        os.close(lock)


def note_address(data_dir: Path, address: str) -> None:
    replace_file(private_folder(data_dir) / _ADDRESS, json.dumps({"address": address}).encode())


def noted_address(data_dir: Path) -> str | None:
    try:
        return str(json.loads((data_dir / _ADDRESS).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def forget_address(data_dir: Path) -> None:
    for name in (_ADDRESS, _TOKEN):
        (data_dir / name).unlink(missing_ok=True)
