"""Embedding and reranking models of transformers: encoders and decoders, with the pooling that they come with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from emberkeep.engine.embedding import EmbeddingCapabilities, Framing, TokenInput, Vectors
from emberkeep.engine.hf.device import choose_device, choose_dtype
from emberkeep.engine.hf.model_loader import (
    HfSource,
    load_network,
    load_tokenizer,
    local_files,
    own_dtype,
    quiet,
    translate_errors,
)
from emberkeep.engine.hf.vocab import WordVocab
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.types.request import Json, Pooling
from emberkeep.values import dataclass

_SEQUENCES = 256
"""Inputs of one step."""
_NO_LENGTH = 1 << 20
"""Tokenizers name a longer one where they know of none."""
_IGNORED = ("pooler.", "position_ids", "lm_head.", "cls.")
"""Weights that no vector depends on, which a folder may lack or have besides."""
_KINDS = "token_type_ids"
"""Which text of a pair a token belongs to; of no use to some models."""
_ACTIVATIONS = {"Identity": torch.nn.Identity, "Tanh": torch.nn.Tanh, "ReLU": torch.nn.ReLU, "GELU": torch.nn.GELU}


@dataclass(frozen=True, slots=True)
class HfEmbeddingSettings:
    pooling: Pooling
    context: int | None = None
    """Longest input; None: as long as the model's positions reach."""
    batch: int = 512
    dense: tuple[Path, ...] = ()
    """Folders of layers that follow the pooling."""
    device: str = "auto"
    dtype: str = "auto"


class HfEmbeddingEngine:
    """Blocks while it loads. Raises ModelBroken for what cannot be loaded, EngineError for what is not here."""

    def __init__(self, folder: Path, settings: HfEmbeddingSettings, weights_digest: str) -> None:
        self._device = choose_device(settings.device)
        source, ranks = HfSource(folder), settings.pooling is Pooling.RANK
        with translate_errors(source, self._device), quiet():
            self._network = _load_network(source, self._device, settings.dtype, ranks=ranks)
            self._dense = [_load_dense(place, self._network) for place in settings.dense]
            tokenizer = load_tokenizer(source)
        self._padding = tokenizer.pad_token_id or 0
        self._tells_kinds = _KINDS in tokenizer.model_input_names
        if ranks and self._network.config.pad_token_id is None:
            self._network.config.pad_token_id = self._padding  # a decoder's head looks for the token before it
        self.vocab = WordVocab(tokenizer.backend_tokenizer, self._network.get_input_embeddings().num_embeddings)
        self.framing = framing_of(tokenizer.backend_tokenizer)
        dimension = (
            self._dense[-1][0].out_features if self._dense else self._network.config.get_text_config().hidden_size
        )
        self.capabilities = EmbeddingCapabilities(
            dimension=1 if ranks else int(dimension),
            context=_context(self._network, tokenizer, settings.context),
            pooling=settings.pooling,
            batch=settings.batch,
            sequences=_SEQUENCES,
        )
        self.fingerprint = _fingerprint(self._network, weights_digest, settings)

    @property
    def details(self) -> dict[str, Json]:
        """What the model's card tells."""
        network = self._network
        return {
            "architecture": str(network.config.model_type),
            "parameters": sum(weight.numel() for weight in network.parameters()),
            "dtype": str(network.dtype).removeprefix("torch."),
            "device": str(self._device),
        }

    @torch.inference_mode()
    def embed(self, inputs: Sequence[TokenInput]) -> Vectors:
        longest = max(len(each.ids) for each in inputs)
        ids = torch.full((len(inputs), longest), self._padding)
        mask, kinds = torch.zeros_like(ids), torch.zeros_like(ids)
        for row, each in enumerate(inputs):
            ids[row, : len(each.ids)] = torch.tensor(each.ids)
            mask[row, : len(each.ids)] = 1
            if each.second is not None:
                kinds[row, each.second : len(each.ids)] = 1
        try:
            vectors = self._forward(ids.to(self._device), mask.to(self._device), kinds.to(self._device))
        except torch.OutOfMemoryError as error:
            raise EngineError(f"{self._device} has no memory for these texts: send fewer at a time.") from error
        return vectors.float().cpu().numpy()

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        more = {_KINDS: kinds} if self._tells_kinds else {}
        result = self._network(input_ids=ids, attention_mask=mask, **more)
        if self.capabilities.pooling is Pooling.RANK:
            return result.logits[:, :1]
        vectors = _pool(self.capabilities.pooling, result.last_hidden_state, mask)
        for layer, activation in self._dense:
            vectors = activation(layer(vectors))
        return vectors

    def close(self) -> None:
        self._network = None
        self._dense = []
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _pool(pooling: Pooling, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if pooling is Pooling.CLS:
        return states[:, 0]
    lengths = mask.sum(1)
    if pooling is Pooling.LAST:
        return states[torch.arange(len(states), device=states.device), lengths - 1]
    # In full precision: a long text has many terms.
    return (states.float() * mask.unsqueeze(-1)).sum(1).div(lengths.unsqueeze(-1)).to(states.dtype)


def framing_of(tokenizer: Tokenizer) -> Framing:
    """What the tokenizer puts around a text, and around and between two: tried out with one letter each."""
    one, two = tokenizer.encode("a"), tokenizer.encode("a", "b")
    head, tail = _around(one.ids, one.special_tokens_mask)
    mask = two.special_tokens_mask
    first = mask.index(0, len(head))
    begin = mask.index(1, first) if 1 in mask[first:] else first + 1
    end = mask.index(0, begin) if 0 in mask[begin:] else len(mask)
    return Framing(head, tail, tuple(two.ids[begin:end]))


def _around(ids: Sequence[int], mask: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    own = [place for place, is_special in enumerate(mask) if not is_special] or [0]
    return tuple(ids[: own[0]]), tuple(ids[own[-1] + 1 :])


def _load_network(source: HfSource, device: torch.device, dtype: str, *, ranks: bool) -> Any:
    config = AutoConfig.from_pretrained(source.folder, **local_files(source))
    if ranks and config.num_labels != 1:
        raise ModelBroken(
            f"{source.name} sorts texts into {config.num_labels} classes: choose a model that ranks documents."
        )
    kind, ignored = (AutoModelForSequenceClassification, ()) if ranks else (AutoModel, _IGNORED)
    return load_network(
        kind, source, config, device, ignored, dtype=choose_dtype(dtype, device, own_dtype(source, config))
    )


def _load_dense(folder: Path, network: Any) -> tuple[torch.nn.Linear, torch.nn.Module]:
    """A layer of sentence-transformers. Raises ModelBroken."""
    config = json.loads((folder / "config.json").read_bytes())
    name = str(config.get("activation_function", "Identity")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ModelBroken(
            f"{folder.name} ends in {name}, which is not known here: choose another embedding model."
        )
    weights = load_file(folder / "model.safetensors")
    layer = torch.nn.Linear(config["in_features"], config["out_features"], bias="linear.bias" in weights)
    layer.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    return layer.to(network.device, network.dtype), _ACTIVATIONS[name]()


def _context(network: Any, tokenizer: PreTrainedTokenizerFast, asked: int | None) -> int:
    """As asked, but no longer than there are positions."""
    config = network.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or _NO_LENGTH
    table = getattr(getattr(network.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    if padding is not None:
        positions -= padding + 1  # as RoBERTa counts them
    usual = tokenizer.model_max_length if tokenizer.model_max_length < _NO_LENGTH else positions
    return int(min(positions, asked or usual))


def _fingerprint(network: Any, weights_digest: str, settings: HfEmbeddingSettings) -> bytes:
    fields = {
        "engine": "hf embeddings",
        "torch": [torch.__version__, torch.__config__.show()],
        "transformers": transformers.__version__,
        "weights": weights_digest,
        "architecture": type(network).__name__,
        "dtype": str(network.dtype),
        "device": str(network.device),
        "pooling": settings.pooling,
        "dense": [place.name for place in settings.dense],
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).digest()
