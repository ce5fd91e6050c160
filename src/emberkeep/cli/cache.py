"""`emberkeep cache`: which prompts are kept, keeping them, removing them."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from emberkeep.cli.cache_table import (
    agreement,
    entry_facts,
    print_entries,
    print_explanation,
    print_shared,
    print_verified,
    removed_line,
    what,
)
from emberkeep.cli.commands import JsonFlag, ModelFlag, YesFlag, command_group, with_settings
from emberkeep.cli.console import ask_first, complain, console, plural, printable, show_facts, whose
from emberkeep.cli.model_setup import pull_reporter
from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import Config
from emberkeep.errors import EmberkeepError, ModelNotFound, RequestError
from emberkeep.types.cache import CacheEntry, Removed, Verified
from emberkeep.types.lineage import EXACT_BITS
from emberkeep.types.request import Json

if TYPE_CHECKING:
    from emberkeep.cli.cache_stores import Listed, StateReader, Store
    from emberkeep.library.stores import Checked

ROWS = 30
EMPTY = "Nothing is stored here yet: `emberkeep chat` and `emberkeep serve` keep what they evaluate."
NO_SUCH = "Nothing is stored for that: without --user and --model the rest is listed."

EXAMPLES = """\b
Examples:
  emberkeep cache ls                           what is kept, the latest used first
  emberkeep cache ls --tier remote             what hosts share, by model and user
  emberkeep cache show 3f2a                    one entry, with its text; ids may be abbreviated
  emberkeep cache pin 3f2a                     never evict it
  emberkeep cache rm --user alice              forget everything of one user
  emberkeep cache explain request.json         what a request would reuse now, and why not more
  emberkeep cache verify                       replay stored state and compare

\b
A running server on the same data folder is asked; without one, the commands work on the folder itself.
"""

app = command_group("Look at stored prompt state, pin it, remove it, ask why it was not used.", EXAMPLES)


class Order(StrEnum):
    USED = "used"
    TOKENS = "tokens"
    SIZE = "size"
    HITS = "hits"


class Tier(StrEnum):
    HOT = "hot"
    WARM = "warm"
    COLD = "cold"
    REMOTE = "remote"


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
SomeIds = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Ids from `emberkeep cache ls`, or their beginnings.")
]
OfModel = Annotated[str | None, typer.Option("--model", "-m", help="Only what is stored for this model.")]
OfUser = Annotated[str | None, typer.Option("--user", help='Only what is theirs; "" for those without a name.')]
TierFlag = Annotated[
    Tier | None,
    typer.Option("--tier", help="Only what is there: in the engine, in RAM, on disk, or where hosts share it."),
]
SortFlag = Annotated[Order, typer.Option("--sort", help="What comes first: the latest used, or the most.")]


@app.command("ls", epilog="Example: emberkeep cache ls --user alice --sort size")
@with_settings("data_dir", "config")
def list_entries(
    config: Config,
    user: OfUser = None,
    model: OfModel = None,
    tier: TierFlag = None,
    sort: SortFlag = Order.USED,
    all_rows: Annotated[bool, typer.Option("--all", help=f"More than the first {ROWS}.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Conversations and prefixes whose state is kept: how much, where, for how long."""
    from emberkeep.cli.cache_stores import all_entries, open_stores

    if tier is Tier.REMOTE:
        _list_shared(config, user, model, as_json)
        return
    with open_stores(config, model) as stores:
        listed = [
            item for item in all_entries(stores) if _is_theirs(item.entry, user) and _is_in(item.entry, tier)
        ]
        listed.sort(key=lambda item: _KEYS[sort](item.entry))
        if as_json:
            _print_json(listed)
        elif listed:
            shown = listed if all_rows else listed[:ROWS]
            print_entries(shown)
            print(_totals(len(listed), len(shown), stores))
        else:
            print(EMPTY if user is None and model is None and tier is None else NO_SUCH)


@app.command("show", epilog="Example: emberkeep cache show 3f2a --chars 10000")
@with_settings("model", "data_dir", "config")
def show_entry(
    config: Config,
    entry_id: Id,
    chars: Annotated[int, typer.Option("--chars", min=0, help="How much of its text to print.")] = 2000,
    model: OfModel = None,
) -> None:
    """One entry and its text.

    Without a running server its model is loaded to read the text.
    """
    from emberkeep.cli.cache_stores import all_entries, choose, open_stores, text_of

    with open_stores(config, model) as stores:
        latest = choose(all_entries(stores), [entry_id])[0]
        show_facts(entry_facts(latest.store.model, latest.entry))
        try:
            text, length = text_of(config, latest, chars)
        except ModelNotFound:
            complain(f"Its text needs the model {latest.store.model}: name its file with --model.")
        except EmberkeepError as error:
            complain(f"Its text cannot be shown: {error}")
        else:
            part = f", {len(text):,} of {length:,} characters" if len(text) < length else ""
            print(f"\ntext{part}\n{printable(text)}")


@app.command(epilog="Example: emberkeep cache pin 3f2a 91c0")
@with_settings("data_dir", "config")
def pin(config: Config, ids: Ids, model: OfModel = None) -> None:
    """Keep entries until they are unpinned: they are not evicted and do not expire."""
    _set_pins(config, model, ids, True)


@app.command(epilog="Example: emberkeep cache unpin 3f2a")
@with_settings("data_dir", "config")
def unpin(config: Config, ids: Ids, model: OfModel = None) -> None:
    """Let pinned entries go when their time has come."""
    _set_pins(config, model, ids, False)


@app.command("rm", epilog="Examples: emberkeep cache rm 3f2a, emberkeep cache rm --user alice --yes")
@with_settings("data_dir", "config")
def remove(
    config: Config,
    ids: SomeIds = None,
    user: Annotated[str | None, typer.Option("--user", help="Everything of this user.")] = None,
    yes: YesFlag = False,
    model: OfModel = None,
) -> None:
    """Remove entries, pinned or not; what others share with them stays."""
    from emberkeep.cli.cache_stores import all_entries, choose, forget_elsewhere, open_stores

    if (user is None) == (not ids):
        raise typer.BadParameter("say what to remove: ids from `emberkeep cache ls`, or --user NAME.")
    with open_stores(config, model, shared=True) as stores:
        listed = all_entries(stores)
        if user is None:
            removed = [item.store.remove(item.entry.id) for item in choose(listed, ids or ())]
        else:
            if not yes:
                entries = plural(sum(_is_theirs(item.entry, user) for item in listed))
                ask_first(f"Remove everything of {whose(user)} ({entries})?")
            removed = [store.remove_user(user) for store in stores]
            forget_elsewhere(config, user)
    print(removed_line(_sum(removed)))


@app.command(epilog="Example: emberkeep cache gc")
@with_settings("data_dir", "config")
def gc(config: Config, model: OfModel = None) -> None:
    """Remove everything that has outlived its time and is not pinned."""
    from emberkeep.cli.cache_stores import open_stores

    with open_stores(config, model) as stores:
        removed = _sum(store.gc() for store in stores)
    print(removed_line(removed) if removed.tokens else "Nothing has outlived its time.")


@app.command(
    epilog='Examples: emberkeep cache explain request.json, emberkeep cache explain --prompt "Once upon a time"'
)
@with_settings("model", "data_dir", "config")
def explain(
    config: Config,
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE|-", help="The JSON body of a chat or completion; - reads a pipe."),
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="A raw prompt instead.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="Who would ask.")] = None,
    model: ModelFlag = None,
) -> None:
    """What a request would reuse if it came now, and why not more.

    Without a running server the model is loaded.
    """
    from emberkeep.cli.cache_stores import open_state_reader

    if (file is None) == (prompt is None):
        raise typer.BadParameter("give a file with a request, - to read it from a pipe, or --prompt TEXT.")
    body = {"prompt": prompt} if file is None else _read_body(file)
    # The request may have been written for another server, which has another name for the model.
    body.pop("model", None)
    if user is not None:
        body["user_id"] = user
    with open_state_reader(config, model) as reader:
        print_explanation(reader.explain(body))


@app.command(epilog="Example: emberkeep cache verify --sample 10 --tokens 32")
@with_settings("model", "data_dir", "config")
def verify(
    config: Config,
    ids: SomeIds = None,
    sample: Annotated[
        int, typer.Option("--sample", min=1, help="How many entries, the latest used, where no ids are given.")
    ] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=256, help="How far to continue each.")] = 16,
    model: ModelFlag = None,
) -> None:
    """Continue stored state and a fresh evaluation of the same tokens, and compare. Status 1 if they differ.

    Without a running server every file is first compared with its checksum, and the model is loaded. A real model
    may differ in a rare token, because what was computed in narrow steps (answers, short turns) rounds differently
    from a whole prompt: the table tells how much of each there is. State in fewer
    than 16 bits or with moved parts is not exact, and may differ in more.
    """
    from emberkeep.cli.cache_stores import open_state_reader

    checked: list[Checked] = []
    with open_state_reader(config, model, lambda: checked.extend(_check_files(config, model))) as reader:
        results = _replay(reader, ids, sample, tokens)
    if results:
        print_verified(results)
    print(f"{plural(len(results))} replayed, {agreement(results)}.")
    if any(part.damaged for part in checked) or not all(_is_as_promised(result) for result in results):
        raise typer.Exit(1)


def _is_as_promised(result: Verified) -> bool:
    return result.is_equal or result.entry.kv_bits != EXACT_BITS or result.entry.repair is not None


def _read_body(file: str) -> dict[str, Json]:
    """Raises RequestError, OSError."""
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} is not JSON ({error}): give the body of a request.") from error
    if not isinstance(body, dict):
        raise RequestError(f"{file} is not the body of a request: that is a JSON object.")
    return body


def _check_files(config: Config, model: str | None) -> list[Checked]:
    """For when no server runs: it checks by itself what it reads. Ends the command where nothing is stored."""
    from emberkeep.cli.cache_stores import closed_folders
    from emberkeep.library.stores import check_files

    folders = closed_folders(config, model)
    if not folders:
        print(EMPTY)
        raise typer.Exit
    with pull_reporter() as reporter:
        report = functools.partial(reporter.progress, "Checking the files")
        checked = [check_files(folder, report) for folder in folders]
    damaged = sum(part.damaged for part in checked)
    quarantine = " and put into quarantine" if damaged else ""
    files = plural(sum(part.files for part in checked), "file", "files")
    print(f"{files} checked, {damaged:,} damaged{quarantine}.")
    return checked


def _replay(reader: StateReader, ids: Sequence[str] | None, sample: int, tokens: int) -> list[Verified]:
    from rich.progress import track

    from emberkeep.cli.cache_stores import full_ids

    stored = reader.entries()
    wanted = full_ids(stored, ids or ())
    entries = [entry for entry in stored if entry.id in wanted] if ids else stored[:sample]
    output = console(stderr=True)
    bar = track(entries, "Replaying", console=output, transient=True, disable=not output.is_terminal)
    return [reader.verify(entry, tokens) for entry in bar]


def _is_theirs(entry: CacheEntry, user: str | None) -> bool:
    """What is shared by all users belongs to no single one."""
    return user is None or (entry.user == user and not entry.is_shared)


def _is_in(entry: CacheEntry, tier: Tier | None) -> bool:
    held = {Tier.HOT: entry.hot_tokens, Tier.WARM: entry.warm_tokens, Tier.COLD: entry.cold_tokens}
    return tier is None or held[tier] > 0


def _list_shared(config: Config, user: str | None, model: str | None, as_json: bool) -> None:
    """What all hosts together have in the shared server. Raises EmberkeepError."""
    from emberkeep.cli.cache_stores import shared_rows

    rows = [row for row in shared_rows(config) if user in (None, row.user) and model in (None, row.model)]
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    elif rows:
        print_shared(rows)
    else:
        print("Nothing is shared there yet.")


def _print_json(listed: Sequence[Listed]) -> None:
    from emberkeep.api.stored import entry_json

    print(json.dumps([{**entry_json(item.entry), "model": item.store.model} for item in listed], indent=2))


def _totals(entries: int, shown: int, stores: Sequence[Store]) -> str:
    """What entries share is stored once, so their sizes do not add up to this."""
    stats = [store.stats() for store in stores]
    disk, ram = (readable_size(sum(part[tier]["bytes"] for part in stats)) for tier in ("cold", "warm"))
    more = f"; --all lists the other {entries - shown:,}" if shown < entries else ""
    return f"{plural(entries)}{more}; {disk} on disk and {ram} in RAM altogether"


def _set_pins(config: Config, model: str | None, ids: Sequence[str], pinned: bool) -> None:
    from emberkeep.cli.cache_stores import all_entries, choose, open_stores

    with open_stores(config, model) as stores:
        for item in choose(all_entries(stores), ids):
            item.store.pin(item.entry.id, pinned)
            state = "pinned" if pinned else "not pinned any more"
            print(f"{item.entry.id} is {state}: {printable(what(item.entry))}")


def _sum(parts: Iterable[Removed]) -> Removed:
    listed = list(parts)
    return Removed(sum(p.entries for p in listed), sum(p.tokens for p in listed), sum(p.bytes for p in listed))
