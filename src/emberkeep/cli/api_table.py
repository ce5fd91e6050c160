"""Models that run somewhere else, as a person reads about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from emberkeep.cli.tables import counted, show, show_facts, texts
from emberkeep.config.tables import public_url
from emberkeep.types import RemoteModel

if TYPE_CHECKING:
    from emberkeep.backend.remote.base import RemoteAbout, WholeAnswer

_MOST_MODELS = 8


def print_remotes(remotes: Sequence[RemoteModel], env: Mapping[str, str]) -> None:
    from rich.table import Table

    table = Table("name", "backend", "model", "where", "key", "good at", box=None, pad_edge=False)
    for remote in remotes:
        table.add_row(*texts(remote.name, *_cells(remote, env), remote.description))
    show(table)


def print_tested(remote: RemoteModel, about: RemoteAbout, answer: WholeAnswer) -> None:
    show_facts(_figures(remote, about, answer))


def _cells(remote: RemoteModel, env: Mapping[str, str]) -> tuple[str, str, str, str]:
    from emberkeep.backend.remote.kinds import has_key, with_defaults
    from emberkeep.errors import ConfigError

    try:
        usual = with_defaults(remote)
    except ConfigError:
        return f"{remote.backend} (not installed)", remote.model, public_url(remote.base_url or ""), ""
    variable = usual.api_key_env
    key = f"{variable} is {'set' if has_key(remote, env) else 'not set'}" if variable else "none needed"
    return remote.backend, usual.model or "(the first there)", _address(usual), key


def _address(remote: RemoteModel) -> str:
    return public_url(remote.base_url) if remote.base_url else "the vendor's own"


def _figures(remote: RemoteModel, about: RemoteAbout, answer: WholeAnswer) -> Iterator[tuple[str, str]]:
    from emberkeep.backend.remote.kinds import with_defaults

    usage = answer.usage
    yield "model", f"{with_defaults(remote).model or '(the first there)'} ({remote.backend})"
    yield "there", _listed(about.models)
    if about.context is not None:
        yield "context", f"{about.context:,} tokens"
    yield "answer", answer.text or "(nothing)"
    yield "tokens", f"{usage.prompt_tokens:,} asked, {usage.completion_tokens:,} answered"
    yield "time", f"{answer.first_ms:.0f} ms to the first word, {answer.ms:.0f} ms in all"


def _listed(models: Sequence[str]) -> str:
    if not models:
        return "it does not say"
    more = len(models) - _MOST_MODELS
    shown = ", ".join(models[:_MOST_MODELS])
    return f"{shown} and {counted(more, 'other', 'others')}" if more > 0 else shown
