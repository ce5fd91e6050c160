"""What is told of the settings: their groups, what they are for, what they accept, and their defaults."""

from __future__ import annotations

from emberkeep.config.settings import FIELDS, Config, kind_of

GROUPS = {
    "Model": "model",
    "Cache": "ram_budget",
    "Serving": "host",
    "Memory": "memory",
    "Tools": "tools",
    "Engine and GPU": "engine",
    "Cluster": "replicas",
}
"""Settings that belong together, each group with its first one; the others follow in the order of `Config`."""
USED_FIRST = (
    *("model", "backend", "ctx", "parallel", "host", "port", "api_key", "data_dir"),
    *("ram_budget", "disk_budget"),
)


def grouped() -> dict[str, list[str]]:
    """All settings, by group."""
    groups: dict[str, list[str]] = {}
    names = {first: group for group, first in GROUPS.items()}
    for key in FIELDS:
        if key in names:
            group = groups.setdefault(names[key], [])
        group.append(key)
    return groups


def help_for(key: str) -> str:
    return str(FIELDS[key].metadata["help"])


def accepts(key: str) -> str:
    return str(kind_of(key).accepts)


def accepted_briefly(key: str) -> str:
    """In a word, or the words that there are."""
    kind = kind_of(key)
    words = kind.accepts.removeprefix("one of ")
    if words != kind.accepts:
        return words
    return f"{kind.type}, {kind.word}" if kind.word else kind.type


def type_of(key: str) -> str:
    return kind_of(key).type


def is_list(key: str) -> bool:
    """Whether it holds several values, so that its flag may be given several times."""
    return kind_of(key).is_list


def default_of(key: str) -> str:
    """The default as a person reads it."""
    kind, default = kind_of(key), getattr(Config(), key)
    return kind.word if kind.word and kind.parse(kind.word) == default else kind.show(default)
