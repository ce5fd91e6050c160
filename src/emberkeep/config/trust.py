"""Configuration files of folders that the user has agreed to, each by its real path and the digest of its bytes.

<the user's data folder>/trusted.json    whatever data_dir says: a file must not choose who vouches for it
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

from emberkeep.files import locked, private_folder, replace_file


def is_trusted(path: Path, digest: str) -> bool:
    """The user has agreed to these very bytes at this place. What cannot be read vouches for nothing."""
    return _read(_record()).get(str(path)) == digest


def trust(path: Path, digest: str) -> None:
    """Raises OSError."""
    _change({str(path): digest})


def withdraw(path: Path) -> bool:
    """Whether there was something to withdraw. Raises OSError."""
    was_trusted = str(path) in _read(_record())
    if was_trusted:
        _change({str(path): None})
    return was_trusted


def _change(digests: Mapping[str, str | None]) -> None:
    record = _record()
    private_folder(record.parent)
    with locked(record.with_suffix(".lock")):
        entries = {**_read(record), **digests}
        kept = {name: digest for name, digest in entries.items() if digest is not None}
        replace_file(record, json.dumps(kept, indent=1).encode())


def _read(record: Path) -> Mapping[str, object]:
    try:
        content = json.loads(record.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _record() -> Path:
    return platformdirs.user_data_path("emberkeep", appauthor=False) / "trusted.json"


# ── values that need no trust ──


def is_model_name(value: object) -> bool:
    """It names an installed model, and none by where its files are, whatever lies in the current folder."""
    name = value.strip() if isinstance(value, str) else "."
    return not ("/" in name or name.startswith(".") or name.endswith(".gguf"))


def is_name_here(value: object) -> bool:
    """Where a service answers, `:` in a name may choose who computes: an Ollama that runs here sends what
    `model:cloud` is asked to its maker."""
    return is_model_name(value) and ":" not in str(value)


def has_cores(value: object) -> bool:
    """Threads that have no core of their own wait for each other by spinning: with hundreds of them the machine is
    busy for minutes with one token."""
    return value == "auto" or (isinstance(value, int) and value <= (os.cpu_count() or 1))
