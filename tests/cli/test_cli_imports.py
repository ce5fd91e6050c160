"""What commands import: a person waits for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from emberkeep import __version__
from emberkeep.cli.main import COMMANDS

HEAVY = {
    *(
        "apsw",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "jsonschema",
        "llguidance",
        "mcp",
        "numpy",
        "prometheus_client",
    ),
    *("prompt_toolkit", "pydantic", "rich", "starlette", "torch", "transformers", "uvicorn", "xxhash"),
}


def modules_of(*arguments: str) -> set[str]:
    """Those that are imported when the command has run."""
    program = (
        f"import sys; sys.argv = ['emberkeep', *{arguments!r}]\n"
        "from emberkeep.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('\\nMODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("\nMODULES ")[2].split())


def test_the_version_is_told_without_any_command() -> None:
    imported = modules_of("--version")
    assert "typer" not in imported
    assert {name for name in imported if name.startswith("emberkeep")} == {"emberkeep", "emberkeep.__main__"}


def test_help_loads_no_command_and_nothing_heavy() -> None:
    imported = modules_of("--help")
    assert HEAVY & imported == set()
    assert {home.module for home in COMMANDS.values()} & imported == set()


def test_the_help_of_a_command_loads_no_other() -> None:
    imported = modules_of("serve", "--help")
    assert HEAVY & imported == set()
    assert {home.module for home in COMMANDS.values()} & imported == {"emberkeep.cli.serve"}


def test_flags_are_read_without_what_checks_requests() -> None:
    assert HEAVY & modules_of("config", "show", "--json", "--log-level", "error") == set()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    said = COMMANDS[name].command().help.partition("\n\n")[0]
    assert COMMANDS[name].help == " ".join(said.split())


def test_the_module_prints_the_version() -> None:
    command = [sys.executable, "-m", "emberkeep", "--version"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"emberkeep {__version__}\n"
