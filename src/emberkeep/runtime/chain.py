"""Who answers: the backends that a Config names, in the order in which they stand in for each other.

A conversation leaves this machine only for a model that its user has named: by `emberkeep api add`, in the
configuration file, or with `--backend`. A key that happens to be in the environment names none.
"""

from __future__ import annotations

import os
from functools import partial

from emberkeep.backend.base import Backend
from emberkeep.backend.fallback import FallbackBackend, Link
from emberkeep.backend.model_pool import Report, tell_nobody
from emberkeep.config.settings import Config
from emberkeep.errors import ConfigError
from emberkeep.models.remotes import Remotes
from emberkeep.runtime.local_model import open_local
from emberkeep.runtime.parts import ModelParts, OwnParts
from emberkeep.runtime.remote import RETRIES, named_backends, open_remote
from emberkeep.runtime.tools import server_tools
from emberkeep.types.models import RemoteModel

AUTO = "auto"
LOCAL = "local"
_TRTLLM = "trtllm"


def open_backend(config: Config, parts: ModelParts | None = None, report: Report = tell_nobody) -> Backend:
    """The first backend that can be opened, with the others behind it. Blocks while a model is loaded.

    `parts`: those that they share with other models.
    Raises ConfigError, ModelError, EngineError, RemoteError.
    """
    chain = _chain(config)
    _check_drafts(config, runs_here=None in chain)
    # Where another one stands in at once, the first is not waited for.
    parts = parts or OwnParts(config)
    retries = RETRIES if len(chain) == 1 else 0
    links = [_link(config, one, parts, report, retries) for one in chain]
    return links[0].open() if len(links) == 1 else FallbackBackend(links)


def backend_names(config: Config) -> list[str]:
    """Those that may answer, in their order. Raises ConfigError."""
    return [LOCAL if one is None else one.name for one in _chain(config)]


def needs_local(config: Config) -> bool:
    """A model that runs here may be asked. Raises ConfigError."""
    return None in _chain(config)


def may_do_without_local(config: Config) -> bool:
    """Another one can stand in for it. Raises ConfigError."""
    return len(_chain(config)) > 1


def _check_drafts(config: Config, *, runs_here: bool) -> None:
    """Raises ConfigError for a draft model that would draft for none."""
    if config.draft_model is None:
        return
    if not runs_here:
        raise ConfigError(
            "A draft model drafts for a model that runs here, and --backend names none: leave speculation out, or "
            "add local to the backends."
        )


def _chain(config: Config) -> list[RemoteModel | None]:
    """None stands for the model that runs here."""
    remotes = Remotes(config)
    if config.backend == AUTO:
        return _automatic(remotes)
    return [None if name == LOCAL else _named(config, remotes, name) for name in named_backends(config)]


def _automatic(remotes: Remotes) -> list[RemoteModel | None]:
    listed = remotes.list()
    if not listed:
        return [None]
    from emberkeep.backend.remote.vendors import has_key

    first = [remote for remote in listed if remote.backend == _TRTLLM]
    others = [remote for remote in listed if remote.backend != _TRTLLM and has_key(remote, os.environ)]
    return [*first, None, *others]


def _named(config: Config, remotes: Remotes, name: str) -> RemoteModel:
    from emberkeep.backend.remote.vendors import vendor_names

    known = {remote.name: remote for remote in remotes.list()}
    if name in known:
        return known[name]
    if name in vendor_names():
        return RemoteModel(name, name, config.model or "", config.base_url, ctx=config.ctx)
    listed = ", ".join(["local", *known, *vendor_names()])
    raise ConfigError(f"There is no backend {name!r}: choose from {listed}, or add one with `emberkeep api add`.")


def _link(config: Config, remote: RemoteModel | None, parts: ModelParts, report: Report, retries: int) -> Link:
    if remote is None:
        return Link(LOCAL, partial(open_local, config, parts, report))
    return Link(remote.name, partial(open_remote, config, remote, server_tools, parts, retries=retries))
