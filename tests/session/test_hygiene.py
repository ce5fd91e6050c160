"""What rules of prefix hygiene do to requests, and what they leave alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emberkeep.chat.messages import with_moved
from emberkeep.session import hygiene as hygiene_module
from emberkeep.session.hygiene import Hygiene
from emberkeep.types.hygiene import BY_DEFAULT, TIMESTAMPS, HygieneAction, HygieneRule, HygieneWhere
from emberkeep.types.request import Breakpoint, Message, Request, Tool

HEADER = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"
RULES = "You are an agent.\nUse the tools that you have."


def chat(system: str, *more: Message, tools: tuple[Tool, ...] = (), namespace: str = "") -> Request:
    return Request(messages=(Message("system", system), *more), tools=tools, namespace=namespace)


def own(pattern: str, action: str, where: str = "system") -> Hygiene:
    return Hygiene([HygieneRule("own", pattern, HygieneWhere(where), HygieneAction(action))])


def systems(request: Request) -> list[str]:
    return [message.content for message in request.messages if message.role == "system"]


def test_what_no_rule_finds_is_the_very_same_request():
    request = chat(RULES, Message("user", "hey"))
    assert Hygiene(BY_DEFAULT).apply(request) is request


def test_a_billing_header_is_dropped_as_a_line():
    hygiene = Hygiene(BY_DEFAULT)
    one, two = (hygiene.apply(chat(f"{HEADER.format(cch)}\n{RULES}")) for cch in ("fa690", "65abc"))
    assert systems(one) == systems(two) == [RULES]
    assert one.execution.tidied.rules == ("billing-header",)


def test_a_billing_header_is_dropped_as_a_message():
    request = Request(
        messages=(Message("system", HEADER.format(1)), Message("system", RULES), Message("user", "x"))
    )
    assert systems(Hygiene(BY_DEFAULT).apply(request)) == [RULES]


def test_breakpoints_stay_where_they_were():
    header, rest = HEADER.format(1), "And be kind."
    joined = f"{header}\n{RULES}\n{rest}"
    marks = (Breakpoint(0), Breakpoint(1, len(joined) - len(rest)), Breakpoint(1), Breakpoint(2))
    request = replace(chat(joined, Message("user", "x")), breakpoints=marks)
    tidied = Hygiene(BY_DEFAULT).apply(request)
    assert tidied.breakpoints == (Breakpoint(0), Breakpoint(1, len(RULES) + 1), Breakpoint(1), Breakpoint(2))
    apart = (Message("system", header), Message("system", RULES), Message("user", "x"))
    marks = (Breakpoint(1), Breakpoint(2, 3), Breakpoint(3))
    tidied = Hygiene(BY_DEFAULT).apply(Request(messages=apart, breakpoints=marks))
    assert tidied.breakpoints == (Breakpoint(0), Breakpoint(1, 3), Breakpoint(2))


def test_a_request_never_loses_its_only_message():
    assert len(Hygiene(BY_DEFAULT).apply(chat(HEADER.format(1))).messages) == 1


def test_what_a_user_writes_is_not_taken_for_a_header():
    request = chat(RULES, Message("user", HEADER.format("fa690")))
    assert Hygiene(BY_DEFAULT).apply(request) is request


def test_tools_come_in_the_order_in_which_this_client_has_sent_them_first():
    a, b, c = Tool("a"), Tool("b", "old"), Tool("c")
    hygiene = Hygiene(BY_DEFAULT)
    assert hygiene.apply(chat(RULES, tools=(b, a, c))).tools == (b, a, c)
    shuffled = hygiene.apply(chat(RULES, tools=(c, replace(b, description="new"), a)))
    assert shuffled.tools == (replace(b, description="new"), a, c)
    assert shuffled.execution.tidied.rules == ("tool-order",)
    assert hygiene.apply(chat(RULES, tools=(c, b, a), namespace="another")).tools == (c, b, a)
    assert hygiene.apply(chat(RULES, tools=(c, a))).tools == (c, a)
    hygiene.forget({""})
    assert hygiene.apply(chat(RULES, tools=(c, b, a))).tools == (c, b, a)


def test_tools_of_the_same_name_are_left_as_they_are():
    tools = (Tool("a", "1"), Tool("a", "2"))
    assert Hygiene(BY_DEFAULT).apply(chat(RULES, tools=tools)).tools == tools


def test_a_line_with_the_time_moves_to_the_end_of_the_latest_message():
    hygiene = Hygiene([TIMESTAMPS])
    request = hygiene.apply(chat(f"It is 10:05 now.\n{RULES}", Message("user", "a"), Message("assistant", "b")))
    assert systems(request) == [RULES]
    assert request.execution.tidied.moved == "It is 10:05 now."
    seen = with_moved(request.messages, request.execution.tidied.moved)
    assert [message.content for message in seen] == [RULES, "a\n\nIt is 10:05 now.", "b"]


def test_applying_the_rules_twice_changes_nothing_more():
    hygiene = Hygiene([*BY_DEFAULT, TIMESTAMPS])
    once = hygiene.apply(chat(f"{HEADER.format(1)}\nIt is 10:05 now.\n{RULES}", Message("user", "a")))
    assert hygiene.apply(once) == once


def test_a_frozen_value_is_the_first_of_its_client():
    hygiene = own(r"run \d+", "freeze")
    assert systems(hygiene.apply(chat("This is run 7 of 9."))) == ["This is run 7 of 9."]
    second = hygiene.apply(chat("This is run 8 of 9."))
    assert systems(second) == ["This is run 7 of 9."]
    assert second.execution.tidied.rules == ("own",)
    assert systems(hygiene.apply(chat("This is run 8 of 9.", namespace="b"))) == ["This is run 8 of 9."]


def test_frozen_values_of_lines_that_look_alike_are_not_mixed_up():
    hygiene = own(r"\d+", "freeze")
    hygiene.apply(chat("- commit 1\n- commit 2"))
    assert systems(hygiene.apply(chat("- commit 3\n- commit 4"))) == ["- commit 1\n- commit 2"]


def test_a_character_of_the_client_is_no_frozen_value():
    hygiene = own(r"\d+", "freeze")
    hygiene.apply(chat("- \0 of 2"))
    assert systems(hygiene.apply(chat("- 3 of 4"))) == ["- 3 of 4"]


def test_asking_what_would_happen_freezes_nothing():
    hygiene = own(r"run \d+", "freeze")
    hygiene.apply(chat("This is run 6."), learn=False)
    hygiene.apply(chat("This is run 7."))
    assert systems(hygiene.apply(chat("This is run 8."))) == ["This is run 7."]


@pytest.mark.parametrize("action", ["move", "drop"])
def test_no_rule_takes_a_question_away(action):
    hygiene = own(r"^Ticket \d+.*$", action, "user")
    request = chat(RULES, Message("user", "a"), Message("assistant", "b"), Message("user", "Ticket 7: why?"))
    assert hygiene.apply(request) is request
    request = chat(RULES, Message("user", "Ticket 7: why?\n \nTicket 8: what?"))
    assert hygiene.apply(request) is request


def test_two_rules_together_take_no_question_away():
    rules = [HygieneRule(name, f"^{name}", HygieneWhere.USER) for name in ("now", "then")]
    hygiene = Hygiene(rules)
    once = hygiene.apply(chat(RULES, Message("user", "now what?\nthen what?")))
    assert (once.messages[-1].content, once.execution.tidied.moved) == ("then what?", "now what?")
    assert hygiene.apply(once) == once


def test_what_a_user_says_beside_its_question_is_moved():
    said = Message("user", "Time: 10:05\nWhy?"), Message("assistant", "So."), Message("user", "Time: 10:06\nHow?")
    request = own(r"^Time: ", "move", "user").apply(chat(RULES, *said))
    seen = with_moved(request.messages, request.execution.tidied.moved)
    assert [message.content for message in seen] == [RULES, "Why?", "So.", "How?\n\nTime: 10:05\nTime: 10:06"]


USER, SYSTEM, DEVELOPER = Message("user", "a"), Message("system", "b"), Message("developer", "c")


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ((USER, SYSTEM, DEVELOPER), 0),
        ((USER, Message("tool", "result"), SYSTEM, DEVELOPER), 1),
        ((SYSTEM, DEVELOPER), 1),
        ((Message("assistant", "I"),), None),
    ],
)
def test_what_is_moved_stands_in_the_latest_message_of_those_whose_it_may_be(messages, place):
    """The system's only where nobody else said anything, and never the model's."""
    expected = list(messages)
    if place is not None:
        expected[place] = replace(messages[place], content=f"{messages[place].content}\n\nmoved")
    assert with_moved(messages, "moved") == tuple(expected)
    assert with_moved(messages, "") == messages


def test_a_dropped_part_of_a_line_leaves_the_rest_of_it():
    assert systems(own(r" at \S+", "drop").apply(chat("Started at 10:05 today.\nGo."))) == ["Started today.\nGo."]


def test_descriptions_of_tools_and_their_parameters_are_looked_at():
    schema = {"type": "object", "properties": {"now": {"type": "string", "description": "now: 12"}}}
    tool = Tool("clock", "The time.\nnow: 11", schema)
    (found,) = own(r"^now: \d+", "drop", "tools").apply(chat(RULES, tools=(tool,))).tools
    assert found.description == "The time."
    assert found.parameters["properties"]["now"] == {"type": "string", "description": ""}


def test_a_line_too_long_to_search_is_left_alone():
    request = chat("now: 1" + "x" * 600)
    assert own(r"now: \d", "drop").apply(request) is request


def test_raw_prompts_are_left_alone():
    request = Request(prompt=HEADER.format(1))
    assert Hygiene(BY_DEFAULT).apply(request) is request


def test_a_rule_that_takes_too_long_leaves_the_rest_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(hygiene_module, "_LONGEST_S", -1.0)
    hygiene = own("now", "drop")
    request = chat("now\nthen")
    assert hygiene.apply(request) is request
    assert hygiene.apply(request) is request
    assert len(caplog.records) == 1 and "the hygiene rule own takes longer" in caplog.text
