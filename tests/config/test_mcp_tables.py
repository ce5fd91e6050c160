"""What `[mcp.servers.NAME]` may say, and what is said about mistakes in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from emberkeep.config.settings import public_values
from emberkeep.config.sources import load_config
from emberkeep.config.tables import McpServer
from emberkeep.errors import ConfigError


def servers(text: str, folder: Path) -> tuple[McpServer, ...]:
    (folder / "emberkeep.toml").write_text(text)
    return load_config({"config": "emberkeep.toml"}, env={}, cwd=folder).config.mcp


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
