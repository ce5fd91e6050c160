"""Whether a model embeds or ranks instead of writing, and how, read from its files alone."""

from __future__ import annotations

from pathlib import Path

from emberkeep.errors import ModelBroken
from emberkeep.models.gguf import GgufHeader, read_header
from emberkeep.models.profile import CONFIG, read_json, read_json_objects
from emberkeep.types.request import Pooling
from emberkeep.values import dataclass

MODULE_LIST = "modules.json"
LENGTHS = "sentence_bert_config.json"
_GGUF_POOLING = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST, 4: Pooling.RANK}
_MODES = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_PLAIN = ("Model", "ForMaskedLM")
"""How architectures end that have no head which writes."""
_RANKS = "ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class EmbeddingProfile:
    pooling: Pooling
    context: int | None = None
    """Longest input, where the files name one that is shorter than the model's positions."""
    dense: tuple[Path, ...] = ()
    """Folders of layers that follow the pooling."""


def embedding_profile(model: Path) -> EmbeddingProfile | None:
    """None for a model that writes. Blocks. Raises ModelNotFound, ModelBroken."""
    return embedding_folder(model) if model.is_dir() else embedding_gguf(read_header(model))


def embedding_gguf(header: GgufHeader) -> EmbeddingProfile | None:
    """None for a model that writes."""
    architecture = str(header.metadata.get("general.architecture"))
    pooling = header.metadata.get(f"{architecture}.pooling_type")
    if isinstance(pooling, int) and pooling in _GGUF_POOLING:
        return EmbeddingProfile(_GGUF_POOLING[pooling])
    looks_ahead = header.metadata.get(f"{architecture}.attention.causal") is False
    return EmbeddingProfile(Pooling.MEAN) if looks_ahead else None


def embedding_folder(folder: Path) -> EmbeddingProfile | None:
    """None for a model that writes. Raises ModelNotFound, ModelBroken."""
    config = read_json(folder / CONFIG)
    if (folder / MODULE_LIST).is_file():
        pooling, dense = _modules(folder)
        return EmbeddingProfile(pooling, _longest(folder), dense)
    architectures = [str(name) for name in config.get("architectures") or ()]
    if any(name.endswith(_RANKS) for name in architectures):
        return EmbeddingProfile(Pooling.RANK)
    if architectures and all(name.endswith(_PLAIN) for name in architectures):
        return EmbeddingProfile(Pooling.MEAN, _longest(folder))
    return None


def _modules(folder: Path) -> tuple[Pooling, tuple[Path, ...]]:
    """What sentence-transformers does with the states of the tokens."""
    listed = read_json_objects(folder / MODULE_LIST)
    kinds = [(str(each.get("type")).rpartition(".")[2], str(each.get("path", ""))) for each in listed]
    unknown = [kind for kind, _ in kinds if kind not in ("Transformer", "Pooling", "Dense", "Normalize")]
    poolings = [_pooling(_inside(folder, path)) for kind, path in kinds if kind == "Pooling"]
    if unknown or len(poolings) != 1:
        what = unknown[0] if unknown else f"{len(poolings)} poolings"
        raise ModelBroken(f"{folder.name} has {what}, which is not known here: choose another embedding model.")
    return poolings[0], tuple(_inside(folder, path) for kind, path in kinds if kind == "Dense")


def _inside(folder: Path, name: str) -> Path:
    """Raises ModelBroken for a name that leads out of the folder."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelBroken(f"{folder.name}/{MODULE_LIST} names {name!r}, which is not in it: pull the model again.")
    return folder / name


def _pooling(folder: Path) -> Pooling:
    config = read_json(folder / CONFIG)
    modes = [mode for mode, is_on in config.items() if mode.startswith("pooling_mode_") and is_on is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        said = ", ".join(modes) or "no way of pooling"
        raise ModelBroken(
            f"{folder.parent.name} has {said}, and mean, cls and last are known: choose another model."
        )
    return _MODES[modes[0]]


def _longest(folder: Path) -> int | None:
    path = folder / LENGTHS
    length = read_json(path).get("max_seq_length") if path.is_file() else None
    return length if isinstance(length, int) and length > 0 else None
