"""Chat templates made to run: they come out of model files, so they are foreign code.

Jinja's immutable sandbox keeps templates away from Python. What it leaves open is cost, so on top of it filters
and string methods are allow-lists, operators and calls pay before they build, and loops pay for every turn: a
rendering has a deadline, and a number of characters that it may build on the way. Nothing here interrupts
anything: the operation that cannot pay raises, with a sentence that says why. What else can cost is stopped from
outside, with the process that it runs in (`template.IsolatedTemplate`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from string import Formatter
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from emberkeep.chat.render_protocol import MAX_OUTPUT, stop_error
from emberkeep.errors import TemplateFailed
from emberkeep.types.request import Json

MAX_CHARS = 256 << 20
"""Built in total; a template that appends to one string message by message builds far more than it writes."""
MAX_SOURCE = 1 << 20
_MAX_INTEGER_BITS = 256

_FILTERS = """
    abs capitalize count d default dictsort e escape first float int items last length list lower map
    reject rejectattr reverse round safe select selectattr title trim upper
"""
_WALKING_FILTERS = "max min sort string unique"
_STRING_METHODS = """
    capitalize count endswith find format index isalnum isalpha isdecimal isdigit islower isnumeric isspace isupper
    join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip
    split splitlines startswith strip title upper
"""


class JinjaTemplate:
    """Runs its source in this process, where nothing can stop a long step of it: foreign ones belong in a worker
    (`template.IsolatedTemplate`).

    Raises TemplateFailed when `source` is not a template.
    """

    def __init__(self, source: str) -> None:
        try:
            self._template = _compile(source)
        except MemoryError as error:
            raise stop_error("it needs too much memory") from error
        # Foreign code: Jinja, Python's parser and its recursion limit all have their say.
        except Exception as error:
            raise TemplateFailed(f"The model's chat template is not valid Jinja: {_reason(error)}.") from error

    def render(self, values: Mapping[str, Json], seconds: float, most: int = MAX_OUTPUT) -> str:
        """At most `most` characters, within `seconds` unless one step takes longer. Raises TemplateFailed."""
        try:
            with _budget(seconds):
                text = self._template.render(values)
        except _OutOfBudget as error:
            raise stop_error(str(error)) from error
        except MemoryError as error:
            raise stop_error("it needs too much memory") from error
        # Foreign code may fail in any way; all of them mean that it cannot write these messages.
        except Exception as error:
            raise TemplateFailed(
                f"The model's chat template refused these messages ({_reason(error)}): "
                "change them to what it expects.",
                "messages",
            ) from error
        if len(text) > MAX_OUTPUT:
            raise TemplateFailed("The prompt is too long to be tokenised: shorten the messages.", "messages")
        if len(text) > most:
            raise stop_error("it builds more text than is allowed")
        return text


def _reason(error: Exception) -> str:
    """The first line of a foreign error, short enough for one sentence."""
    text = error.message if isinstance(error, TemplateError) else str(error)
    line = (text or type(error).__name__).strip().partition("\n")[0]
    return line[:200].rstrip(".")


# ── what a rendering may spend ──


_running = threading.local()


class _OutOfBudget(SecurityError):
    """The template takes too long or builds too much."""


@contextmanager
def _budget(seconds: float) -> Iterator[None]:
    """Let this thread's sandbox operations spend for the length of the block."""
    _running.deadline = time.monotonic() + seconds
    _running.chars = MAX_CHARS
    try:
        yield
    finally:
        del _running.deadline, _running.chars


def _spend(chars: int = 0) -> None:
    """Pay for `chars` characters (or list items) about to be built. Raises _OutOfBudget."""
    _running.chars -= chars
    if _running.chars < 0:
        raise _OutOfBudget("it builds more text than is allowed")
    if time.monotonic() > _running.deadline:
        raise _OutOfBudget("it takes too long")


def _spend_on(value: object) -> None:
    """Pay for the text of `value`, walking all of it.

    A few shared lists nested in each other have a text of exponential length, and are walked by one
    uninterruptible call when they are printed, compared or hashed: so they are walked here first.
    """
    if isinstance(value, str):
        _spend(len(value))
        return
    _spend(1)
    if isinstance(value, Mapping):
        for key, item in value.items():
            _spend_on(key)
            _spend_on(item)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _spend_on(item)


# ── what templates do to values when it can grow or walk far: each operation pays first ──


class _Iterations:
    """A loop's iterable; keeps `len`, which `loop.length` and `loop.last` want."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _spend()
            yield item


def _walk(value: Any) -> Any:
    """`value`, after paying for the walk that comparing, hashing or printing it will be."""
    if not isinstance(value, str):
        _spend_on(value)
    return value


def _concatenate(values: list[Any]) -> str:
    _spend_on(values)
    return "".join(map(str, values))


def _replace(text: object, old: str, new: str, count: int | None = None) -> str:
    subject = str(_walk(text))
    _spend(len(subject) + subject.count(old) * len(new))
    return subject.replace(old, new, -1 if count is None else count)


def _join_text(values: Iterable[Any], separator: str = "") -> str:
    items = list(_Iterations(values))
    _spend(len(items) * len(separator))
    _spend_on(items)
    return separator.join(map(str, items))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _spend(len(text) + (text.count("\n") + 1) * _width(width))
    return do_indent(text, width, first, blank)


def _width(indent: int | str) -> int:
    return max(indent, 0) if isinstance(indent, int) else len(indent)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As chat templates expect it: plain JSON, with no escaping for HTML."""
    _spend_on(value)
    if indent is not None and _width(indent) > 16:
        raise SecurityError("it indents JSON by more than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _format(pattern: str, *values: Any, **named: Any) -> str:
    """`str.format` with plain fields only: no attributes, no widths."""
    parts: list[Any] = []
    unnamed = iter(values)
    for literal, field, spec, conversion in Formatter().parse(pattern):
        parts.append(literal)
        if spec or conversion:
            raise SecurityError("it formats text with more than plain fields")
        if field is not None:
            parts.append(named[field] if field in named else values[int(field)] if field else next(unnamed))
    return _concatenate(parts)


def _walk_first(name: str) -> Callable[..., Any]:
    """Jinja's filter of this name, behind a walk over what it compares."""
    plain = FILTERS[name]

    def filter(*args: Any, **options: Any) -> Any:
        for arg in args:
            if not isinstance(arg, Environment):
                _spend_on(arg)
        return plain(*args, **options)

    if hasattr(plain, "jinja_pass_arg"):
        filter.jinja_pass_arg = plain.jinja_pass_arg  # type: ignore[attr-defined]
    return filter


# ── the dialect ──


def _compile(source: str) -> Template:
    """Raises a Jinja TemplateError, or whatever Python's own parser says of hopeless sources."""
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"it is longer than {MAX_SOURCE} characters")
    return _ENVIRONMENT.from_string(_Meter().visit(_ENVIRONMENT.parse(source)))


class _Meter(NodeTransformer):
    """Puts the operations that the environment has no hook for behind filters of ours."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _behind_filter(node.iter, "_iterate")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _behind_filter(node.expr, "_walk")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _behind_filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenate")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _behind_filter(node, "_walk") if node.ctx == "load" else node


def _behind_filter(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@pass_context
def _print(_context: Context, value: Any) -> Any:
    """Takes the context only because Jinja would otherwise print constants while it compiles."""
    return _walk(value)


@pass_environment
def _join(
    environment: Environment, values: Iterable[Any], separator: str = "", attribute: str | None = None
) -> str:
    if attribute is None:
        return _join_text(values, separator)
    return _join_text((environment.getitem(item, attribute) for item in values), separator)


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


_BUILDING_METHODS: dict[str, Callable[..., str]] = {
    "format": _format,
    "join": lambda separator, values: _join_text(values, separator),
    "replace": _replace,
}


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Folding constants would run filters and operators while the template is compiled.
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            finalize=_print,
        )
        self._string_methods = frozenset(_STRING_METHODS.split())
        self.filters = {name: FILTERS[name] for name in _FILTERS.split()}
        self.filters |= {name: _walk_first(name) for name in _WALKING_FILTERS.split()}
        self.filters |= {"replace": _replace, "join": _join, "indent": _indent, "tojson": _to_json}
        self.filters |= {"_iterate": _Iterations, "_walk": _walk, "_concatenate": _concatenate}
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a macro, a `set` block or the template wrote."""
        written = list(_Iterations(pieces))
        _spend(sum(map(len, written)))
        return "".join(written)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja's own safe `format` knows field widths, which have no bound: ours stands in `call`."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in self._string_methods
        if type(obj) is Namespace:
            # Holds only what the template put there. Templates that scan all messages for each message
            # come here a million times, and Jinja's own check is slow.
            return not attr.startswith("_")
        return not isinstance(obj, int | float) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **options: Any) -> Any:
        subject = getattr(obj, "__self__", None)
        if isinstance(subject, str):
            _spend(len(subject))
            own = _BUILDING_METHODS.get(obj.__name__)
            obj = partial(own, subject) if own else obj
        _spend()
        return super().call(context, obj, *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _spend(_size_of_result(operator, left, right))
        return _walk_tuple(super().call_binop(context, operator, left, right))


def _size_of_result(operator: str, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _MAX_INTEGER_BITS:
            raise SecurityError("it computes with very large numbers")
        return 0
    if operator == "%" and isinstance(left, str):
        raise SecurityError("it formats text with %, which is not supported")
    if operator != "*":
        return _length(left) + _length(right)
    times = left if isinstance(left, int) else right if isinstance(right, int) else 0
    return (_length(left) + _length(right)) * max(times, 0)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _walk_tuple(value: Any) -> Any:
    return _walk(value) if isinstance(value, tuple) else value


_ENVIRONMENT = _ChatEnvironment()
