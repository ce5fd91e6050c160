"""Calls: whatever a tool or a model does, there is a result, and everything else goes on."""

from __future__ import annotations

import asyncio
import datetime
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from emberkeep.errors import ConfigError, ToolFailed
from emberkeep.tools import as_tool, tool
from emberkeep.tools.function import MOST_LEFT, Answered, ToolFunction
from emberkeep.tools.toolbox import ToolBox, ToolPolicy
from emberkeep.types.events import Caller, ToolOutcome
from emberkeep.types.request import ToolCall
from helpers.chance import examples
from helpers.tool_calls import box_of, called, refused, told, written


class Place(BaseModel):
    north: float


@dataclass
class Berth:
    place: Place
    day: datetime.date


def returning(value: Any) -> ToolFunction:
    @tool
    def give() -> Any:
        """Give it."""
        return value

    return as_tool(give)


def raising(error: BaseException) -> ToolFunction:
    @tool
    def fail() -> None:
        """Fail."""
        raise error

    return as_tool(fail)


def given_back(value: Any) -> str:
    return asyncio.run(told(box_of(returning(value)), "give"))


# ── values ──


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (b"bytes", "bytes"),
        (None, "Done."),
        ({"a": [1, 2.5, True, None, "é"]}, '{"a":[1,2.5,true,null,"é"]}'),
        (Berth(Place(north=1), datetime.date(2030, 1, 2)), '{"place":{"north":1.0},"day":"2030-01-02"}'),
        ({3}, "[3]"),
        ([float("nan"), float("-inf")], '["NaN","-Infinity"]'),
        ("half \ud800", "half ?"),
    ],
)
def test_a_text_stays_and_everything_else_becomes_json(value: Any, text: str) -> None:
    assert given_back(value) == text


def cyclic() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


def deep() -> list[Any]:
    items: list[Any] = []
    for _ in range(100_000):
        items = [items]
    return items


@pytest.mark.parametrize("value", [cyclic(), deep(), object(), {"a": b"\xff"}, count()])
def test_what_json_cannot_say_is_a_clear_error(value: Any) -> None:
    text = asyncio.run(refused(box_of(returning(value)), "give"))
    assert text.startswith("Error: What it returned cannot be written as JSON: ")
    assert "\n" not in text


def test_a_remark_is_for_the_person_who_watches() -> None:
    outcome = asyncio.run(called(box_of(returning(Answered({"a": 1}, "from far away"))), "give"))
    assert (outcome.text, outcome.remark) == ('{"a":1}', "from far away")


# ── errors ──


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ToolFailed("No berth is free."), "Error: No berth is free."),
        (ValueError("No such ship."), "Error: No such ship."),
        (KeyError("colour"), "Error: KeyError: 'colour'"),
        (ZeroDivisionError(), "Error: ZeroDivisionError"),
        (FileNotFoundError(2, "No such file", "a"), "Error: [Errno 2] No such file: 'a'"),
        (TimeoutError("the line is dead"), "Error: the line is dead"),
        (StopIteration(), "Error: It ended with StopIteration."),
        (SystemExit(3), "Error: It ended with SystemExit: 3."),
        (KeyboardInterrupt(), "Error: It ended with KeyboardInterrupt."),
        (Mute(), "Error: Mute"),
    ],
)
def test_what_a_tool_raises_is_its_result(error: BaseException, text: str) -> None:
    assert asyncio.run(refused(box_of(raising(error)), "fail")) == text


def test_a_tools_own_trouble_with_values_is_not_blamed_on_the_arguments() -> None:
    def look() -> Place:
        """Look."""
        return Place.model_validate({"north": "up"})

    text = asyncio.run(refused(box_of(look), "look"))
    assert text.startswith("Error: 1 validation error for Place") and "arguments" not in text


def test_a_coroutine_cannot_end_the_program_nor_cancel_its_caller() -> None:
    async def leave() -> None:
        """Leave."""
        raise SystemExit("enough")

    async def cancel() -> None:
        """Cancel."""
        raise asyncio.CancelledError

    box = box_of(leave, cancel)
    assert asyncio.run(refused(box, "leave")) == "Error: It ended with SystemExit: enough."
    assert asyncio.run(refused(box, "cancel")) == "Error: It cancelled itself."


def test_endless_recursion_is_a_result() -> None:
    def dig() -> None:
        """Dig."""
        dig()

    assert "recursion" in asyncio.run(refused(box_of(dig), "dig"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("{", "are not JSON"),
        ("[1]", "must be an object"),
        ('{"a": NaN}', "NaN is no number"),
        ("[" * 100_000, "are not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "are not JSON"),
    ],
)
def test_arguments_that_are_no_object_are_explained(arguments: str, reason: str) -> None:
    outcome = asyncio.run(box_of(returning(1)).run(ToolCall("1", "give", arguments), Caller()))
    assert outcome.failed and reason in outcome.text


def test_no_arguments_are_an_empty_object() -> None:
    assert asyncio.run(box_of(returning(1)).run(ToolCall("1", "give", ""), Caller())).text == "1"


def test_an_unknown_tool_is_answered_with_the_nearest_or_with_all() -> None:
    box = box_of(returning(1))
    assert asyncio.run(refused(box, "gives")) == "Error: There is no tool 'gives': did you mean give?"
    assert asyncio.run(refused(box, "zzz")) == "Error: There is no tool 'zzz': use give, more_output."


@as_tool
def MOOR(ship: str, place: Place | None = None) -> list[Any]:
    """Moor a ship."""
    return [ship, place]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@examples(150)
@given(
    st.sampled_from(["MOOR", "more_output", "other"]),
    st.one_of(JSON, st.fixed_dictionaries({}, optional={"ship": JSON, "place": JSON, "page": JSON})).map(
        json.dumps
    )
    | st.text(),
)
def test_whatever_a_model_writes_there_is_a_text_that_can_be_sent(name: str, arguments: str) -> None:
    outcome = asyncio.run(box_of(MOOR).run(ToolCall("1", name, arguments), Caller()))
    assert isinstance(outcome, ToolOutcome)
    assert outcome.text.encode()


# ── time ──


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Lets blocked tools go when the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_a_tool_that_hangs_is_not_waited_for(gate: threading.Event) -> None:
    def hang() -> None:
        """Hang."""
        gate.wait()

    async def elsewhere() -> str:
        box = box_of(hang, returning("free"), timeout_s=0.01)
        text = await refused(box, "hang")
        assert await told(box, "give") == "free"
        return text

    assert asyncio.run(elsewhere()) == "Error: hang took longer than 0.01 s: its result is no longer waited for."


def test_so_many_may_hang_and_no_more(gate: threading.Event) -> None:
    def hang() -> None:
        """Hang."""
        gate.wait()

    async def often() -> list[str]:
        box = box_of(hang, timeout_s=0.01)
        texts = [await refused(box, "hang") for _ in range(MOST_LEFT + 1)]
        before = {thread.name for thread in threading.enumerate()}
        assert "emberkeep-tool" in before
        return texts

    *_, before_last, last = asyncio.run(often())
    assert "took longer" in before_last
    assert "are still running" in last
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "emberkeep-tool":
            thread.join()
    assert asyncio.run(told(box_of(returning(1)), "give")) == "1"


@pytest.mark.slow
def test_a_tool_that_hangs_does_not_hold_up_the_exit() -> None:
    program = """
import asyncio, threading
from emberkeep.tools import as_tool, function
from emberkeep.tools.toolbox import ToolBox, ToolLimits, ToolPolicy
from emberkeep.types.events import Caller
from emberkeep.types.request import ToolCall

def hang() -> None:
    "Hang."
    threading.Event().wait()

async def stubborn() -> None:
    "Go on and on."
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

async def main():
    function._GRACE_S = 0.05
    box = ToolBox([as_tool(hang), as_tool(stubborn)], ToolPolicy(), limits=ToolLimits(0.05))
    for name in ("hang", "stubborn"):
        print((await box.run(ToolCall("1", name, "{}"), Caller())).failed)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\nTrue\n", "")


def test_a_coroutine_that_goes_on_when_it_is_cancelled_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("emberkeep.tools.function._GRACE_S", 0.01)
    seen: list[str] = []

    async def stubborn() -> None:
        """Go on and on."""
        try:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    seen.append("cancelled")
        finally:
            seen.append("closed")

    async def run() -> str:
        text = await refused(box_of(stubborn, timeout_s=0.01), "stubborn")
        while asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.sleep(0)
        return text

    assert "took longer" in asyncio.run(run())
    assert seen == ["cancelled", "closed"]


def test_a_coroutine_may_clean_up_when_its_time_is_over() -> None:
    seen: list[str] = []

    async def slow() -> None:
        """Take long."""
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("clean")

    assert "took longer" in asyncio.run(refused(box_of(slow, timeout_s=0.01), "slow"))
    assert seen == ["clean"]


def test_a_coroutine_may_have_time_limits_and_tasks_of_its_own() -> None:
    async def patient() -> list[str]:
        """Wait, but not forever."""
        seen = []
        with anyio.move_on_after(0.01):
            try:
                await asyncio.Event().wait()
            finally:
                with anyio.CancelScope(shield=True):
                    await asyncio.sleep(0)
                    seen.append("cleaned up")
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            seen.append("timed out")
        async with asyncio.TaskGroup() as group:
            task = group.create_task(asyncio.sleep(0, "both"))
        return [*seen, task.result()]

    assert asyncio.run(told(box_of(patient), "patient")) == '["cleaned up","timed out","both"]'


def test_cancelling_cancels_the_call() -> None:
    seen: list[str] = []

    async def slow() -> None:
        """Take long."""
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("cancelled")

    async def cancelled() -> None:
        task = asyncio.create_task(box_of(slow).run(written("slow"), Caller()))
        while not seen:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert seen == ["begun", "cancelled"]


def test_a_tool_has_a_time_limit_of_its_own() -> None:
    @tool(timeout_s=0.01)
    async def slow() -> None:
        """Take long."""
        await asyncio.Event().wait()

    assert "longer than 0.01 s" in asyncio.run(refused(box_of(slow, timeout_s=600), "slow"))


def test_the_time_it_took_is_told() -> None:
    assert asyncio.run(called(box_of(returning(1)), "give")).ms > 0


# ── long results ──


def test_a_long_result_is_read_page_by_page() -> None:
    text = "".join(f"{i:04}" for i in range(100))

    async def read() -> list[str]:
        box = box_of(returning(text), chars=150)
        return [
            await told(box, "give"),
            await told(box, "more_output", output="output-1", page=2),
            await told(box, "more_output", output="output-1", page="3"),
        ]

    pages = [page.rpartition("\n") for page in asyncio.run(read())]
    assert "".join(page for page, _, _ in pages) == text
    assert [note for _, _, note in pages] == [
        "[output-1, page 1 of 3, 400 characters in all: more_output gives page 2.]",
        "[output-1, page 2 of 3, 400 characters in all: more_output gives page 3.]",
        "[output-1, page 3 of 3, 400 characters in all.]",
    ]


def test_a_result_that_was_short_has_no_pages_and_need_not_be_made_again() -> None:
    told = asyncio.run(refused(box_of(returning("short")), "more_output", output="short", page=1))
    assert told == "Error: 'short' names no long result, what was shown is all of it: answer with it."


def test_pages_belong_to_the_user_they_were_made_for() -> None:
    async def read() -> str:
        box = box_of(returning("x" * 1000), chars=300)
        await told(box, "give", owner="alice")
        assert await told(box, "more_output", owner="alice", output="output-1", page=2)
        return await refused(box, "more_output", owner="bob", output="output-1", page=2)

    assert asyncio.run(read()) == "Error: There is no output 'output-1' any more: call the tool again."


@pytest.mark.parametrize("page", [0, 5, "two", -1, None, 1e9, "9" * 5000, "²"])
def test_a_page_that_is_not_there_says_which_are(page: Any) -> None:
    async def read() -> str:
        box = box_of(returning("x" * 1000), chars=300)
        await told(box, "give")
        return await refused(box, "more_output", output="output-1", page=page)

    assert asyncio.run(read()) == "Error: output-1 has pages 1 to 4."


def test_old_results_make_room_for_new_ones_and_huge_ones_are_cut() -> None:
    async def read() -> tuple[str, str, str]:
        box = box_of(returning("x" * (9 << 20)), chars=1 << 20)
        shown = [await told(box, "give") for _ in range(5)]
        last = await told(box, "more_output", output="output-5", page=9)
        return shown[0], last, await refused(box, "more_output", output="output-1", page=2)

    first, last, gone = asyncio.run(read())
    assert "page 1 of 9" in first
    assert f"[Cut: {1 << 20} more characters are lost.]" in last
    assert "no output 'output-1' any more" in gone


# ── which are used ──


def named(name: str, group: str = "user", *, dangerous: bool = False) -> ToolFunction:
    @tool(name=name, group=group, dangerous=dangerous)
    def use() -> None:
        """Use it."""

    return as_tool(use)


TOOLS = (
    named("read_file", "files"),
    named("delete_file", "files", dangerous=True),
    named("time__now", "mcp"),
    named("time__zone", "mcp", dangerous=True),
    named("berth"),
)


def names(policy: ToolPolicy, tools: Sequence[ToolFunction] = TOOLS) -> list[str]:
    return [function.name for function in ToolBox(tools, policy).functions()]


def test_dangerous_tools_are_used_where_a_user_can_be_asked() -> None:
    assert names(ToolPolicy(asks=True)) == ["delete_file", "read_file", "time__now", "time__zone", "berth"]
    assert names(ToolPolicy(asks=False)) == ["read_file", "time__now", "berth"]


@pytest.mark.parametrize(
    ("enabled", "expected"),
    [
        (("all",), ["delete_file", "read_file", "time__now", "time__zone", "berth"]),
        (("files",), ["delete_file", "read_file"]),
        (("delete_file", "berth"), ["delete_file", "berth"]),
        (("time",), ["time__now", "time__zone"]),
        (("*_file",), ["delete_file", "read_file"]),
    ],
)
def test_tools_are_enabled_by_name_group_server_and_pattern(enabled: tuple[str, ...], expected: list[str]) -> None:
    assert names(ToolPolicy(enabled)) == expected


def test_disabling_counts_for_more_than_enabling() -> None:
    assert names(ToolPolicy(("all",), ("files", "time__z*"))) == ["time__now", "berth"]


def test_a_name_that_fits_nothing_is_an_error_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"There is no tool or group .file.: did you mean files\?"):
        ToolPolicy(("file",)).check(TOOLS)
    with pytest.raises(ConfigError, match="`emberkeep tools list` shows them"):
        ToolPolicy((), ("zzzzzz",)).check(TOOLS)
    ToolPolicy(("all", "git", "git__log"), ("files", "re*")).check(TOOLS, later=["git"])


def test_a_tool_that_is_off_cannot_be_called_but_is_known() -> None:
    box = ToolBox(TOOLS, ToolPolicy((), ("berth",)))
    assert not box.is_ours("berth")
    assert asyncio.run(refused(box, "berth")).startswith("Error: There is no tool 'berth'")
    assert "berth" in [function.name for function in box.known()]


def test_definitions_come_in_the_same_order_whatever_order_they_were_given_in() -> None:
    there, back = (ToolBox(tools, ToolPolicy()).definitions for tools in (TOOLS, TOOLS[::-1]))
    assert there == back
    assert there[-1].name == "more_output"
    assert ToolBox([], ToolPolicy()).definitions == ()


class Server:
    """Tools that come when it has started, and one that failed."""

    def __init__(self) -> None:
        self._found: list[ToolFunction] = []
        self.is_closed = False

    async def start(self) -> None:
        self._found = [named("late"), returning("never")]

    def functions(self) -> Sequence[ToolFunction]:
        return self._found

    def withdrawn(self, name: str) -> str | None:
        return "old changed since you approved it." if name == "old" else None

    async def close(self) -> None:
        self.is_closed = True
        raise OSError("it was gone already")


def test_a_tool_that_was_withdrawn_says_why() -> None:
    box = ToolBox([returning("ours")], ToolPolicy(), sources=[Server()])
    outcome = asyncio.run(box.run(ToolCall("1", "old", "{}"), Caller()))
    assert outcome.failed
    assert "changed since you approved it" in outcome.text


def test_tools_of_servers_come_later_and_never_in_place_of_ours() -> None:
    async def use() -> tuple[list[str], str]:
        server = Server()
        box = ToolBox([returning("ours")], ToolPolicy(), sources=[server])
        assert [function.name for function in box.functions()] == ["give"]
        await box.start()
        text = await told(box, "give")
        await box.close()
        assert server.is_closed
        return [function.name for function in box.functions()], text

    assert asyncio.run(use()) == (["give", "late"], "ours")


def test_it_is_known_what_may_run_beside_others() -> None:
    @tool(parallel=False)
    def alone() -> None:
        """Alone."""

    box = box_of(alone, returning(1))
    assert [box.may_run_beside(name) for name in ("alone", "give")] == [False, True]
