"""Commands as a person types them."""

from __future__ import annotations

from dataclasses import dataclass

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
