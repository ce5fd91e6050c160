"""JSON tools: read it, lay it out, check it against a schema, take values out of it."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from emberkeep.errors import ToolFailed
from emberkeep.signals import with_default_signals
from emberkeep.text import exceeds_depth
from emberkeep.tools import json_worker
from emberkeep.tools.function import tool
from emberkeep.types.request import Json

GROUP = "json"

_MOST_CHARS = 2 << 20
_DEEPEST = 100
_WORK_S = 5.0


def _as_text(value: Json) -> Json:
    # Models hand over the object itself as often as its text.
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_object(value: Json) -> Json:
    return json.loads(value) if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_as_text), Field(description="JSON.")]
Schema = Annotated[dict[str, Any], BeforeValidator(_as_object), Field(description="A JSON schema.")]


class JsonTools:
    """Sizes, depth and time are bounded. Raises ToolFailed."""

    @tool(group=GROUP, only_reads=True)
    def json_parse(self, text: Text) -> Json:
        """Read JSON and write it without blanks, or say where it is wrong."""
        return _read(text)

    @tool(group=GROUP, only_reads=True)
    def json_pretty(self, text: Text, sort_keys: bool = False) -> str:
        """Lay JSON out over indented lines."""
        return _lay_out(_read(text), json.JSONEncoder(indent=2, sort_keys=sort_keys, ensure_ascii=False))

    @tool(group=GROUP, only_reads=True)
    async def json_validate(self, text: Text, schema: Schema) -> Json:
        """Check JSON against a schema; what does not fit is listed."""
        return await _work(text, schema=schema)

    @tool(group=GROUP, only_reads=True)
    async def json_query(
        self, text: Text, path: Annotated[str, Field(description="JSONPath, such as $.ships[0].name")]
    ) -> Json:
        """Every value in JSON that a path leads to."""
        return await _work(text, path=path)


def _read(text: str) -> Json:
    """Raises ToolFailed."""
    _check_size(text)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ToolFailed(f"This is not JSON: {error}.") from error
    except RecursionError as error:
        raise _too_deep() from error
    if exceeds_depth(value, _DEEPEST):
        raise _too_deep()
    return value


def _lay_out(value: Json, encoder: json.JSONEncoder) -> str:
    """Raises ToolFailed where most of it would be blanks: deep down, every value has a line full of them."""
    parts: list[str] = []
    left = _MOST_CHARS
    for part in encoder.iterencode(value):
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise ToolFailed(f"Laid out it has more than {_MOST_CHARS} characters: take a part with json_query.")
    return "".join(parts)


def _check_size(text: str) -> None:
    if len(text) > _MOST_CHARS:
        raise ToolFailed(f"This JSON has {len(text)} characters: give at most {_MOST_CHARS}.")


def _too_deep() -> ToolFailed:
    return ToolFailed(f"This JSON is nested too deep: {_DEEPEST} levels are allowed.")


async def _work(text: str, **asked: Json) -> Json:
    """In a process of its own, which can be stopped. Raises ToolFailed."""
    _check_size(text)
    question = json.dumps({"text": text, **asked}).encode()
    if len(question) > 2 * _MOST_CHARS:
        raise ToolFailed(f"This is too large: give at most {_MOST_CHARS} characters.")
    process = await asyncio.create_subprocess_exec(
        # -I: nothing of the current folder is imported.
        *with_default_signals([sys.executable, "-I", str(Path(json_worker.__file__))]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(question), _WORK_S)
    except TimeoutError as error:
        raise ToolFailed(f"It took longer than {_WORK_S:g} s: use a simpler schema or path.") from error
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return _answer(output)


def _answer(output: bytes) -> Json:
    """Raises ToolFailed."""
    try:
        answer = json.loads(output)
    except ValueError as error:
        raise ToolFailed("It needed too much memory or time: use a simpler schema or path.") from error
    if "error" in answer:
        raise ToolFailed(f"It failed: {answer['error'].rstrip('.')}.")
    return answer["value"]
