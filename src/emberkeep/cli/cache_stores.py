"""Who does the work of `emberkeep cache`: a running server for what it serves, else the stores themselves, and a
model that is loaded for what only a model can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from emberkeep.api.openai_chat import ChatBody
from emberkeep.api.openai_completions import CompletionBody, read_chat_or_completion, to_one_request
from emberkeep.api.stored import MAX_VERIFY_S, entry_from_json, lookup_from_json, shown_json
from emberkeep.cli.console import complain
from emberkeep.cli.model_setup import install_model, open_model
from emberkeep.cli.running_server import RunningServer, find_server
from emberkeep.config.kinds import public_url, readable_size
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError, EmberkeepError, NoSuchEntry, StoreFailed
from emberkeep.kv.remote.blocks import holdings
from emberkeep.kv.remote.link import RemoteLink, Unreachable
from emberkeep.library.emberkeep import Emberkeep
from emberkeep.library.stores import ClosedStore, StoreFolder, replica_folder, replica_folders, store_folders
from emberkeep.models.library import id_at
from emberkeep.types.cache import CacheEntry, Explanation, Removed, Verified
from emberkeep.types.request import Json
from emberkeep.values import dataclass


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
        """At most so many characters of an entry's text, from both ends, and how long all of it is."""
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


Store = ClosedStore | ServedStore
"""One model's stored state. Every method blocks, and may raise EmberkeepError or OSError."""
StateReader = _LoadedModel | ServedStore
"""A model that can read its stored state. Every method blocks, and may raise EmberkeepError."""


@contextmanager
def served_stores(config: Config) -> Iterator[list[ServedStore]]:
    """The stores of the models that the latest server on the data folder has loaded, the default one first; none
    without a server. Raises EmberkeepError."""
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


# ── the server in which hosts share their state ──


@dataclass(frozen=True, slots=True)
class SharedRow:
    """State of one model and one user, of all hosts."""

    model: str | None
    """None: no store on this host is of that model."""
    user: str | None
    """None: nothing on this host is theirs, or it is shared by all users."""
    is_shared: bool
    store: str
    tag: str
    chunks: int
    bytes: int
    kept_s: float


def shared_rows(config: Config) -> list[SharedRow]:
    """The largest first. Blocks. Raises EmberkeepError."""
    link = _link(config)
    models = {folder.path.name: folder.model for folder in closed_folders(config, None)}
    users = {link.tag(user): user for user in known_users(config)}
    try:
        return [
            SharedRow(
                models.get(one.store),
                users.get(one.tag),
                one.tag == link.tag(None),
                one.store,
                one.tag,
                one.chunks,
                one.bytes,
                round(one.longest_s, 1),
            )
            for one in holdings(link)
        ]
    except Unreachable as error:
        raise StoreFailed(
            f"{public_url(config.remote or '')} does not answer ({error}): is it running?"
        ) from error
    finally:
        link.close()


def known_users(config: Config) -> set[str]:
    """All who have something on this host."""
    with served_stores(config) as served:
        found = {entry.user for store in served for entry in store.entries()}
        for folder in closed_folders(config, None, served):
            store = ClosedStore(folder, config.ttl.by_class())
            found |= {entry.user for entry in store.entries()}
            store.close()
    return found | {""}


def forget_elsewhere(config: Config, user: str) -> None:
    """Leave nothing of a user where hosts share it, if they do. Blocks. Raises EmberkeepError."""
    if config.remote is None:
        return
    link = _link(config)
    try:
        link.forget(user)
    except Unreachable as error:
        raise StoreFailed(
            f"Nothing of that user is left here, but {public_url(config.remote)} does not answer ({error}): "
            "remove it there when it does, with the same command."
        ) from error
    finally:
        link.close()


def shared_server_report(config: Config) -> tuple[str, list[str]]:
    """How it is, and what could be better. Blocks, for the deadline at most. Raises ConfigError."""
    link, where = _link(config), public_url(config.remote or "")
    begin = perf_counter()
    try:
        link.ping()
        milliseconds = 1e3 * (perf_counter() - begin)
        about = link.about()
    except Unreachable as error:
        advice = ["requests are answered without it; start it, or correct remote"]
        return f"{where} does not answer ({error})", advice
    finally:
        link.close()
    name = "Valkey" if "valkey_version" in about else "Redis"
    version = about.get("valkey_version") or about.get("redis_version")
    limit, policy = int(about.get("maxmemory", 0)), str(about.get("maxmemory_policy", ""))
    sealed = "encrypted" if link.settings.key else "not encrypted"
    held, room = readable_size(int(about.get("used_memory", 0))), readable_size(limit) if limit else "no limit"
    text = f"{where}: {name} {version}, answers in {milliseconds:.1f} ms, holds {held} of {room}, {sealed}"
    return text, _advice(limit, policy, is_closed=bool(link.settings.key))


def _advice(limit: int, policy: str, *, is_closed: bool) -> list[str]:
    found = []
    if not limit:
        found.append("set its maxmemory, or it grows until the machine has none left")
    elif policy == "noeviction":
        found.append("set its maxmemory-policy to allkeys-lru, or it takes nothing more when it is full")
    if not is_closed:
        found.append("set remote_key on all hosts, or whoever reaches it can read prompts and forge state")
    return found


def _link(config: Config) -> RemoteLink:
    link = open_link(config)
    if link is None:
        raise ConfigError('No server is shared: set remote = "valkey://HOST:6379", or EMBERKEEP_REMOTE.')
    return link
