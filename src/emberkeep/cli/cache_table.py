"""What is in the cache, and why something is not, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from emberkeep.cli.console import ago, plural, printable, show, show_facts, span, texts, width
from emberkeep.config.kinds import readable_size
from emberkeep.text import shorten
from emberkeep.types.cache import CacheEntry, EntryKind, Explanation, Removed, Verified, expectation
from emberkeep.types.events import LookupRecord
from emberkeep.types.lineage import EXACT_BITS

if TYPE_CHECKING:
    from rich.text import Text

    from emberkeep.cli.cache_stores import Listed, SharedRow

ROOMY = 110
"""Columns of a terminal that has room for a table of entries."""
LONGEST_USER = 24
NO_USER = "-"


def print_entries(listed: Sequence[Listed]) -> None:
    several = len({item.store.model for item in listed}) > 1
    rows = [_cells(item.entry) + [item.store.model] * several for item in listed]
    if width() >= ROOMY:
        heads = ["what", "user", ">tokens", ">size", "where", "last use", ">hits", "kept", "id"]
        _print_table([*heads, "model"] if several else heads, rows)
    else:
        _print_cards(rows)


def print_shared(rows: Sequence[SharedRow]) -> None:
    cells = [
        (_shared_model(row), _shared_user(row), f"{row.chunks:,}", readable_size(row.bytes), span(row.kept_s))
        for row in rows
    ]
    _print_table(["model", "user", ">chunks", ">size", "kept"], cells)
    chunks, size = sum(row.chunks for row in rows), sum(row.bytes for row in rows)
    print(f"{plural(chunks, 'chunk', 'chunks')}, {readable_size(size)} altogether")


def _shared_model(row: SharedRow) -> str:
    return row.model or f"not here ({row.store[:8]})"


def _shared_user(row: SharedRow) -> str:
    if row.is_shared:
        return "shared"
    return f"not known here ({row.tag[:8]})" if row.user is None else row.user or NO_USER


def print_explanation(explanation: Explanation) -> None:
    print(f"{printable(explanation.sentence)}\n")
    show_facts(_reuse(explanation.lookup))


def print_verified(results: Sequence[Verified]) -> None:
    rows = [[what(r.entry), _reused(r), _steps(r), agreement([r]), r.entry.id] for r in results]
    _print_table(["what", "reused", "in steps", "agreement", "id"], rows)
    figures = ((r.reused_tokens, r.wide_tokens, r.reproducible_tokens) for r in results)
    print(expectation(*(sum(column) for column in zip(*figures, strict=True))))


def agreement(results: Sequence[Verified]) -> str:
    agreed, compared = sum(r.agreed for r in results), sum(r.compared for r in results)
    if not compared:
        return "nothing to compare"
    return f"{agreed / compared:.1%} of {compared} tokens agree"


def what(entry: CacheEntry) -> str:
    """What a person would call it."""
    called = [part for part in (entry.name, entry.head) if part]
    return ": ".join(called) or f"a {entry.kind} without a name"


def removed_line(removed: Removed) -> str:
    return f"Removed {plural(removed.entries)}, {removed.tokens:,} tokens, {readable_size(removed.bytes)}."


def _cells(entry: CacheEntry) -> list[str]:
    return [
        what(entry),
        shorten(_user(entry), LONGEST_USER),
        f"{entry.tokens:,}",
        _size(entry),
        _where(entry),
        ago(entry.idle_s),
        f"{entry.hits:,}",
        _lifetime(entry),
        entry.id,
    ]


def entry_facts(model: str, entry: CacheEntry) -> Iterator[tuple[str, str]]:
    yield "id", entry.id
    yield "kind", entry.kind
    if entry.name:
        yield "conversation id" if entry.kind is EntryKind.CONVERSATION else "name", entry.name
    yield "first words", entry.head or "not known any more"
    yield "model", model
    yield "user", _user(entry)
    yield "tokens", f"{entry.tokens:,}"
    yield "size", f"{_size(entry)}, with what it shares with others"
    yield "where", _where(entry)
    yield "last use", ago(entry.idle_s)
    yield "used", f"{plural(entry.turns, 'turn', 'turns')}, {plural(entry.hits, 'hit', 'hits')}"
    yield "branches", str(entry.branches)
    yield "kept", _lifetime(entry)


def _reuse(lookup: LookupRecord) -> Iterator[tuple[str, str]]:
    yield "from the engine", f"{lookup.hot_tokens:,} tokens"
    yield "from RAM", f"{lookup.warm_tokens:,} tokens"
    yield "from disk", f"{lookup.cold_tokens:,} tokens"
    if lookup.remote_tokens:
        yield "from other hosts", f"{lookup.remote_tokens:,} tokens"
    yield "to evaluate", f"{lookup.prompt_tokens - lookup.reused_tokens:,} of {lookup.prompt_tokens:,} tokens"
    yield "reason", lookup.reason
    if lookup.divergence:
        where = f", {lookup.divergence.where}" if lookup.divergence.where else ""
        yield "leaves it at", f"token {lookup.divergence.token_index:,}{where}"
        yield "stored is", repr(lookup.divergence.stored_text)
        yield "the prompt has", repr(lookup.divergence.prompt_text)


def _reused(result: Verified) -> str:
    return f"{result.reused_tokens:,} of {result.entry.tokens:,} tokens"


def _steps(result: Verified) -> str:
    """In what steps they were computed."""
    counts = {"wide": result.wide_tokens, "narrow": result.narrow_tokens}
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.items() if count) or "-"


def _user(entry: CacheEntry) -> str:
    return "everybody" if entry.is_shared else entry.user or NO_USER


def _size(entry: CacheEntry) -> str:
    packed = f" in {entry.kv_bits} bits" if entry.kv_bits != EXACT_BITS else ""
    moved = " with moved parts" if entry.repair else ""
    return readable_size(entry.bytes) + packed + moved


def _where(entry: CacheEntry) -> str:
    held = {"engine": entry.hot_tokens, "RAM": entry.warm_tokens, "disk": entry.cold_tokens}
    shares = {place: tokens / entry.tokens for place, tokens in held.items() if tokens}
    return ", ".join(place if part >= 1 else f"{place} {part:.0%}" for place, part in shares.items()) or "-"


def _lifetime(entry: CacheEntry) -> str:
    if entry.is_pinned:
        return "pinned"
    return f"{entry.ttl}, {span(entry.expires_in_s)} left" if entry.expires_in_s > 0 else "expired"


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column gives way where there is little room; `>` aligns one to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head.lstrip(">"), justify="right" if head.startswith(">") else "left", no_wrap=number > 0)
    for first, *rest in rows:
        table.add_row(_one_line(first), *texts(*rest))
    show(table)


def _print_cards(rows: Sequence[Sequence[str]]) -> None:
    """Two lines or more per entry, where the terminal is too narrow for columns."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2))
    for first, user, tokens, size, where, used, hits, kept, entry_id, *model in rows:
        details = [f"{tokens} tokens", size, where, used, f"hits: {hits}", kept, *model]
        grid.add_row(entry_id, _one_line(first))
        grid.add_row("", *texts(" · ".join(details if user == NO_USER else [user, *details])))
    show(grid)


def _one_line(cell: str) -> Text:
    """A cell of one line, whatever room there is."""
    (text,) = texts(cell)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
