"""`emberkeep cache`: which prompts are kept, keeping them, removing them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.cache_checks import EMPTY, SomeIds, explain, verify
from emberkeep.cli.cache_table import print_entries, print_entry, removed_line, what
from emberkeep.cli.common import (
    ConfigFlag,
    DataDirFlag,
    JsonFlag,
    YesFlag,
    ask_first,
    complain,
    load_config,
    whose,
)
from emberkeep.cli.tables import counted, printable
from emberkeep.config import Config, readable_size
from emberkeep.errors import EmberkeepError, ModelNotFound
from emberkeep.types import CacheEntry, Removed

if TYPE_CHECKING:
    from emberkeep.cli.cache_access import Listed, Store

ROWS = 30
NO_SUCH = "Nothing is stored for that: without --user and --model the rest is listed."

EXAMPLES = """\b
Examples:
  emberkeep cache ls                           what is kept, the latest used first
  emberkeep cache show 3f2a                    one entry, with its text; ids may be abbreviated
  emberkeep cache pin 3f2a                     never evict it
  emberkeep cache rm --user alice              forget everything of one user
  emberkeep cache explain request.json         what a request would reuse now, and why not more
  emberkeep cache verify                       replay stored state and compare

\b
A running server on the same data folder is asked; without one, the commands work on the folder itself.
"""

app = typer.Typer(
    help="Look at stored prompt state, pin it, remove it, ask why it was not used.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Order(StrEnum):
    USED = "used"
    TOKENS = "tokens"
    SIZE = "size"
    HITS = "hits"


_KEYS: dict[Order, Callable[[CacheEntry], float]] = {
    Order.USED: lambda entry: entry.idle_s,
    Order.TOKENS: lambda entry: -entry.tokens,
    Order.SIZE: lambda entry: -entry.bytes,
    Order.HITS: lambda entry: -entry.hits,
}

Id = Annotated[str, typer.Argument(metavar="ID", help="An id from `emberkeep cache ls`, or its beginning.")]
Ids = Annotated[
    list[str], typer.Argument(metavar="ID", help="Ids from `emberkeep cache ls`, or their beginnings.")
]
OfModel = Annotated[str | None, typer.Option("--model", "-m", help="Only what is stored for this model.")]
OfUser = Annotated[str | None, typer.Option("--user", help='Only what is theirs; "" for those without a name.')]
SortFlag = Annotated[Order, typer.Option("--sort", help="What comes first: the latest used, or the most.")]


@app.command("ls", epilog="Example: emberkeep cache ls --user alice --sort size")
def list_entries(
    user: OfUser = None,
    model: OfModel = None,
    sort: SortFlag = Order.USED,
    all_rows: Annotated[bool, typer.Option("--all", help=f"More than the first {ROWS}.")] = False,
    as_json: JsonFlag = False,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Conversations and prefixes whose state is kept: how much, where, for how long."""
    from emberkeep.cli.cache_access import listing, open_stores

    with open_stores(load_config(data_dir=data_dir, config=config), model) as stores:
        listed = [item for item in listing(stores) if _is_theirs(item.entry, user)]
        listed.sort(key=lambda item: _KEYS[sort](item.entry))
        if as_json:
            _print_json(listed)
        elif listed:
            shown = listed if all_rows else listed[:ROWS]
            print_entries(shown)
            print(_totals(len(listed), len(shown), stores))
        else:
            print(EMPTY if user is None and model is None else NO_SUCH)


@app.command("show", epilog="Example: emberkeep cache show 3f2a --chars 10000")
def show_entry(
    entry_id: Id,
    chars: Annotated[int, typer.Option("--chars", min=0, help="How much of its text to print.")] = 2000,
    model: OfModel = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """One entry and its text.

    Without a running server its model is loaded to read the text.
    """
    from emberkeep.cli.cache_access import chosen, listing, open_stores, text_of

    settled = load_config(model=model, data_dir=data_dir, config=config)
    with open_stores(settled, model) as stores:
        latest = chosen(listing(stores), [entry_id])[0]
        print_entry(latest.store.model, latest.entry)
        try:
            text, length = text_of(settled, latest, chars)
        except ModelNotFound:
            complain(f"Its text needs the model {latest.store.model}: name its file with --model.")
        except EmberkeepError as error:
            complain(f"Its text cannot be shown: {error}")
        else:
            part = f", {len(text):,} of {length:,} characters" if len(text) < length else ""
            print(f"\ntext{part}\n{printable(text)}")


@app.command(epilog="Example: emberkeep cache pin 3f2a 91c0")
def pin(ids: Ids, model: OfModel = None, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Keep entries until they are unpinned: they are not evicted and do not expire."""
    _set_pins(load_config(data_dir=data_dir, config=config), model, ids, True)


@app.command(epilog="Example: emberkeep cache unpin 3f2a")
def unpin(ids: Ids, model: OfModel = None, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Let pinned entries go when their time has come."""
    _set_pins(load_config(data_dir=data_dir, config=config), model, ids, False)


@app.command("rm", epilog="Examples: emberkeep cache rm 3f2a, emberkeep cache rm --user alice --yes")
def remove(
    ids: SomeIds = None,
    user: Annotated[str | None, typer.Option("--user", help="Everything of this user.")] = None,
    yes: YesFlag = False,
    model: OfModel = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Remove entries, pinned or not; what others share with them stays."""
    from emberkeep.cli.cache_access import chosen, listing, open_stores

    if (user is None) == (not ids):
        raise typer.BadParameter("say what to remove: ids from `emberkeep cache ls`, or --user NAME.")
    with open_stores(load_config(data_dir=data_dir, config=config), model) as stores:
        listed = listing(stores)
        if user is None:
            removed = [item.store.remove(item.entry.id) for item in chosen(listed, ids or ())]
        else:
            if not yes:
                entries = counted(sum(_is_theirs(item.entry, user) for item in listed))
                ask_first(f"Remove everything of {whose(user)} ({entries})?")
            removed = [store.remove_user(user) for store in stores]
    print(removed_line(_sum(removed)))


@app.command(epilog="Example: emberkeep cache gc")
def gc(model: OfModel = None, data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Remove everything that has outlived its time and is not pinned."""
    from emberkeep.cli.cache_access import open_stores

    with open_stores(load_config(data_dir=data_dir, config=config), model) as stores:
        removed = _sum(store.gc() for store in stores)
    print(removed_line(removed) if removed.tokens else "Nothing has outlived its time.")


app.command(
    epilog='Examples: emberkeep cache explain request.json, emberkeep cache explain --prompt "Once upon a time"'
)(explain)
app.command(epilog="Example: emberkeep cache verify --sample 10 --tokens 32")(verify)


def _is_theirs(entry: CacheEntry, user: str | None) -> bool:
    """What belongs to everybody belongs to no user."""
    return user is None or (entry.user == user and not entry.is_shared)


def _print_json(listed: Sequence[Listed]) -> None:
    from emberkeep.api.stored import entry_json

    print(json.dumps([{**entry_json(item.entry), "model": item.store.model} for item in listed], indent=2))


def _totals(entries: int, shown: int, stores: Sequence[Store]) -> str:
    """What entries share is stored once, so their sizes do not add up to this."""
    stats = [store.stats() for store in stores]
    disk, ram = (readable_size(sum(part[tier]["bytes"] for part in stats)) for tier in ("cold", "warm"))
    more = f"; --all lists the other {entries - shown:,}" if shown < entries else ""
    return f"{counted(entries)}{more}; {disk} on disk and {ram} in RAM altogether"


def _set_pins(config: Config, model: str | None, ids: Sequence[str], pinned: bool) -> None:
    from emberkeep.cli.cache_access import chosen, listing, open_stores

    with open_stores(config, model) as stores:
        for item in chosen(listing(stores), ids):
            item.store.pin(item.entry.id, pinned)
            state = "pinned" if pinned else "not pinned any more"
            print(f"{item.entry.id} is {state}: {printable(what(item.entry))}")


def _sum(parts: Iterable[Removed]) -> Removed:
    listed = list(parts)
    return Removed(sum(p.entries for p in listed), sum(p.tokens for p in listed), sum(p.bytes for p in listed))
