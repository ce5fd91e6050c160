"""Tools as a person reads them, and the arguments that a person writes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from emberkeep.cli.tables import printable, show, texts
from emberkeep.errors import ConfigError
from emberkeep.types import Json, Tool

if TYPE_CHECKING:
    from rich.text import Text

_EXAMPLES: Mapping[str, Json] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}}


@dataclass(frozen=True, slots=True)
class Row:
    definition: Tool
    group: str
    is_dangerous: bool
    in_chat: bool
    in_server: bool

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def chat(self) -> str:
        return ("asks" if self.is_dangerous else "yes") if self.in_chat else "no"

    @property
    def server(self) -> str:
        return "yes" if self.in_server else "no"


def as_json(row: Row) -> dict[str, Json]:
    return {
        "name": row.name,
        "group": row.group,
        "dangerous": row.is_dangerous,
        "chat": row.in_chat,
        "server": row.in_server,
        "description": row.definition.description,
        "parameters": row.definition.parameters,
    }


def print_tools(rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table("tool", "group", "in chat", "in a server", "what it does", box=None, pad_edge=False)
    for row in rows:
        table.add_row(*_cells(row))
    show(table)


def _cells(row: Row) -> list[Text]:
    return texts(row.name, row.group, row.chat, row.server, gist(row.definition))


def gist(tool: Tool) -> str:
    """The first sentence of what a tool says about itself."""
    return f"{tool.description.partition('. ')[0].rstrip('.')}."


def print_tool(row: Row) -> None:
    danger = ", dangerous" if row.is_dangerous else ""
    where = f"in chat: {row.chat}, in a server: {row.server}"
    print(f"{printable(row.name)} (group {printable(row.group)}{danger}; {where})")
    print(f"\n{printable(row.definition.description)}\n")
    print(printable(json.dumps(row.definition.parameters, indent=2, ensure_ascii=False)))
    print(f"\nExample: {printable(_example(row.definition))}")


def _example(tool: Tool) -> str:
    properties = tool.parameters.get("properties", {})
    given = {name: _value(properties.get(name, {})) for name in tool.parameters.get("required", ())}
    written = [shlex.quote(json.dumps(given, ensure_ascii=False))] if given else []
    return " ".join(["emberkeep tools run", tool.name, *written])


def _value(schema: Mapping[str, Json]) -> Json:
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    if schema.get("anyOf"):
        return _value(schema["anyOf"][0])
    if schema.get("type") == "integer":
        return schema.get("minimum", 1)
    return _EXAMPLES.get(str(schema.get("type")), "...")


def read_arguments(given: Sequence[str], parameters: Mapping[str, Json]) -> str:
    """An object as text. A value of `KEY=VALUE` is JSON where the tool takes no text. Raises ConfigError."""
    if len(given) == 1 and given[0].lstrip().startswith("{"):
        return given[0]
    pairs: dict[str, Json] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not (name and equals):
            raise ConfigError(f"{one!r} is no argument: write KEY=VALUE, or all of them as one JSON object.")
        pairs[name] = _read(value, parameters.get("properties", {}).get(name, {}))
    return json.dumps(pairs)


def _read(value: str, schema: Mapping[str, Json]) -> Json:
    if schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
