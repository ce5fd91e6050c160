"""Embeddings as OpenAI and llama-server have them, and ranks as Jina, Cohere and text-embeddings-inference do."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator

from emberkeep.api.body import INT32_MAX, WHOLE, Body, Count, one_of
from emberkeep.api.fields import UserFields
from emberkeep.api.openai_completions import to_prompts
from emberkeep.errors import InvalidField
from emberkeep.types.request import Embedded, EmbeddingInput, EmbeddingRequest, Json, Ranked, RerankRequest, Vector

MAX_INPUTS = 2048
MAX_DOCUMENTS = 2048
_EUCLIDEAN = 2
_LARGEST_INT16 = 32760.0
"""What llama-server makes of the largest number of a vector whose norm is 0."""


def _to_inputs(value: Any) -> tuple[EmbeddingInput, ...]:
    inputs = to_prompts(value, MAX_INPUTS)
    if not all(inputs):
        raise ValueError("a text is not empty")
    return inputs


_Text = Annotated[str, Field(min_length=1)]
_Tokens = Annotated[list[Count], Field(min_length=1)]
_Texts = Annotated[list[_Text], Field(min_length=1, max_length=MAX_INPUTS)]
_TokenLists = Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_INPUTS)]
Inputs = Annotated[
    tuple[EmbeddingInput, ...],
    PlainValidator(_to_inputs, json_schema_input_type=_Text | _Texts | _Tokens | _TokenLists),
]
Encoding = Literal["float", "base64"]
Dimensions = Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE]


def embedding_request(body: UserFields, inputs: tuple[EmbeddingInput, ...], **fields: Any) -> EmbeddingRequest:
    """For the user of `body`. Raises InvalidField where its fields contradict each other."""
    return EmbeddingRequest(inputs, user=body.to_user(), namespace=body.to_namespace(), **fields)


class OpenAIEmbeddingsBody(UserFields):
    """OpenAI's, with `truncate` of other servers."""

    model: str | None = None
    input: Inputs
    encoding_format: Encoding | None = None
    dimensions: Dimensions | None = None
    truncate: bool | None = None

    def to_request(self) -> EmbeddingRequest:
        return embedding_request(self, self.input, dimensions=self.dimensions, truncate=self.truncate)

    def items(self, embedded: Embedded) -> Iterator[Json]:
        for index, vector in enumerate(embedded.vectors):
            yield {"object": "embedding", "index": index, "embedding": self._written(vector)}

    def _written(self, vector: Vector) -> Json:
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()


class LlamaEmbeddingBody(UserFields):
    """llama-server's own."""

    model_config = ConfigDict(json_schema_extra=one_of("content", "input"))

    model: str | None = None
    input: Inputs | None = None
    content: Inputs | None = None
    embd_normalize: Annotated[int, Field(ge=-1, le=INT32_MAX), WHOLE] | None = None
    truncate: bool | None = None

    def to_request(self) -> EmbeddingRequest:
        """Raises InvalidField where nothing is to be embedded."""
        inputs = self.input or self.content
        if inputs is None:
            raise InvalidField("content", "is required.")
        return embedding_request(self, inputs, normalize=False, truncate=self.truncate)

    def items(self, embedded: Embedded) -> Iterator[Json]:
        norm = _EUCLIDEAN if self.embd_normalize is None else self.embd_normalize
        for index, vector in enumerate(embedded.vectors):
            # A list of one: without pooling there would be a vector for each token.
            yield {"index": index, "embedding": [_normalized(vector, norm).tolist()]}


def _normalized(vector: Vector, norm: int) -> Vector:
    """By llama-server's numbers: -1 as it is, 0 as numbers of 16 bits, otherwise by the norm of that order."""
    if norm < 0:
        return vector
    length = (
        np.abs(vector).max() / _LARGEST_INT16 if norm == 0 else np.linalg.norm(vector.astype(np.float64), norm)
    )
    return (vector / length).astype(np.float32) if length else vector


def embedding_usage(done: Embedded | Ranked) -> Json:
    return {
        "prompt_tokens": done.prompt_tokens,
        "total_tokens": done.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }


# ── ranks ──


def _to_documents(value: Any) -> Any:
    """A document may be an object with a text."""
    if not isinstance(value, list):
        return value
    return [each.get("text") if isinstance(each, dict) else each for each in value]


class _Document(Body):
    text: str


_Many = Field(min_length=1, max_length=MAX_DOCUMENTS)
Documents = Annotated[
    list[str],
    _Many,
    BeforeValidator(_to_documents, json_schema_input_type=Annotated[list[str | _Document], _Many]),
]


class RerankBody(UserFields):
    """With `texts` instead of `documents` it is text-embeddings-inference's, and is answered in its shape."""

    model_config = ConfigDict(json_schema_extra=one_of("documents", "texts"))

    model: str | None = None
    query: _Text
    documents: Documents | None = None
    texts: Annotated[list[str], _Many] | None = None
    top_n: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None

    @property
    def listed(self) -> list[str]:
        """Raises InvalidField where nothing is to be ranked."""
        if (listed := self.documents or self.texts) is None:
            raise InvalidField("documents", "is required.")
        return listed

    def to_request(self) -> RerankRequest:
        return RerankRequest(
            self.query,
            tuple(self.listed),
            truncate=self.truncate is not False,
            user=self.to_user(),
            namespace=self.to_namespace(),
        )

    def answer(self, ranked: Ranked, model: str) -> Json:
        """The best first."""
        scores = [logit if self.raw_scores else _sigmoid(logit) for logit in ranked.logits]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n]
        if self.texts is not None:
            texts = self.listed if self.return_text else ()
            shown = {index: {"text": text} for index, text in enumerate(texts)}
            return [{"index": index, "score": scores[index], **shown.get(index, {})} for index in best]
        results = [{"index": index, "relevance_score": scores[index], **self._document(index)} for index in best]
        return {"object": "list", "model": model, "usage": embedding_usage(ranked), "results": results}

    def _document(self, index: int) -> dict[str, Json]:
        return {"document": {"text": self.listed[index]}} if self.return_documents else {}


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
