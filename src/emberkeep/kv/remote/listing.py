"""What is in the shared server, by model and user. It does not tell names: who asks brings those it knows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from emberkeep.kv.remote.link import FOLLOWERS, SNAPSHOTS, VERSION, RemoteLink
from emberkeep.values import dataclass

if TYPE_CHECKING:
    from valkey.client import Pipeline


@dataclass(frozen=True, slots=True)
class Holding:
    store: str
    """The name of the store's folder on every host that has it."""
    tag: str
    """As `RemoteLink.tag` makes it of a user."""
    chunks: int = 0
    bytes: int = 0
    longest_s: float = 0.0
    """Until the last of them expires."""

    def plus(self, size: int, milliseconds: int) -> Holding:
        longest = max(self.longest_s, milliseconds / 1000)
        return Holding(self.store, self.tag, self.chunks + 1, self.bytes + size, longest)


def holdings(link: RemoteLink) -> list[Holding]:
    """The largest first. Blocks while every name is looked at. Raises Unreachable."""
    found: dict[tuple[str, str], Holding] = {}
    for names in link.scan(f"{VERSION}:*:*:*"):
        values = sorted({name for name in names if not name.endswith((FOLLOWERS, SNAPSHOTS))})
        told = link.run(partial(_ask, values))
        for name, size, left in zip(values, told[::2], told[1::2], strict=True):
            _, store, tag, _ = name.decode("ascii", "replace").split(":", 3)
            found[store, tag] = found.get((store, tag), Holding(store, tag)).plus(size, left)
    return sorted(found.values(), key=lambda holding: -holding.bytes)


def _ask(names: Sequence[bytes], pipe: Pipeline) -> None:
    for name in names:
        pipe.strlen(name)
        pipe.pttl(name)
