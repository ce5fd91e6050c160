"""The command `emberkeep`, and `python -m emberkeep`."""

from __future__ import annotations

import sys

from emberkeep.large_pages import ask_for_large_pages

_COMPUTE = ("serve", "chat", "bench")


def main() -> None:
    if _command(sys.argv[1:]) in _COMPUTE:
        ask_for_large_pages()
    # Not before: the process may have been started anew.
    from emberkeep.cli.main import main as command

    command()


def _command(arguments: list[str]) -> str:
    """The first word behind the options that all commands have."""
    rest = iter(arguments)
    for word in rest:
        if word == "--log-level":
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return ""


if __name__ == "__main__":
    main()
