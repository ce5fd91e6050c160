"""What `--warm` and `[[warm]]` may say, and what becomes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emberkeep.config.kinds import Lifetimes
from emberkeep.config.sources import load_config
from emberkeep.config.tables import WarmPrefix
from emberkeep.errors import ConfigError
from emberkeep.library.installation import declared_prefixes
from emberkeep.types.lineage import SHARED
from emberkeep.types.request import Message, Ttl


def prefixes(*given: object, cwd: Path) -> tuple[WarmPrefix, ...]:
    return load_config({"warm": list(given)}, env={}, cwd=cwd).config.warm


def from_file(text: str, folder: Path) -> tuple[WarmPrefix, ...]:
    path = folder / "emberkeep.toml"
    path.write_text(text)
    return load_config({"config": path}, env={}, cwd=folder).config.warm


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
