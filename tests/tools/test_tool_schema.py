"""What a model is told of a function, and what the function gets of what the model wrote."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from emberkeep import tool
from emberkeep.errors import ConfigError
from emberkeep.tools import as_tool
from emberkeep.tools.function import tools_of
from emberkeep.types.events import Caller
from emberkeep.types.request import Json
from helpers.tool_calls import box_of, refused, told


class Sail(Enum):
    MAIN = "main"
    JIB = "jib"


class Place(BaseModel):
    north: float
    east: float = 0.0


class Crew(BaseModel):
    name: str
    title: str = "sailor"
    under: list[Crew] = []


@dataclass
class Berth:
    place: Place
    metres: int = 20


class Flag(TypedDict, total=False):
    colour: str


def properties(function: Callable[..., Any]) -> dict[str, Json]:
    return dict(as_tool(function).definition.parameters["properties"])


def ran(function: Callable[..., Any], **arguments: Json) -> str:
    return asyncio.run(told(box_of(function), as_tool(function).name, **arguments))


def failed(function: Callable[..., Any], **arguments: Json) -> str:
    return asyncio.run(refused(box_of(function), as_tool(function).name, **arguments))


# ── types ──


def test_plain_types_defaults_and_descriptions_are_told() -> None:
    def moor(ship: str, metres: Annotated[int, Field(ge=1, description="Its length.")] = 20) -> str:
        """Moor a ship."""
        return f"{ship} {metres}"

    made = as_tool(moor).definition
    assert (made.name, made.description) == ("moor", "Moor a ship.")
    assert made.parameters == {
        "type": "object",
        "properties": {
            "ship": {"type": "string"},
            "metres": {"type": "integer", "minimum": 1, "default": 20, "description": "Its length."},
        },
        "required": ["ship"],
        "additionalProperties": False,
    }


def test_values_have_the_types_that_the_function_names() -> None:
    def set_sail(sail: Sail, how: Literal["fast", "slow"], place: Place, berth: Berth, flag: Flag) -> str:
        """Set a sail."""
        return repr((sail, how, place, berth, flag))

    shown = ran(
        set_sail,
        sail="jib",
        how="fast",
        place={"north": 1},
        berth={"place": {"north": 2, "east": 3}},
        flag={"colour": "red"},
    )
    assert shown == repr(
        (Sail.JIB, "fast", Place(north=1), Berth(Place(north=2, east=3)), {"colour": "red"}),
    )


def test_a_union_keeps_what_was_given() -> None:
    def look(depth: int | str | None = None) -> str:
        """Look."""
        return repr(depth)

    assert [ran(look, depth=value) for value in (3, "deep", None)] == ["3", "'deep'", "None"]


def test_enumerations_and_models_stand_where_they_are_used() -> None:
    def set_sail(sail: Sail, places: list[Place]) -> None:
        """Set a sail."""

    told_ = properties(set_sail)
    assert told_["sail"] == {"type": "string", "enum": ["main", "jib"]}
    assert told_["places"]["items"]["properties"]["east"] == {"type": "number", "default": 0.0}
    assert "$defs" not in as_tool(set_sail).definition.parameters


def test_a_model_of_itself_stays_a_reference() -> None:
    def hire(crew: Crew) -> str:
        """Hire a crew."""
        return crew.under[0].name

    schema = as_tool(hire).definition.parameters
    assert schema["properties"]["crew"] == {"$ref": "#/$defs/Crew"}
    assert schema["$defs"]["Crew"]["properties"]["title"] == {"type": "string", "default": "sailor"}
    assert ran(hire, crew={"name": "a", "under": [{"name": "b"}]}) == "b"


def test_only_generated_titles_are_left_out() -> None:
    def name(title: str, extra: dict[str, str] = {"title": "Dr"}) -> None:  # noqa: B006
        """Name a person."""

    told_ = properties(name)
    assert told_["title"] == {"type": "string"}
    assert told_["extra"]["default"] == {"title": "Dr"}


@pytest.mark.parametrize("name", ["schema", "copy", "json", "model_config", "_hidden", "self_", "from_"])
def test_a_parameter_may_have_any_name(name: str) -> None:
    made: dict[str, Any] = {}
    exec(f"def use({name}: int) -> int:\n  'Use it.'\n  return {name}", made)
    assert list(properties(made["use"])) == [name]
    assert ran(made["use"], **{name: 7}) == "7"


def test_pydantics_own_way_to_write_a_default_works() -> None:
    def moor(metres: int = Field(20, description="Its length.", ge=1)) -> int:
        """Moor a ship."""
        return metres

    assert properties(moor)["metres"] == {
        "type": "integer",
        "default": 20,
        "minimum": 1,
        "description": "Its length.",
    }
    assert ran(moor) == "20"


# ── what a function is ──


def test_methods_coroutines_and_decorated_functions_are_tools() -> None:
    class Harbour:
        def __init__(self, name: str) -> None:
            self._name = name

        @tool(group="harbour", dangerous=True, parallel=False, timeout_s=3)
        def berth(self, ship: str) -> str:
            """Find a berth."""
            return f"{ship} in {self._name}"

        @tool(name="tide")
        async def tide_of_today(self) -> float:
            """The tide."""
            return 1.5

        def private(self) -> str:
            return ""

    class Marina(Harbour):
        pass

    berth, tide = tools_of(Marina("Lorient"))
    assert (berth.name, berth.group, berth.is_dangerous, berth.runs_beside, berth.timeout_s) == (
        "berth",
        "harbour",
        True,
        False,
        3,
    )
    assert (tide.name, tide.group, tide.is_dangerous) == ("tide", "user", False)
    assert asyncio.run(told(box_of(berth, tide), "berth", ship="Marigold")) == "Marigold in Lorient"
    assert asyncio.run(told(box_of(berth, tide), "tide")) == "1.5"


def test_a_decorator_may_hide_a_coroutine() -> None:
    def logged(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    @logged
    async def double(number: int) -> int:
        """Double it."""
        return 2 * number

    assert ran(double, number=4) == "8"


def test_a_marked_function_is_still_a_function() -> None:
    @tool
    def double(number: int) -> int:
        """Double it."""
        return 2 * number

    assert double(4) == 8


def test_who_calls_is_not_the_models_to_say() -> None:
    def whose(caller: Caller) -> str:
        """Who it is."""
        return caller.owner

    assert properties(whose) == {}
    assert asyncio.run(told(box_of(whose), "whose", owner="alice")) == "alice"
    assert "there is no caller" in failed(whose, caller={"owner": "bob"})


# ── docstrings ──


def google(ship: str, metres: int = 3) -> None:
    """Find a berth
    for a ship.

    Only by day.

    Args:
        ship (str): Its name,
            as painted: on the bow.
        metres: Its length.

    Returns:
        Nothing: it is done.
    """


def numpy(ship: str, metres: int = 3) -> None:
    """Find a berth for a ship.

    Only by day.

    Parameters
    ----------
    ship : str
        Its name,
        as painted: on the bow.
    metres : int, optional
        Its length.

    Returns
    -------
    None
    """


def sphinx(ship: str, metres: int = 3) -> None:
    """Find a berth for a ship.

    Only by day.

    :param ship: Its name,
        as painted: on the bow.
    :param int metres: Its length.
    :returns: nothing
    """


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_docstrings_describe_parameters(function: Callable[..., Any]) -> None:
    assert as_tool(function).definition.description == "Find a berth for a ship. Only by day."
    assert properties(function)["ship"]["description"] == "Its name, as painted: on the bow."
    assert properties(function)["metres"]["description"] == "Its length."


def test_what_a_type_says_of_itself_counts_for_more_than_the_docstring() -> None:
    def moor(ship: Annotated[str, Field(description="Hers.")]) -> None:
        """Moor.

        Args:
            ship: Its.
        """

    assert properties(moor)["ship"]["description"] == "Hers."


# ── functions that cannot be tools ──


def test_what_cannot_be_a_tool_says_what_to_change() -> None:
    def no_words(ship: str) -> None: ...

    def no_type(ship) -> None:  # type: ignore[no-untyped-def]
        """Moor."""

    def any_number(*ships: str) -> None:
        """Moor."""

    def no_json(ship: Callable[[], None]) -> None:
        """Moor."""

    def endless(metres: float = math.inf) -> None:
        """Moor."""

    def unknown(ship: Nothing) -> None:  # type: ignore[name-defined]  # noqa: F821
        """Moor."""

    reasons = {
        no_words: "has no docstring",
        no_type: "give it a type",
        any_number: "give each of its parameters a name",
        no_json: "JSON cannot say",
        endless: "JSON cannot say",
        unknown: "'Nothing' is not defined",
        tool(lambda: None): "cannot be a tool's name",
        tool(google, name="two words"): "cannot be a tool's name",
        Place: "is no function",
        functools.partial(google, "a"): "is no function",
    }
    for function, reason in reasons.items():
        with pytest.raises(ConfigError, match=reason) as caught:
            as_tool(function)
        assert "\n" not in str(caught.value)
    del google._emberkeep_tool  # type: ignore[attr-defined]


# ── what a model writes ──


def moor(ship: str, metres: int = 20, place: Place | None = None) -> str:
    """Moor a ship."""
    return f"{ship} {metres} {place}"


def test_wrong_arguments_are_one_sentence_that_helps() -> None:
    assert failed(moor) == "Error: The arguments of moor do not fit: ship is missing."
    assert failed(moor, ship="a", meters=3) == (
        "Error: The arguments of moor do not fit: there is no meters (did you mean metres?)."
    )
    assert "there is no colour (it takes ship, metres, place)" in failed(moor, ship="a", colour=3)
    assert "metres: Input should be a valid integer" in failed(moor, ship="a", metres="long")
    assert "place.north: Input should be a valid number" in failed(moor, ship="a", place={"north": "up"})


def test_numbers_in_quotes_are_numbers() -> None:
    assert ran(moor, ship="a", metres="30") == "a 30 None"


def test_null_is_what_was_left_out() -> None:
    assert ran(moor, ship="a", metres=None) == "a 20 None"
    assert "ship: Input should be a valid string" in failed(moor, ship=None)


def test_paths_and_dates_come_as_such() -> None:
    def size(path: Path) -> str:
        """Its size."""
        return path.suffix

    assert json.loads(json.dumps(properties(size)))["path"] == {"type": "string", "format": "path"}
    assert ran(size, path="a/b.txt") == ".txt"
