"""`python -m emberkeep` is the command `emberkeep`."""

from __future__ import annotations

from emberkeep.cli.main import main

if __name__ == "__main__":
    main()
