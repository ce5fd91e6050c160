"""The models kept on this machine.

<root>/<id>/model.json      the record: written before the folder gets its name, so a folder is complete
<root>/<id>/<id>.gguf       the weights, or
<root>/<id>/<id>-00001-of-0000N.gguf and so on, where they are split, or
<root>/<id>/model/          a folder with config.json, safetensors and a tokenizer
<root>/NAME.gguf, <root>/NAME/   models that were put there by hand
<root>/.pulls/<key>/        work in progress of one pull, kept for resuming
<root>/.digests/            digests of the weights, for `weights_digest`
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from emberkeep.config.kinds import is_model_name
from emberkeep.config.settings import DEFAULT_MODEL
from emberkeep.errors import ModelBroken, ModelError, ModelNotFound
from emberkeep.files import link_or_copy, private_folder, replace_file, sync
from emberkeep.models.digest import known_digest, model_digest, remember
from emberkeep.models.parts import (
    MAX_PARTS,
    PartName,
    is_weights_name,
    model_in,
    name_parts,
    part_files,
    part_name,
    whole_name,
)
from emberkeep.models.profile import CONFIG, WEIGHTS, folder_files, is_model_folder, profile_of
from emberkeep.values import dataclass

RECORD = "model.json"
FOLDER = "model"
_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_PART_NUMBERS = re.compile(r"([._-]*-[0-9]{5}-of-[0-9]{5})+$")
_REPO = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """Weights that can be loaded, whether the library keeps them or not."""

    id: str
    path: Path
    """A GGUF file, the first part of a split one, or a folder with config.json, safetensors and a tokenizer."""

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What the library knows about a model beyond its file."""

    source: str
    """Where it was pulled from, without credentials."""
    sha256: str
    """Empty for a model that was put here by hand, until it was computed."""
    size: int
    quantisation: str
    pulled_at: int
    """Unix seconds."""
    optimized_from: str | None = None
    """The weight format of the pulled file, where the kept one was requantised from it."""


@dataclass(frozen=True, slots=True)
class InstalledModel(ModelFile):
    record: ModelRecord


class ModelLibrary:
    """Blocks on disk. Any number of processes may use one root: models appear and disappear as a whole."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.digests = root / ".digests"
        """The `cache_dir` in which `weights_digest` already knows every pulled model."""

    def list(self) -> Sequence[InstalledModel]:
        """Every usable model, by id. Damaged ones are left out."""
        return [model for model in self._read_all() if isinstance(model, InstalledModel)]

    def damages(self) -> Sequence[ModelError]:
        """For every model that `list` leaves out, what `get` raises."""
        return [model for model in self._read_all() if isinstance(model, ModelError)]

    def ids(self) -> Sequence[str]:
        """The id of every model, be it damaged, in order."""
        return sorted(self._entries())

    def holds(self, id: str) -> bool:
        """Whether there is a model called `id`, be it damaged."""
        return is_model_id(id) and (self._is_installed(id) or id in self._dropped())

    def get(self, id: str) -> InstalledModel:
        """Raises ModelNotFound, or ModelBroken when the folder is there and its content is not usable."""
        return _usable(self._read(id, self._entry(id)))

    def resolve(self, name_or_path: str) -> ModelFile:
        """An installed model by its id or its repository on the hub, or any file or folder of one by its path.

        A path has a / in it, or ends in .gguf: what lies in the current folder never takes the place of an
        installed model, nor of one that is missing. Raises ModelNotFound or ModelBroken.
        """
        path = Path(name_or_path)
        if installed := self._installed(name_or_path):
            return installed
        if is_model_name(name_or_path):
            return self._missing(name_or_path)
        found = weights_at(path)
        if found is not None:
            return ModelFile(id_at(path), part_files(found)[0])
        if is_model_folder(path):
            return ModelFile(id_from(path.resolve().name), path)
        if path.is_dir():
            raise ModelNotFound(
                f"{path} holds no model: a GGUF file is needed there, or config.json and *.safetensors."
            )
        if is_repo(name_or_path):
            raise ModelNotFound(
                f"There is no file at {path}; if it is a repository on the Hugging Face hub, "
                f"`emberkeep models pull hf:{path}` fetches it."
            )
        raise ModelNotFound(f"There is no file at {path}; `emberkeep models list` shows the models here.")

    def lasting_name(self, name_or_path: str) -> str:
        """A name that means the same model in any folder."""
        try:
            is_path = not isinstance(self.resolve(name_or_path), InstalledModel)
        except ModelError:
            is_path = not is_model_name(name_or_path) and Path(name_or_path).exists()
        return str(Path(name_or_path).absolute()) if is_path else name_or_path

    def remove(self, id: str) -> None:
        """Delete a model, also a damaged one. Raises ModelNotFound."""
        entry = self._entry(id)
        if entry is None or (entry.is_dir() and not entry.is_symlink()):
            self._discard(entry or self._folder(id))
            return
        files = {*self.root.glob("*.gguf"), entry}
        for file in sorted(files, reverse=True):
            if whole_name(file.name) == whole_name(entry.name):
                file.unlink(missing_ok=True)

    def install(self, id: str, weights: Path, record: ModelRecord) -> InstalledModel:
        """Move `weights` in as model `id`, in place of any with that id that was installed.

        They are a file, the first of several parts or a folder, in a `workspace`. Raises ModelError where a folder
        was put there by hand.
        """
        self.check_free(id)
        staged = weights.parent / "ready"
        shutil.rmtree(staged, ignore_errors=True)
        names = _names_of(check_id(id), weights)
        for file in filter(Path.is_file, weights.rglob("*") if weights.is_dir() else names):
            _make_private(file)
        private_folder(staged)
        for file, name in names.items():
            file.rename(staged / name)
        replace_file(staged / RECORD, json.dumps(asdict(record), indent=2).encode())
        if self._folder(id).is_dir():
            self._discard(self._folder(id))
        staged.rename(self._folder(id))
        sync(self.root)
        model = InstalledModel(id, self._folder(id) / next(iter(names.values())), record)
        if len(names) == 1 and not model.is_folder:
            remember(model.path, record.sha256, self.digests)
        return model

    def check_free(self, id: str) -> None:
        """Raises ModelError where the user has put a folder there: it is never replaced."""
        if self._folder(id).is_dir() and not self._is_installed(id):
            raise ModelError(
                f"{self._folder(id)} was put there by hand: move it, choose another --name, "
                f"or `emberkeep models remove {id}` first."
            )

    def copy(self, id: str, name: str) -> InstalledModel:
        """Install the weights of model `id` under `name` too, in place of any model with that name: as hard links,
        where the file system allows it. Raises ModelNotFound, ModelBroken, ModelError."""
        model = self.get(id)
        if check_id(name) == id:
            return model
        folder = self.workspace(f"copy {id} {name}")
        try:
            digest = model.record.sha256 or model_digest(model.path, self.digests)
            return self.install(name, _link(model.path, folder), replace(model.record, sha256=digest))
        except OSError as error:
            raise ModelError(f"{id} could not be copied ({error.strerror or error}): make room.") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def workspace(self, source: str) -> Path:
        """A private folder on the library's file system; the same source gives the same folder."""
        key = hashlib.sha256(source.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return private_folder(private_folder(private_folder(self.root) / ".pulls") / key)

    def _installed(self, name: str) -> InstalledModel | None:
        """By its id, its repository or its file's name. Raises ModelBroken."""
        if self.holds(name):
            return self.get(name)
        if is_repo(name):
            return next((model for model in self.list() if model.record.source == f"hf:{name}"), None)
        is_path = "/" in name or name.startswith(".")
        entry = None if is_path else self._dropped().get(id_from(name))
        return _usable(self._read_dropped(id_from(name), entry)) if entry else None

    def _missing(self, name: str) -> InstalledModel:
        with suppress(OSError):  # no file can be called so
            if Path(name).is_dir():
                raise ModelNotFound(f"No model called {name}; for the folder of this name write ./{name}.")
        return self.get(name)

    def _entry(self, id: str) -> Path | None:
        """What was put here by hand as model `id`; None where it was installed. Raises ModelNotFound."""
        if not self.holds(id):
            raise ModelNotFound(
                f"No model called {id}; `emberkeep models list` shows what is here, "
                f"`emberkeep models pull {_spec_for(id)}` fetches one."
            )
        return None if self._is_installed(id) else self._dropped().get(id)

    def _read_all(self) -> Iterator[InstalledModel | ModelError]:
        """By id."""
        return (self._read(id, entry) for id, entry in sorted(self._entries().items()))

    def _entries(self) -> dict[str, Path | None]:
        """By id what was put here by hand; None for what was installed."""
        folders = self.root.iterdir() if self.root.is_dir() else ()
        names = (folder.name for folder in folders if is_model_id(folder.name))
        return self._dropped() | dict.fromkeys(filter(self._is_installed, names))

    def _read(self, id: str, entry: Path | None) -> InstalledModel | ModelError:
        """One that was installed, or put here by hand as `entry`; why, where it cannot be used."""
        if entry is not None:
            return self._read_dropped(id, entry)
        try:
            record = ModelRecord(**json.loads((self._folder(id) / RECORD).read_bytes()))
        except (OSError, ValueError, TypeError):
            return self._broken(id)
        path = self._weights(id)
        return self._broken(id) if path is None else InstalledModel(id, path, record)

    def _read_dropped(self, id: str, entry: Path) -> InstalledModel | ModelError:
        try:
            path, record = _look_at(entry)
            digest = "" if path.is_dir() else known_digest(path, self.digests)
        except ModelError as error:
            return error
        return InstalledModel(id, path, replace(record, source=str(entry), sha256=digest or ""))

    def _is_installed(self, id: str) -> bool:
        """By a pull, be it damaged since."""
        return (self._folder(id) / RECORD).exists()

    def _dropped(self) -> dict[str, Path]:
        """What was put here by hand, by id: where names differ in nothing that an id has, the first; of a split
        model any part. Reads none of it."""
        found: dict[str, Path] = {}
        for entry in sorted(self.root.iterdir()) if self.root.is_dir() else ():
            if entry.is_dir():
                may_be_model = not (entry / RECORD).exists()
            else:  # no pipe: it would be waited for
                may_be_model = is_weights_name(entry.name) and (entry.is_file() or not entry.exists())
            if may_be_model and not entry.name.startswith("."):
                found.setdefault(id_from(entry.name), entry)
        return found

    def _weights(self, id: str) -> Path | None:
        """Where a complete model lies in its folder."""
        file, folder = self._folder(id) / f"{id}.gguf", self._folder(id) / FOLDER
        if file.is_file():
            return file
        parts = self._parts(id)
        if parts and len(parts) == parts[0].count:
            return self._folder(id) / str(parts[0])
        return folder if is_model_folder(folder) else None

    def _parts(self, id: str) -> tuple[PartName, ...]:
        """The parts of a split model that are there, by number."""
        names = (part_name(file.name) for file in sorted(self._folder(id).glob("*.gguf")) if file.is_file())
        return tuple(part for part in names if part and part.stem == id and part.count <= MAX_PARTS)

    def _broken(self, id: str) -> ModelBroken:
        damage, parts = "is damaged", self._parts(id)
        if missing := [part.number for part in parts[0].all() if part not in parts] if parts else []:
            damage = f"lacks {name_parts(missing, parts[0].count)}"
        return ModelBroken(f"The folder of {id} {damage}; `emberkeep models remove {id}` and pull it again.")

    def _discard(self, folder: Path) -> None:
        # Renamed first: a half-deleted folder must never be found under its id.
        folder.rename(self.root / f".trash-{uuid.uuid4().hex}")
        for trash in self.root.glob(".trash-*"):
            shutil.rmtree(trash, ignore_errors=True)

    def _folder(self, id: str) -> Path:
        """The only place where an id becomes a path."""
        return self.root / check_id(id)


def _usable(model: InstalledModel | ModelError) -> InstalledModel:
    if isinstance(model, ModelError):
        raise model
    return model


def weights_at(path: Path) -> Path | None:
    """The GGUF file that is meant by a path: itself, any part of a split model, or the only model in a folder.

    Raises ModelBroken, naming them, where parts are missing, and ModelNotFound for a folder with several models
    and for what cannot be looked at.
    """
    try:
        if path.is_dir():
            return None if is_model_folder(path) else model_in(path)
        return path if part_files(path)[0].is_file() else None
    except OSError as error:
        raise ModelNotFound(f"Cannot read {path}: {error.strerror}.") from error


def _names_of(id: str, weights: Path) -> dict[Path, str]:
    """What the files of a model, or its folder, are called in the library."""
    if weights.is_dir():
        return {weights: FOLDER}
    files = part_files(weights)
    if len(files) == 1:
        return {weights: f"{id}.gguf"}
    return {file: str(PartName(id, number, len(files))) for number, file in enumerate(files, 1)}


def _link(weights: Path, folder: Path) -> Path:
    """The same files once more, in `folder`. Raises OSError."""
    if weights.is_dir():
        return shutil.copytree(weights, folder / weights.name, copy_function=link_or_copy)
    for file in part_files(weights):
        link_or_copy(file, folder / file.name)
    return folder / weights.name


def _spec_for(id: str) -> str:
    """What to pull so that there is a model called `id`, as far as that can be known."""
    if id == DEFAULT_MODEL:
        return id
    name = f" --name {id}" if is_model_id(id) else ""
    return f"hf:owner/repo/file.gguf{name}"


def _make_private(weights: Path) -> None:
    # A hard link shares its mode with the user's own file, which is not ours to change.
    if weights.stat().st_nlink == 1:
        weights.chmod(0o600)


def is_model_id(text: str) -> bool:
    """Whether files can be called like this, and be taken for a model of their own."""
    part = part_name(f"{text}.gguf")
    return _ID.fullmatch(text) is not None and (part is None or part.count == 1)


def check_id(text: str) -> str:
    """`text`, which can be a model's id. Raises ModelError when it cannot."""
    if is_model_id(text):
        return text
    raise ModelError(
        f"{text!r} cannot be a model's name; use lower-case letters, digits, dots, dashes and underscores."
    )


def is_repo(text: str) -> bool:
    """Whether it can name a repository on the hub: `owner/name`."""
    return _REPO.fullmatch(text) is not None


def id_from(file_name: str) -> str:
    """The id of a file that has none: its name, without a part's number, as far as an id allows it."""
    stem = re.sub(r"[^a-z0-9._-]+", "-", file_name.lower().removesuffix(".gguf")).strip(".-_")[:128]
    return _PART_NUMBERS.sub("", stem).strip(".-_") or "model"


def id_at(path: Path) -> str:
    """The id of the model at a path."""
    try:
        found = weights_at(path)
    except ModelError:
        found = None
    return id_from((found or path.absolute()).name)


# ── what was put here by hand: it stays as it lies, and may be half copied, or no model at all ──


def _look_at(entry: Path) -> tuple[Path, ModelRecord]:
    """Raises ModelError for what is no complete model. Blocks for one pass over its headers, the first time."""
    weights: Path | None = entry
    if entry.is_dir() and not is_model_folder(entry):
        weights = model_in(entry)
    if weights is None:
        raise ModelError(
            f"{entry} holds no model: a GGUF file is needed there, or {CONFIG} and {WEIGHTS}; "
            "or move it elsewhere."
        )
    files = folder_files(weights, (CONFIG, WEIGHTS)) if weights.is_dir() else part_files(weights)
    try:
        version = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError as error:
        raise ModelError(f"Cannot read {entry}: {error.strerror}.") from error
    path = weights if weights.is_dir() else files[0]
    return path, _record_of(path, version)


@lru_cache(maxsize=256)
def _record_of(path: Path, version: tuple[tuple[Path, int, int], ...]) -> ModelRecord:
    """`version`: of its files, so that others are read again."""
    size = sum(size for _, size, _ in version)
    changed = max(changed for _, _, changed in version) // 10**9
    return ModelRecord("", "", size, profile_of(path).quantisation, changed)
