"""The command `emberkeep`, and `python -m emberkeep`."""

from __future__ import annotations

import gc
import os
import sys

from emberkeep import __version__

_COMPUTE = ("serve", "chat", "bench")


def main() -> None:
    if sys.argv[1:] == ["--version"]:  # asked by scripts, which need not wait for all that commands need
        print(f"emberkeep {__version__}")
        return
    name = _command(sys.argv[1:])
    if name in _COMPUTE:
        from emberkeep.large_pages import ask_for_large_pages

        ask_for_large_pages()
    if name == "serve":
        # What is imported stays, and looking through it for garbage takes time. The server enables it.
        gc.disable()
        # Nobody else sees what is asked: pydantic looks through every installed package for such plugins.
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
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
