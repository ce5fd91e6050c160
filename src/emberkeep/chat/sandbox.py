"""Chat templates made to run: they come out of model files, so they are foreign code.

Jinja's immutable sandbox keeps templates away from Python. It does not bound what they cost: that is done from
outside, with the process that a template runs in (`render_worker`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from emberkeep.errors import TemplateFailed
from emberkeep.types.request import Json

MAX_SOURCE = 1 << 20


class JinjaTemplate:
    """Runs its source in this process, where nothing can stop it: foreign ones belong in a worker.

    Raises TemplateFailed when `source` is not a template, and MemoryError.
    """

    def __init__(self, source: str) -> None:
        try:
            if len(source) > MAX_SOURCE:
                raise TemplateError(f"it is longer than {MAX_SOURCE} characters")
            self._template = _ENVIRONMENT.from_string(source)
        except MemoryError:
            raise
        # Foreign code: Jinja, Python's parser and its recursion limit all have their say.
        except Exception as error:
            raise TemplateFailed(f"The model's chat template is not valid Jinja: {_reason(error)}.") from error

    def render(self, values: Mapping[str, Json]) -> str:
        """Raises TemplateFailed, MemoryError."""
        try:
            return self._template.render(values)
        except MemoryError:
            raise
        # Foreign code may fail in any way; all of them mean that it cannot write these messages.
        except Exception as error:
            raise TemplateFailed(
                f"The model's chat template refused these messages ({_reason(error)}): "
                "change them to what it expects.",
                "messages",
            ) from error


def _reason(error: Exception) -> str:
    """The first line of a foreign error, short enough for one sentence."""
    text = error.message if isinstance(error, TemplateError) else str(error)
    line = (text or type(error).__name__).strip().partition("\n")[0]
    return line[:200].rstrip(".")


# ── the dialect of chat templates ──


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, with no escaping for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:200])


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is Namespace:
            # Holds only what the template put there. Templates that scan all messages for each message
            # come here a million times, and Jinja's own check is slow.
            return not attr.startswith("_")
        return super().is_safe_attribute(obj, attr, value)


def _environment() -> Environment:
    environment = _ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


_ENVIRONMENT = _environment()
