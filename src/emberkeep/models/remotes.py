"""Models that run somewhere else, as their user has registered them: by command, or in the configuration."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict

from emberkeep.config.settings import Config
from emberkeep.config.tables import parse_remotes
from emberkeep.errors import ConfigError
from emberkeep.files import locked, private_folder, replace_file
from emberkeep.text import did_you_mean
from emberkeep.types.models import RemoteModel
from emberkeep.types.request import Json

_FILE = "backends.json"


class Remotes:
    """Every method reads the file again. Blocks."""

    def __init__(self, config: Config) -> None:
        self._configured = config.backends
        self._path = config.data_dir / _FILE

    def list(self) -> tuple[RemoteModel, ...]:
        """All of them, by name. Raises ConfigError for a file that cannot be read, and for a name that is used
        twice."""
        added = self._read_added()
        for name in sorted({remote.name for remote in self._configured} & set(added)):
            raise ConfigError(
                f"{name} is in the configuration and was added too: `emberkeep api remove {name}` "
                "removes what was added."
            )
        return tuple(sorted((*self._configured, *added.values()), key=lambda remote: remote.name))

    def get(self, name: str) -> RemoteModel:
        """Raises ConfigError."""
        remotes = {remote.name: remote for remote in self.list()}
        if name in remotes:
            return remotes[name]
        hint = did_you_mean(name, remotes, "`emberkeep api list` shows them.")
        raise ConfigError(f"There is no model {name!r}: {hint}")

    def add(self, remote: RemoteModel) -> None:
        """Raises ConfigError, without repeating what may be a key, for what is no good or there already."""
        parse_remotes({remote.name: _row(remote)})
        with self._lock():
            added = self._read_added()
            if remote.name in added or any(one.name == remote.name for one in self._configured):
                raise ConfigError(
                    f"There is a model {remote.name} already: take another name, "
                    "or `emberkeep api remove` it first."
                )
            self._write({**added, remote.name: remote})

    def remove(self, name: str) -> None:
        """Raises ConfigError for one that was not added."""
        with self._lock():
            added = self._read_added()
            if name in added:
                self._write({other: remote for other, remote in added.items() if other != name})
                return
        if any(remote.name == name for remote in self._configured):
            raise ConfigError(f"{name} is in the configuration: remove [backends.{name}] there.")
        self.get(name)

    def _read_added(self) -> dict[str, RemoteModel]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            return {remote.name: remote for remote in parse_remotes(content)}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError, ConfigError) as error:
            raise ConfigError(
                f"{self._path} cannot be read ({error}): repair it, or remove it and add its models again."
            ) from error

    def _lock(self) -> AbstractContextManager[None]:
        """Others may be adding at the same time: none of them may get lost."""
        private_folder(self._path.parent)
        return locked(self._path.with_suffix(".lock"))

    def _write(self, remotes: dict[str, RemoteModel]) -> None:
        table = {name: _row(remotes[name]) for name in sorted(remotes)}
        replace_file(self._path, json.dumps(table, indent=2, ensure_ascii=False).encode() + b"\n")


def _row(remote: RemoteModel) -> dict[str, Json]:
    values = asdict(remote)
    del values["name"]
    return {key: value for key, value in values.items() if value not in (None, "")}
