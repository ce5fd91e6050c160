"""The Jinja dialect of chat templates: away from Python, and no growth and no loop without a bound.

Jinja's immutable sandbox keeps templates away from Python. What it leaves open is cost, so on top of it
filters and string methods are allow-lists, operators and calls pay before they build (`budget`), and loops
pay for every turn. That is not all that can cost: what is left is stopped from outside (`render_pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context, pass_environment
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from emberkeep.chat.budget import spend
from emberkeep.chat.building import (
    Turns,
    concatenated,
    formatted,
    indented,
    joined,
    replaced,
    tojson,
    walked,
    walking,
)

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


def compile_template(source: str) -> Template:
    """Raises a Jinja TemplateError, or whatever Python's own parser says of hopeless sources."""
    if len(source) > MAX_SOURCE:
        raise TemplateError(f"it is longer than {MAX_SOURCE} characters")
    return _ENVIRONMENT.from_string(_Meter().visit(_ENVIRONMENT.parse(source)))


class _Meter(NodeTransformer):
    """Puts the operations that the environment has no hook for behind filters of ours."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_turns")
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filtered(node.expr, "_walked")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_concatenated")

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_walked") if node.ctx == "load" else node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


# ── filters and functions ────────────────────────────────────────────────────────────────────────


@pass_context
def _printed(_context: Context, value: Any) -> Any:
    """Takes the context only because Jinja would otherwise print constants while it compiles."""
    return walked(value)


@pass_environment
def _join(
    environment: Environment, values: Iterable[Any], separator: str = "", attribute: str | None = None
) -> str:
    if attribute is None:
        return joined(values, separator)
    return joined((environment.getitem(item, attribute) for item in values), separator)


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
    "format": formatted,
    "join": lambda separator, values: joined(values, separator),
    "replace": replaced,
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
            finalize=_printed,
        )
        self._string_methods = frozenset(_STRING_METHODS.split())
        self.filters = {name: FILTERS[name] for name in _FILTERS.split()}
        self.filters |= {name: walking(name) for name in _WALKING_FILTERS.split()}
        self.filters |= {"replace": replaced, "join": _join, "indent": indented, "tojson": tojson}
        self.filters |= {"_turns": Turns, "_walked": walked, "_concatenated": concatenated}
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins what a macro, a `set` block or the template wrote."""
        written = list(Turns(pieces))
        spend(sum(map(len, written)))
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
            spend(len(subject))
            own = _BUILDING_METHODS.get(obj.__name__)
            obj = partial(own, subject) if own else obj
        spend()
        return super().call(context, obj, *args, **options)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        spend(_size_of_result(operator, left, right))
        return _walked_tuple(super().call_binop(context, operator, left, right))


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


def _walked_tuple(value: Any) -> Any:
    return walked(value) if isinstance(value, tuple) else value


_ENVIRONMENT = _ChatEnvironment()
