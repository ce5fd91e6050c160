"""Every `emberkeep ...` in README, CONTRIBUTING and docs/ is a command that exists, with flags that it has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from emberkeep.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^\s*```(?:sh|console|text)\n(.*?)^\s*```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`(emberkeep [a-z][^`\n]*)`")
_LINE = re.compile(
    r"^\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(?:.*?(?:\||&&) )?(?:\.venv/bin/)?(emberkeep [a-z].*)$", re.MULTILINE
)


def commands(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    yield from _SPAN.findall(text)
    for block in _FENCE.findall(text):
        yield from _LINE.findall(block)


def words_of(line: str) -> list[str]:
    words = shlex.split(line, comments=True)[1:]
    ends = [i for i, word in enumerate(words) if word in ("|", "&&", "&", ">", ";", "||", "--")]
    return words[: ends[0]] if ends else words


def complaint(line: str) -> str | None:
    """What is wrong with a command that is shown; None: nothing."""
    name, *words = words_of(line)
    if name not in COMMANDS:
        return f"{line}: there is no command {name}"
    command = COMMANDS[name].command()
    while (subcommands := getattr(command, "commands", None)) and words and not words[0].startswith("-"):
        name = words.pop(0)
        if name == "COMMAND" or name.startswith("..."):
            return None
        if name not in subcommands:
            return f"{line}: there is no command {name}"
        command = subcommands[name]
    flags = {flag for param in command.params for flag in [*param.opts, *param.secondary_opts]} | {"--help", "-h"}
    shown = {word.split("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
    return f"{line}: there is no {sorted(shown - flags)}" if shown - flags else None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_is_shown_exists(page: Path) -> None:
    assert [wrong for line in commands(page) if (wrong := complaint(line))] == []


def test_commands_are_found_in_the_pages() -> None:
    shown = [words_of(line) for line in commands(ROOT / "docs/guide.md")]
    assert ["cache", "ls"] in shown
    assert len(shown) > 20


@pytest.mark.parametrize("line", ["emberkeep sing", "emberkeep chat --sing", "emberkeep cache sing"])
def test_what_does_not_exist_is_noticed(line: str) -> None:
    assert complaint(line)
