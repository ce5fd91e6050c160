"""The server in which hosts share their state, as a person asks about it."""

from __future__ import annotations

from time import perf_counter

from emberkeep.cli.cache_stores import closed_folders, open_link, served_stores
from emberkeep.config.kinds import public_url, readable_size
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError, StoreFailed
from emberkeep.kv.remote.link import RemoteLink, Unreachable
from emberkeep.kv.remote.listing import holdings
from emberkeep.library.stores import ClosedStore
from emberkeep.values import dataclass


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


@dataclass(frozen=True, slots=True)
class ServerReport:
    text: str
    advice: list[str]


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


def shared_server_report(config: Config) -> ServerReport:
    """Blocks, for the deadline at most. Raises ConfigError."""
    link, where = _link(config), public_url(config.remote or "")
    begin = perf_counter()
    try:
        link.ping()
        milliseconds = 1e3 * (perf_counter() - begin)
        told = link.about()
    except Unreachable as error:
        advice = ["requests are answered without it; start it, or correct remote"]
        return ServerReport(f"{where} does not answer ({error})", advice)
    finally:
        link.close()
    name = "Valkey" if "valkey_version" in told else "Redis"
    version = told.get("valkey_version") or told.get("redis_version")
    limit, policy = int(told.get("maxmemory", 0)), str(told.get("maxmemory_policy", ""))
    sealed = "encrypted" if link.seal.is_closed else "not encrypted"
    held, room = readable_size(int(told.get("used_memory", 0))), readable_size(limit) if limit else "no limit"
    text = f"{where}: {name} {version}, answers in {milliseconds:.1f} ms, holds {held} of {room}, {sealed}"
    return ServerReport(text, list(_advice(limit, policy, is_closed=link.seal.is_closed)))


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
