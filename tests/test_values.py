"""Dataclasses that are defined quickly are as those of the standard library are."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, field, fields, replace
from typing import Any, ClassVar

import pytest

from emberkeep.values import dataclass

made_lists = list[list[int]]()


def new_list() -> list[int]:
    made_lists.append([])
    return made_lists[-1]


@dataclass(frozen=True, slots=True)
class Point:
    """Where something is."""

    x: int
    y: int = 0
    tags: list[int] = field(default_factory=list, compare=False)
    origin: ClassVar[int] = 7

    def moved(self) -> Point:
        return replace(self, x=self.x + 1)


@dataclass(frozen=True, slots=True)
class Named(Point):
    name: str = field(default="", repr=False)
    label: str = field(default="none", init=False)


@dataclass(slots=True)
class Counter:
    count: int = 0
    seen: list[int] = field(default_factory=new_list)
    twice: int = field(init=False)

    def __post_init__(self) -> None:
        self.twice = 2 * self.count


@dataclass(frozen=True)
class Alone:
    value: Any


def test_fields_are_given_by_place_and_by_name() -> None:
    assert (Point(1, 2).x, Point(y=2, x=1).y, Point(1).tags, Point.origin) == (1, 2, [], 7)
    assert Named(1, name="a").label == "none"
    with pytest.raises(TypeError, match=r"Point\.__init__\(\) missing 1 required positional argument: 'x'"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        Point(1, z=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes from 2 to 4 positional arguments but 5 were given"):
        Point(1, 2, [], 3)  # type: ignore[call-arg]


def test_each_instance_gets_a_value_of_its_own_from_a_factory() -> None:
    before = len(made_lists)
    first, second = Counter(), Counter(1)
    assert first.seen is not second.seen
    assert len(made_lists) == before + 2
    assert (first.twice, second.twice) == (0, 2)


def test_equal_ones_have_equal_values_and_the_same_class() -> None:
    assert Point(1, 2) == Point(1, 2, [5])
    assert Point(1, 2) != Point(1, 3)
    assert Point(1) != Named(1)
    assert Point(1) != (1, 0)
    assert Counter(1) == Counter(1)
    assert len({Point(1), Point(1), Point(2)}) == 2
    with pytest.raises(TypeError, match="unhashable"):
        hash(Counter())


def test_one_field_that_compares_in_its_own_way_is_compared_as_in_a_tuple() -> None:
    nan = float("nan")
    assert Alone(nan) == Alone(nan)
    assert hash(Alone(1)) == hash(Alone(1.0))


def test_frozen_ones_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        Point(1).x = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'x'"):
        del Point(1).x
    with pytest.raises(AttributeError):
        Counter().other = 1  # type: ignore[attr-defined]

    class Wider(Point):
        pass

    wider = Wider(1)
    wider.other = 1  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        wider.x = 2  # type: ignore[misc]


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("value", [Point(1, 2, [3]), Named(1, name="n"), Counter(3, [4]), Alone(5)])
def test_copies_are_equal(value: Any, again: Callable[[Any], Any]) -> None:
    assert again(value) == value
    assert asdict(again(value)) == asdict(value)


def test_the_tools_of_the_standard_library_work_with_them() -> None:
    assert Point(1).moved() == Point(2)
    assert asdict(Named(1, name="n")) == {"x": 1, "y": 0, "tags": [], "name": "n", "label": "none"}
    assert [each.name for each in fields(Named)] == ["x", "y", "tags", "name", "label"]
    match Point(3, 4):
        case Point(x, y):
            assert (x, y) == (3, 4)


def test_they_show_their_values() -> None:
    assert repr(Named(1, name="secret")) == "Named(x=1, y=0, tags=[], label='none')"
    inner = Alone([])
    inner.value.append(inner)
    assert repr(inner) == "Alone(value=[...])"


def test_what_a_class_has_itself_stays() -> None:
    @dataclass(frozen=True, slots=True)
    class Own:
        x: int

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 5

        def __repr__(self) -> str:
            return "own"

    assert (Own(1) == Own(2), hash(Own(1)), repr(Own(1)), Own.__doc__) == (True, 5, "own", None)

    @dataclass(eq=False, slots=True)
    class Itself:
        x: int = 0

    assert Itself() != Itself()
    assert len({Itself(), Itself()}) == 2


def test_a_name_can_be_required() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Asked:
        b: int = 1
        a: int

    assert Asked(a=2).b == 1
    with pytest.raises(TypeError):
        Asked(2)  # type: ignore[call-arg, misc]


def test_options_that_are_rare_are_those_of_the_standard_library() -> None:
    @dataclass(order=True)
    class Ordered:
        x: int

    assert Ordered(1) < Ordered(2)


@dataclasses.dataclass(frozen=True, slots=True)
class StandardPoint:
    x: int
    y: int = 0


@dataclass(frozen=True, slots=True)
class QuickPoint:
    x: int
    y: int = 0


def test_those_of_the_standard_library_extend_them_and_are_extended() -> None:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Wider(QuickPoint):
        z: int = 0

    @dataclass(frozen=True, slots=True)
    class Wide(StandardPoint):
        z: int = 0

    assert (Wider(1, 2, 3).z, Wide(1, 2, 3).z, Wide(1) == Wide(1)) == (3, 3, True)
    with pytest.raises(FrozenInstanceError):
        Wide(1).z = 2  # type: ignore[misc]


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_ones_and_others_do_not_extend_each_other(frozen: bool) -> None:
    with pytest.raises(TypeError, match="cannot inherit"):

        @dataclass(frozen=not frozen)
        class Wider(dataclass(frozen=frozen)(type("Narrow", (), {"__annotations__": {"x": "int"}}))):  # type: ignore[misc]
            y: int


def test_hashes_and_texts_are_those_of_the_standard_library() -> None:
    assert hash(QuickPoint(1, 2)) == hash(StandardPoint(1, 2))
    assert repr(QuickPoint(1, 2)) == repr(StandardPoint(1, 2)).replace("Standard", "Quick")
    assert QuickPoint.__match_args__ == StandardPoint.__match_args__
