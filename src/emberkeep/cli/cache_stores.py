"""Who does the work of `emberkeep cache`: a running server for what it serves, else the stores themselves, and a
model that is loaded for what only a model can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from emberkeep.api.openai.body import ChatBody, CompletionBody, read_chat_or_completion, to_one_request
from emberkeep.api.stored import MAX_VERIFY_S, entry_from_json, lookup_from_json, shown_json
from emberkeep.cli.console import complain
from emberkeep.cli.model_setup import install_model, open_model
from emberkeep.cli.running_server import RunningServer, find_server
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, NoSuchEntry
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.stores import ClosedStore, StoreFolder, replica_folder, replica_folders, store_folders
from emberkeep.models.library import id_at
from emberkeep.types.cache import CacheEntry, Explanation, Removed, Verified
from emberkeep.types.request import Json
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from emberkeep.kv.remote.link import RemoteLink


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


class StateReader(Protocol):
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
def open_stores(config: Config, model: str | None, *, shared: bool = False) -> Iterator[list[Store]]:
    """Those of all models, or of one. What is changed in them is written when the block ends; `shared`: what is
    removed, other hosts do not find any more."""
    with ExitStack() as opened:
        served = opened.enter_context(served_stores(config))
        found: list[Store] = [store for store in served if is_called(store.model, model)]
        for folder in closed_folders(config, model, served):
            try:
                link = open_link(config) if shared else None
                found.append(
                    opened.enter_context(
                        closing(ClosedStore(folder, config.ttl.by_class(), link, expire=config.expire))
                    )
                )
            except OSError as error:
                complain(f"{folder.path} is left out: {error}.")
        yield found


def closed_folders(config: Config, model: str | None, served: Sequence[ServedStore] = ()) -> list[StoreFolder]:
    """Stores that no server looks after, also those of replicas of a cluster."""
    open_ones = {store.folder for store in served}
    return [
        folder
        for data_dir in (config.data_dir, *replica_folders(config.data_dir))
        for folder in store_folders(data_dir, complain)
        if folder.path not in open_ones and is_called(folder.model, model)
    ]


def open_link(config: Config) -> RemoteLink | None:
    """To the server that hosts share; None where they do not. Raises ConfigError."""
    from emberkeep.runtime.parts import open_link  # takes longer than listing a store

    return open_link(config)


@contextmanager
def open_state_reader(
    config: Config, model: str | None, before_loading: Callable[[], None] = lambda: None
) -> Iterator[StateReader]:
    """The running server if it has loaded the model that is asked for, else the configured model, which is
    loaded."""
    with served_stores(config) as served:
        found = next((store for store in served if is_called(store.model, model)), None)
        if found is not None:
            yield found
            return
    before_loading()
    install_model(config)
    with _load_model(config) as reader:
        yield reader


def text_of(config: Config, listed: Listed, chars: int) -> tuple[str, int]:
    """As `StateReader.text`; the model of the entry's store is loaded unless served. Raises EmberkeepError."""
    store = listed.store
    if isinstance(store, ServedStore):
        return store.text(listed.entry.id, chars)
    model = config.local_model if is_called(store.model, config.local_model) else store.model
    with _load_model(replace(config, model=model)) as reader:
        return reader.text(listed.entry.id, chars)


def all_entries(stores: Sequence[Store]) -> list[Listed]:
    """Everything in them, the latest used first."""
    listed = [Listed(store, entry) for store in stores for entry in store.entries()]
    return sorted(listed, key=lambda item: item.entry.idle_s)


def choose(listed: Sequence[Listed], ids: Sequence[str]) -> list[Listed]:
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


class _LoadedModel:
    def __init__(self, llm: Emberkeep) -> None:
        self._llm = llm

    def entries(self) -> list[CacheEntry]:
        return self._llm.cache.entries()

    def text(self, entry_id: str, chars: int) -> tuple[str, int]:
        shown = shown_json(self._llm.cache.show(entry_id), chars)
        return shown["text"], shown["text_chars"]

    def explain(self, body: dict[str, Json]) -> Explanation:
        return self._llm.cache.explain(to_one_request(read_chat_or_completion(body, ChatBody, CompletionBody)))

    def verify(self, entry: CacheEntry, tokens: int) -> Verified:
        return self._llm.verify_entry(entry.id, tokens)


@contextmanager
def _load_model(config: Config) -> Iterator[_LoadedModel]:
    # No user will chat with it: one sequence is enough, and nothing has to be made ready.
    with open_model(replace(config, parallel=1, warm=())) as llm:
        yield _LoadedModel(llm)


def _full_id(found: set[str], wanted: str) -> str:
    if not found:
        raise NoSuchEntry(f"There is no entry {wanted!r}: `emberkeep cache ls --all` lists them.")
    if len(found) > 1:
        raise EmberkeepError(f"{len(found)} entries begin with {wanted!r}: give more of the id.")
    return found.pop()


# ── a running server ──


class ServedStore:
    """What a server keeps of one model that it has loaded. Every method blocks, and raises EmberkeepError."""

    def __init__(self, server: RunningServer, model: str, data_dir: Path, replica: Mapping[str, str]) -> None:
        """`replica`: in a cluster the one that it is in, as its gateway is asked for it."""
        self._server = server
        self._replica = replica
        self.model = model
        self._of = {"model": model, **replica}
        folder: str | None = self.stats()["folder"]
        self.folder = data_dir / "kv" / folder if folder else None

    def entries(self) -> list[CacheEntry]:
        """Page by page: what moves from one to the next meanwhile is told once."""
        found: dict[str, CacheEntry] = {}
        offset, has_more = 0, True
        while has_more:
            page = self._server.ask("GET", "/v1/cache", params={**self._of, "offset": offset})
            found |= {listed["id"]: entry_from_json(listed) for listed in page["data"]}
            offset, has_more = offset + len(page["data"]), page["has_more"]
        return list(found.values())

    def stats(self) -> Json:
        return self._server.ask("GET", "/v1/stats", params=self._of)["store"]

    def pin(self, entry_id: str, pinned: bool) -> None:
        path = "/v1/cache/pin" if pinned else "/v1/cache/unpin"
        self._server.ask("POST", path, params=self._of, json={"id": entry_id})

    def remove(self, entry_id: str) -> Removed:
        return Removed(**self._server.ask("DELETE", f"/v1/cache/{entry_id}", params=self._of)["removed"])

    def remove_user(self, user: str) -> Removed:
        return Removed(**self._server.ask("DELETE", "/v1/cache", params={"user_id": user})["removed"])

    def gc(self) -> Removed:
        return Removed(**self._server.ask("POST", "/v1/cache/gc", params=self._of)["removed"])

    def text(self, entry_id: str, chars: int) -> tuple[str, int]:
        shown = self._server.ask("GET", f"/v1/cache/{entry_id}", params={**self._of, "chars": chars})
        return shown["text"], shown["text_chars"]

    def explain(self, body: dict[str, Json]) -> Explanation:
        asked = {**body, "model": self.model}
        answer = self._server.ask("POST", "/v1/cache/explain", params=self._replica, json=asked)
        return Explanation(lookup_from_json(answer), answer["explanation"])

    def verify(self, entry: CacheEntry, tokens: int) -> Verified:
        body = {"ids": [entry.id], "tokens": tokens, "seconds": MAX_VERIFY_S}
        results = self._server.ask("POST", "/v1/cache/verify", params=self._of, json=body, timeout=None)["data"]
        if not results:
            raise EmberkeepError(
                f"Entry {entry.id} takes over {MAX_VERIFY_S} seconds to verify while the server runs: stop it, "
                "and try again."
            )
        figures = ("reused", "compared", "agreed", "wide", "reproducible")
        return Verified(entry, *(results[0][name] for name in figures))


@contextmanager
def served_stores(config: Config) -> Iterator[list[ServedStore]]:
    """Of the models that the latest server on the data folder has loaded, the default one first; none without a
    server. Raises EmberkeepError."""
    server = find_server(config)
    if server is None:
        yield []
        return
    with closing(server):
        yield [
            ServedStore(server, model["id"], data_dir, replica)
            for data_dir, replica in _places(config.data_dir, server.ask("GET", "/health"))
            for model in server.ask("GET", "/v1/models", params=replica)["data"]
            if model["status"]["value"] == "loaded" and model["status"]["local"]
        ]


def _places(data_dir: Path, health: Json) -> list[tuple[Path, dict[str, str]]]:
    """The data folders that a server uses, and how it is asked about each: a cluster has one for each replica."""
    names = health.get("replicas")
    if names is None:
        return [(data_dir, {})]
    return [(replica_folder(data_dir, name), {"replica": name}) for name in names]
