"""How a model's template writes calls whose arguments are JSON: the literal text around names and arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass

from emberkeep.chat.dialects.table import HARMONY
from emberkeep.chat.messages import CALL_END, CALL_START
from emberkeep.chat.sections import Kind, Sections
from emberkeep.types import Tool


@dataclass(frozen=True, slots=True)
class Writing:
    """`before` name `between` arguments, `separator` name `between` arguments, ..., `after`."""

    before: str
    between: str
    separator: str | None
    """None: one call only."""
    after: str

    def call(self, name: str, arguments: str) -> str:
        return f"{self.before}{name}{self.between}{arguments}{self.after}"


TAGGED_JSON = Writing(
    before=f'{CALL_START}\n{{"name": "',
    between='", "arguments": ',
    separator=f'}}\n{CALL_END}\n{CALL_START}\n{{"name": "',
    after=f"}}\n{CALL_END}",
)


def find_writing(one: str, two: str, names: tuple[str, str], key: str) -> Writing | None:
    """From what a template writes for a call of the first of `names`, and for calls of both ("": it cannot).

    Every call has one argument, `key`, whose value is the call's name. None where arguments are not written as
    JSON, or where what is written could not be read again.
    """
    match = _calls(names[:1], key).fullmatch(one)
    if match is None:
        return None
    before, between, after = match["before"], match["between0"], match["after"].rstrip()
    both = _calls(names, key).fullmatch(two)
    is_alike = both and (both["before"], both["between0"], both["between1"]) == (before, between, between)
    writing = Writing(before, between, both["separator"] if both and is_alike else None, after)
    return writing if _is_read(writing, names[0], f'{{"{key}": "{names[0]}"}}') else None


def _calls(names: tuple[str, ...], key: str) -> re.Pattern[str]:
    parts = [rf'{name}(?P<between{i}>[^{{}}]*)\{{\s*"{key}"\s*:\s*"{name}"\s*\}}' for i, name in enumerate(names)]
    return re.compile("(?P<before>.*?)" + "(?P<separator>.*?)".join(parts) + "(?P<after>.*)", re.DOTALL)


def _is_read(writing: Writing, name: str, arguments: str) -> bool:
    sections = Sections({name: Tool(name)}, None, HARMONY)
    found = sections.feed(writing.call(name, arguments)) + sections.finish()
    pieces = [piece for section in found for piece in section.pieces]
    texts = [section.text.strip() for section in found if section.kind is Kind.TEXT]
    is_same = "".join(piece.arguments for piece in pieces) == arguments
    return is_same and [piece.name for piece in pieces if piece.name] == [name] and not any(texts)
