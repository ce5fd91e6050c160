"""How deeply a JSON value is nested."""

from __future__ import annotations

from emberkeep.types.asking import Json


def exceeds_depth(value: Json, levels: int) -> bool:
    """Whether more than `levels` objects and lists stand in each other. Not recursive."""
    level = [value]
    for _ in range(levels):
        level = [child for parent in level for child in _containers(parent)]
        if not level:
            return False
    return True


def _containers(value: Json) -> list[Json]:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in children if isinstance(child, (dict, list))]
