"""`emberkeep memory facts`: names with values that are remembered until they are deleted."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from emberkeep.cli.common import ConfigFlag, DataDirFlag, JsonFlag, load_config
from emberkeep.cli.memory_table import print_known_facts
from emberkeep.cli.tables import printable
from emberkeep.errors import NoSuchEntry


class _ListByDefault(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_command = args and (not args[0].startswith("-") or args[0] in ctx.help_option_names)
        return super().parse_args(ctx, args if is_command else ["list", *args])


EXAMPLES = """\b
Examples:
  emberkeep memory facts                       all of them
  emberkeep memory facts set home Lyon         it replaces what was there
  emberkeep memory facts get home --user alice
  emberkeep memory facts delete home
"""

app = typer.Typer(
    cls=_ListByDefault,
    help="List facts, set, get and delete them; no command lists.",
    epilog=EXAMPLES,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What it is about.")]
Value = Annotated[str, typer.Argument(metavar="VALUE", help="What is so.")]
OfUser = Annotated[str, typer.Option("--user", help="Whose; without it, of those who gave no name.")]


@app.command("list", epilog="Example: emberkeep memory facts list --user alice")
def list_facts(
    user: OfUser = "", as_json: JsonFlag = False, data_dir: DataDirFlag = None, config: ConfigFlag = None
) -> None:
    """Everything that was set."""
    from emberkeep.library.user_memory import open_memory

    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        facts = memory.facts(user=user)
    if as_json:
        print(json.dumps([asdict(fact) for fact in facts], indent=2, ensure_ascii=False))
    elif facts:
        print_known_facts(facts)
    else:
        print("No facts yet: `emberkeep memory facts set NAME VALUE` sets one.")


@app.command("set", epilog="Example: emberkeep memory facts set 'favourite colour' green")
def set_fact(
    name: Name, value: Value, user: OfUser = "", data_dir: DataDirFlag = None, config: ConfigFlag = None
) -> None:
    """Remember something under a name, in place of what was there."""
    from emberkeep.library.user_memory import open_memory

    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        memory.set_fact(name, value, user=user)
    print(f"{printable(name)} is set.")


@app.command("get", epilog="Example: emberkeep memory facts get home")
def get_fact(name: Name, user: OfUser = "", data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Print what is remembered under a name, and nothing else."""
    from emberkeep.library.user_memory import open_memory

    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        fact = memory.fact(name, user=user)
    if fact is None:
        raise _no_such(name)
    print(printable(fact.value))


@app.command("delete", epilog="Example: emberkeep memory facts delete home")
def delete_fact(name: Name, user: OfUser = "", data_dir: DataDirFlag = None, config: ConfigFlag = None) -> None:
    """Forget what is remembered under a name."""
    from emberkeep.library.user_memory import open_memory

    with open_memory(load_config(data_dir=data_dir, config=config)) as memory:
        if not memory.delete_fact(name, user=user):
            raise _no_such(name)
    print(f"{printable(name)} is deleted.")


def _no_such(name: str) -> NoSuchEntry:
    return NoSuchEntry(f"There is no fact {name!r}: `emberkeep memory facts` lists them.")
