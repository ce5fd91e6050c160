"""The engine for models whose state is not only attention: each sequence by itself, in the model's own cache.

Recurrent, convolutional and other layers keep a state that cannot be taken apart by token, and some models
compute attention in ways of their own. They run as their authors wrote them; their state is stored as a whole,
where it will be wanted again:

    0   magic "EKWS", i32 position, u32 length of the description, u32 0
    16  description: JSON, one entry for each tensor and each number in the cache
        tensors, each at a multiple of 64 bytes

A cache is walked, not known: whatever tensors and numbers its layers hold are its state. Only a cache that has
the same entries takes them back.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from emberkeep.engine.base import (
    Blended,
    Capabilities,
    Exported,
    Footprint,
    KvUnit,
    Logits,
    Outcome,
    Payload,
    Piece,
    Rows,
)
from emberkeep.engine.hf.engine import HfEngine
from emberkeep.engine.hf.expert_counter import HookExpertCounter
from emberkeep.engine.hf.footprint import peak_bytes
from emberkeep.engine.hf.model_loader import HfModel, HfSettings, fingerprint
from emberkeep.engine.hf.network import has_choice
from emberkeep.engine.hf.transfer import as_tensor
from emberkeep.errors import EngineError
from emberkeep.types.request import Json
from emberkeep.values import dataclass

log = logging.getLogger("emberkeep.engine")

_PROBED = 12


@dataclass(slots=True)
class _WholeState:
    cache: Any
    """None: what is in it comes with a snapshot."""
    end: int


class HfWholeEngine:
    """See `Engine` for the contracts."""

    attention = None
    footprint: Footprint | None = None

    @torch.no_grad()
    def __init__(self, model: HfModel, settings: HfSettings, weights_digest: str) -> None:
        """Raises EngineError for a model that gives no cache that could be kept."""
        self._model = model.network
        self._device = model.network.device
        self._stream = model.stream
        self.vocab = model.vocab
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "past_key_values" if "past_key_values" in parameters else "cache_params"
        self._picks_logits = "logits_to_keep" in parameters
        self._states: dict[int, _WholeState] = {}
        self._logits_of: dict[int, Logits] = {}
        self._goes_on_by = settings.batch
        """Most tokens that can be added to a state at once."""
        self._empty, size = self._probe()
        self.experts = HookExpertCounter.of(
            model.network, self._device, lambda: self._run(np.arange(3, dtype=np.int32), None), self._states.clear
        )
        cells = settings.cells or settings.context
        self.capabilities = Capabilities(
            kv_unit=KvUnit.SNAPSHOT,
            can_shift=False,
            max_sequences=settings.sequences,
            cells=cells,
            context=min(settings.context, cells),
            batch=settings.batch,
            outputs=settings.sequences,
            kv_bytes_per_token=0,
            snapshot_bytes=size * settings.context,
        )
        attention = str(getattr(self._model.config, "_attn_implementation", None))
        self.fingerprint = fingerprint(model, "whole", weights_digest, attention, stored=settings.stored)

    @torch.no_grad()
    def evaluate(self, batch: Sequence[Rows]) -> Outcome:
        if self._lacks_room(sum(len(rows.tokens) for rows in batch)):
            return Outcome.NO_ROOM
        self._logits_of = {}
        if self.experts is not None:
            self.experts.step_failed()  # what the latest one left, if it failed
        for index, rows in enumerate(batch):
            state = self._states.get(rows.sequence)
            if rows.start != self._end(rows.sequence) or (state and state.cache is None):
                raise EngineError(f"Sequence {rows.sequence} cannot go on at {rows.start}.")
            logits, cache = self._run(rows.tokens, state.cache if state else None)
            self._states[rows.sequence] = _WholeState(cache, rows.start + len(rows.tokens))
            if rows.outputs:
                self._logits_of[index] = logits
        if self.experts is not None:
            self.experts.step_done()
        return Outcome.DONE

    def logits(self, index: int, row: int = 0) -> Logits:
        return self._logits_of[index]

    def likeliest(self, index: int, row: int = 0) -> int:
        return int(self.logits(index, row).argmax())

    draws = is_ahead = False
    meanwhile: Callable[[], None] = staticmethod(lambda: None)
    logprobs = went_on = None

    def export_kv(self, sequence: int, borders: Sequence[int], bits: int = 16) -> Exported:
        if borders[-1] > self._end(sequence):
            raise EngineError(f"Sequence {sequence} does not reach from {borders[0]} to {borders[-1]}.")
        return Exported([memoryview(b"") for _ in borders[1:]])

    def export_snapshot(self, sequence: int) -> Payload:
        state = self._states.get(sequence)
        if state is None or state.cache is None:
            raise EngineError(f"Sequence {sequence} has nothing that could be kept as a snapshot.")
        return write_cache(state.cache, state.end)

    def import_kv(
        self, sequence: int, start: int, end: int, payloads: Sequence[Payload], payload_start: int
    ) -> Outcome:
        if any(len(payload) for payload in payloads):
            raise EngineError("A stored KV payload is of another kind.")
        if not self._end(sequence) == start < end:
            raise EngineError(f"Sequence {sequence} does not end at {start}, so nothing can be appended there.")
        self._states[sequence] = _WholeState(None, end)
        return Outcome.DONE

    def payload_buffer(self, size: int) -> memoryview | None:
        return None

    def is_loading(self, sequence: int) -> bool:
        return False

    def import_snapshot(self, sequence: int, position: int, payload: Payload) -> Outcome:
        state = self._states.get(sequence)
        if state and (state.cache is not None or state.end != position):
            raise EngineError(f"Sequence {sequence} does not wait for a snapshot at {position}.")
        cache = read_cache(payload, position, self._empty, self._device)
        if self._lacks_room(position - self._end(sequence)):
            return Outcome.NO_ROOM
        self._states[sequence] = _WholeState(cache, position)
        return Outcome.DONE

    def blend(self, rows: Rows, pieces: Sequence[Piece], ratio: float) -> Blended:
        raise EngineError("This model's state cannot be moved to another place.")

    def copy_kv(self, source: int, target: int, end: int) -> None:
        state = self._states[source]
        if end != state.end:
            raise EngineError(f"This model's state can be shared only as a whole, and {end} is not where it ends.")
        self._states[target] = _WholeState(copy.deepcopy(state.cache), end)

    def trim(self, sequence: int, start: int) -> None:
        state = self._states.get(sequence)
        if start == 0:
            self._states.pop(sequence, None)
        elif state is None or start < state.end:
            raise EngineError(f"This model's state cannot be cut back to {start} tokens.")

    def splice(self, sequence: int, start: int, end: int, insert: npt.NDArray[np.int32]) -> Outcome:
        raise EngineError("Nothing can be cut out of this model's state.")

    def rest(self) -> None:
        pass

    can_improve = False

    def improve(self, is_wanted: Callable[[], bool]) -> bool:
        return True

    def step_seconds(self, rows: int, depth: int, outputs: int) -> float | None:
        return None

    def peak_bytes(self) -> int | None:
        return peak_bytes(self._device)

    def stats(self) -> dict[str, Json]:
        streaming: dict[str, Json] = {"streaming": self._stream.stats()} if self._stream else {}
        return {"sequences": len(self._states), **streaming}

    def close(self) -> None:
        self._states.clear()
        if self._stream is not None:
            self._stream.close()
        if self.experts is not None:
            self.experts.close()
        self._model = None

    def _end(self, sequence: int) -> int:
        state = self._states.get(sequence)
        return state.end if state else 0

    def _lacks_room(self, tokens: int) -> bool:
        held = sum(state.end for state in self._states.values())
        return held + tokens > self.capabilities.cells

    def _run(self, tokens: Any, cache: Any) -> tuple[Logits, Any]:
        """Logits after the last of `tokens`, and the state then. Changes `cache`."""
        step = len(tokens) if cache is None else self._goes_on_by
        logits = np.empty(0, np.float32)
        for begin in range(0, len(tokens), step):
            ids = torch.from_numpy(np.asarray(tokens[begin : begin + step], np.int64)).to(self._device)
            given: dict[str, Any] = {self._cache_name: cache}
            if self._picks_logits:
                given["logits_to_keep"] = 1
            try:
                output = self._model(input_ids=ids[None], use_cache=True, **given)
            except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
                raise EngineError(f"The model failed: {error}") from error
            cache = getattr(output, self._cache_name)
            logits = output.logits[0, -1].float().cpu().numpy()
        return logits, cache

    def _probe(self) -> tuple[Any, int]:
        """A cache to restore others into, and about the bytes of state per token. Raises EngineError.

        Some models' code goes on from a state by one token only: that is found out here.
        """
        tokens = np.arange(3, 3 + _PROBED, dtype=np.int32)
        expected, cache = self._run(tokens, None)
        if not hasattr(cache, "layers"):
            raise EngineError("This model's cache is of a kind that cannot be stored.")
        size = len(write_cache(cache, _PROBED)) // _PROBED
        for most in (self._goes_on_by, 1):
            self._goes_on_by = most
            _, begun = self._run(tokens[:4], None)
            restored = read_cache(write_cache(begun, 4), 4, begun, self._device)
            logits, _ = self._run(tokens[4:], restored)
            if np.corrcoef(logits, expected)[0, 1] > (1 - 1e-4 if self._model.dtype == torch.float32 else 0.98):
                return copy.deepcopy(begun), size
        raise EngineError("This model computes something else when it goes on from where it stopped.")


# ── the cache as bytes ──

_HEAD = struct.Struct("<4siII")
_MAGIC = b"EKWS"
_ALIGN = 64
_MOST_DESCRIPTION = 4 << 20
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)}
_BROKEN = "A stored snapshot does not have the shape of this model's state."


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A tensor or a number, and where it is held."""

    path: str
    holder: Any
    """A dict or a list."""
    key: Any

    @property
    def value(self) -> Any:
        return self.holder[self.key]


def write_cache(cache: Any, position: int) -> Payload:
    """A copy of everything that `cache` holds. Raises EngineError for a tensor of a kind that is not known."""
    entries, tensors, offset = [], [], 0
    for leaf in _leaves(cache):
        if not isinstance(leaf.value, torch.Tensor):
            entries.append([leaf.path, leaf.value])
            continue
        tensor = leaf.value.detach().to("cpu").contiguous()
        if str(tensor.dtype) not in _DTYPES:
            raise EngineError(f"This model's state holds {tensor.dtype}, which cannot be stored.")
        entries.append([leaf.path, str(tensor.dtype), list(tensor.shape), offset])
        tensors.append((tensor, offset))
        offset += _pad(tensor.numel() * tensor.element_size())
    description = json.dumps(entries).encode()
    begin = _pad(_HEAD.size + len(description))
    payload = np.zeros(begin + offset, np.uint8)
    payload[: _HEAD.size] = np.frombuffer(_HEAD.pack(_MAGIC, position, len(description), 0), np.uint8)
    payload[_HEAD.size : _HEAD.size + len(description)] = np.frombuffer(description, np.uint8)
    for tensor, at in tensors:
        size = tensor.numel() * tensor.element_size()
        payload[begin + at : begin + at + size] = tensor.flatten().view(torch.uint8).numpy()
    return memoryview(payload)


def read_cache(payload: Payload, position: int, model_cache: Any, device: torch.device) -> Any:
    """A cache like `model_cache`, with the state of `payload`, which must be of `position`. Raises EngineError."""
    entries, begin = _describe(payload, position)
    cache = copy.deepcopy(model_cache)
    leaves = {leaf.path: leaf for leaf in _leaves(cache)}
    if set(entries) != set(leaves):
        raise EngineError(_BROKEN)
    data = as_tensor(payload, torch.uint8)
    for path, leaf in leaves.items():
        leaf.holder[leaf.key] = _value(entries[path], leaf.value, data, begin, device)
    return cache


def _value(entry: list[Any], like: Any, data: torch.Tensor, begin: int, device: torch.device) -> Any:
    if not isinstance(like, torch.Tensor):
        if len(entry) != 1 or not isinstance(entry[0], bool | int | float | None):
            raise EngineError(_BROKEN)
        return entry[0]
    try:
        name, shape, offset = entry
        dtype, size = _DTYPES[name], math.prod(shape)
        start, end = begin + offset, begin + offset + size * dtype.itemsize
        if dtype != like.dtype or len(shape) != like.ndim or not begin <= start <= end <= len(data):
            raise EngineError(_BROKEN)
        return data[start:end].clone().view(dtype).view(shape).to(device)
    except (ValueError, TypeError, KeyError, RuntimeError):
        raise EngineError(_BROKEN) from None


def _describe(payload: Payload, position: int) -> tuple[dict[str, list[Any]], int]:
    """Path to what is said about it, and where the tensors begin."""
    if len(payload) < _HEAD.size:
        raise EngineError(_BROKEN)
    magic, taken_at, length, rest = _HEAD.unpack_from(payload)
    if magic != _MAGIC or rest or length > min(_MOST_DESCRIPTION, len(payload) - _HEAD.size):
        raise EngineError(_BROKEN)
    if taken_at != position or position < 1:
        raise EngineError("A stored snapshot was taken at another position than its place.")
    try:
        entries = json.loads(bytes(payload[_HEAD.size : _HEAD.size + length]))
        return {str(path): about for path, *about in entries}, _pad(_HEAD.size + length)
    except (ValueError, TypeError, RecursionError):
        raise EngineError(_BROKEN) from None


def _leaves(cache: Any) -> Iterator[_Leaf]:
    for index, layer in enumerate(cache.layers):
        yield from _inside(layer, f"{index}")


def _inside(holder: Any, path: str) -> Iterator[_Leaf]:
    holder = holder if isinstance(holder, dict | list) else vars(holder)
    keys = range(len(holder)) if isinstance(holder, list) else holder
    for key in sorted(keys, key=str):
        value, inner = holder[key], f"{path}/{key}"
        if isinstance(value, torch.Tensor | bool | int | float) or value is None:
            yield _Leaf(inner, holder, key)
        elif isinstance(value, dict | list):
            yield from _inside(value, inner)


def _pad(size: int) -> int:
    return size + -size % _ALIGN


def open_engine(model: HfModel, settings: HfSettings, weights_digest: str) -> HfEngine | HfWholeEngine:
    """Paged and batched where the model's code allows it; else one sequence at a time, with state as a whole.

    Raises EngineError for a model that neither can run.
    """
    try:
        return HfEngine(model, settings, weights_digest)
    except EngineError as reason:
        log.info("sequences are evaluated one by one: %s", reason)
    try:
        return _open_whole("sdpa", model, settings, weights_digest)
    except (EngineError, ValueError):  # it cannot, or says so
        return _open_whole("eager", model, settings, weights_digest)


def _open_whole(attention: str, model: HfModel, settings: HfSettings, weights_digest: str) -> HfWholeEngine:
    if has_choice(model.network):
        model.network.set_attn_implementation(attention)
    return HfWholeEngine(model, settings, weights_digest)
