"""What grows in a process: containers below an object, threads, descriptors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CONTAINERS = (dict, list, set, deque)


def sizes_below(root: object) -> dict[str, int]:
    """The longest container at each path of attributes below an object of ours, by that path."""
    found: dict[str, int] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [(type(root).__name__, root)]
    while todo:
        path, one = todo.pop()
        if id(one) in seen or isinstance(one, (str, bytes, int, float, type)):
            continue
        seen.add(id(one))
        if isinstance(one, _CONTAINERS):
            found[path] = max(found.get(path, 0), len(one))
        todo += ((path + name, inner) for name, inner in _inside(one))
    return found


def _inside(one: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(one, dict):
        # Others may change it meanwhile.
        yield from (("[]", inner) for inner in list(one.values()))
    elif isinstance(one, (list, set, deque, tuple)):
        yield from (("[]", inner) for inner in list(one))
    elif type(one).__module__.startswith("emberkeep") and type(one).__name__ != "Chunk":
        names = [*getattr(one, "__dict__", ()), *(n for kind in type(one).__mro__ for n in _slots(kind))]
        yield from ((f".{name}", getattr(one, name)) for name in names if hasattr(one, name))


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads() -> int:
    return threading.active_count()
