"""Dataclasses that are defined in a tenth of the time: the modules of a server have hundreds of them.

The standard library writes the source of six methods for each and compiles it, which takes about a millisecond.
Here they share their methods, and `__init__` is compiled when the first instance is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, fields
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, **options):
        """As `dataclasses.dataclass`, without `InitVar`."""
        if cls is None:
            return lambda decorated: dataclass(decorated, **options)
        if options.keys() - _OPTIONS:
            return dataclasses.dataclass(cls, **options)
        return _made(cls, **options)


_OPTIONS = frozenset({"frozen", "slots", "eq", "repr", "kw_only"})


def _made(
    cls: type[Any],
    *,
    frozen: bool = False,
    slots: bool = False,
    eq: bool = True,
    repr: bool = True,
    kw_only: bool = False,
) -> type[Any]:
    own = set(vars(cls))
    if cls.__dict__.get("__hash__") is None:
        own.discard("__hash__")  # Python's, for a class that has an `__eq__`
    doc, cls.__doc__ = cls.__doc__, cls.__doc__ or cls.__name__  # without one, the standard library writes one
    # Only a class that extends another one needs the standard library's methods, which check that both are frozen.
    checked = frozen and any(map(dataclasses.is_dataclass, cls.__bases__))
    made = dataclasses.dataclass(
        cls, init=False, repr=False, eq=False, slots=slots, kw_only=kw_only, frozen=checked
    )
    made.__doc__, made.__dataclass_params__.frozen = doc, frozen
    for name, method in _methods(made, frozen=frozen, slots=slots, eq=eq, repr=repr):
        if name not in own:
            setattr(made, name, method)
    return made


def _methods(
    made: type[Any], *, frozen: bool, slots: bool, eq: bool, repr: bool
) -> Iterator[tuple[str, Callable[..., Any] | None]]:
    listed = fields(made)
    yield "__init__", _compiling_init(made, listed, frozen=frozen, slots=slots)
    if repr:
        yield "__repr__", _repr
    if eq:
        yield "__eq__", _equality(_values_of(listed, lambda field: field.compare))
        hashed = _values_of(listed, lambda field: field.compare if field.hash is None else field.hash)
        yield "__hash__", _hashing(hashed) if frozen else None
    if frozen:
        names = frozenset(field.name for field in listed)
        yield "__setattr__", _refusing(made, names, "__setattr__", "assign to")
        yield "__delattr__", _refusing(made, names, "__delattr__", "delete")
    if frozen and slots:  # which otherwise cannot be copied
        yield "__getstate__", _state
        yield "__setstate__", _set_state


# ── methods ──


def _values_of(
    listed: Sequence[Field[Any]], is_wanted: Callable[[Field[Any]], bool]
) -> Callable[[Any], tuple[Any, ...]]:
    names = [field.name for field in listed if is_wanted(field)]
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _equality(values_of: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any, Any], Any]:
    def __eq__(self: Any, other: Any) -> Any:
        return values_of(self) == values_of(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hashing(values_of: Callable[[Any], tuple[Any, ...]]) -> Callable[[Any], int]:
    def __hash__(self: Any) -> int:
        return hash(values_of(self))

    return __hash__


def _refusing(made: type[Any], names: frozenset[str], method: str, verb: str) -> Callable[..., None]:
    """Other attributes may be set in classes that extend it."""

    def refuse(self: Any, name: str, *value: Any) -> None:
        if type(self) is made or name in names:
            raise FrozenInstanceError(f"cannot {verb} field {name!r}")
        getattr(super(made, self), method)(name, *value)

    return refuse


@recursive_repr()
def _repr(self: Any) -> str:
    shown = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.repr)
    return f"{type(self).__qualname__}({shown})"


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


# ── __init__ ──


def _compiling_init(
    made: type[Any], listed: Sequence[Field[Any]], *, frozen: bool, slots: bool
) -> Callable[..., None]:
    def __init__(self: Any, /, *args: Any, **named: Any) -> None:
        compiled = _compile_init(made, listed, frozen=frozen, slots=slots)
        made.__init__ = compiled
        compiled(self, *args, **named)

    return __init__


def _compile_init(
    made: type[Any], listed: Sequence[Field[Any]], *, frozen: bool, slots: bool
) -> Callable[..., None]:
    namespace: dict[str, Any] = {"_set": object.__setattr__, "_MISSING": MISSING}
    given, named, lines = list[str](), list[str](), list[str]()
    for field in listed:
        namespace[f"_default_{field.name}"] = field.default
        namespace[f"_make_{field.name}"] = field.default_factory
        if field.init:
            (named if field.kw_only else given).append(_parameter(field))
        if value := _value(field, slots=slots):
            name = field.name
            if frozen and slots:
                namespace[f"_set_{name}"] = getattr(made, name).__set__
                lines.append(f"_set_{name}(self, {value})")
            else:
                lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(made, "__post_init__"):
        lines.append("self.__post_init__()")
    parameters = ", ".join(["self", *given, *(["*", *named] if named else [])])
    exec(f"def __init__({parameters}):\n " + "\n ".join(lines or ["pass"]), namespace)
    init: Callable[..., None] = namespace["__init__"]
    init.__qualname__ = f"{made.__qualname__}.__init__"
    return init


def _parameter(field: Field[Any]) -> str:
    if field.default_factory is not MISSING:
        return f"{field.name}=_MISSING"
    return field.name if field.default is MISSING else f"{field.name}=_default_{field.name}"


def _value(field: Field[Any], *, slots: bool) -> str:
    """Empty: nothing is set."""
    name = field.name
    if field.default_factory is not MISSING:
        return f"_make_{name}() if {name} is _MISSING else {name}" if field.init else f"_make_{name}()"
    if field.init:
        return name
    return f"_default_{name}" if slots and field.default is not MISSING else ""
