"""Where the state of a request lives: state that is approximate has a namespace of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from emberkeep.errors import ConfigError, InvalidField
from emberkeep.types import (
    EXACT_BITS,
    Approximation,
    Request,
    exact_namespace,
    marked_namespace,
    without_mark,
)

_CANNOT_MOVE = "needs an engine that can move stored state: use --engine hf, or ask for exact answers."


@dataclass(frozen=True, slots=True)
class Lineages:
    default_bits: int
    """In which state is stored unless a request asks for something else."""
    packs: frozenset[int]
    """What the engine can do."""
    approximation: Approximation | None = None
    """What requests get that do not say whether state may be moved."""
    can_move: bool = False
    """The engine can."""
    exact: bool = False
    """Whatever is asked for, nothing is approximate."""
    can_cut: bool = False
    """The engine can cut something out of its state."""

    def check(self) -> None:
        """Raises ConfigError unless the engine can do the default."""
        if self.exact:
            return
        if self.approximation is not None and not self.can_move:
            raise ConfigError(f"approximate = {self.approximation.repair} {_CANNOT_MOVE}")
        if self.default_bits not in self.packs:
            raise ConfigError(f"kv_bits {self.default_bits} is nothing for this model: {_possible(self.packs)}.")

    def settle(self, request: Request) -> Request:
        """`request` in the namespace of what it may reuse and leaves behind; one that has marks stays as it is.

        What it leaves behind is there only once state has been moved into it, see `stored_namespace`. Raises
        InvalidField for what the engine cannot do.
        """
        if exact_namespace(request.namespace) != request.namespace:
            return request
        if self.exact:
            return replace(request, approximate=False, kv_bits=EXACT_BITS)
        if request.kv_bits is not None and request.kv_bits not in self.packs:
            raise InvalidField("kv_bits", f"this model cannot do {request.kv_bits}: {_possible(self.packs)}.")
        request = replace(request, approximate=self._approximation(request))
        marks = marks_of(request, self.default_bits)
        return replace(request, namespace=marked_namespace(request.namespace, marks))

    def _approximation(self, request: Request) -> Approximation | Literal[False]:
        """Prefixes are made for others, who may want them exact."""
        if request.is_prefix or request.approximate is False:
            return False
        if request.approximate is not None and not self.can_move:
            raise InvalidField("approximate", _CANNOT_MOVE)
        return request.approximate or self.approximation or False

    def may_cut(self, request: Request) -> bool:
        """Of a request as it came: its state may be cut where messages leave it, and not evaluated again."""
        return self.can_cut and not self.exact and request.approximate is not False

    def cut(self, request: Request, mark: str) -> Request:
        """A settled request, with state out of which something was cut."""
        marks = [*marks_of(request, self.default_bits), mark]
        exact = exact_namespace(request.namespace)
        return replace(request, cut_mark=mark, namespace=marked_namespace(exact, marks))

    def repacked(self, request: Request, bits: int) -> Request:
        """A settled request, with its state stored in other bits."""
        settled = self.settle(replace(request, kv_bits=bits, namespace=exact_namespace(request.namespace)))
        return self.cut(settled, request.cut_mark) if request.cut_mark else settled


def marks_of(request: Request, default_bits: int) -> list[str]:
    """In which ways the state that `request` leaves behind is approximate."""
    bits = default_bits if request.kv_bits is None else request.kv_bits
    packed = [] if bits == EXACT_BITS else [str(bits)]
    return [*packed, request.approximate.repair] if request.approximate else packed


def stored_namespace(request: Request) -> str:
    """Where the state of a settled request is stored as long as nothing was moved into it or cut out of it."""
    namespace = without_mark(request.namespace, request.cut_mark)
    return without_mark(namespace, request.approximate.repair) if request.approximate else namespace


def _possible(packs: frozenset[int]) -> str:
    return f"use {' or '.join(str(bits) for bits in sorted(packs, reverse=True))}"
