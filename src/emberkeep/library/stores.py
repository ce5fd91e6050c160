"""Stored state without its model: what can be seen, kept and removed when no server has it open."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from emberkeep.errors import NoSuchEntry
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.index import INDEX, description_of, read_meta, stores_under
from emberkeep.kv.disk.transfers import FetchState, check_file
from emberkeep.kv.policy import Keeping
from emberkeep.kv.remote.link import RemoteLink
from emberkeep.kv.remote.tier import RemoteTier
from emberkeep.kv.store import Budgets, KvStore
from emberkeep.kv.tree import store_name
from emberkeep.types.cache import Removed
from emberkeep.types.request import Ttl
from emberkeep.values import dataclass

_REPLICAS = "replicas"


@dataclass(frozen=True, slots=True)
class StoreFolder:
    """Where the state of one model lies."""

    path: Path
    model: str
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Checked:
    """Files that were read and compared with their checksums."""

    files: int
    damaged: int
    """How many of them were not what they should be. They are in quarantine now."""


def replica_folder(data_dir: Path, replica: str) -> Path:
    """The data folder of one replica of a cluster."""
    return data_dir / _REPLICAS / replica.rpartition("/")[2]


def replica_folders(data_dir: Path) -> list[Path]:
    """Those of all replicas that there ever were."""
    return sorted(path for path in (data_dir / _REPLICAS).glob("*") if path.is_dir())


def store_folders(data_dir: Path, on_broken: Callable[[str], None]) -> list[StoreFolder]:
    """The stores of all models, the latest used first. `on_broken` gets a sentence for each that has to be left
    out."""
    found = []
    for path in filter(_has_chunks, stores_under(data_dir / "kv")):
        try:
            meta = read_meta(path / INDEX)
            if store_name(meta["fingerprint"]) != path.name:
                raise ValueError("it names another store")
            found.append(StoreFolder(path, str(meta["model"]), meta["fingerprint"]))
        except (OSError, LookupError, TypeError, ValueError) as error:
            on_broken(_why_left_out(path, error))
    return found


def check_files(folder: StoreFolder, on_progress: Callable[[int, int], None]) -> Checked:
    """Read everything in a store; `on_progress` gets the bytes so far and in all. Raises OSError."""
    files = ChunkFiles(folder.path.parent, folder.fingerprint)
    try:
        rows, damaged = files.open_rows()
        done, total = 0, sum(row.bytes for row in rows)
        for row in rows:
            result = check_file(files, description_of(row, folder.fingerprint))
            damaged += result.state in (FetchState.DAMAGED, FetchState.UNREADABLE)
            done += row.bytes
            on_progress(done, total)
        return Checked(len(rows), damaged)
    finally:
        files.close()


class ClosedStore:
    """A store that is opened without its model. Nothing is evicted; what is changed is written by `close`.

    Every method blocks on disk. Raises OSError where the folder cannot be used.
    """

    def __init__(
        self,
        folder: StoreFolder,
        ttl: Mapping[Ttl, float],
        link: RemoteLink | None = None,
        *,
        expire: bool = False,
    ) -> None:
        """`link`: to a server where other hosts find what is stored. `expire`: to open it is to delete what has
        outlived its TTL."""
        self.folder = folder
        self._store = KvStore(
            folder.fingerprint,
            Budgets(ram=0, disk=sys.maxsize),
            ChunkFiles(folder.path.parent, folder.fingerprint),
            shared=partial(RemoteTier, link) if link else None,
            keeping=Keeping(ttl, expire=expire),
        )
        catalogue = self._store.catalogue
        self.model = folder.model
        self.entries, self.gc, self.remove_user = catalogue.entries, catalogue.gc, catalogue.forget_user
        self.stats: Callable[[], Any] = self._store.stats
        self.close = self._store.close

    def pin(self, entry_id: str, pinned: bool) -> None:
        """Raises NoSuchEntry."""
        if not self._store.catalogue.pin(entry_id, pinned):
            raise NoSuchEntry(f"{entry_id} has no name that could be pinned: use it once, then pin it.")

    def remove(self, entry_id: str) -> Removed:
        return self._store.catalogue.remove(entry_id) or Removed()


def _has_chunks(path: Path) -> bool:
    return any(path.glob("chunks/*/*.kv"))


def _why_left_out(path: Path, error: Exception) -> str:
    reason = "its index does not say what it holds" if isinstance(error, LookupError) else error
    return f"{path} is left out ({reason}): serving its model once repairs it, and deleting it is safe."
