"""Embedding models in llama.cpp: encoders such as BERT, and decoders whose states are pooled.

llama.cpp pools the tokens of one step, so an input has to be in one as a whole. The last token of a causal
model, however, has the same state wherever the input was cut. There steps stay short, because each token in a
step of llama.cpp takes a row of logits, as wide as the vocabulary, whether they are wanted or not.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence

import numpy as np

from emberkeep.engine.base import Rows
from emberkeep.engine.embedding import EmbeddingCapabilities, Framing, TokenInput, Vectors
from emberkeep.engine.llamacpp.c_api import Handle, defaults
from emberkeep.engine.llamacpp.context import BatchBuffer
from emberkeep.engine.llamacpp.model import LlamaModel
from emberkeep.engine.llamacpp.shared_library import (
    build,
    llama,
    own_switches,
    take_errors,
)
from emberkeep.engine.llamacpp.threads import ThreadPool, available_cores
from emberkeep.errors import EngineError, ModelBroken
from emberkeep.types.request import Pooling
from emberkeep.values import dataclass

SEQUENCES = 63
"""Inputs of one step."""
_NUMBERED = SEQUENCES + 1
"""llama.cpp plans its buffers for a multiple of so many tokens, and ends the process where a step is none."""
_POOLING = {1: Pooling.MEAN, 2: Pooling.CLS, 3: Pooling.LAST, 4: Pooling.RANK}
_NUMBERS = {pooling: number for number, pooling in _POOLING.items()}
_YES_AND_NO = ((2, "qwen3"), (2, "qwen3vl"))
"""Whose head gives probabilities of yes and of no."""
_QUERY, _DOCUMENT = "{query}", "{document}"


@dataclass(frozen=True, slots=True)
class LlamaEmbeddingSettings:
    context: int
    """Longest input, in tokens."""
    batch: int = 512
    """Tokens evaluated in one step; more where one input has to be in one step and is longer."""
    pooling: Pooling | None = None
    """None: as the model's file says."""
    threads: int | None = None


class LlamaEmbeddingEngine:
    """Owns `model`, unless it is `shared` with another engine. Raises EngineError, ModelBroken."""

    def __init__(
        self, model: LlamaModel, settings: LlamaEmbeddingSettings, weights_digest: str, *, shared: bool = False
    ) -> None:
        self._model = None if shared else model
        self._threads = ThreadPool()
        self._context: Handle | None = None
        self.vocab = model.vocab
        try:
            pooling = settings.pooling or own_pooling(model)
            longest = settings.batch if _can_cut(model, pooling) else max(settings.batch, settings.context)
            self._step = -(-longest // _NUMBERED) * _NUMBERED
            self._context = _open_context(model, settings, pooling, self._step)
            self._memory: Handle | None = llama().llama_get_memory(self._context)
            self._threads.start(settings.threads or available_cores())
            self._threads.attach(self._context)
            self.capabilities = EmbeddingCapabilities(
                dimension=1 if pooling is Pooling.RANK else llama().llama_model_n_embd_out(model.handle),
                context=settings.context if self._memory else min(settings.context, self._step),
                pooling=pooling,
                batch=settings.batch,
                sequences=SEQUENCES,
            )
            self.framing = framing_of(model)
            self._outputs = _outputs(model) if pooling is Pooling.RANK else self.capabilities.dimension
            self.fingerprint = _fingerprint(model, weights_digest, pooling, settings)
        except BaseException:
            self.close()
            raise
        self._buffer = BatchBuffer(self._step)

    def embed(self, inputs: Sequence[TokenInput]) -> Vectors:
        try:
            if len(inputs) == 1 and len(inputs[0].ids) > self._step:
                return self._embed_cut(inputs[0])
            self._decode([_rows(number, 0, each.ids) for number, each in enumerate(inputs)])
            return np.concatenate([self._result(number) for number in range(len(inputs))])
        finally:
            if self._memory:
                llama().llama_memory_clear(self._memory, False)

    def _embed_cut(self, one: TokenInput) -> Vectors:
        """What is longer than a step, of a causal model of which the last token counts."""
        for start in range(0, len(one.ids), self._step):
            self._decode([_rows(0, start, one.ids[start : start + self._step])])
        return self._result(0)

    def _decode(self, rows: Sequence[Rows]) -> None:
        # What has no memory, an encoder, is encoded by the same call.
        if llama().llama_decode(self._context, self._buffer.fill(rows)[0]):
            raise EngineError(f"llama.cpp could not embed a text: {take_errors() or 'it does not say why'}.")

    def _result(self, number: int) -> Vectors:
        """The vector of one input of the latest step, as a table of one row."""
        address = llama().llama_get_embeddings_seq(self._context, number + 1)
        if not address:
            raise EngineError("llama.cpp gave no vector for a text: choose another file of this model.")
        values = np.ctypeslib.as_array(
            ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (self._outputs,)
        ).copy()
        if self.capabilities.pooling is Pooling.RANK and self._outputs == 2:
            least = np.float32(1e-30)
            values = np.log(np.maximum(values[:1], least)) - np.log(np.maximum(values[1:], least))
        return values[np.newaxis]

    def close(self) -> None:
        if self._context:
            llama().llama_free(self._context)
            self._context = None
        self._threads.close()
        if self._model is not None:
            self.vocab.close()
            self._model.close()
            self._model = None


def own_pooling(model: LlamaModel) -> Pooling:
    """As the model's file says. Raises ModelBroken where it says nothing that is known here."""
    number = model.hyperparameter("pooling_type") or ""
    pooling = _POOLING.get(int(number) if number.isdecimal() else 0)
    if pooling is None:
        raise ModelBroken(
            f"{model.path.name} does not say how its tokens become one vector: set pooling to mean, cls or last."
        )
    return pooling


def _can_cut(model: LlamaModel, pooling: Pooling) -> bool:
    """An input may be computed in several steps."""
    return pooling is Pooling.LAST and model.hyperparameter("attention.causal") != "false"


def framing_of(model: LlamaModel) -> Framing:
    """What llama.cpp itself puts around a text, and what the model was trained with between two."""
    vocab = model.vocab
    head = _known(vocab.bos if vocab.adds_bos or vocab.is_wordpiece else None)
    if vocab.is_wordpiece:
        return Framing(head, tail=_known(vocab.sep), middle=_known(vocab.sep))
    end = _known((vocab.sep if vocab.eos is None else vocab.eos) if vocab.adds_eos else None)
    # Older files of XLM-RoBERTa's kind do not say that two texts have a separator between them, too.
    between = _known(vocab.sep if vocab.adds_sep or vocab.is_unigram else None)
    return Framing(head, end, (*end, *between), _template(model))


def _template(model: LlamaModel) -> tuple[str, str, str] | None:
    source = model.metadata("tokenizer.chat_template.rerank")
    if not source or _QUERY not in source:
        return None
    before, _, rest = source.partition(_QUERY)
    between, found, after = rest.partition(_DOCUMENT)
    return (before, between, after) if found else None


def _known(token: int | None) -> tuple[int, ...]:
    return () if token is None else (token,)


def _rows(number: int, start: int, ids: Sequence[int]) -> Rows:
    return Rows(number, start, np.array(ids, np.int32), outputs=len(ids))


def _outputs(model: LlamaModel) -> int:
    """Numbers that the head of a model that ranks gives. Raises ModelBroken."""
    count = int(llama().llama_model_n_cls_out(model.handle))
    if count != 1 and (count, model.metadata("general.architecture")) not in _YES_AND_NO:
        raise ModelBroken(
            f"{model.path.name} sorts texts into {count} classes: choose a model that ranks documents."
        )
    return count


def _open_context(model: LlamaModel, settings: LlamaEmbeddingSettings, pooling: Pooling, step: int) -> Handle:
    params = defaults(llama().llama_context_default_params)
    params.n_ctx = max(step, settings.context)
    params.n_batch = params.n_ubatch = params.n_outputs_max = step
    params.n_seq_max = _NUMBERED
    params.n_threads = params.n_threads_batch = settings.threads or available_cores()
    params.embeddings = True
    params.pooling_type = _NUMBERS[pooling]
    params.kv_unified = True
    params.no_perf = True
    try:
        return model.open_context(params)
    except EngineError as reason:
        raise EngineError(
            f"llama.cpp has no room for inputs of {settings.context} tokens, {reason}: try a smaller --ctx."
        ) from None


def _fingerprint(
    model: LlamaModel, weights_digest: str, pooling: Pooling, settings: LlamaEmbeddingSettings
) -> bytes:
    parts = [
        "llama.cpp embeddings",
        *build(),
        weights_digest,
        pooling,
        # Beyond some length a model may rotate its positions in another way.
        settings.context,
        own_switches(),
        [(adapter.digest, adapter.scale) for adapter in model.adapters],
        model.placement,
    ]
    return hashlib.sha256("\0".join(repr(part) for part in parts).encode()).digest()
