"""llama-server's own endpoints: completion, infill, props, slots and LoRA adapters."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic, perf_counter
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from emberkeep import __version__
from emberkeep.api.llama_server import InfillBody, LlamaBody, LlamaCompletionBody, settings_json
from emberkeep.api.llama_server_answer import LlamaEnvelope, LlamaFrames, PromptRecord, whole_json
from emberkeep.api.request import INT32_MAX, Body, parse_list
from emberkeep.backend.base import Backend
from emberkeep.backend.capabilities import cache_of, tokenizer_of
from emberkeep.backend.models import Models
from emberkeep.errors import InvalidField, NoSuchEntry, RequestError
from emberkeep.server.json_response import json_response
from emberkeep.server.routes import STREAMS, Parameters, Routes, TakenBody, read_parameters, takes
from emberkeep.server.side_work import SideWork
from emberkeep.server.stream import gather, make_of_body, read_body, stream
from emberkeep.types.cache import CacheEntry
from emberkeep.types.events import Events
from emberkeep.types.request import Json, Request

_SCALES = TakenBody(schema={"type": "array"}, example=[])
_MOST_NAMES = 4096
_LOOKS, _BETWEEN_LOOKS_S = 100, 0.02
"""At a slot whose turn is being stored."""


class LlamaModel(Parameters):
    model: str | None = None


class SlotsParameters(LlamaModel):
    fail_on_no_slot: str = ""


class SlotParameters(LlamaModel):
    slot: Annotated[int, Field(ge=0, le=INT32_MAX)]
    action: Literal["save", "restore", "erase"]


def llama_routes(models: Models, side: SideWork) -> Routes:
    routes, saved = Routes(), SavedSlots()

    @routes.post("/completion", content=STREAMS, body=takes(LlamaCompletionBody, prompt="Once upon a time"))
    async def completion(http: HttpRequest) -> Response:
        body = await read_body(http, LlamaCompletionBody)
        backend = models.find(body.model)
        if body.needs_tokens:
            requests = await side.run_on(lambda loaded: body.to_requests(_tokenizing(loaded)), backend)
        else:
            requests = await make_of_body(http, partial(body.to_requests, _tokenizing(backend)))
        return await _respond(http, backend, body, requests)

    @routes.post("/infill", content=STREAMS, body=takes(InfillBody, input_prefix="a", input_suffix="b"))
    async def infill(http: HttpRequest) -> Response:
        body = await read_body(http, InfillBody)
        return await _respond(http, models.find(body.model), body, await make_of_body(http, body.to_requests))

    @routes.get("/props", parameters=LlamaModel)
    async def props(http: HttpRequest) -> Response:
        backend = models.find(read_parameters(http, LlamaModel).model)
        return await side.run_on(lambda loaded: json_response(_props(loaded)), backend)

    @routes.post("/props")
    async def change_props(_: HttpRequest) -> Response:
        raise RequestError(
            "Properties cannot be changed while the server runs: send what should differ with each request, or "
            "change its configuration and start it again."
        )

    @routes.get("/slots", parameters=SlotsParameters)
    async def slots(http: HttpRequest) -> Response:
        asked = read_parameters(http, SlotsParameters)
        told = await asyncio.to_thread(_slots, models.find(asked.model))
        if asked.fail_on_no_slot and all(slot["is_processing"] for slot in told):
            return json_response(
                {"error": {"code": 503, "message": "no slot available", "type": "unavailable_error"}}, 503
            )
        return json_response(told)

    @routes.post("/slots/{slot}", parameters=SlotParameters, body=takes(SlotBody, filename="chat.bin"))
    async def act_on_slot(http: HttpRequest) -> Response:
        asked = read_parameters(http, SlotParameters)
        act = {"save": saved.save, "restore": saved.restore, "erase": saved.erase}[asked.action]
        backend = models.find(asked.model)
        body = await read_body(http, SlotBody) if await http.body() else SlotBody()
        return await side.run_on(lambda loaded: json_response(act(loaded, asked.slot, body.filename)), backend)

    @routes.get("/lora-adapters", parameters=LlamaModel)
    async def adapters(http: HttpRequest) -> Response:
        return json_response(_adapters(models.find(read_parameters(http, LlamaModel).model)))

    @routes.post("/lora-adapters", parameters=LlamaModel, body=_SCALES)
    async def scale_adapters(http: HttpRequest) -> Response:
        asked, raw = read_parameters(http, LlamaModel), await http.body()
        wanted = await make_of_body(http, lambda: parse_list(raw))
        _check_scales(wanted, _adapters(models.find(asked.model)))
        return json_response({"success": True})

    return routes


# ── completions ──


async def _respond(http: HttpRequest, backend: Backend, body: LlamaBody, requests: Sequence[Request]) -> Response:
    """Raises what the backend raises before the first event, and ClientGone."""
    witness = Witness(backend, requests)
    envelope = LlamaEnvelope(backend.card.id, body, witness.records)
    if body.stream:
        return await stream(http, witness, requests, lambda: LlamaFrames(envelope, monotonic))
    answer = await gather(http, witness, requests)
    return json_response(whole_json(answer.choices, envelope))


class Witness:
    """In front of a backend: notes what an answer to each of several prompts tells besides its text."""

    def __init__(self, backend: Backend, requests: Sequence[Request]) -> None:
        self._backend = backend
        self.records = [PromptRecord(request) for request in requests]
        self._asked = 0

    def generate(self, request: Request) -> Events:
        """Called once for each of the requests, in their order."""
        record = self.records[self._asked]
        self._asked += 1
        return self._noted(record, self._backend.generate(request))

    async def _noted(self, record: PromptRecord, events: Events) -> Events:
        async with aclosing(events):
            async for event in events:
                record.note(event)
                yield event


def _tokenizing(backend: Backend) -> Callable[[str, bool], list[int]]:
    def tokenize(text: str, is_first: bool) -> list[int]:
        return tokenizer_of(backend).tokenize(text, add_special=is_first, parse_special=True)

    return tokenize


# ── about the server ──


def _props(backend: Backend) -> dict[str, Json]:
    """The file's name alone: where models lie is nothing for clients."""
    card, texts = backend.card, tokenizer_of(backend, "template").texts()
    usual = Request(prompt="")
    details = card.details or {}
    return {
        "default_generation_settings": {"params": settings_json(usual), "n_ctx": card.context},
        "total_slots": len(_slots(backend)),
        "model_alias": card.id,
        "model_ftype": details.get("quantisation"),
        "model_path": details.get("file", card.id),
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": texts.chat_template,
        "chat_template_caps": {"supports_tools": card.calls_tools, "supports_tool_calls": card.calls_tools},
        "bos_token": texts.bos,
        "eos_token": texts.eos,
        "build_info": f"emberkeep-{__version__}",
        "is_sleeping": False,
    }


def _slots(backend: Backend) -> list[dict[str, Json]]:
    """Without texts: an operator reads it. None for a model that runs elsewhere, which has none that we know."""
    slots = (backend.stats().get("scheduler") or {}).get("slots", [])
    context = backend.card.context
    return [
        {"id": slot["id"], "n_ctx": context, **{k: v for k, v in slot.items() if k != "entry"}} for slot in slots
    ]


def _adapters(backend: Backend) -> list[dict[str, Json]]:
    loaded = (backend.card.details or {}).get("lora", [])
    return [{"id": place, "path": each["file"], "scale": each["scale"]} for place, each in enumerate(loaded)]


def _check_scales(wanted: list[Json], loaded: list[dict[str, Json]]) -> None:
    """Raises RequestError for scales that differ from those the model was loaded with."""
    scales = {each["id"]: 0.0 for each in loaded}
    for each in wanted:
        match each:
            case {"id": int() as adapter, "scale": int() | float() as scale} if adapter in scales:
                scales[adapter] = float(scale)
            case _:
                raise RequestError(
                    "Give a list of objects with the id of an adapter and its scale: GET lists them."
                )
    if any(scales[each["id"]] != each["scale"] for each in loaded):
        raise RequestError(
            "Scales of adapters cannot be changed while a model is loaded, because stored state depends on them: "
            "start the server with --lora FILE:SCALE, or serve the model twice under two names."
        )


# ── slots ──


def _without_folders(filename: str) -> str:
    if "/" in filename or "\\" in filename:
        raise ValueError("give a name without folders")
    return filename


class SlotBody(Body):
    filename: Annotated[str, Field(min_length=1, max_length=255), AfterValidator(_without_folders)] | None = None


class SavedSlots:
    """Slots that clients have saved. All state is stored anyway; saving it means that it stays. Every method
    blocks, for milliseconds. Names are known as long as the server runs; an entry's id or own name works too."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[str, str], str] = OrderedDict()

    def save(self, backend: Backend, slot: int, filename: str | None) -> dict[str, Json]:
        """Pin what rests in a slot. Raises RequestError, NoSuchEntry."""
        began, name = perf_counter(), _named(filename)
        entry = cache_of(backend).pin(_resting(backend, slot), True)
        self._entries[backend.card.id, name] = entry.id
        if len(self._entries) > _MOST_NAMES:
            self._entries.popitem(last=False)
        told = {"n_saved": entry.tokens, "n_written": entry.bytes, "timings": {"save_ms": _since(began)}}
        return {"id_slot": slot, "filename": name, **told, "emberkeep": {"entry": entry.id}}

    def restore(self, backend: Backend, slot: int, filename: str | None) -> dict[str, Json]:
        """Nothing has to be done: the next request that goes on with it finds it. Raises InvalidField,
        NoSuchEntry."""
        began, name = perf_counter(), _named(filename)
        entry = self._find(backend, name)
        told = {"n_restored": entry.tokens, "n_read": entry.bytes, "timings": {"restore_ms": _since(began)}}
        return {"id_slot": slot, "filename": name, **told, "emberkeep": {"entry": entry.id}}

    def erase(self, backend: Backend, slot: int, filename: str | None) -> dict[str, Json]:
        """Remove what rests in a slot, stored or not. Raises RequestError, NoSuchEntry."""
        entry = _resting(backend, slot)
        return {"id_slot": slot, "n_erased": cache_of(backend).remove(entry).tokens}

    def _find(self, backend: Backend, name: str) -> CacheEntry:
        wanted = self._entries.get((backend.card.id, name), name)
        found = next((each for each in cache_of(backend).entries() if wanted in (each.id, each.name)), None)
        if found is None:
            raise NoSuchEntry(f"Nothing was saved as {name!r}: GET /v1/cache lists what is stored.", "filename")
        return found


def _resting(backend: Backend, slot: int) -> str:
    """The entry that rests in a slot; waits for a moment where its turn is just being stored. Raises RequestError
    where there is none."""
    for _ in range(_LOOKS):
        held = _held(backend, slot)
        if held["is_processing"]:
            raise RequestError(f"Slot {slot} is at work: ask again when its answer is done.", "id_slot")
        if held["entry"] is not None:
            return str(held["entry"])
        if not held.get("n_tokens"):
            break
        time.sleep(_BETWEEN_LOOKS_S)
    raise RequestError(f"Nothing rests in slot {slot}: GET /v1/cache lists what is stored.", "id_slot")


def _held(backend: Backend, slot: int) -> dict[str, Json]:
    slots = (backend.stats().get("scheduler") or {}).get("slots", [])
    if slot >= len(slots):
        raise RequestError(f"There are {len(slots)} slots, from 0 on.", "id_slot")
    held: dict[str, Json] = slots[slot]
    return held


def _named(filename: str | None) -> str:
    if filename is None:
        raise InvalidField("filename", "is required.")
    return filename


def _since(began: float) -> float:
    return round(1e3 * (perf_counter() - began), 3)
