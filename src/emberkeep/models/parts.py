"""A GGUF model in several files, NAME-00001-of-0000N.gguf to NAME-0000N-of-0000N.gguf, which lie in one folder.

Names say which files belong together, as they do for llama.cpp; `read_header` checks that their headers agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from emberkeep.errors import ModelBroken, ModelNotFound
from emberkeep.values import dataclass

MAX_PARTS = 1024
"""The largest models that are published have fewer than a hundred."""
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
_NO_MODELS = re.compile(r"(mmproj|imatrix)", re.IGNORECASE)
"""How files are called that lie beside models: projectors for pictures, statistics for quantising."""
_MAX_LINKS = 8
_NAMED = 8
"""So many are named in a message."""


@dataclass(frozen=True, slots=True)
class PartName:
    stem: str
    number: int
    """From 1 on."""
    count: int

    def __str__(self) -> str:
        return f"{self.stem}-{self.number:05}-of-{self.count:05}.gguf"

    def all(self) -> list[PartName]:
        """Those of the whole model, by number. Raises ModelBroken for a number of parts that no model has."""
        if self.count > MAX_PARTS:
            raise ModelBroken(f"{self} claims to be one of {self.count} parts; get the model from somewhere else.")
        return [replace(self, number=number) for number in range(1, self.count + 1)]

    def first(self) -> PartName:
        return replace(self, number=1)


def part_name(name: str) -> PartName | None:
    """What a file's name, or an address that ends with one, says; None where it is no part's."""
    match = _PART.fullmatch(name)
    if match is None:
        return None
    part = PartName(match["stem"], int(match["number"]), int(match["count"]))
    return part if 1 <= part.number <= part.count else None


def part_files(path: Path) -> tuple[Path, ...]:
    """The files of the model that `path` is a part of, by number; `path` alone where its name is no part's.

    Blocks for a look at each, and reads none. Raises ModelBroken when some are missing; where all are, the
    code that opens them says so.
    """
    named = _behind_links(path)
    part = part_name(named.name)
    if part is None:
        return (path,)
    files = tuple(named.with_name(str(other)) for other in part.all())
    missing = [number for number, file in enumerate(files, 1) if not file.is_file()]
    if missing and len(missing) < len(files):
        raise ModelBroken(
            f"{part.stem} in {named.parent.absolute()} lacks {name_parts(missing, part.count)}: "
            "put all parts into one folder, under the names that they were published with."
        )
    return files


def model_in(folder: Path) -> Path | None:
    """A file of the only GGUF model in a folder; None where there is none. Raises ModelNotFound for several."""
    files = {whole_name(file.name): file for file in sorted(folder.glob("*.gguf")) if is_weights_name(file.name)}
    if len(files) > 1:
        raise ModelNotFound(f"{folder} holds several models ({some(sorted(files))}): give the path of one file.")
    return next(iter(files.values()), None)


def whole_name(name: str) -> str:
    """The same for all parts of one model, and different for every other."""
    part = part_name(name)
    return name if part is None else str(part.first())


def is_weights_name(name: str) -> bool:
    """Whether a file of that name, or at that path, holds a model's weights."""
    return name.endswith(".gguf") and _NO_MODELS.match(name.rpartition("/")[2]) is None


def name_parts(numbers: Sequence[int], count: int) -> str:
    """`part 2 of 3`, `parts 2, 3 of 5`."""
    return f"{'part' if len(numbers) == 1 else 'parts'} {some(map(str, numbers))} of {count}"


def some(names: Iterable[str]) -> str:
    """All of them, or the first few and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(listed[:_NAMED]) + more


def _behind_links(path: Path) -> Path:
    """Where a link leads that is not named as a part itself, if what it leads to is.

    One step at a time: in the hub's own cache the parts are links, and what they lead to has no such names.
    """
    at = path
    for _ in range(_MAX_LINKS):
        if part_name(at.name) or not at.is_symlink():
            break
        at = at.parent / at.readlink()
    return at if part_name(at.name) else path
