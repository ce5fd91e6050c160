"""Flags of a benchmark, made from the fields of its plan. Needs nothing but Python."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def add_flags(parser: ArgumentParser, *plans: type) -> None:
    """One per field of these dataclasses: `--answer-tokens` of `answer_tokens`. What is not given is not set."""
    known = dict[str, tuple[Field[Any], Any]]()
    for plan in plans:
        hints = get_type_hints(plan)
        known |= {field.name: (field, hints[field.name]) for field in fields(plan)}
    for name, (field, hint) in known.items():
        has_default = field.default is not MISSING
        about = f"default: {field.default}" if has_default and field.default is not None else None
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, dest=name, default=SUPPRESS, required=not has_default, help=about, **_reading(hint)
        )


def _reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a value of this type."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(one for one in get_args(hint) if one is not NoneType)
    if get_origin(hint) is tuple:
        return {**_reading(get_args(hint)[0]), "nargs": "+"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint)}
    if hint is bool:
        return {"action": "store_true"}
    return {"type": hint, "metavar": "FILE" if hint is Path else hint.__name__.upper()}


def given(namespace: Any, *plans: type) -> dict[str, Any]:
    """What was given of fields of these plans, several values as tuples, as plans have them."""
    names = {field.name for plan in plans for field in fields(plan)}
    values = {name: value for name, value in vars(namespace).items() if name in names}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
