"""Who does the work of `emberkeep cache`: a running server for what it serves, else the stores themselves, and a
model that is loaded for what only a model can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from emberkeep.api.messages import read_chat_or_completion, to_one_request
from emberkeep.api.stored import shown_json
from emberkeep.cli.common import complain, install_model, open_model
from emberkeep.cli.served import ServedStore, served_store
from emberkeep.config import Config, ttls
from emberkeep.errors import EmberkeepError, NoSuchEntry
from emberkeep.library import Emberkeep
from emberkeep.library.stores import ClosedStore, StoreFolder, store_folders
from emberkeep.models.library import id_at
from emberkeep.types import CacheEntry, Explanation, Json, Removed, Verified


class Store(Protocol):
    """One model's stored state. Every method blocks, and may raise EmberkeepError or OSError."""

    @property
    def model(self) -> str: ...

    def entries(self) -> list[CacheEntry]: ...

    def stats(self) -> Json:
        """As `KvStore.stats`."""

    def pin(self, entry_id: str, pinned: bool) -> None: ...

    def remove(self, entry_id: str) -> Removed: ...

    def remove_user(self, user: str) -> Removed: ...

    def gc(self) -> Removed: ...


class Knowing(Protocol):
    """A model that can read its stored state. Every method blocks, and may raise EmberkeepError."""

    def entries(self) -> list[CacheEntry]: ...

    def text(self, entry_id: str, chars: int) -> tuple[str, int]:
        """At most so many characters of an entry's text, from both ends, and how long all of it is."""

    def explain(self, body: dict[str, Json]) -> Explanation: ...

    def verify(self, entry: CacheEntry, tokens: int) -> Verified: ...


@dataclass(frozen=True, slots=True)
class Listed:
    store: Store
    entry: CacheEntry


@contextmanager
def open_stores(config: Config, model: str | None) -> Iterator[list[Store]]:
    """Those of all models, or of one. What is changed in them is written when the block ends."""
    with ExitStack() as opened:
        served = served_store(config)
        found: list[Store] = []
        if served is not None:
            opened.callback(served.close)
            found += [served] if is_called(served.model, model) else []
        for folder in closed_folders(config, model, served):
            try:
                found.append(opened.enter_context(closing(ClosedStore(folder, ttls(config)))))
            except OSError as error:
                complain(f"{folder.path} is left out: {error}.")
        yield found


def closed_folders(config: Config, model: str | None, served: ServedStore | None = None) -> list[StoreFolder]:
    """Stores that no server looks after."""
    folders = store_folders(config.data_dir, complain)
    open_one = served.folder if served else None
    return [f for f in folders if f.path.name != open_one and is_called(f.model, model)]


@contextmanager
def open_knowing(
    config: Config, model: str | None, before_loading: Callable[[], None] = lambda: None
) -> Iterator[Knowing]:
    """The running server if it serves the model that is asked for, else the configured model, which is loaded."""
    served = served_store(config)
    if served is not None:
        with closing(served):
            if is_called(served.model, model):
                yield served
                return
    before_loading()
    install_model(config)
    with _loaded(config) as knowing:
        yield knowing


def text_of(config: Config, listed: Listed, chars: int) -> tuple[str, int]:
    """As `Knowing.text`; the model of the entry's store is loaded unless it is served. Raises EmberkeepError."""
    store = listed.store
    if isinstance(store, ServedStore):
        return store.text(listed.entry.id, chars)
    model = config.model if is_called(store.model, config.model) else store.model
    with _loaded(replace(config, model=model)) as knowing:
        return knowing.text(listed.entry.id, chars)


def listing(stores: Sequence[Store]) -> list[Listed]:
    """Everything in them, the latest used first."""
    listed = [Listed(store, entry) for store in stores for entry in store.entries()]
    return sorted(listed, key=lambda item: item.entry.idle_s)


def chosen(listed: Sequence[Listed], ids: Sequence[str]) -> list[Listed]:
    """What has these ids, which may be abbreviated; several models may have state of one conversation.

    Raises EmberkeepError unless each leads to one id.
    """
    wanted = full_ids([item.entry for item in listed], ids)
    return [item for item in listed if item.entry.id in wanted]


def full_ids(entries: Sequence[CacheEntry], ids: Sequence[str]) -> set[str]:
    """Raises EmberkeepError unless each of `ids` is the beginning of exactly one."""
    return {_full_id({entry.id for entry in entries if entry.id.startswith(id_)}, id_) for id_ in ids}


def is_called(name: str, wanted: str | None) -> bool:
    """Whether a model of that name is meant by a name, or by the path of its file or folder."""
    return wanted is None or wanted == name or id_at(Path(wanted)) == name


class _Loaded:
    def __init__(self, keeper: Emberkeep) -> None:
        self._keeper = keeper

    def entries(self) -> list[CacheEntry]:
        return self._keeper.cache.entries()

    def text(self, entry_id: str, chars: int) -> tuple[str, int]:
        shown = shown_json(self._keeper.cache.show(entry_id), chars)
        return shown["text"], shown["text_chars"]

    def explain(self, body: dict[str, Json]) -> Explanation:
        return self._keeper.cache.explain(to_one_request(read_chat_or_completion(body)))

    def verify(self, entry: CacheEntry, tokens: int) -> Verified:
        return self._keeper.verify_entry(entry.id, tokens)


@contextmanager
def _loaded(config: Config) -> Iterator[_Loaded]:
    # Nobody will chat with it: one sequence is enough, and nothing has to be made ready.
    with open_model(replace(config, parallel=1, warm=())) as keeper:
        yield _Loaded(keeper)


def _full_id(found: set[str], wanted: str) -> str:
    if not found:
        raise NoSuchEntry(f"There is no entry {wanted!r}: `emberkeep cache ls --all` lists them.")
    if len(found) > 1:
        raise EmberkeepError(f"{len(found)} entries begin with {wanted!r}: give more of the id.")
    return found.pop()
