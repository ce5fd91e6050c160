"""Files with one JSON object per line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from emberkeep.errors import EmberkeepError
from emberkeep.types.request import Json


def write_lines(path: Path, rows: Iterable[Mapping[str, Json]]) -> None:
    """A new file that only its owner can read, whole or not at all. Raises EmberkeepError, and what `rows` raises;
    an existing file is left alone."""
    try:
        with open(path, "x", encoding="utf-8", opener=_private) as file, _removed_if_unfinished(path):
            file.writelines(line(row) for row in rows)
            file.flush()
    except FileExistsError as error:
        raise EmberkeepError(f"{path} exists already: give another name.") from error
    except OSError as error:
        raise EmberkeepError(f"Cannot write {path}: {error.strerror or error}.") from error


def line(row: Mapping[str, Json]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> Iterator[dict[str, Json]]:
    """The file is open while it is iterated. Raises EmberkeepError."""
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                yield _parse_line(text, f"Line {number} of {path}")
    except UnicodeDecodeError as error:
        raise EmberkeepError(f"{path} is not valid UTF-8: give a file that was exported.") from error
    except OSError as error:
        raise EmberkeepError(f"Cannot read {path}: {error.strerror or error}.") from error


def _parse_line(text: str, where: str) -> dict[str, Json]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise EmberkeepError(f"{where} is not a JSON object: give a file that was exported.")
    return row


@contextmanager
def _removed_if_unfinished(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
