"""`emberkeep models`: what is here, getting more, looking closer, making room."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from emberkeep.cli.commands import JsonFlag, YesFlag, command_group, with_settings
from emberkeep.cli.console import complain, printable, show_facts, show_table
from emberkeep.cli.model_setup import pull_reporter
from emberkeep.config.kinds import readable_size
from emberkeep.config.settings import Config
from emberkeep.errors import ModelError
from emberkeep.models.digest import model_digest
from emberkeep.models.library import InstalledModel, ModelFile, ModelLibrary
from emberkeep.models.parts import part_files
from emberkeep.models.profile import ModelProfile, profile_of
from emberkeep.models.spec import spec_of_quantisation
from emberkeep.types.request import Json

TEMPLATE_LINES = 5

app = command_group("List, pull, show and remove models.")


@app.command("list")
@with_settings("data_dir", "as_json")
def list_models(config: Config, as_json: JsonFlag = False) -> None:
    """Every model on this machine."""
    library = _library(config)
    models = library.list()
    for damage in library.damages():
        complain(str(damage))
    if as_json:
        print(json.dumps([_facts(model) for model in models], indent=2))
    elif models:
        show_table(("model", "format", "size", "pulled", "from"), map(_cells, models))
    else:
        print("No models yet; `emberkeep models pull smollm2-135m` fetches the default one.")


@app.command("pull")
@with_settings("data_dir")
def pull_model(
    config: Config,
    spec: Annotated[
        str,
        typer.Argument(
            help="smollm2-135m, hf:owner/repo/file.gguf[@revision], hf:owner/repo:Q4_K_M[@revision] for the GGUF "
            "with that quantisation, hf:owner/repo[@revision] for safetensors, an http(s) address, or the path of "
            "a file or folder; any part of a split GGUF stands for the whole model"
        ),
    ],
    quant: Annotated[
        str | None,
        typer.Option("--quant", help="Of a repository (owner/repo), the GGUF with this quantisation: Q4_K_M."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name to keep it under.")] = None,
    optimize: Annotated[
        bool | None,
        typer.Option(
            "--optimize/--no-optimize",
            help="Requantise formats that are slow on CPUs (default: only smollm2-135m).",
        ),
    ] = None,
) -> None:
    """Fetch a model; an interrupted pull goes on where it stopped."""
    # Imported here: only this command needs the HTTP client.
    from emberkeep.models.pull import pull

    spec = spec_of_quantisation(spec, quant) if quant else spec
    with pull_reporter() as reporter:
        model = pull(spec, _library(config), name=name, optimize=optimize, reporter=reporter)
    print(f"{model.id}: {model.path} ({readable_size(model.record.size)})")


@app.command("show")
@with_settings("data_dir", "as_json")
def show_model(
    config: Config,
    model: Annotated[str, typer.Argument(help="A model's name, or the path of a file or folder.")],
    template: Annotated[bool, typer.Option("--template", help="Print the whole chat template only.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """What a model is: architecture, size, context, chat template, cost per token."""
    library = _library(config)
    file = library.resolve(model)
    found = profile_of(file.path)
    if template:
        print(printable(found.chat_template or ""))
    elif as_json:
        facts = _facts(file) | {"sha256": model_digest(file.path, library.digests)}
        print(json.dumps(facts | {"profile": asdict(found)}, indent=2))
    else:
        show_facts(_lines(file, found, model_digest(file.path, library.digests)))


@app.command("remove")
@with_settings("data_dir")
def remove_model(
    config: Config,
    model: Annotated[str, typer.Argument(help="A model's name.")],
    yes: YesFlag = False,
) -> None:
    """Delete a model."""
    library = _library(config)
    if library.holds(model) and not yes:
        typer.confirm(f"Delete {model}{_where(library, model)}?", abort=True, err=True)
    library.remove(model)
    print(f"{model} is removed.")


def _where(library: ModelLibrary, model: str) -> str:
    try:
        return f" ({library.get(model).path})"
    except ModelError:
        return ""


def _library(config: Config) -> ModelLibrary:
    return ModelLibrary(config.data_dir / "models")


def _facts(file: ModelFile) -> dict[str, Json]:
    facts = {"id": file.id, "file": str(file.path), "parts": len(part_files(file.path))}
    return facts | asdict(file.record) if isinstance(file, InstalledModel) else facts


def _cells(model: InstalledModel) -> tuple[str, ...]:
    record = model.record
    was = f" (was {record.optimized_from})" if record.optimized_from else ""
    pulled = f"{datetime.fromtimestamp(record.pulled_at):%Y-%m-%d %H:%M}"
    return model.id, record.quantisation + was, readable_size(record.size), pulled, record.source


def _lines(file: ModelFile, found: ModelProfile, digest: str) -> Iterator[tuple[str, str]]:
    parts = len(part_files(file.path))
    in_parts = f" in {parts} parts" if parts > 1 else ""
    yield "model", file.id
    yield "name", found.name
    yield "architecture", f"{found.architecture}, {found.layers} layers"
    yield "kind", _kind(found)
    yield "parameters", f"{found.parameters / 1e6:,.0f} M"
    yield "quantisation", found.quantisation
    yield "context", f"{found.context_length} tokens"
    yield "vocabulary", f"{found.vocab_size} tokens"
    yield "KV per token", f"{readable_size(found.kv_bytes_per_token)} at 16 bits"
    yield "file", f"{file.path} ({readable_size(found.size)}{in_parts})"
    yield "sha256", digest
    if isinstance(file, InstalledModel):
        yield "from", file.record.source
        if file.record.optimized_from:
            yield "optimised", f"requantised from {file.record.optimized_from}"
    yield "chat template", _beginning(found.chat_template)


def _kind(found: ModelProfile) -> str:
    details = []
    if found.sliding_window:
        details.append(f"window of {found.sliding_window} tokens")
    if found.expert_count:
        details.append(f"{found.expert_count} experts")
    return f"{found.kind} ({', '.join(details)})" if details else str(found.kind)


def _beginning(template: str | None) -> str:
    if template is None:
        return "none: messages cannot be formatted for this model"
    lines = template.splitlines()
    rest = "\n… (--template prints all of it)" if len(lines) > TEMPLATE_LINES else ""
    return "\n".join(lines[:TEMPLATE_LINES]) + rest
