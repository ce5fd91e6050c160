"""What `[[hygiene]]` may say, and what is said about mistakes in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emberkeep.config.settings import public_values
from emberkeep.config.sources import load_config
from emberkeep.errors import ConfigError
from emberkeep.types.hygiene import (
    BILLING_HEADER,
    BUILT_IN,
    LONGEST_LINE,
    TIMESTAMPS,
    TOOL_ORDER,
    HygieneAction,
    HygieneRule,
    HygieneWhere,
    check_pattern,
    rules_in_use,
)


def rules(text: str, folder: Path) -> tuple[HygieneRule, ...]:
    (folder / "emberkeep.toml").write_text(text)
    return load_config({"config": "emberkeep.toml"}, env={}, cwd=folder).config.hygiene


def test_a_rule_of_ones_own_is_read(tmp_path):
    (rule,) = rules(
        """
        [[hygiene]]
        name = "build"
        where = "tools"
        pattern = '^Build \\d+$'
        action = "freeze"
        """,
        tmp_path,
    )
    assert rule == HygieneRule("build", r"^Build \d+$", HygieneWhere.TOOLS, HygieneAction.FREEZE)


def test_without_more_than_a_pattern_lines_move_out_of_the_system_prompt(tmp_path):
    (rule,) = rules("[[hygiene]]\nname = \"build\"\npattern = 'Build'\n", tmp_path)
    assert (rule.where, rule.action) == (HygieneWhere.SYSTEM, HygieneAction.MOVE)


def test_the_name_of_a_rule_that_exists_switches_it_on(tmp_path):
    (rule,) = rules('[[hygiene]]\nname = "timestamps"\n', tmp_path)
    assert rule == TIMESTAMPS
    assert rules_in_use([rule]) == (BILLING_HEADER, TOOL_ORDER, TIMESTAMPS)


def test_a_rule_that_is_on_can_be_switched_off_or_changed(tmp_path):
    off, frozen = rules(
        '[[hygiene]]\nname = "tool-order"\naction = "off"\n'
        '[[hygiene]]\nname = "billing-header"\naction = "freeze"\n',
        tmp_path,
    )
    (rule,) = rules_in_use([off, frozen])
    assert (rule.name, rule.pattern, rule.action) == ("billing-header", BILLING_HEADER.pattern, "freeze")


def test_they_are_shown(tmp_path):
    (tmp_path / "emberkeep.toml").write_text('[[hygiene]]\nname = "ids"\n')
    shown = public_values(load_config({"config": "emberkeep.toml"}, env={}, cwd=tmp_path).config)["hygiene"]
    assert shown[0]["name"] == "ids" and shown[0]["action"] == "move"


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('name = "x"', "rule x needs a pattern, or the name of a rule that exists: billing-header, tool-order"),
        ("pattern = 'x'", "needs a name"),
        ('name = "x"\npatern = "y"', r"has no key 'patern': did you mean pattern\?"),
        ("name = \"x\"\npattern = '('", "no regular expression"),
        ("name = \"x\"\npattern = '(a+)+'", "repeats a group, and might search for ever"),
        ("name = \"x\"\npattern = '(a|a)*b'", "repeats a group"),
        ("name = \"x\"\npattern = '(ab?){3}'", "repeats a group"),
        ("name = \"x\"\npattern = 'a*a*a*b'", "too many repetitions"),
        ('name = "x"\npattern = \'x\'\nwhere = "body"', "where must be one of system, user, tools"),
        ('name = "x"\npattern = \'x\'\naction = "cut"', "action must be one of move, freeze, drop, off"),
        ('name = "tool-order"\naction = "move"', "can only freeze the order of tools, or be off"),
        ("name = \"a b\"\npattern = 'x'", "name must be"),
        ("name = \"x\"\npattern = 'x'\n[[hygiene]]\nname = \"x\"\npattern = 'y'", "Two .* rules are called x"),
    ],
)
def test_mistakes_are_named(table, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        rules(f"[[hygiene]]\n{table}\n", tmp_path)


def test_something_else_than_tables_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a list of tables"):
        rules('hygiene = "timestamps"\n', tmp_path)


@pytest.mark.parametrize(
    "pattern",
    [
        r"^x-header:.*$",
        r"[({*+]+",
        r"\(\d+\) at \S+",
        r"a{,2}b{3}c{1,4}?",
        r"(?:on|at) \d\d?",
        r"x{",
        r"[]a]*",
        "a+?",
    ],
)
def test_patterns_that_end_are_accepted(pattern):
    check_pattern(pattern)


def test_what_is_accepted_ends_on_the_worst_line():
    pattern = re.compile(r"\w*\w*!")
    check_pattern(pattern.pattern)
    assert pattern.search("a" * LONGEST_LINE) is None


@pytest.mark.parametrize(
    ("name", "text", "is_found"),
    [
        ("timestamps", "It is 2026-11-16T21:30:22Z.", True),
        ("timestamps", "Today's date is Monday, November 16, 2026", True),
        ("timestamps", "Time: 9:05 PM", True),
        ("timestamps", "16 Nov 2026", True),
        ("timestamps", "epoch 1763328622", True),
        ("timestamps", "Use version 1.2.3 of Python 3.11, and 100 lines at most.", False),
        ("ids", "Session: 3f2504e0-4f89-11d3-9a0c-0305e82c3301", True),
        ("ids", "request req_01HXYZabc9 came", True),
        ("ids", "Call the function parse_request with an id.", False),
        ("billing-header", "x-anthropic-billing-header: cc_version=2.1.37.0d9; cch=fa690;", True),
        ("billing-header", "The header x-anthropic-billing-header: is sent by some clients.", False),
    ],
)
def test_what_the_rules_that_exist_find(name, text, is_found):
    assert (re.search(BUILT_IN[name].pattern, text) is not None) == is_found
