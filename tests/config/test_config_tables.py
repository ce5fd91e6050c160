"""What `[[hygiene]]`, `[mcp.servers.NAME]` and `[[warm]]` may say, and what is said about mistakes in them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from emberkeep.config.kinds import Lifetimes
from emberkeep.config.settings import Config, public_values
from emberkeep.config.sources import load_config
from emberkeep.config.tables import McpServer, WarmPrefix
from emberkeep.errors import ConfigError
from emberkeep.library.installation import declared_prefixes
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
from emberkeep.types.lineage import SHARED
from emberkeep.types.request import Message, Ttl


def load(text: str, folder: Path) -> Config:
    (folder / "emberkeep.toml").write_text(text)
    return load_config({"config": "emberkeep.toml"}, env={}, cwd=folder).config


# ── rules of prefix hygiene ──


def rules(text: str, folder: Path) -> tuple[HygieneRule, ...]:
    return load(text, folder).hygiene


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


# ── MCP servers ──


def servers(text: str, folder: Path) -> tuple[McpServer, ...]:
    return load(text, folder).mcp


def test_a_program_and_an_address_are_read(tmp_path):
    program, address = servers(
        """
        [mcp.servers.git]
        command = ["mcp-server-git", "--repository", "."]
        env = { TOKEN = "$TOKEN" }
        cwd = "work"
        timeout_s = 5
        trusted = true
        tools = ["git_log"]

        [mcp.servers.docs]
        url = "https://example.org/mcp/"
        headers = { Authorization = "Bearer $KEY" }
        """,
        tmp_path,
    )
    assert program == McpServer(
        "git",
        ("mcp-server-git", "--repository", "."),
        env={"TOKEN": "$TOKEN"},
        cwd=tmp_path / "work",
        timeout_s=5.0,
        trusted=True,
        tools=("git_log",),
    )
    assert address == McpServer("docs", url="https://example.org/mcp", headers={"Authorization": "Bearer $KEY"})


def test_some_tools_of_a_server_may_be_trusted(tmp_path):
    (server,) = servers('[mcp.servers.git]\ncommand = "x"\ntrusted = ["git_log"]\n', tmp_path)
    assert server.trusts("git_log") and not server.trusts("git_push")


def test_a_command_may_be_one_text(tmp_path):
    (server,) = servers("[mcp.servers.time]\ncommand = \"run 'a b' c\"\n", tmp_path)
    assert server.command == ("run", "a b", "c")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('comand = "x"', r"\[mcp\.servers\.x\] has no key 'comand': did you mean command\?"),
        ('command = "x"\nzebra = 1', r"has no key 'zebra': it has command, url"),
        ("command = 3", r"\[mcp\.servers\.x\] command must be a program"),
        ("command = []", r"command must be a program"),
        ('url = "ftp://x"', r"\[mcp\.servers\.x\] url must be an address that begins with http"),
        ('command = "x"\ntimeout_s = 0', r"timeout_s must be seconds"),
        ('command = "x"\ntrusted = "yes"', r"trusted must be true or false"),
        ('command = "x"\ntrusted = [3]', r"trusted must be true or false, or a list of tools' names"),
        ("trusted = true", r"\[mcp\.servers\.x\] needs either command"),
        ('command = "x"\nurl = "http://x"', r"\[mcp\.servers\.x\] needs either command"),
        ('command = "x"\nheaders = {A = "b"}', r"headers is not for such a server"),
        ('url = "http://x"\nenv = {A = "b"}', r"env is not for such a server"),
    ],
)
def test_a_mistake_is_named_with_its_table_and_key(tmp_path, table, said):
    with pytest.raises(ConfigError, match=said):
        servers(f"[mcp.servers.x]\n{table}\n", tmp_path)


@pytest.mark.parametrize("name", ["a__b", '"a b"', '"-a"', "a" * 33])
def test_a_name_that_could_not_begin_a_tools_name_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot have this name"):
        servers(f'[mcp.servers.{name}]\ncommand = "x"\n', tmp_path)


def test_other_tables_beside_servers_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\[mcp\] has no key 'server': did you mean servers\?"):
        servers('[mcp.server.x]\ncommand = "x"\n', tmp_path)
    with pytest.raises(ConfigError, match=r"\[mcp\.servers\] must hold one table"):
        servers("[mcp]\nservers = 3\n", tmp_path)


def test_values_of_variables_and_headers_are_never_shown(tmp_path):
    flags = {"mcp": {"servers": {"x": {"command": "x", "env": {"KEY": "canary-7"}}}}}
    config = load_config(flags, env={}, cwd=tmp_path).config
    shown = [repr(config), repr(config.mcp), str(public_values(config))]
    with pytest.raises(ConfigError) as caught:
        load_config({"mcp": {"servers": {"x": {"command": ["canary-7", 3]}}}}, env={}, cwd=tmp_path)
    assert not any("canary-7" in text for text in [*shown, str(caught.value)])


def test_a_remote_model_without_a_backend_is_told_so(tmp_path):
    with pytest.raises(ConfigError, match=r"\[backends\.big\] needs backend"):
        load_config({"backends": {"big": {"model": "m"}}}, env={}, cwd=tmp_path)


# ── prefixes to have ready ──


def prefixes(*given: object, cwd: Path) -> tuple[WarmPrefix, ...]:
    return load_config({"warm": list(given)}, env={}, cwd=cwd).config.warm


def from_file(text: str, folder: Path) -> tuple[WarmPrefix, ...]:
    return load(text, folder).warm


def test_a_text_is_a_system_message_and_so_is_a_files(tmp_path):
    (tmp_path / "rules.txt").write_text("Be brief.\n")
    assert prefixes("You are kind.", "rules.txt", cwd=tmp_path) == (
        WarmPrefix(system="You are kind."),
        WarmPrefix(system="Be brief.\n"),
    )


def test_a_text_too_long_for_a_path_is_a_text(tmp_path):
    (prefix,) = prefixes("word " * 5000, cwd=tmp_path)
    assert prefix.system == "word " * 5000


def test_a_json_file_has_messages_and_tools(tmp_path):
    content = {"messages": [{"role": "system", "content": "Be brief."}], "tools": [], "ttl": "long"}
    (tmp_path / "agent.json").write_text(json.dumps(content))
    (prefix,) = prefixes("agent.json", cwd=tmp_path)
    assert (prefix.messages, prefix.ttl) == (tuple(content["messages"]), Ttl.LONG)


def test_tables_of_the_file_are_read_and_their_files_stand_beside_it(tmp_path):
    (tmp_path / "rules.txt").write_text("Be brief.")
    listed = from_file(
        '[[warm]]\nfile = "rules.txt"\nttl = "extended"\n[[warm]]\nprompt = "Once upon a time"\n', tmp_path
    )
    assert listed == (WarmPrefix(system="Be brief.", ttl=Ttl.EXTENDED), WarmPrefix(prompt="Once upon a time"))


@pytest.mark.parametrize(
    "table",
    [
        'sistem = "x"',
        'system = "x"\nprompt = "y"',
        "system = 3",
        'ttl = "long"',
        'system = "x"\nttl = "forever"',
        'messages = "x"',
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path, table):
    with pytest.raises(ConfigError, match="warm"):
        from_file(f"[[warm]]\n{table}\n", tmp_path)


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "agent.json").write_text('{"massages": []}')
    with pytest.raises(ConfigError, match=r"agent\.json is not a prefix to warm"):
        prefixes("agent.json", cwd=tmp_path)
    with pytest.raises(ConfigError, match=r"Cannot read .*none\.txt"):
        from_file('[[warm]]\nfile = "none.txt"\n', tmp_path)


@pytest.mark.parametrize("missing", ["none.txt", "prompts/agent", "/nowhere/agent.json", "~/agent.md"])
def test_a_missing_file_is_not_taken_for_a_text(tmp_path, missing):
    with pytest.raises(ConfigError, match="There is no file"):
        prefixes(missing, cwd=tmp_path)


def test_declared_prefixes_are_shared_and_count_against_no_user(tmp_path):
    tool = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
    flags = {"warm": [{"system": "Be brief.", "ttl": "long"}, {"prompt": "Once"}, {"tools": [tool]}]}
    system, raw, tools = declared_prefixes(load_config(flags, env={}, cwd=tmp_path).config)
    assert {r.namespace for r in (system, raw, tools)} == {r.user for r in (system, raw, tools)} == {SHARED}
    assert all(request.execution.is_prefix for request in (system, raw, tools))
    assert (system.messages, system.ttl) == ((Message("system", "Be brief."),), Ttl.LONG)
    assert raw.prompt == "Once"
    assert [tool.name for tool in tools.tools] == ["find"]


def test_a_prefix_with_a_bad_message_is_refused_before_the_model_is_loaded(tmp_path):
    flags = {"warm": [{"messages": [{"role": "captain", "content": "x"}]}]}
    with pytest.raises(ConfigError, match="number 1 cannot be used: messages"):
        declared_prefixes(load_config(flags, env={}, cwd=tmp_path).config)


@pytest.mark.parametrize(("given", "settled"), [(0.1, 2), (-5, 2), (600, 600), (1e12, 365 * 86_400)])
def test_intervals_are_clamped_to_what_makes_sense(tmp_path, given, settled):
    config = load_config({"ttl": {"short": given}}, env={}, cwd=tmp_path).config
    assert config.ttl == Lifetimes(short=settled)
