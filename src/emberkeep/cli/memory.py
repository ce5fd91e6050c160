"""`emberkeep memory`: search what was said, keep facts, take memory along, forget."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperGroup

from emberkeep.cli.commands import JsonFlag, YesFlag, command_group, with_settings
from emberkeep.cli.console import ago, ask_first, console, plural, printable, show, show_facts, texts, whose
from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import Config
from emberkeep.errors import NoSuchEntry
from emberkeep.types.memory import Forgotten, MemoryKind, Recollection
from emberkeep.types.request import Json

if TYPE_CHECKING:
    from rich.text import Text

    from emberkeep.library.user_memory import UserMemory

T = TypeVar("T")

LONG = 10_000
"""So many rows take long enough for a bar."""
NOTHING_FOUND = "Nothing like that is remembered: only what has left a context is searched, and stored answers."
_LONGEST = 300
"""Characters of what one side said."""
_BEFORE = 80
"""Characters that are shown before the first match of a longer text."""

_KINDS = {
    "turns": "archived turns",
    "answers": "stored answers",
    "facts": "facts",
    "conversations": "saved conversations",
    "responses": "stored responses",
}
"""What is remembered, as figures have it and in words."""

EXAMPLES = """\b
Examples:
  emberkeep memory search "capital of France"  turns that have left a context, the best first
  emberkeep memory facts set home Lyon         something to remember until it is deleted
  emberkeep memory facts                       everything that was told so
  emberkeep memory export backup.jsonl         take all of it along; import reads it again
  emberkeep memory forget --user alice         remove everything of one user, for good
  emberkeep memory stats                       how much there is

\b
No model is loaded, and a running server may use the same memory meanwhile.
"""

app = command_group("Search what has left a conversation, keep facts, export, import, forget.", EXAMPLES)

OfUser = Annotated[str, typer.Option("--user", help="Whose memory; without it, that of those who gave no name.")]
OfUserOrAll = Annotated[
    str | None, typer.Option("--user", help='Only what is theirs; "" for those who gave no name.')
]


@app.command(epilog='Example: emberkeep memory search "what did I call the boat" --user alice -n 3')
@with_settings("data_dir", "config")
def search(
    config: Config,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Words, or a whole question.")],
    user: OfUser = "",
    max_results: Annotated[
        int, typer.Option("--max-results", "-n", min=1, max=100, help="Most that is shown.")
    ] = 5,
    conversation: Annotated[
        str | None, typer.Option("--conversation", metavar="ID", help="Only what was said in this one.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Archived turns and stored answers that fit a query, the best first."""
    with _open(config) as memory:
        found = memory.search(query, max_results=max_results, user=user, conversation_id=conversation)
    if as_json:
        from emberkeep.api.stored import found_json

        print(json.dumps(found_json(found)["data"], indent=2, ensure_ascii=False))
    elif found:
        print_found(found)
    else:
        print(NOTHING_FOUND)


@app.command(epilog="Examples: emberkeep memory export backup.jsonl, emberkeep memory export --user alice | gzip")
@with_settings("data_dir", "config")
def export(
    config: Config,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A new file; without it, stdout.")] = None,
    user: OfUserOrAll = None,
) -> None:
    """Write everything that is remembered, one JSON object per line. An existing file is left alone."""
    from emberkeep.files import line, write_lines

    with _open(config) as memory:
        rows = _with_bar(memory.export(user=user), "Exporting", _rows(memory.stats(user=user)))
        if file is None:
            sys.stdout.writelines(line(row) for row in rows)
        else:
            write_lines(file, rows)
            print(f"Everything is in {file}: `emberkeep memory import {file}` reads it again.")


@app.command("import", epilog="Example: emberkeep memory import backup.jsonl")
@with_settings("data_dir", "config")
def import_(
    config: Config,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that was exported.")],
) -> None:
    """Read what was exported, each row for its own user. What is known already is not added twice."""
    from emberkeep.files import read_lines

    with _open(config) as memory:
        added = memory.import_(_with_bar(read_lines(file), "Importing", None))
    print(f"{plural(added, 'thing', 'things')} added from {file}.")


@app.command(
    epilog="Examples: emberkeep memory forget --user alice, emberkeep memory forget --conversation 3f2a91c07b4d"
)
@with_settings("data_dir", "config")
def forget(
    config: Config,
    user: Annotated[str | None, typer.Option("--user", help='Whose; "" for those who gave no name.')] = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", metavar="ID", help="Only what was said in this one.")
    ] = None,
    yes: YesFlag = False,
) -> None:
    """Remove everything of a user, facts too, or one conversation. It is nowhere in the file afterwards.

    Stored prompt state is another matter: `emberkeep cache rm` removes it.
    """
    if user is None and conversation is None:
        raise typer.BadParameter("say what to forget: --user NAME, --conversation ID, or both.")
    with _open(config) as memory:
        if not yes:
            ask_first(f"Forget {_what(memory, user or '', conversation)}?")
        forgotten = memory.forget(user=user or "", conversation_id=conversation)
    print(forgotten_line(forgotten) if forgotten != Forgotten() else "Nothing of that was remembered.")


@app.command(epilog="Example: emberkeep memory stats --user alice")
@with_settings("data_dir", "config")
def stats(
    config: Config,
    user: OfUserOrAll = None,
    as_json: JsonFlag = False,
) -> None:
    """How much is remembered, and since when."""
    with _open(config) as memory:
        figures = memory.stats(user=user)
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        show_facts(_figures(figures))


def _open(config: Config) -> AbstractContextManager[UserMemory]:
    from emberkeep.library.user_memory import open_memory  # takes longer than `--help` may

    return open_memory(config)


def _what(memory: UserMemory, user: str, conversation: str | None) -> str:
    if conversation is not None:
        return f"the conversation {conversation} of {whose(user)}"
    return f"everything of {whose(user)} ({plural(_rows(memory.stats(user=user)), 'thing', 'things')})"


def _rows(stats: dict[str, Json]) -> int:
    return sum(stats[kind] for kind in _KINDS)


def _with_bar(rows: Iterable[T], what: str, total: int | None) -> Iterator[T]:
    """The same rows; where they are many, or it is not known how many, a terminal shows how far they are."""
    from rich.progress import track

    output = console(stderr=True)
    is_short = total is not None and total < LONG
    yield from track(
        rows, what, total=total, console=output, transient=True, disable=is_short or not output.is_terminal
    )


# ── facts: names with values that are remembered until they are deleted ──


class _ListByDefault(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_command = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_command else ["list", *args])


FACTS_EXAMPLES = """\b
Examples:
  emberkeep memory facts                       all of them
  emberkeep memory facts set home Lyon         it replaces what was there
  emberkeep memory facts get home --user alice
  emberkeep memory facts delete home
"""

facts_app = typer.Typer(
    cls=_ListByDefault,
    help="List facts, set, get and delete them; no command lists.",
    epilog=FACTS_EXAMPLES,
    rich_markup_mode=None,
)

app.add_typer(facts_app, name="facts")

Name = Annotated[str, typer.Argument(metavar="NAME", help="What it is about.")]
Value = Annotated[str, typer.Argument(metavar="VALUE", help="What is so.")]
FactsOfUser = Annotated[str, typer.Option("--user", help="Whose; without it, of those who gave no name.")]


@facts_app.command("list", epilog="Example: emberkeep memory facts list --user alice")
@with_settings("data_dir", "config")
def list_facts(config: Config, user: FactsOfUser = "", as_json: JsonFlag = False) -> None:
    """Everything that was set."""
    with _open(config) as memory:
        facts = memory.facts(user=user)
    if as_json:
        print(json.dumps([asdict(fact) for fact in facts], indent=2, ensure_ascii=False))
    elif facts:
        show_facts((fact.name, fact.value) for fact in facts)
    else:
        print("No facts yet: `emberkeep memory facts set NAME VALUE` sets one.")


@facts_app.command("set", epilog="Example: emberkeep memory facts set 'favourite colour' green")
@with_settings("data_dir", "config")
def set_fact(config: Config, name: Name, value: Value, user: FactsOfUser = "") -> None:
    """Remember something under a name, in place of what was there."""
    with _open(config) as memory:
        memory.set_fact(name, value, user=user)
    print(f"{printable(name)} is set.")


@facts_app.command("get", epilog="Example: emberkeep memory facts get home")
@with_settings("data_dir", "config")
def get_fact(config: Config, name: Name, user: FactsOfUser = "") -> None:
    """Print what is remembered under a name, and nothing else."""
    with _open(config) as memory:
        fact = memory.fact(name, user=user)
    if fact is None:
        raise _no_such(name)
    print(printable(fact.value))


@facts_app.command("delete", epilog="Example: emberkeep memory facts delete home")
@with_settings("data_dir", "config")
def delete_fact(config: Config, name: Name, user: FactsOfUser = "") -> None:
    """Forget what is remembered under a name."""
    with _open(config) as memory:
        if not memory.delete_fact(name, user=user):
            raise _no_such(name)
    print(f"{printable(name)} is deleted.")


def _no_such(name: str) -> NoSuchEntry:
    return NoSuchEntry(f"There is no fact {name!r}: `emberkeep memory facts` lists them.")


# ── as a person reads it ──


def print_found(found: Sequence[Recollection]) -> None:
    from rich.table import Table

    table = Table("score", "when", "", "said", box=None, pad_edge=False)
    for one in found:
        cells = [f"{one.score:.2f}", ago(time.time() - one.at)]
        for who, what in _sayings(one):
            table.add_row(*texts(*cells, who), _highlighted(what, one))
            cells = ["", ""]
    show(table)


def describe(one: Recollection) -> str:
    """The same in a few lines of a chat."""
    lines = [f"  {who}: {printable(_excerpt(what, one))}" for who, what in _sayings(one)]
    return "\n".join([f"{ago(time.time() - one.at)}, score {one.score:.2f}", *lines])


def forgotten_line(forgotten: Forgotten) -> str:
    """What went, and how much smaller the file is."""
    counts = {words: getattr(forgotten, kind) for kind, words in _KINDS.items()}
    there = [plural(count, words.removesuffix("s"), words) for words, count in counts.items() if count]
    return f"Forgot {', '.join(there) or 'nothing'}; the file is {readable_size(forgotten.bytes)} smaller."


def _figures(stats: Mapping[str, Json]) -> Iterator[tuple[str, str]]:
    for kind, words in _KINDS.items():
        yield words, f"{stats[kind]:,}"
    yield "size", f"{readable_size(stats['bytes'])} of {readable_size(stats['limit'])}"
    for name in ("oldest", "newest"):
        if stats[name] is not None:
            yield f"{name} turn", ago(time.time() - stats[name])


def _sayings(one: Recollection) -> Iterator[tuple[str, str]]:
    """Who said what; a side that said nothing is left out."""
    asked, answered = ("question", "answer") if one.kind is MemoryKind.ANSWER else ("user", "assistant")
    sayings = [(asked, one.user_text), (answered, one.assistant_text)]
    sayings += [(use.name, use.result) for use in one.tool_uses]
    yield from ((who, what) for who, what in sayings if what)


def _highlighted(what: str, one: Recollection) -> Text:
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
    words = {one.passage[start:stop] for start, stop in one.matches}
    return re.compile(rf"\b({'|'.join(map(re.escape, sorted(words)))})\b", re.IGNORECASE) if words else None
