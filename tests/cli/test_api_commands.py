"""`emberkeep api`: models that run somewhere else."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from typer.testing import Result

from emberkeep.cli.api import QUESTION, app
from emberkeep.errors import ConfigError, EmberkeepError, RemoteDown, RemoteRefused
from helpers.commands import Commands
from helpers.vendors.anthropic_server import KEY, MODELS, AnthropicServer, failed, said

commands = Commands(app)
run, ok, refused = commands.run, commands.ok, commands.refused

CLAUDE = ("add", "claude", "anthropic", "--model", MODELS[0])


@pytest.fixture(autouse=True)
def no_keys(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.endswith("_API_KEY")]:
        monkeypatch.delenv(name)


def result_of_testing(server: AnthropicServer) -> Result:
    """`api test` of a model that this server serves."""

    async def serve() -> Result:
        async with server:
            ok(*CLAUDE, "--base-url", server.url)
            return await asyncio.to_thread(run, "test", "claude")

    return asyncio.run(serve())


def test_nothing_is_there_at_first() -> None:
    assert "api add" in ok("list")
    assert json.loads(ok("list", "--json")) == []


def test_a_model_that_was_added_is_listed_until_it_is_removed() -> None:
    assert "api test claude" in ok(*CLAUDE, "--max-tokens", "100", "--description", "Good at prose.")
    (row,) = json.loads(ok("list", "--json"))
    assert (row["name"], row["backend"], row["model"], row["max_tokens"]) == (
        "claude",
        "anthropic",
        MODELS[0],
        100,
    )
    assert "Good at prose." in ok("list")
    ok("remove", "claude")
    assert json.loads(ok("list", "--json")) == []


def test_a_list_says_whether_a_key_is_set_and_never_which(monkeypatch: pytest.MonkeyPatch) -> None:
    ok(*CLAUDE)
    ok("add", "here", "ollama")
    listed = ok("list")
    assert "ANTHROPIC_API_KEY is not set" in listed and "none needed" in listed
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    assert "ANTHROPIC_API_KEY is set" in ok("list")
    assert KEY not in ok("list") + ok("list", "--json")


def test_a_list_says_which_of_two_variables_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    ok("add", "gem", "gemini")
    assert "GEMINI_API_KEY is not set" in ok("list")
    monkeypatch.setenv("GOOGLE_API_KEY", KEY)
    assert "GOOGLE_API_KEY is set" in ok("list")
    monkeypatch.setenv("GEMINI_API_KEY", KEY)
    assert "GEMINI_API_KEY is set" in ok("list")


def users_own_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config" / "emberkeep" / "emberkeep.toml"
    file.parent.mkdir(parents=True)
    file.write_text(content)


def test_models_of_the_configuration_are_listed_too(tmp_path: Path) -> None:
    users_own_file(tmp_path, '[backends.gpt]\nbackend = "openai"\nmodel = "gpt-6-sol"\n')
    ok(*CLAUDE)
    assert [row["name"] for row in json.loads(ok("list", "--json"))] == ["claude", "gpt"]
    assert "[backends.gpt]" in refused("remove", "gpt")


def test_a_key_that_was_pasted_is_refused_and_not_repeated(tmp_path: Path) -> None:
    result = run(*CLAUDE, "--api-key-env", KEY)
    assert isinstance(result.exception, ConfigError)
    assert KEY not in str(result.exception) + result.output
    assert not list(tmp_path.rglob("backends.json"))


def test_a_pasted_key_in_the_configuration_is_refused_and_not_repeated(tmp_path: Path) -> None:
    users_own_file(tmp_path, f'[backends.gpt]\nbackend = "openai"\napi_key_env = "{KEY}"\n')
    assert KEY not in refused("list")


def test_an_unknown_backend_is_not_added() -> None:
    assert "did you mean anthropic" in refused("add", "x", "antropic")
    assert json.loads(ok("list", "--json")) == []


def test_a_model_that_could_never_be_asked_is_not_added() -> None:
    assert "needs an address" in refused("add", "desk", "compatible")
    assert "means something else" in refused("add", "local", "openai")
    assert json.loads(ok("list", "--json")) == []


def test_a_model_whose_backend_is_no_longer_installed_is_still_listed(tmp_path: Path) -> None:
    users_own_file(tmp_path, '[backends.old]\nbackend = "parrot"\n')
    assert "not installed" in ok("list")


@pytest.mark.slow
def test_a_test_shows_the_answer_and_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    server = AnthropicServer(said("Good morning!"))
    result = result_of_testing(server)
    assert result.exit_code == 0, result.exception
    for part in ("Good morning!", *MODELS, "200,000 tokens", "10 asked, 7 answered", "ms to the first word"):
        assert part in result.stdout
    assert server.asked[-1].body["messages"][0]["content"][0]["text"] == QUESTION
    assert KEY not in result.output


@pytest.mark.slow
@pytest.mark.parametrize(("key", "expected"), [(KEY, RemoteDown), ("sk-wrong-canary", RemoteRefused)])
def test_a_test_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, key: str, expected: type[EmberkeepError]
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", key)
    result = result_of_testing(AnthropicServer(failed(529, "overloaded_error", "Busy")))
    assert isinstance(result.exception, expected)
    assert key not in str(result.exception) + result.output


def test_a_test_without_a_key_names_the_variable() -> None:
    ok(*CLAUDE)
    error = run("test", "claude").exception
    assert isinstance(error, RemoteRefused) and "ANTHROPIC_API_KEY" in str(error)


def test_only_what_is_there_can_be_tested() -> None:
    ok(*CLAUDE)
    assert "did you mean claude" in refused("test", "claud")
