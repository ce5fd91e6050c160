"""`emberkeep memory`: search what was said, keep facts, take memory along, forget."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from emberkeep.cli.common import (
    ConfigFlag,
    DataDirFlag,
    JsonFlag,
    YesFlag,
    ask_first,
    console,
    load_config,
    whose,
)
from emberkeep.cli.memory_facts import app as facts_app
from emberkeep.cli.memory_table import NOTHING_FOUND, forgotten_line, print_found, print_stats
from emberkeep.cli.tables import counted
from emberkeep.types import Forgotten, Json

if TYPE_CHECKING:
    from emberkeep.library.user_memory import UserMemory

T = TypeVar("T")

LONG = 10_000
"""So many rows take long enough for a bar."""

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

app = typer.Typer(
    help="Search what has left a conversation, keep facts, export, import, forget.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(facts_app, name="facts")

OfUser = Annotated[str, typer.Option("--user", help="Whose memory; without it, that of those who gave no name.")]
OfUserOrAll = Annotated[
    str | None, typer.Option("--user", help='Only what is theirs; "" for those who gave no name.')
]


@app.command(epilog='Example: emberkeep memory search "what did I call the boat" --user alice -n 3')
def search(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="Words, or a whole question.")],
    user: OfUser = "",
    max_results: Annotated[
        int, typer.Option("--max-results", "-n", min=1, max=100, help="Most that is shown.")
    ] = 5,
    conversation: Annotated[
        str | None, typer.Option("--conversation", metavar="ID", help="Only what was said in this one.")
    ] = None,
    as_json: JsonFlag = False,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Archived turns and stored answers that fit a query, the best first."""
    from emberkeep.library.user_memory import open_memory

    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        found = memory.search(query, max_results=max_results, user=user, conversation_id=conversation)
    if as_json:
        from emberkeep.api.stored import found_json

        print(json.dumps(found_json(found)["data"], indent=2, ensure_ascii=False))
    elif found:
        print_found(found)
    else:
        print(NOTHING_FOUND)


@app.command(epilog="Examples: emberkeep memory export backup.jsonl, emberkeep memory export --user alice | gzip")
def export(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A new file; without it, stdout.")] = None,
    user: OfUserOrAll = None,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Write everything that is remembered, one JSON object per line. An existing file is left alone."""
    from emberkeep.library.user_memory import line, open_memory, write_lines

    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        rows = _with_bar(memory.export(user=user), "Exporting", _rows(memory.stats(user=user)))
        if file is None:
            sys.stdout.writelines(line(row) for row in rows)
        else:
            write_lines(file, rows)
            print(f"Everything is in {file}: `emberkeep memory import {file}` reads it again.")


@app.command("import", epilog="Example: emberkeep memory import backup.jsonl")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that was exported.")],
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Read what was exported, for those whom it belongs to. What is known already is not added twice."""
    from emberkeep.library.user_memory import open_memory, read_lines

    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        added = memory.import_(_with_bar(read_lines(file), "Importing", None))
    print(f"{counted(added, 'thing', 'things')} added from {file}.")


@app.command(
    epilog="Examples: emberkeep memory forget --user alice, emberkeep memory forget --conversation 3f2a91c07b4d"
)
def forget(
    user: Annotated[str | None, typer.Option("--user", help='Whose; "" for those who gave no name.')] = None,
    conversation: Annotated[
        str | None, typer.Option("--conversation", metavar="ID", help="Only what was said in this one.")
    ] = None,
    yes: YesFlag = False,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """Remove everything of a user, facts too, or one conversation. It is nowhere in the file afterwards.

    Stored prompt state is another matter: `emberkeep cache rm` removes it.
    """
    from emberkeep.library.user_memory import open_memory

    if user is None and conversation is None:
        raise typer.BadParameter("say what to forget: --user NAME, --conversation ID, or both.")
    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        if not yes:
            ask_first(f"Forget {_what(memory, user or '', conversation)}?")
        forgotten = memory.forget(user=user or "", conversation_id=conversation)
    print(forgotten_line(forgotten) if forgotten != Forgotten() else "Nothing of that was remembered.")


@app.command(epilog="Example: emberkeep memory stats --user alice")
def stats(
    user: OfUserOrAll = None,
    as_json: JsonFlag = False,
    data_dir: DataDirFlag = None,
    config: ConfigFlag = None,
) -> None:
    """How much is remembered, and since when."""
    from emberkeep.library.user_memory import open_memory

    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        figures = memory.stats(user=user)
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        print_stats(figures)


def _what(memory: UserMemory, user: str, conversation: str | None) -> str:
    if conversation is not None:
        return f"the conversation {conversation} of {whose(user)}"
    return f"everything of {whose(user)} ({counted(_rows(memory.stats(user=user)), 'thing', 'things')})"


def _rows(stats: dict[str, Json]) -> int:
    return sum(stats[kind] for kind in ("turns", "answers", "facts", "conversations"))


def _with_bar(rows: Iterable[T], what: str, total: int | None) -> Iterator[T]:
    """The same rows; where they are many, or nobody knows how many, a terminal shows how far they are."""
    from rich.progress import track

    output = console(stderr=True)
    is_short = total is not None and total < LONG
    yield from track(
        rows, what, total=total, console=output, transient=True, disable=is_short or not output.is_terminal
    )
