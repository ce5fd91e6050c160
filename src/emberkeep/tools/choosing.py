"""Which tools are used: by name, by group, by pattern."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from emberkeep.errors import ConfigError
from emberkeep.tools.base import ToolFunction

ALL = "all"


@dataclass(frozen=True, slots=True)
class Choice:
    """Each entry is a tool's name, a group, a pattern (`time__*`) or `all`."""

    enabled: tuple[str, ...] = ()
    """None given: every tool, the dangerous ones only where `asks`."""
    disabled: tuple[str, ...] = ()
    asks: bool = False
    """Somebody can be asked before a dangerous one runs. Where nobody can, it has to be enabled."""

    def takes(self, function: ToolFunction) -> bool:
        if _any(self.disabled, function):
            return False
        if self.enabled:
            return _any(self.enabled, function)
        return self.asks or not function.is_dangerous

    def allows(self, function: ToolFunction, target: ToolFunction) -> bool:
        """A call of `function`, which is taken, that acts as `target`."""
        return self.takes(target) or (_any(self.enabled, function) and not _any(self.disabled, target))

    def would_ask(self, function: ToolFunction) -> bool:
        """It is left out for one reason only: nobody can be asked."""
        return not (self.enabled or self.asks or _any(self.disabled, function)) and function.is_dangerous

    def check(self, functions: Sequence[ToolFunction], later: Iterable[str] = ()) -> None:
        """Raises ConfigError for an entry that fits nothing; `later`: groups whose tools are not known yet."""
        known = {ALL, *later, *(function.group for function in functions)}
        for entry in (*self.enabled, *self.disabled):
            prefix, separator, _ = entry.partition("__")
            fits = entry in known or (separator and prefix in known) or any(_fits(entry, f) for f in functions)
            if not fits:
                raise ConfigError(f"There is no tool or group {entry!r}{_nearest(entry, functions, known)}")


def _any(entries: Iterable[str], function: ToolFunction) -> bool:
    return any(_fits(entry, function) for entry in entries)


def _fits(entry: str, function: ToolFunction) -> bool:
    return (
        entry in (ALL, function.group)
        or fnmatchcase(function.name, entry)
        or function.name.startswith(f"{entry}__")
    )


def _nearest(entry: str, functions: Sequence[ToolFunction], known: set[str]) -> str:
    near = difflib.get_close_matches(entry, [*known, *(function.name for function in functions)], n=1)
    return f": did you mean {near[0]}?" if near else ": `emberkeep tools list` shows them."
