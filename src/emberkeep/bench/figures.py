"""Numbers that were measured more than once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil
from statistics import median, stdev

from emberkeep.types.request import Json
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class Series:
    """Samples of one quantity in the order they were taken; never empty."""

    samples: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def low(self) -> float:
        return min(self.samples)

    @property
    def high(self) -> float:
        return max(self.samples)

    def json(self) -> dict[str, Json]:
        return {
            "median": self.median,
            "low": self.low,
            "high": self.high,
            "unit": self.unit,
            "samples": list(self.samples),
        }


def series(samples: Iterable[float], unit: str) -> Series:
    return Series(tuple(samples), unit)


def ratios(over: Series, under: Series, unit: str = "×") -> Series:
    """Pair by pair, for samples that were taken side by side."""
    return series((a / b for a, b in zip(over.samples, under.samples, strict=True)), unit)


def speedup(reference: Series, faster: Series) -> Series:
    """How many times faster each sample is than the reference's median: the two may differ in number."""
    return series((reference.median / sample for sample in faster.samples), "×")


def overhead(product: Series, bare: Series) -> Series:
    """What the product adds to the bare work, in percent, pair by pair."""
    return series((100 * (ratio - 1) for ratio in ratios(product, bare).samples), "%")


def standard_error(samples: Sequence[float]) -> float:
    """Of their mean; 0 for a single one."""
    return stdev(samples) / len(samples) ** 0.5 if len(samples) > 1 else 0.0


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` of them do not exceed."""
    ordered = sorted(samples)
    return ordered[max(ceil(len(ordered) * percent / 100), 1) - 1]
