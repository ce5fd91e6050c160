"""What models are put together with: stores, the memory with the conversations over it, and what rules of hygiene
keep. Several models share them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from emberkeep.config.settings import Config, TooLong, memory_file
from emberkeep.engine.base import Engine
from emberkeep.engine.embedding import EmbeddingEngine
from emberkeep.engine.facts import Stored
from emberkeep.errors import MemoryFailed
from emberkeep.kv.disk.chunk_files import ChunkFiles
from emberkeep.kv.disk.index import stores_under
from emberkeep.kv.disk.vector_file import VectorFile, delete_vectors
from emberkeep.kv.expiry import UnusedStores
from emberkeep.kv.forgetting import Holders
from emberkeep.kv.policy import Keeping
from emberkeep.kv.remote.link import RemoteLink, RemoteSettings
from emberkeep.kv.remote.tier import RemoteTier
from emberkeep.kv.store import Budgets, KvStore, expire_closed
from emberkeep.kv.tree import store_name
from emberkeep.memory.memory import Memory
from emberkeep.memory.vectors import find_embedder
from emberkeep.session.hygiene import Hygiene
from emberkeep.session.sessions import Policy, Sessions, about_tokens
from emberkeep.types.cache import Removed
from emberkeep.types.hygiene import rules_in_use
from emberkeep.types.request import Json, Recall
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep")
_RECALL_TOKENS = 512
"""Most that is quoted of what has left a conversation."""
_REST_SHARE = 2
"""At most this part of the RAM for stored state is for models that are not loaded."""
_VECTORS = "vectors.db"
_VECTOR_PART = 20
"""The vectors of embeddings take such a part of `disk_budget`."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An engine with its model, as either engine gives it."""

    engine: Engine
    template: str | None
    details: Mapping[str, Json]
    """What the model's card tells."""
    states: EmbeddingEngine | None = None
    """Pooled, where that was asked for."""


def open_memory(config: Config) -> Memory | None:
    """None: it is switched off. Raises MemoryFailed."""
    if not config.memory:
        return None
    return Memory(memory_file(config), limit_bytes=config.memory_budget, embed=find_embedder())


def open_memory_or_none(config: Config) -> Memory | None:
    """Without a usable file nothing is remembered: serving goes on."""
    try:
        return open_memory(config)
    except MemoryFailed as error:
        log.warning("nothing is remembered: %s", error)
        return None


def open_sessions(
    config: Config, memory: Memory | None, context: int, count: Callable[[str], int] = about_tokens
) -> Sessions:
    """`count`: of a text's tokens."""
    recall_tokens = min(context // 8, _RECALL_TOKENS)
    evicts = config.too_long == TooLong.EVICT
    policy = Policy(context, evicts, recall=Recall(config.recall), recall_tokens=recall_tokens)
    return Sessions(memory, policy, count)


@dataclass(slots=True)
class _Kept:
    store: KvStore
    share: float
    is_used: bool = False


class ModelParts:
    """What models are put together with. Safe to use from any thread; everything blocks.

    Where it `stays`, several models share it: a store stays open while its model is unloaded, so that what it
    holds in RAM, and what is not worth writing, is there when the model comes back. All of them together keep to
    the budget. Else all of it ends with the model."""

    def __init__(self, config: Config, *, stays: bool = False) -> None:
        self._config = config
        self._stays = stays
        self.hygiene = Hygiene(rules_in_use(config.hygiene))
        """What a client has sent first does not depend on the model that it asks."""
        self.holders = _holders(config, self.hygiene)
        """Everything that holds what users sent."""
        self._lock = threading.Lock()
        """Guards what is kept. Held for moments, never over a look at the disk."""
        self._kept: list[_Kept] = []
        """The latest used one last."""
        self._opening = threading.Lock()
        self._memory: Memory | None = None
        self._is_memory_open = False

    def store(
        self, fingerprint: bytes, about: Mapping[str, str], share: float = 1.0, *, is_draft: bool = False
    ) -> KvStore:
        """`share`: of the RAM for the state of one model. Other hosts need not have what `is_draft`."""
        with self.holders.opening:
            own = self._at_rest(fingerprint) or _Kept(
                open_store(self._config, fingerprint, about, share, is_draft=is_draft, holders=self.holders),
                share,
            )
            with self._lock:
                own.is_used = True
                self._kept = [*(kept for kept in self._kept if kept is not own), own]
                self._share_out()
        own.store.follow(fingerprint)
        return own.store

    def close_store(self, store: KvStore) -> None:
        if self._stays:
            store.flush()
        else:
            store.close()
        with self._lock:
            own = next(kept for kept in self._kept if kept.store is store)
            own.is_used = False
            if not self._stays:
                self._kept.remove(own)
            self._share_out()

    def memory(self) -> Memory | None:
        """Blocks until it was opened once, and never again: the event loop asks, before a model is there."""
        if not self._is_memory_open:
            with self._opening:
                if not self._is_memory_open:
                    self._memory = open_memory_or_none(self._config)
                    self._is_memory_open = True
        return self._memory

    def close_memory(self, memory: Memory) -> None:
        if not self._stays:
            memory.close()

    def sweep(self) -> None:
        """What models look after while they are loaded: state that outlived its TTL, users that were forgotten."""
        for store in self._resting():
            store.sweep()

    def close(self) -> None:
        """When all models are closed."""
        for kept in self._kept:
            kept.store.close()
        if self._memory is not None:
            self._memory.close()

    def _resting(self) -> list[KvStore]:
        with self._lock:
            return [kept.store for kept in self._kept if not kept.is_used]

    def _at_rest(self, fingerprint: bytes) -> _Kept | None:
        """Two models may be the same file under two names: each has a store of its own, over one folder."""
        with self._lock:
            own = (kept for kept in self._kept if kept.store.fingerprint == fingerprint and not kept.is_used)
            return next(own, None)

    def _share_out(self) -> None:
        """Models that are loaded share what those at rest leave of the budget."""
        resting = [kept for kept in self._kept if not kept.is_used]
        used = [kept for kept in self._kept if kept.is_used]
        held = [kept.store.held_bytes()[0] for kept in resting]
        budgets = rest_budgets(held, self._config.ram_budget // _REST_SHARE if used else self._config.ram_budget)
        for kept, budget in zip(resting, budgets, strict=True):
            kept.store.resize_ram(budget)
        left, shares = self._config.ram_budget - sum(budgets), sum(kept.share for kept in used) or 1.0
        for kept in used:
            kept.store.resize_ram(int(left * kept.share / shares))


def rest_budgets(held: list[int], room: int) -> list[int]:
    """What each store at rest may keep of the bytes that it holds: the latest, at the end, all of it if that fits,
    and the others what is left. Pure."""
    budgets: list[int] = []
    for size in reversed(held):
        budgets.append(min(size, room))
        room -= budgets[-1]
    return budgets[::-1]


def open_link(config: Config) -> RemoteLink | None:
    """None where state is not shared. Nothing is asked yet. Raises ConfigError."""
    if config.remote is None:
        return None
    return RemoteLink(RemoteSettings(config.remote, config.remote_key))


def open_vectors(config: Config) -> VectorFile | None:
    """The vectors of all models that embed; None where none are kept on disk. A text can be guessed from its
    vector: where nothing may outlast its TTL, they are in RAM only."""
    budget = _vector_budget(config)
    return VectorFile(config.data_dir / _VECTORS, budget) if budget and not config.expire else None


def _vector_budget(config: Config) -> int:
    return config.disk_budget // _VECTOR_PART


def _holders(config: Config, hygiene: Hygiene) -> Holders:
    """With what outlives every model."""
    holders = Holders()
    holders.join("first values of what changes in prompts", hygiene, hygiene.forget)
    holders.join_lasting(config, partial(_clear_vectors, config))
    return holders


def _clear_vectors(config: Config, user: str) -> Removed:
    """All of them are of requests without a user; a model that embeds may not be loaded now."""
    if not user and (config.data_dir / _VECTORS).exists():
        file = VectorFile(config.data_dir / _VECTORS, _vector_budget(config))
        file.clear()
        file.close()
    return Removed()


def stored_by(config: Config) -> Stored | None:
    """Looks at the folders that there are now. None where a store of before is of no use: there is none, or hosts
    share state and have to agree on its name."""
    if config.remote is not None or not config.disk_budget:
        return None
    try:
        folders = [path.name for path in stores_under(config.data_dir / "kv")]
    except OSError:  # opening the store will tell
        return None

    def latest_of(fingerprints: Iterable[bytes]) -> bytes | None:
        names: dict[str, bytes] = {}
        for fingerprint in fingerprints:
            names[store_name(fingerprint)] = fingerprint
            if folders[0] in names:  # before all others are computed, of which there are a thousand
                return fingerprint
        return next((names[folder] for folder in folders if folder in names), None)

    return latest_of if folders else None


def open_store(
    config: Config,
    fingerprint: bytes,
    about: Mapping[str, str],
    share: float = 1.0,
    *,
    is_draft: bool = False,
    holders: Holders | None = None,
) -> KvStore:
    """Without a usable folder the store lives in RAM: serving goes on. `share`: of the RAM that is for state.

    Raises ConfigError where hosts are to share it and cannot.
    """
    if config.expire and not is_draft:
        delete_vectors(config.data_dir / _VECTORS)
    keeping = Keeping(config.ttl.by_class(), writes_per_day=config.disk_writes_per_day, expire=config.expire)
    budgets = Budgets(int(config.ram_budget * share), config.disk_budget)

    link = None if is_draft else open_link(config)

    def store(files: ChunkFiles | None) -> KvStore:
        tier = partial(RemoteTier, link) if link else None
        return KvStore(fingerprint, budgets, files, shared=tier, keeping=keeping, about=about, holders=holders)

    try:
        opened = store(ChunkFiles(config.data_dir / "kv", fingerprint) if config.disk_budget else None)
    except OSError as error:
        log.warning("stored state is kept in RAM only: %s", error)
        opened = store(None)
    if config.expire and not is_draft:
        opened.beside = UnusedStores(config.data_dir / "kv", keeping, expire_closed).sweep
    return opened
