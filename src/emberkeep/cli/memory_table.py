"""What is remembered, as a person reads it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from emberkeep.cli.tables import ago, counted, printable, show, show_facts, texts
from emberkeep.config import readable_size
from emberkeep.types import Fact, Forgotten, Json, MemoryKind, Recollection

if TYPE_CHECKING:
    from rich.text import Text

NOTHING_FOUND = "Nothing like that is remembered: only what has left a context is searched, and stored answers."

_LONGEST = 300
"""Characters of what one side said."""
_BEFORE = 80
"""Characters that are shown before the first match of a longer text."""


def print_found(found: Sequence[Recollection]) -> None:
    from rich.table import Table

    table = Table("score", "when", "", "said", box=None, pad_edge=False)
    for one in found:
        cells = [f"{one.score:.2f}", ago(time.time() - one.at)]
        for who, what in _sayings(one):
            table.add_row(*texts(*cells, who), _marked(what, one))
            cells = ["", ""]
    show(table)


def told(one: Recollection) -> str:
    """The same in a few lines of a chat."""
    said = [f"  {who}: {printable(_excerpt(what, one))}" for who, what in _sayings(one)]
    return "\n".join([f"{ago(time.time() - one.at)}, score {one.score:.2f}", *said])


def print_known_facts(facts: Sequence[Fact]) -> None:
    show_facts((fact.name, fact.value) for fact in facts)


def print_stats(stats: Mapping[str, Json]) -> None:
    show_facts(_figures(stats))


def forgotten_line(forgotten: Forgotten) -> str:
    """What went, and how much smaller the file is."""
    return f"Forgot {_listed(forgotten)}; the file is {readable_size(forgotten.bytes)} smaller."


def _listed(forgotten: Forgotten) -> str:
    counts = [
        counted(forgotten.turns, "archived turn", "archived turns"),
        counted(forgotten.answers, "stored answer", "stored answers"),
        counted(forgotten.facts, "fact", "facts"),
        counted(forgotten.conversations, "saved conversation", "saved conversations"),
    ]
    there = [count for count in counts if not count.startswith("0 ")]
    return ", ".join(there) or "nothing"


def _figures(stats: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    yield "archived turns", f"{stats['turns']:,}"
    yield "stored answers", f"{stats['answers']:,}"
    yield "facts", f"{stats['facts']:,}"
    yield "saved conversations", f"{stats['conversations']:,}"
    yield "size", f"{readable_size(stats['bytes'])} of {readable_size(stats['limit'])}"
    for name in ("oldest", "newest"):
        if stats[name] is not None:
            yield f"{name} turn", ago(time.time() - stats[name])


def _sayings(one: Recollection) -> Iterator[tuple[str, str]]:
    """Who said what; whoever said nothing is left out."""
    asked, answered = ("question", "answer") if one.kind is MemoryKind.ANSWER else ("user", "assistant")
    said = [(asked, one.user_text), (answered, one.assistant_text)]
    said += [(use.name, use.result) for use in one.tool_uses]
    yield from ((who, what) for who, what in said if what)


def _marked(what: str, one: Recollection) -> Text:
    (text,) = texts(_excerpt(what, one))
    if pattern := _matched_words(one):
        text.highlight_regex(pattern, style="bold yellow")
    return text


def _excerpt(what: str, one: Recollection) -> str:
    """One line, around the first match."""
    line = " ".join(what.split())
    if len(line) <= _LONGEST:
        return line
    pattern = _matched_words(one)
    match = pattern.search(line) if pattern else None
    start = max(0, match.start() - _BEFORE) if match else 0
    end = start + _LONGEST
    return f"{'…' if start else ''}{line[start:end]}{'…' if end < len(line) else ''}"


def _matched_words(one: Recollection) -> re.Pattern[str] | None:
    words = set(re.findall(r"\*\*(.+?)\*\*", one.highlight))
    return re.compile(rf"\b({'|'.join(map(re.escape, sorted(words)))})\b", re.IGNORECASE) if words else None
