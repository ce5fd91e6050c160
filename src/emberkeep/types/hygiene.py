"""Prefix hygiene: rules for the parts of a prompt that change with every call, and that nothing depends on."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum

from emberkeep.values import dataclass

LONGEST_LINE = 512
"""Characters of the longest line that a pattern is tried on: what a search takes grows with a power of it."""
_MOST_WAYS = 1 << 21
"""In how many ways the repetitions of a pattern may share out such a line."""


class HygieneAction(StrEnum):
    """What is done where a rule's pattern is found."""

    MOVE = "move"  # its line goes behind everything that stays the same: to the end of the latest message
    FREEZE = "freeze"  # the value that this client sent first is kept
    DROP = "drop"  # nothing stands there any more
    OFF = "off"  # nothing is done


class HygieneWhere(StrEnum):
    """The part of a request in which a rule's pattern is looked for."""

    SYSTEM = "system"  # messages of the system and of developers
    USER = "user"
    TOOLS = "tools"  # descriptions of tools and of their parameters


@dataclass(frozen=True, slots=True)
class HygieneRule:
    name: str
    pattern: str = ""
    """A regular expression, looked for line by line. Empty: the order of tools, which no pattern describes."""
    where: HygieneWhere = HygieneWhere.SYSTEM
    action: HygieneAction = HygieneAction.MOVE


@dataclass(frozen=True, slots=True)
class Tidied:
    """What rules have done to a request."""

    rules: tuple[str, ...] = ()
    """Names of those that changed something."""
    moved: str = ""
    """What they moved: it stands at the end of the prompt's latest message, and in no history."""


NOT_TIDIED = Tidied()

# ── those that exist without being written down ──

_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
TIMESTAMP = (
    r"(?<!\d)\d{4}[-/.]\d{1,2}[-/.]\d{1,2}(?!\d)|(?<!\d)\d{1,2}[./]\d{1,2}[./]\d{4}(?!\d)"
    r"|(?<!\d)\d{1,2}:\d{2}(?::\d{2})?(?:[.,]\d{1,9})?(?!\d)"
    rf"|\b{_MONTH}\.? {{1,2}}\d{{1,2}}(?:,? \d{{4}})?\b|\b\d{{1,2}}\.? {_MONTH}(?:,? \d{{4}})?\b"
    r"|\b1[5-9]\d{8}(?:\d{3})?\b"
)
"""A date, a time of day, or seconds or milliseconds since 1970."""
ID = (
    r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    r"|\b(?:req|request|trace|run|sess|session|msg|chatcmpl)[-_][0-9A-Za-z]{6,64}\b|\b[0-9a-f]{16,64}\b"
)
"""A UUID, a name that a program made for a request, or a long hash."""

BILLING_HEADER = HygieneRule(
    "billing-header", r"^x-anthropic-billing-header:.*$", HygieneWhere.SYSTEM, HygieneAction.DROP
)
TOOL_ORDER = HygieneRule("tool-order", "", HygieneWhere.TOOLS, HygieneAction.FREEZE)
TIMESTAMPS = HygieneRule("timestamps", TIMESTAMP)
IDS = HygieneRule("ids", ID)

BY_DEFAULT = (BILLING_HEADER, TOOL_ORDER)
"""They cannot change what is meant: no model is told anything by the one, and the other gives it an order of tools
that the same client has sent before."""
BUILT_IN = {rule.name: rule for rule in (*BY_DEFAULT, TIMESTAMPS, IDS)}


def rules_in_use(configured: Iterable[HygieneRule]) -> tuple[HygieneRule, ...]:
    """Those by default, and those that are written down: of the same name the latter. In that order."""
    by_name = {rule.name: rule for rule in (*BY_DEFAULT, *configured)}
    return tuple(rule for rule in by_name.values() if rule.action is not HygieneAction.OFF)


def as_written(
    name: str, pattern: str | None, where: HygieneWhere | None, action: HygieneAction | None
) -> HygieneRule:
    """A rule of which only some things were said: the rest is as in the built-in one of that name. Raises
    ValueError, with a sentence, where that is not enough."""
    known = BUILT_IN.get(name)
    if known is None and pattern is None:
        raise ValueError(f"needs a pattern, or the name of a rule that exists: {', '.join(BUILT_IN)}")
    rule = known or HygieneRule(name)
    rule = replace(rule, pattern=rule.pattern if pattern is None else pattern)
    rule = replace(rule, where=where or rule.where, action=action or rule.action)
    if not rule.pattern and rule.action not in (HygieneAction.FREEZE, HygieneAction.OFF):
        raise ValueError("can only freeze the order of tools, or be off")
    if pattern is not None:
        check_pattern(pattern)
    return rule


# ── patterns that end ──

_PARTS = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<count>\{(?P<low>\d*)(?P<comma>,?)(?P<high>\d*)\})|.", re.DOTALL
)


def check_pattern(pattern: str) -> None:
    """Raises ValueError, with a sentence, for what is no regular expression or might search for ever.

    Python's engine tries one way after the other. Where no group is repeated, there are at most as many ways as
    the repetitions can share out a line among themselves.
    """
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"has a pattern that is no regular expression ({error})") from error
    ways, after = 1, ""
    for part in _PARTS.finditer(pattern):
        is_count = part[0] in ("*", "+") or part["count"] is not None
        if is_count and after == ")":
            raise ValueError(
                "has a pattern that repeats a group, and might search for ever: repeat characters only"
            )
        # After these a question mark is no repetition.
        if part[0] != "?" or after not in ("*", "+", "?", "(", "}"):
            ways *= _repeated(part)
        after = "}" if part["count"] else part[0]
    if ways > _MOST_WAYS:
        raise ValueError("has a pattern with too many repetitions: use two of * and + at most")


def _repeated(part: re.Match[str]) -> int:
    """How many lengths it may have."""
    if part[0] in ("*", "+"):
        return LONGEST_LINE
    if part["count"] is None:
        return 2 if part[0] == "?" else 1
    if not part["low"] and not part["high"]:
        return 1  # a brace that is a character
    if part["comma"] and not part["high"]:
        return LONGEST_LINE
    low, high = int(part["low"] or 0), int(part["high"] or part["low"])
    return max(min(high, LONGEST_LINE) - low + 1, 1) if part["comma"] else 1
