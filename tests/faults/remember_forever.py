"""Archives turns until it is killed, and says of each, once it is archived, that it is. Arguments: file, owner."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

from emberkeep.memory.memory import Memory
from emberkeep.types.memory import Note, NoteKind, Turn


def main() -> None:
    path, owner = Path(sys.argv[1]), sys.argv[2]
    memory = Memory(path, limit_bytes=1 << 40)
    first = memory.stats(owner)["turns"]
    for i in itertools.count(first):
        key = i.to_bytes(16)
        said = f"item{i}of{owner} and words that all of them have"
        memory.archive(owner, [Turn(key, "talk", float(i), said, "yes")], [Note(key, NoteKind.EVICTED, i)])
        os.write(1, f"{i}\n".encode())


if __name__ == "__main__":
    main()
