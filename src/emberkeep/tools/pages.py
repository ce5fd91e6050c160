"""Long results, page by page: the model gets the first, and can ask for the next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from emberkeep.errors import ToolFailed
from emberkeep.types import Caller, Json, Tool

_NAME = "output-"
_KEPT = 64
_KEPT_CHARS = 32 << 20
_LONGEST = 8 << 20
"""Characters of one result; nobody reads as much, and everything has to be in memory."""

MORE = Tool(
    "more_output",
    "Read the next page of a long result: only where one ended with a line like [output-1, page 1 of 3].",
    {
        "type": "object",
        "properties": {
            "output": {"type": "string", "description": "The name that the result gave."},
            "page": {"type": "integer", "minimum": 1, "description": "Which page; the first has been shown."},
        },
        "required": ["output", "page"],
        "additionalProperties": False,
    },
)


class Pages:
    """The latest long results, each for the user it was made for. Belongs to the event loop."""

    def __init__(self, chars: int) -> None:
        self._chars = chars
        self._count = 0
        self._kept: OrderedDict[tuple[str, str], str] = OrderedDict()

    def first(self, text: str, caller: Caller) -> str:
        if len(text) <= self._chars:
            return text
        if len(text) > _LONGEST:
            text = f"{text[:_LONGEST]}\n[Cut: {len(text) - _LONGEST} more characters are lost.]"
        self._count += 1
        name = f"{_NAME}{self._count}"
        self._kept[caller.owner, name] = text
        while len(self._kept) > 1 and (len(self._kept) > _KEPT or self._size() > _KEPT_CHARS):
            self._kept.popitem(last=False)
        return self._page(name, text, 1)

    def more(self, arguments: Mapping[str, Json], caller: Caller) -> str:
        """Raises ToolFailed."""
        name, page = str(arguments.get("output")), str(arguments.get("page", 2))
        text = self._kept.get((caller.owner, name))
        if text is None and not name.startswith(_NAME):
            raise ToolFailed(f"{name[:64]!r} names no long result, what was shown is all of it: answer with it.")
        if text is None:
            raise ToolFailed(f"There is no output {name[:64]!r} any more: call the tool again.")
        # As a text: models write numbers in quotes too.
        if not (page.isdecimal() and len(page) < 9 and 1 <= int(page) <= self._pages(text)):
            raise ToolFailed(f"{name} has pages 1 to {self._pages(text)}.")
        return self._page(name, text, int(page))

    def _size(self) -> int:
        return sum(map(len, self._kept.values()))

    def _pages(self, text: str) -> int:
        return -(-len(text) // self._chars)

    def _page(self, name: str, text: str, page: int) -> str:
        part = text[(page - 1) * self._chars : page * self._chars]
        last = self._pages(text)
        where = f"[{name}, page {page} of {last}, {len(text)} characters in all"
        return f"{part}\n{where}{f': more_output gives page {page + 1}' if page < last else ''}.]"
