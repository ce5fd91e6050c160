"""Facts that nobody can guess, each with the question that asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

_NAMES = (
    *("Adara", "Belmin", "Corvo", "Dagny", "Elswin", "Farren", "Gisela", "Hollis", "Ivarin", "Jorun", "Kerrin"),
    *("Lomax", "Maelis", "Nerida", "Osric", "Perrin", "Quilla", "Rowena", "Sorrel", "Tamsin"),
)
_THINGS = ("boat", "horse", "garden", "violin", "cottage", "bakery", "parrot", "sword", "tavern", "telescope")
_FIRST = ("amber", "cobalt", "crimson", "dusty", "frozen", "gilded", "hollow", "ivory", "silent", "velvet")
_SECOND = ("badger", "comet", "falcon", "glacier", "heron", "lantern", "meadow", "orchid", "raven", "thistle")


@dataclass(frozen=True, slots=True)
class Fact:
    sentence: str
    question: str
    value: str


def made_up_facts(count: int) -> list[Fact]:
    """At most a hundred. Names and things come again, but never together; values do not."""
    random = Random(count)
    owned = random.sample([(name, thing) for name in _NAMES for thing in _THINGS], count)
    values = random.sample([f"{first}-{second}" for first in _FIRST for second in _SECOND], count)
    return [
        Fact(f"The {thing} of {name} is called {value}.", f"What is the {thing} of {name} called?", value)
        for (name, thing), value in zip(owned, values, strict=True)
    ]
