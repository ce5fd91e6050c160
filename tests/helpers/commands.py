"""Commands as a person types them, here and in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer
from typer.testing import CliRunner, Result

from emberkeep.errors import EmberkeepError


@dataclass(frozen=True)
class Commands:
    app: typer.Typer

    def run(self, *arguments: str, input: str | None = None) -> Result:
        return CliRunner().invoke(self.app, list(arguments), input=input)

    def ok(self, *arguments: str, input: str | None = None) -> str:
        """What a command prints that must go well."""
        result = self.run(*arguments, input=input)
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    def refused(self, *arguments: str) -> str:
        """The sentence with which it is refused."""
        result = self.run(*arguments)
        assert isinstance(result.exception, EmberkeepError), (result.output, result.exception)
        return str(result.exception)


def run_module(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`python -m` with nothing of this machine's settings."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("EMBERKEEP_")}
    env |= {"XDG_CONFIG_HOME": str(cwd), "XDG_DATA_HOME": str(cwd)}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run([sys.executable, "-m", *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def emberkeep(data_dir: Path, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    """A command that must go well; `said` is typed into it."""
    command = [sys.executable, "-m", "emberkeep", *arguments, "--data-dir", str(data_dir)]
    return subprocess.run(command, input=said, capture_output=True, text=True, check=True)
