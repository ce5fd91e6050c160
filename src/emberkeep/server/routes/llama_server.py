"""llama-server's own endpoints: completion, infill, props, slots, LoRA adapters; tokens and templates."""

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
from emberkeep.api.body import INT32_MAX, Body, Count, parse_list
from emberkeep.api.llama_server import (
    InfillBody,
    LlamaBody,
    LlamaCompletionBody,
    LlamaEnvelope,
    LlamaFrames,
    PromptRecord,
    settings_json,
    whole_json,
)
from emberkeep.api.openai_chat import MessageList, TemplateArgs, ToolList, to_messages
from emberkeep.backend.base import Backend, cache_of, tokenizer_of
from emberkeep.errors import InvalidField, NoSuchEntry, RequestError
from emberkeep.server.routes.base import (
    HELLO,
    STREAMS,
    Parameters,
    Routes,
    Served,
    json_response,
    list_response,
    respond,
)
from emberkeep.server.stream import make_of_body, read_body
from emberkeep.types.cache import CacheEntry
from emberkeep.types.events import Events
from emberkeep.types.request import Json, Request

_MOST_NAMES = 4096
_LOOKS, _BETWEEN_LOOKS_S = 100, 0.02
"""At a slot whose turn is being stored."""


class LlamaParameters(Parameters):
    model: str | None = None


class SlotsParameters(LlamaParameters):
    fail_on_no_slot: str = ""


class SlotParameters(LlamaParameters):
    slot: Annotated[int, Field(ge=0, le=INT32_MAX)]
    action: Literal["save", "restore", "erase"]


def routes(served: Served) -> Routes:
    routes = Routes()
    _add_completions(routes, served)
    _add_slots(routes, served)
    _add_settings(routes, served)
    _add_tokenizing(routes, served)
    return routes


# ── completions ──


def _add_completions(routes: Routes, served: Served) -> None:
    models, side = served.models, served.side

    @routes.post("/completion", content=STREAMS, example={"prompt": "Once upon a time"})
    async def completion(http: HttpRequest, body: LlamaCompletionBody) -> Json:
        backend = models.find(body.model)
        if body.needs_tokens:
            requests = await side.run_on(lambda loaded: body.to_requests(_tokenizing(loaded)), backend)
        else:
            requests = await make_of_body(http, partial(body.to_requests, _tokenizing(backend)))
        return await _respond(http, backend, body, requests)

    @routes.post("/infill", content=STREAMS, example={"input_prefix": "a", "input_suffix": "b"})
    async def infill(http: HttpRequest, body: InfillBody) -> Json:
        return await _respond(http, models.find(body.model), body, await make_of_body(http, body.to_requests))


async def _respond(http: HttpRequest, backend: Backend, body: LlamaBody, requests: Sequence[Request]) -> Json:
    witness = Witness(backend, requests)
    envelope = LlamaEnvelope(backend.card.id, body, witness.records)
    streams = (lambda: LlamaFrames(envelope, monotonic)) if body.stream else None
    return await respond(http, witness, requests, streams, lambda answer: whole_json(answer.choices, envelope))


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


def _add_settings(routes: Routes, served: Served) -> None:
    models = served.models

    @routes.get("/props")
    async def props(query: LlamaParameters) -> Json:
        return await served.side.run_on(_props, models.find(query.model))

    @routes.post("/props")
    async def change_props() -> Json:
        raise RequestError(
            "Properties cannot be changed while the server runs: send what should differ with each request, or "
            "change its configuration and start it again."
        )

    @routes.get("/lora-adapters")
    async def adapters(query: LlamaParameters) -> Json:
        return _adapters(models.find(query.model))

    @routes.post("/lora-adapters", schema={"type": "array"}, example=[])
    async def scale_adapters(http: HttpRequest, query: LlamaParameters) -> Json:
        raw = await http.body()
        wanted = await make_of_body(http, lambda: parse_list(raw))
        _check_scales(wanted, _adapters(models.find(query.model)))
        return {"success": True}


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
    context = backend.card.context
    return [
        {"id": slot["id"], "n_ctx": context, **{key: value for key, value in slot.items() if key != "entry"}}
        for slot in _held(backend)
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


def _add_slots(routes: Routes, served: Served) -> None:
    models, saved = served.models, SavedSlots()

    @routes.get("/slots")
    async def slots(query: SlotsParameters) -> Json:
        listed = await asyncio.to_thread(_slots, models.find(query.model))
        if query.fail_on_no_slot and all(slot["is_processing"] for slot in listed):
            error = {"code": 503, "message": "no slot available", "type": "unavailable_error"}
            return json_response({"error": error}, 503)
        return listed

    @routes.post("/slots/{slot}", bodies=(SlotBody,), example={"filename": "chat.bin"})
    async def act_on_slot(http: HttpRequest, query: SlotParameters) -> Json:
        act = {"save": saved.save, "restore": saved.restore, "erase": saved.erase}[query.action]
        backend = models.find(query.model)
        body = await read_body(http, SlotBody) if await http.body() else SlotBody()
        return await served.side.run_on(lambda loaded: act(loaded, query.slot, body.filename), backend)


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
        figures = {"n_saved": entry.tokens, "n_written": entry.bytes, "timings": {"save_ms": _since(began)}}
        return {"id_slot": slot, "filename": name, **figures, "emberkeep": {"entry": entry.id}}

    def restore(self, backend: Backend, slot: int, filename: str | None) -> dict[str, Json]:
        """Nothing has to be done: the next request that goes on with it finds it. Raises InvalidField,
        NoSuchEntry."""
        began, name = perf_counter(), _named(filename)
        entry = self._find(backend, name)
        figures = {"n_restored": entry.tokens, "n_read": entry.bytes, "timings": {"restore_ms": _since(began)}}
        return {"id_slot": slot, "filename": name, **figures, "emberkeep": {"entry": entry.id}}

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
        slots = _held(backend)
        if slot >= len(slots):
            raise RequestError(f"There are {len(slots)} slots, from 0 on.", "id_slot")
        held = slots[slot]
        if held["is_processing"]:
            raise RequestError(f"Slot {slot} is at work: ask again when its answer is done.", "id_slot")
        if held["entry"] is not None:
            return str(held["entry"])
        if not held.get("n_tokens"):
            break
        time.sleep(_BETWEEN_LOOKS_S)
    raise RequestError(f"Nothing rests in slot {slot}: GET /v1/cache lists what is stored.", "id_slot")


def _held(backend: Backend) -> list[dict[str, Json]]:
    """What each slot holds."""
    return list((backend.stats().get("scheduler") or {}).get("slots", []))


def _named(filename: str | None) -> str:
    if filename is None:
        raise InvalidField("filename", "is required.")
    return filename


def _since(began: float) -> float:
    return round(1e3 * (perf_counter() - began), 3)


# ── texts, tokens and templates ──

MAX_CHARS = 4 << 20
MAX_TOKENS = 500_000
MAX_PIECES = 128 << 10
_SLICE = 10_000
"""Tokens that are written without letting other threads go on."""


class TokenizeBody(Body):
    model: str | None = None
    content: Annotated[str, Field(max_length=MAX_CHARS)]
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[Count], Field(max_length=MAX_TOKENS)]


class TemplateBody(Body):
    model: str | None = None
    messages: MessageList
    tools: ToolList | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateArgs | None = None


def _add_tokenizing(routes: Routes, served: Served) -> None:
    models, run_on = served.models, served.side.run_on

    @routes.post("/tokenize", example={"content": "hello world"})
    async def tokenize(body: TokenizeBody) -> Response:
        return await run_on(_tokens, models.find(body.model), body)

    @routes.post("/detokenize", example={"tokens": [1, 2]})
    async def detokenize(body: DetokenizeBody) -> Json:
        return await run_on(_text, models.find(body.model), body)

    @routes.post("/apply-template", example=HELLO)
    async def apply_template(body: TemplateBody) -> Json:
        return await run_on(_prompt, models.find(body.model), body)


def _tokens(backend: Backend, body: TokenizeBody) -> Response:
    tokenizer = tokenizer_of(backend)
    ids = tokenizer.tokenize(
        body.content, add_special=bool(body.add_special), parse_special=body.parse_special is not False
    )
    if not body.with_pieces:
        slices = (ids[i : i + _SLICE] for i in range(0, len(ids), _SLICE))
        written = ", ".join(", ".join(map(str, part)) for part in slices)
        return Response(f'{{"tokens": [{written}]}}', media_type="application/json")
    if len(ids) > MAX_PIECES:
        raise InvalidField("with_pieces", f"is for {MAX_PIECES} tokens at most: send less, or leave it out.")
    pieces = zip(ids, tokenizer.pieces(ids), strict=True)
    return list_response("tokens", ({"id": token, "piece": _piece(piece)} for token, piece in pieces))


def _piece(piece: bytes) -> str | list[int]:
    """A piece that ends in the middle of a character is told by its bytes, as llama-server does."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)


def _text(backend: Backend, body: DetokenizeBody) -> Json:
    return {"content": tokenizer_of(backend).detokenize(body.tokens)}


def _prompt(backend: Backend, body: TemplateBody) -> Json:
    tools = [tool.to_tool() for tool in body.tools or ()]
    messages = to_messages(body.messages)
    prompt = tokenizer_of(backend, "template").apply_template(
        messages,
        tools,
        body.chat_template_kwargs or {},
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    return {"prompt": prompt}
