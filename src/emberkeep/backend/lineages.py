"""Which lineage a request has: what it asks for, what is configured, and what the engine can do."""

from __future__ import annotations

from dataclasses import dataclass, replace

from emberkeep.errors import ConfigError, InvalidField
from emberkeep.types import Approximation, Lineage, Request

_CANNOT_MOVE = "needs an engine that can move stored state: use --engine hf, or ask for exact answers."


@dataclass(frozen=True, slots=True)
class Lineages:
    default_bits: int
    """In which state is stored unless a request asks for something else."""
    packs: frozenset[int]
    """What the engine can do."""
    approximation_by_default: Approximation | None = None
    """What requests get that do not say whether state may be moved."""
    can_move: bool = False
    """The engine can."""
    exact: bool = False
    """Whatever is asked for, nothing is approximate."""
    can_splice: bool = False
    """The engine can take something out of its state."""

    def check(self) -> None:
        """Raises ConfigError unless the engine can do the default."""
        if self.exact:
            return
        if self.approximation_by_default is not None and not self.can_move:
            raise ConfigError(f"approximate = {self.approximation_by_default.repair} {_CANNOT_MOVE}")
        if self.default_bits not in self.packs:
            raise ConfigError(f"kv_bits {self.default_bits} is nothing for this model: {_possible(self.packs)}.")

    def of(self, request: Request) -> Lineage:
        """What `request` may reuse and may leave behind. Raises InvalidField for what the engine cannot do."""
        if request.lineage is not None:
            return request.lineage
        if self.exact:
            return Lineage(request.namespace)
        if request.kv_bits is not None and request.kv_bits not in self.packs:
            raise InvalidField("kv_bits", f"this model cannot do {request.kv_bits}: {_possible(self.packs)}.")
        bits = self.default_bits if request.kv_bits is None else request.kv_bits
        approximation = self.approximation(request)
        return Lineage(request.namespace, bits, approximation.repair if approximation else None)

    def approximation(self, request: Request) -> Approximation | None:
        """How state from other places may be reused for `request`. None: it may not.

        Prefixes are made for others, who may want them exact. Raises InvalidField for what the engine cannot do.
        """
        if self.exact or request.is_prefix or request.approximate is False:
            return None
        if request.approximate is not None and not self.can_move:
            raise InvalidField("approximate", _CANNOT_MOVE)
        return request.approximate or self.approximation_by_default

    def may_splice(self, request: Request) -> bool:
        """Where messages leave its context, its state may be spliced, and not be evaluated again."""
        return self.can_splice and not self.exact and request.approximate is not False

    def repacked(self, lineage: Lineage, bits: int) -> Lineage:
        """The same, stored in other bits."""
        return lineage if self.exact else replace(lineage, bits=bits)


def _possible(packs: frozenset[int]) -> str:
    return f"use {' or '.join(str(bits) for bits in sorted(packs, reverse=True))}"
