"""The command `emberkeep`, and `python -m emberkeep`."""

from __future__ import annotations

import sys

from emberkeep.large_pages import ask_for_large_pages

_COMPUTE = ("serve", "chat", "bench")


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in _COMPUTE:
        ask_for_large_pages()
    # Not before: the process may have been started anew.
    from emberkeep.cli.main import main as command

    command()


if __name__ == "__main__":
    main()
